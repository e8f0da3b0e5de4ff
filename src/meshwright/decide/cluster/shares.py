"""Proportional, GREEDY and TUNE: the allocations of Synergy (OSDI 2022), and what schedulers do without it.

Cite: Mohan et al., "Looking Beyond GPUs for DNN Scheduling on Multi-Tenant Clusters", OSDI 2022 (sections 4.1 to 4.3).
Left open by the paper: what a job demands. Our answer: the smallest cores, then memory, at `knee` times its highest speed, never more than a server.
Deviations: gangs that no single server has the GPUs for are spread over several, at their share; the leftovers of TUNE stay where they are.
Invariant: proportional and TUNE keep every job at its share at least, and use the GPUs of every job that the order admits.
Cost: O(jobs · servers).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cite import FOLKLORE, Cite
from .layout import Layout, Piece, spread
from .problem import AllocationProblem, AllocationStrategy, Divided

__all__ = ["CITE", "Greedy", "Proportional", "Tune", "tuned"]

CITE = Cite(
    key="mohan2022synergy", title="Looking Beyond GPUs for DNN Scheduling on Multi-Tenant Clusters", year=2022, venue="OSDI",
    authors="Jayashree Mohan, Amar Phanishayee, Janardhan Kulkarni, Vijay Chidambaram", url="https://arxiv.org/abs/2110.06073",
)  # fmt: skip
KNEE = 0.95  # the paper says 0.9 to 0.98 of the highest speed
Demand = tuple[int, int]  # cores and steps of memory, of the whole job


def demand_of(problem: AllocationProblem, job: int, kind: int, knee: float) -> Demand | None:
    """What a job asks for on one server of a kind; None if it is larger than a server."""
    gpus = problem.queue.jobs[job].gpus
    if gpus > problem.book.kinds[kind].gpus:
        return None
    o = problem.book.options(problem.book.class_of(int(problem.queue.profile[job]), gpus, kind))
    at = int(np.argmax(o.gain >= knee * o.gain.max()))  # options go by cores, then steps
    return int(o.cores[at]), int(o.steps[at])


def best_fit(layout: Layout, job: int, need: dict[int, Demand]) -> int:
    """The server with the least free GPUs, then cores, then memory that takes the job with what it needs on its kind; -1 for none."""
    problem, s = layout.problem, layout.problem.servers
    gpus, kind = problem.queue.jobs[job].gpus, s.kind
    cores = np.array([need.get(k, (1 << 30, 0))[0] for k in range(len(s.kinds))])[kind]
    steps = np.array([need.get(k, (0, 0))[1] for k in range(len(s.kinds))])[kind]
    fits = np.flatnonzero((layout.free_gpus >= gpus) & (layout.free_cores >= cores) & (layout.free_steps >= steps) & problem.allowed(job))
    if not len(fits):
        return -1
    return int(fits[np.lexsort((layout.free_steps[fits], layout.free_cores[fits], layout.free_gpus[fits]))[0]])


def shares_of(problem: AllocationProblem, job: int) -> dict[int, Demand]:
    gpus = problem.queue.jobs[job].gpus
    return {n: k.share(gpus) for n, k in enumerate(problem.book.kinds) if k.gpus >= gpus}


def put_spread(layout: Layout, job: int) -> bool:
    """Spread at its share, whoever has more than theirs there; False if GPUs do not suffice or it may not."""
    found = spread(layout, job)
    if found is None:
        return False
    pieces = [(server, gpus, *layout.share(server, gpus)) for server, gpus in found]
    for server, _, cores, steps in pieces:
        take_back(layout, server, cores, steps)
    layout.put(job, pieces)
    return True


def take_back(layout: Layout, server: int, cores: int, steps: int) -> None:
    """Jobs there that have more than their share return to it, most cores per GPU first, until so much is free."""
    above: list[tuple[float, float, int, Piece]] = []
    for job in set(layout.on[server]):
        for piece in layout.pieces[job]:
            if piece[0] == server:
                share = layout.share(server, piece[1])
                if piece[2] > share[0] or piece[3] > share[1]:
                    above.append((-piece[2] / piece[1], -piece[3] / piece[1], job, piece))
    for _, _, _, piece in sorted(above, key=lambda x: x[:3]):
        if layout.free_cores[server] >= cores and layout.free_steps[server] >= steps:
            return
        layout.give(piece, *layout.share(server, piece[1]))


def tuned(layout: Layout, jobs: Iterable[int], knee: float) -> list[int]:
    """TUNE's placement of jobs, largest demand first, into what the layout has left. Returns those that no servers could take."""
    problem, left = layout.problem, []
    kinds = range(len(problem.book.kinds))
    demands = {j: {k: d for k in kinds if (d := demand_of(problem, j, k, knee)) is not None} for j in jobs}
    for j in sorted(demands, key=lambda j: (-problem.queue.jobs[j].gpus, *(-x for x in next(iter(demands[j].values()), (0, 0))), j)):
        gpus, shares = problem.queue.jobs[j].gpus, shares_of(problem, j)
        need = demands[j]
        server = best_fit(layout, j, need)
        if server < 0:
            need = {k: shares[k] if need[k][0] > shares[k][0] or need[k][1] > shares[k][1] else need[k] for k in need}
            server = best_fit(layout, j, need)
        if server < 0:
            server = best_fit(layout, j, dict.fromkeys(shares, (0, 0)))
            if server >= 0:
                take_back(layout, server, *need[int(problem.servers.kind[server])])
        if server >= 0:
            layout.put(j, [(server, gpus, *need[int(problem.servers.kind[server])])])
        elif not put_spread(layout, j):
            left.append(j)
    return left


