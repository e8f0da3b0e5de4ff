"""Queues on engines that neither move nor resize what runs: a job keeps what it was given until it ends.

An order says who goes first, an allocation divides what is free. The same policy drives the simulator and real engines (`run.engines`).
Deviations from rounds (`drive.cluster.Rounds`): decisions fall at arrivals, ends, failures and repairs; nobody is preempted. A server on which a GPU
has less than its share of cores or memory left, because others were given more, offers only as many GPUs as have it.
Invariant: nobody gets less than the share of their GPUs. Cost: that of the allocation, on the servers that have something free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from ..cluster.allocation import Part, Parts
from ..cluster.queue import Queue
from ..cluster.servers import STEPS_PER_GPU, Server, Servers
from ..decide.cluster import AllocationProblem, Book, Waiting
from ..decide.cluster.problem import AllocationStrategy, OrderStrategy, admitted, ranking
from ..simulate.cluster import Moment, State

__all__ = ["MAX_PASSED", "Kept"]

MAX_PASSED = 16  # starts of others behind a job before nobody behind it starts; on queues of 50 jobs no gang waited for more than a dozen


class _Free(NamedTuple):
    """What a server has free: numbers of GPUs, cores, steps of memory, in the server's own units."""

    server: int
    gpus: tuple[int, ...]
    cores: int
    steps: int


@dataclass(kw_only=True)
class Kept:
    """The policy. `most_passed`: starts of others that a job waits for at most; 0: for ever. `asked`: decisions so far."""

    servers: Servers
    queue: Queue
    order: OrderStrategy
    allocation: AllocationStrategy
    seed: int = 0
    most_passed: int = MAX_PASSED
    moments: ClassVar[frozenset[str]] = frozenset({"arrival", "end", "failure", "repair"})
    round_s: float = 0.0
    asked: int = 0
    _passed: dict[int, int] = field(default_factory=dict)

    def _free(self, state: State) -> list[_Free]:
        """Servers with GPUs that have their share of cores and memory left."""
        used: dict[int, list[Part]] = {}
        for parts in state.parts.values():
            for p in parts:
                used.setdefault(p.server, []).append(p)
        found = []
        for s, server in enumerate(self.servers.servers):
            held = used.get(s, [])
            taken = {g for p in held for g in p.gpus}
            gpus = [g for g in range(len(server.gpus)) if g not in taken]
            cores, steps = server.cores - sum(p.cores for p in held), server.kind.steps - sum(p.steps for p in held)
            while gpus and (server.kind.share(len(gpus))[0] > cores or server.kind.share(len(gpus))[1] > steps):
                gpus.pop()
            if gpus and s not in state.down:
                found.append(_Free(s, tuple(gpus), cores, steps))
        return found

    def _offered(self, free: list[_Free]) -> Servers:
        offered = []
        for f in free:
            server = self.servers.servers[f.server]
            names = tuple(server.gpus[g] for g in f.gpus)
            memory_bytes = max(server.kind.bytes_of(f.steps), STEPS_PER_GPU * len(names))
            offered.append(Server(name=server.name, gpus=names, cores=f.cores, memory_bytes=memory_bytes, type=server.type))
        return Servers(servers=tuple(offered), fabric=self.servers.fabric)

    def decide(self, state: State, moment: Moment) -> Mapping[int, Parts]:
        """Parts of jobs that start now, first in the order first."""
        self.asked += 1
        jobs, free = np.array(sorted(state.waiting), np.int64), self._free(state)
        if not len(jobs) or not free:
            return {}
        servers = self._offered(free)
        book = Book(servers, self.queue.profiles)
        left_s, attained_s = state.progress(jobs, moment.now_s)
        wanted = int(self.queue.gpus[state.there].sum())
        ranked = ranking(self.order, Waiting(
            servers=servers, queue=self.queue, book=book, now_s=moment.now_s, jobs=jobs, left_s=left_s, attained_s=attained_s,
            contention=max(1.0, wanted / self.servers.total_gpus),
        ))  # fmt: skip
        blocked = next((n for n, j in enumerate(ranked.tolist()) if self.most_passed and self._passed.get(j, 0) >= self.most_passed), len(ranked))
        running = admitted(servers, self.queue, ranked[: blocked + 1])
        if not running:
            return {}
        problem = AllocationProblem(servers=servers, queue=self.queue, book=book, running=tuple(running), ranked=tuple(ranked.tolist()))
        made = self.allocation.plan(problem, rng=np.random.default_rng(self.seed)).parts
        place = {j: n for n, j in enumerate(ranked.tolist())}
        starts: dict[int, Parts] = {}
        cores, steps = {f.server: f.cores for f in free}, {f.server: f.steps for f in free}
        for j in sorted((j for j in made if made[j] and place[j] <= blocked), key=lambda j: place[j]):
            parts = self._parts(free, made[j])
            if all(p.cores <= cores[p.server] and p.steps <= steps[p.server] for p in parts):  # shares of a rest are rounded: one more may not fit
                starts[j] = parts
                for p in parts:
                    cores[p.server], steps[p.server] = cores[p.server] - p.cores, steps[p.server] - p.steps
        for j in ranked.tolist():
            if j not in starts:
                self._passed[j] = self._passed.get(j, 0) + sum(place[x] > place[j] for x in starts)
        return starts

    def _parts(self, free: list[_Free], parts: Parts) -> Parts:
        """In the servers' own numbers and steps; at least the share of its GPUs there."""
        found = []
        for p in parts:
            f = free[p.server]
            kind, n = self.servers.servers[f.server].kind, len(p.gpus)
            cores, steps = kind.share(n)
            steps = max(steps, p.steps * f.steps // (STEPS_PER_GPU * len(f.gpus)))
            found.append(Part(f.server, tuple(f.gpus[g] for g in p.gpus), max(cores, p.cores), steps))
        return tuple(found)
