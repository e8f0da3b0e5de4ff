"""Priced: jobs meet on servers by the prices of the linear programme; every server is divided exactly; gangs swap servers where that gains.

Cite: no publication; it stands on Synergy's sensitivity (Mohan et al., OSDI 2022), whose TUNE asks for the knee or the share and nothing between.
Left open by the paper: which jobs share a server, and how its cores and memory are divided among them.
Deviations: none, it is ours.
Invariant: every job is at its share at least; speed never below that of the same placement with proportional shares.
Cost: O(jobs · servers) for the placement, `evaluations` divisions of a server for the swaps; a division is O(jobs · cores · steps · options),
and kept.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...cite import FOLKLORE, Cite
from ...cluster.allocation import Parts
from .bound import GB, Prices, groups_of, lp_prices
from .layout import Layout, spread
from .problem import AllocationProblem, AllocationStrategy, Divided

__all__ = ["Priced"]

MOST_PAIRS = 6  # of jobs that two servers try to swap at a time, most promising first
GAIN = 1e-9  # of a swap below which it is none


@dataclass(frozen=True, kw_only=True)
class Priced(AllocationStrategy):
    """evaluations: divisions of servers that swaps may look at, for each server. stay: jobs stay where they ran, unless a swap gains more than moving
    them costs; only where moving costs something."""

    name: ClassVar[str] = "priced"
    cite: ClassVar[Cite] = FOLKLORE

    evaluations: int = 40
    stay: bool = True

    def plan(self, problem: AllocationProblem, *, rng: np.random.Generator) -> Divided:
        prices = lp_prices(problem.book, groups_of(problem, problem.running))
        keep = self.stay and problem.move_s > 0
        layout = _placed(problem, prices, problem.previous if keep else {})
        if keep and len(layout.pieces) < len(problem.running):  # those that stay are in the way
            again = _placed(problem, prices, {})
            layout = again if len(again.pieces) > len(layout.pieces) else layout
        swaps = _Swaps(layout)
        looked = swaps.improve(self.evaluations * len(problem.servers))
        swaps.divide()
        return Divided(parts=layout.parts(), notes={"evaluations": looked, "swaps": swaps.done, "price_of_core": list(prices.core),
            "lp": prices.value})


def _demands(problem: AllocationProblem, prices: Prices) -> dict[int, dict[int, tuple[float, int, int]]]:
    """Of each job that fits on a server, by kind: what it is worth there beyond its prices, and the cores and steps that make it so."""
    found: dict[int, dict[int, tuple[float, int, int]]] = {}
    kept: dict[tuple[int, int, tuple[str, ...]], dict[int, tuple[float, int, int]]] = {}
    for j in problem.running:
        job, profile = problem.queue.jobs[j], int(problem.queue.profile[j])
        key = (profile, job.gpus, job.types)
        if key not in kept:
            kept[key] = {}
            for t, kind in enumerate(problem.book.kinds):
                if kind.gpus >= job.gpus and (not job.types or kind.type in job.types):
                    o = problem.book.options(problem.book.class_of(profile, job.gpus, t))
                    net = o.gain - prices.core[t] * o.cores - prices.gb[t] * o.steps * (kind.bytes_of(1) / GB) - prices.gpu[t] * job.gpus
                    at = int(np.argmax(net))
                    kept[key][t] = (float(net[at]), int(o.cores[at]), int(o.steps[at]))
        found[j] = kept[key]
    return found


def _placed(problem: AllocationProblem, prices: Prices, previous: Mapping[int, Parts]) -> Layout:
    """Everybody on servers; cores and memory are noted as demands and may exceed what there is: they are divided later."""
    layout, demands = Layout(problem), _demands(problem, prices)
    kinds, servers = problem.servers.kind, problem.servers
    running = set(problem.running)
    for j, parts in previous.items():
        if j in running:
            layout.put(j, [(p.server, len(p.gpus), p.cores, p.steps) for p in parts])
    mean = [k.cores / k.gpus for k in problem.book.kinds]

    def first(j: int) -> tuple[float, ...]:
        gpus, d = problem.queue.jobs[j].gpus, demands[j]
        cores = max((x[1] for x in d.values()), default=0)
        return (-gpus, -cores / gpus, j)

    for j in sorted(running - layout.pieces.keys(), key=first):
        gpus, d = problem.queue.jobs[j].gpus, demands[j]
        fits = np.flatnonzero((layout.free_gpus >= gpus) & np.array([t in d for t in range(len(mean))])[kinds])
        if len(fits):
            net = np.array([d.get(t, (-np.inf, 0, 0))[0] for t in range(len(mean))])[kinds[fits]]
            fits = fits[net >= net.max() - GAIN]
            cores = np.array([d.get(t, (0, 0, 0))[1] for t in range(len(mean))])[kinds[fits]]
            per_gpu = layout.free_cores[fits] / layout.free_gpus[fits]
            hungry = cores / gpus >= np.array(mean)[kinds[fits]]
            # Who wants many cores goes where many are left per GPU, who wants few where few are.
            server = int(fits[np.lexsort((fits, layout.free_gpus[fits], np.where(hungry, -per_gpu, per_gpu)))[0]])
            layout.put(j, [(server, gpus, *d[int(kinds[server])][1:])])
        elif (found := spread(layout, j)) is not None:
            layout.put(j, [(s, g, *servers.servers[s].kind.share(g)) for s, g in found])
    return layout


class _Swaps:
    """Exchanges of whole jobs between servers, by the exact worth of the servers concerned."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.problem = layout, layout.problem
        self.book, self.kinds = layout.problem.book, layout.problem.servers.kind.tolist()
        self.done = 0
        # Of every server: (class, job) of its pieces, sorted; what they gain, and the worth of one more core.
        self.there: list[list[tuple[int, int]]] = [[] for _ in self.kinds]
        for j, pieces in layout.pieces.items():
            for server, gpus, _, _ in pieces:
                insort(self.there[server], (self._class(j, gpus, server), j))
        self.worth = [self._worth(s, there) for s, there in enumerate(self.there)]
        previous = self.problem.previous if self.problem.move_s > 0 else {}
        self.home = {j: parts[0].server for j, parts in previous.items() if len(parts) == 1}

    def _class(self, job: int, gpus: int, server: int) -> int:
        return self.book.class_of(int(self.problem.queue.profile[job]), gpus, self.kinds[server], len(self.layout.pieces[job]) > 1)

    def _worth(self, server: int, there: list[tuple[int, int]]) -> Any:
        return self.book.divide(self.kinds[server], tuple(k for k, _ in there))

    def _cost(self, jobs: list[int], server: int) -> float:
        """What moving there loses, in the same unit as a round's gain: the speed of a job times the share of the round that it stands still."""
        share = self.problem.move_s / self.problem.round_s
        return sum(share * self.problem.queue.jobs[j].gpus for j in jobs if self.home.get(j, server) != server)

    def improve(self, budget: int) -> int:
        """Swap until nothing gains or so many divisions were looked at; how many were."""
        looked, quiet, count = 0, False, len(self.there)
        # The hungriest with the idlest first, then step by step further from the ends.
        places = sorted(((i, k) for i in range(count) for k in range(i + 1, count)), key=lambda p: (p[0] - p[1], p[0]))
        while not quiet and looked < budget:
            quiet = True
            order = sorted(range(len(self.there)), key=lambda s: -self.worth[s].core)
            for i, k in places:
                if looked >= budget:
                    break
                tried, better = self._pair(order[i], order[k])
                looked += tried
                quiet = quiet and not better
        return looked

    def _pair(self, a: int, b: int) -> tuple[int, bool]:
        """Server a has more use of cores than b: the best of the promising exchanges of equally many GPUs; how many were tried, and whether one was
        made."""
        best: tuple[float, Any] = (GAIN, None)
        tried = 0
        pair = (self.kinds[a], tuple(k for k, _ in self.there[a]), self.kinds[b], tuple(k for k, _ in self.there[b]))
        if pair in self.book.settled:
            return 0, False
        for out, back in self._exchanges(a, b):
            there_a, there_b = self._after(a, out, back), self._after(b, back, out)
            if there_a is None or there_b is None:
                continue
            tried += 2
            worth = self._worth(a, there_a), self._worth(b, there_b)
            gain = worth[0].gain + worth[1].gain - self.worth[a].gain - self.worth[b].gain
            gain -= self._cost(back, a) + self._cost(out, b) - self._cost(out, a) - self._cost(back, b)
            if gain > best[0]:
                best = (gain, (there_a, there_b, worth, out, back))
        if best[1] is None:
            if not self.home:  # without costs of moving, it is a matter of classes alone
                self.book.settle(pair)
            return tried, False
        there_a, there_b, worth, out, back = best[1]
        self.there[a], self.there[b] = there_a, there_b
        self.worth[a], self.worth[b] = worth
        for jobs, to in ((out, b), (back, a)):
            for j in jobs:
                self.layout.pieces[j][0][0] = to
        self.done += 1
        return tried, True

    def _movable(self, server: int) -> list[tuple[float, int, int, int]]:
        """(cores per GPU that it has, GPUs, class, job) of jobs of one piece; one per class."""
        found, seen = [], set()
        for (k, j), o in zip(self.there[server], self.worth[server].picked, strict=True):
            if k not in seen and len(self.layout.pieces[j]) == 1:
                seen.add(k)
                gpus = self.layout.pieces[j][0][1]
                found.append((float(self.book.options(k).cores[o]) / gpus, gpus, k, j))
        return found

    def _exchanges(self, a: int, b: int) -> list[tuple[list[int], list[int]]]:
        """Jobs of a for jobs of b with as many GPUs: one for one, or one for several smaller ones."""
        mine, theirs = self._movable(a), self._movable(b)
        found: list[tuple[float, list[int], list[int]]] = []
        for x in mine:
            for y in theirs:
                if x[1] == y[1] and x[2] != y[2]:
                    found.append((y[0] - x[0], [x[3]], [y[3]]))
            for few in self._several(b, x[1], calm=True):
                found.append((few[0] - x[0], [x[3]], few[1]))
        for y in theirs:
            for many in self._several(a, y[1], calm=False):
                found.append((y[0] - many[0], many[1], [y[3]]))
        found.sort(key=lambda e: (abs(e[0]) < GAIN, e[0], e[1], e[2]))
        return [(out, back) for _, out, back in found[:MOST_PAIRS]]

    def _several(self, server: int, gpus: int, *, calm: bool) -> list[tuple[float, list[int]]]:
        """Several small jobs of a server with so many GPUs together, those with the fewest (or most) cores per GPU; none, or one choice."""
        rows = []
        for (k, j), o in zip(self.there[server], self.worth[server].picked, strict=True):
            if len(self.layout.pieces[j]) == 1 and (n := self.layout.pieces[j][0][1]) < gpus:
                rows.append((float(self.book.options(k).cores[o]) / n, n, j))
        rows.sort(key=lambda r: (r[0] if calm else -r[0], r[1], r[2]))
        taken, cores, left = [], 0.0, gpus
        for per_gpu, n, j in rows:
            if n <= left:
                taken.append(j)
                cores += per_gpu * n
                left -= n
        return [(cores / gpus, taken)] if not left and len(taken) > 1 else []

    def _after(self, server: int, out: list[int], back: list[int]) -> list[tuple[int, int]] | None:
        there = [x for x in self.there[server] if x[1] not in out]
        kind = self.book.kinds[self.kinds[server]].type
        for j in back:
            types = self.problem.queue.jobs[j].types
            if types and kind not in types:
                return None
            insort(there, (self._class(j, self.layout.pieces[j][0][1], server), j))
        return there

    def divide(self) -> None:
        """Give everybody what the best division of its server says."""
        for server, there in enumerate(self.there):
            for (k, j), o in zip(there, self.worth[server].picked, strict=True):
                piece = next(p for p in self.layout.pieces[j] if p[0] == server)
                options = self.book.options(k)
                piece[2], piece[3] = int(options.cores[o]), int(options.steps[o])