@dataclass(frozen=True, kw_only=True)
class Proportional(AllocationStrategy):
    """Cores and memory by GPUs. No options."""

    name: ClassVar[str] = "proportional"
    cite: ClassVar[Cite] = FOLKLORE

    def plan(self, problem: AllocationProblem, *, rng: np.random.Generator) -> Divided:
        layout = Layout(problem)
        for j in sorted(problem.running, key=lambda j: (-problem.queue.jobs[j].gpus, j)):
            shares = shares_of(problem, j)
            server = best_fit(layout, j, shares)
            if server >= 0:
                layout.put(j, [(server, problem.queue.jobs[j].gpus, *shares[int(problem.servers.kind[server])])])
            else:
                put_spread(layout, j)
        return Divided(parts=layout.parts())


@dataclass(frozen=True, kw_only=True)
class Greedy(AllocationStrategy):
    """knee: share of its highest speed at which a job has what it asks for."""

    name: ClassVar[str] = "greedy"
    cite: ClassVar[Cite] = CITE
    admits: ClassVar[bool] = True

    knee: float = KNEE

    def plan(self, problem: AllocationProblem, *, rng: np.random.Generator) -> Divided:
        layout = Layout(problem)
        kinds = range(len(problem.book.kinds))
        for j in problem.ranked or problem.running:
            if not layout.free_gpus.any():
                break
            need = {k: d for k in kinds if (d := demand_of(problem, j, k, self.knee)) is not None}
            server = best_fit(layout, j, need) if need else -1
            if server >= 0:
                layout.put(j, [(server, problem.queue.jobs[j].gpus, *need[int(problem.servers.kind[server])])])
            elif not need and (found := spread(layout, j)) is not None:
                pieces = [(s, g, *layout.share(s, g)) for s, g in found]
                if all(layout.free_cores[s] >= c and layout.free_steps[s] >= u for s, _, c, u in pieces):
                    layout.put(j, pieces)
        return Divided(parts=layout.parts())


@dataclass(frozen=True, kw_only=True)
class Tune(AllocationStrategy):
    """knee: share of its highest speed at which a job has what it asks for."""

    name: ClassVar[str] = "tune"
    cite: ClassVar[Cite] = CITE

    knee: float = KNEE

    def plan(self, problem: AllocationProblem, *, rng: np.random.Generator) -> Divided:
        layout = Layout(problem)
        tuned(layout, problem.running, self.knee)
        return Divided(parts=layout.parts())
