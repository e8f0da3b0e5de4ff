"""Servers while they are filled: what is free, and which job lies where with how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ...cluster.allocation import Part, Parts
from .problem import AllocationProblem

__all__ = ["Layout", "Piece", "spread"]

Piece = list[int]  # server, GPUs, cores, steps


class Layout:
    """`pieces[job]`: its pieces. `on[server]`: jobs with a piece there."""

    def __init__(self, problem: AllocationProblem) -> None:
        self.problem, s = problem, problem.servers
        self.free_gpus, self.free_cores, self.free_steps = s.gpus.copy(), s.cores.copy(), s.steps.copy()
        self.pieces: dict[int, list[Piece]] = {}
        self.on: list[list[int]] = [[] for _ in range(len(s))]

    def put(self, job: int, pieces: Iterable[tuple[int, int, int, int]]) -> None:
        self.pieces[job] = [list(p) for p in pieces]
        for server, gpus, cores, steps in self.pieces[job]:
            self.free_gpus[server] -= gpus
            self.free_cores[server] -= cores
            self.free_steps[server] -= steps
            self.on[server].append(job)

    def give(self, piece: Piece, cores: int, steps: int) -> None:
        """Change what a piece has."""
        self.free_cores[piece[0]] += piece[2] - cores
        self.free_steps[piece[0]] += piece[3] - steps
        piece[2], piece[3] = cores, steps

    def share(self, server: int, gpus: int) -> tuple[int, int]:
        return self.problem.servers.servers[server].kind.share(gpus)

    def parts(self, previous: Mapping[int, Parts] | None = None) -> dict[int, Parts]:
        """With numbers of GPUs: the same as before where a job stays with as many on its server."""
        previous = self.problem.previous if previous is None else previous
        servers = self.problem.servers.servers
        free = [set(range(len(s.gpus))) for s in servers]
        kept: dict[tuple[int, int], tuple[int, ...]] = {}
        for job, pieces in self.pieces.items():
            had = {p.server: p.gpus for p in previous.get(job, ())}
            for server, gpus, _, _ in pieces:
                if len(had.get(server, ())) == gpus and free[server].issuperset(had[server]):
                    kept[job, server] = had[server]
                    free[server] -= set(had[server])
        found: dict[int, Parts] = {}
        for job, pieces in self.pieces.items():
            made = []
            for server, gpus, cores, steps in pieces:
                numbers = kept.get((job, server))
                if numbers is None:
                    numbers = tuple(sorted(free[server])[:gpus])
                    free[server] -= set(numbers)
                made.append(Part(server, numbers, cores, steps))
            found[job] = tuple(made)
        return found


def spread(layout: Layout, job: int) -> list[tuple[int, int]] | None:
    """Servers and GPUs for a gang that no single server can take: whole servers near each other first, then the largest rests; None if it may not be
    spread, or the GPUs that it may use do not suffice."""
    problem = layout.problem
    wanted, free = problem.queue.jobs[job].gpus, np.where(problem.allowed(job), layout.free_gpus, 0)
    if problem.queue.jobs[job].together or wanted > int(free.sum()):
        return None
    # Neighbours by number: groups of a fabric that lie together follow each other.
    anchor = int(np.argmax(free))
    order = sorted(range(len(free)), key=lambda s: (-int(free[s]), abs(s - anchor), s))
    found = []
    for s in order:
        take = min(wanted, int(free[s]))
        if take:
            found.append((s, take))
            wanted -= take
        if not wanted:
            break
    if len(found) > 1:  # the last part into the smallest rest that holds it
        last, used = found[-1][1], {s for s, _ in found[:-1]}
        fitting = [s for s in range(len(free)) if s not in used and int(free[s]) >= last]
        found[-1] = (min(fitting, key=lambda s: (int(free[s]), abs(s - anchor), s)), last)
    return found
