"""Searches by moves, several side by side: each has a placement, its times, and its part of one graph that a net reads at once.

Nodes are numbered by level (longest path of tasks before theirs), then by problem, so a sweep takes slices. How many edges begin and end at a level
does not change when tasks move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....kernels.moves import EDGE_FEATURES, NODE_FEATURES, criticality, followed, gpnet
from ....kernels.tasks import first_come
from ..problem import PlaceProblem

__all__ = ["Episodes", "GpNet", "Move", "random_start"]

FOLLOW = 0.1  # of the criticality that is missing, gained by every edge of the critical path in every simulation
STEEP = 10.0  # of the softmax over message sizes from which criticality begins


class GpNet(NamedTuple):
    """`x_node` [nodes, 5]; edges by level of their end: `src`, `dst`, `x_edge` [edges, 5]; `back`: their places by level of their begin. `node_ptr`,
    `into_ptr`, `out_ptr` [levels + 1]: nodes and edges of every level in these orders."""

    x_node: NDArray[np.float32]
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    x_edge: NDArray[np.float32]
    back: NDArray[np.int64]
    node_ptr: NDArray[np.int64]
    into_ptr: NDArray[np.int64]
    out_ptr: NDArray[np.int64]


class Move(NamedTuple):
    """A task from device `source` to device `to`: makespans, whether the task was on the critical path, and by how much later it starts now."""

    task: int
    source: int
    to: int
    before_s: float
    after_s: float
    critical: bool
    start_s: float


def random_start(problem: PlaceProblem, rng: np.random.Generator) -> NDArray[np.int64]:
    """A device for every task, of those that can run it."""
    return np.array([rng.choice(np.flatnonzero(np.isfinite(row))) for row in problem.arrays.dur], np.int64)


class _Search:
    """One problem's tables and where its search is. Devices run tasks first come, first served, as GiPH's do."""

    def __init__(self, problem: PlaceProblem, on: NDArray[np.int64]) -> None:
        self.problem, self.on = problem, on.copy()
        a = problem.arrays
        n = len(on)
        self.work = np.array([t.work for t in problem.graph.tasks])
        self.level = np.zeros(n, np.int64)
        self.order = np.array(problem.graph.order, np.int64)
        for i in problem.graph.order:
            for e in range(a.ptr[i], a.ptr[i + 1]):
                self.level[i] = max(self.level[i], self.level[a.parent[e]] + 1)
        self.child = np.repeat(np.arange(n), np.diff(a.ptr))
        self.options = np.isfinite(a.dur).sum(1)
        self.out_ptr = np.concatenate([[0], np.cumsum(np.bincount(a.parent, minlength=n))]).astype(np.int64)
        self.out_edge = np.argsort(a.parent, kind="stable").astype(np.int64)
        share = np.exp(STEEP * (a.size / np.array([max(a.size[self._out(p)].max(), 1.0) for p in a.parent]) - 1)) if len(a.size) else a.size
        self.edge_critical = share / np.bincount(a.parent, share, minlength=n)[a.parent] if len(a.size) else share
        self.critical, self.start, self.end = np.empty(n), np.empty(n), np.empty(n)
        self.path, self.critical_tasks = np.empty(n, np.int64), 0
        self.moved, self.moves = -1, list[Move]()
        criticality(self.order, a.ptr, a.parent, self.edge_critical, self.critical)
        self.makespan_s = self.best_s = self._timed()
        self.best_on, self.best_at = self.on.copy(), 0

    def _out(self, p: int) -> NDArray[np.int64]:
        return self.out_edge[self.out_ptr[p] : self.out_ptr[p + 1]]

    def _timed(self) -> float:
        a = self.problem.arrays
        found = float(first_come(self.problem.edge_numbers, self.on, *a, self.start, self.end))
        messages = (a.ptr, a.parent, a.size, a.delay, a.per_byte)
        self.critical_tasks = followed(self.on, self.end, *messages, self.out_ptr, self.out_edge, FOLLOW, self.edge_critical, self.path)
        criticality(self.order, a.ptr, a.parent, self.edge_critical, self.critical)
        return found

    def move(self, task: int, device: int) -> float:
        """Seconds by which the makespan becomes shorter."""
        before, source, start = self.makespan_s, int(self.on[task]), float(self.start[task])
        critical = task in self.path[: self.critical_tasks]
        self.on[task], self.moved = device, task
        self.makespan_s = self._timed()
        self.moves.append(Move(task, source, device, before, self.makespan_s, critical, float(self.start[task]) - start))
        if self.makespan_s < self.best_s:
            self.best_s, self.best_on, self.best_at = self.makespan_s, self.on.copy(), len(self.moves)
        return before - self.makespan_s


class Episodes:
    """Searches from these placements (`on`: a device for every task)."""

    def __init__(self, problems: Sequence[PlaceProblem], starts: Sequence[NDArray[np.int64]]) -> None:
        self.searches = [_Search(p, on) for p, on in zip(problems, starts, strict=True)]
        levels = 1 + max(int(s.level.max()) for s in self.searches)
        nodes, into, out = (np.zeros((len(self.searches), levels), np.int64) for _ in range(3))
        for b, s in enumerate(self.searches):
            parent, child = s.problem.arrays.parent, s.child
            edges = s.options[child] + s.options[parent] - 1
            np.add.at(nodes[b], s.level, s.options)
            np.add.at(into[b], s.level[child], edges)
            np.add.at(out[b], s.level[parent], edges)
        self.node_ptr, first = _places(nodes)
        self.into_ptr, self._into = _places(into)
        self.out_ptr, self._out = _places(out)
        self.task, self.device, self.owner = (np.empty(int(self.node_ptr[-1]), np.int64) for _ in range(3))
        self.node_of, self.nodes = [], []
        for b, s in enumerate(self.searches):
            node_of = np.full(s.problem.arrays.dur.shape, -1, np.int64)
            at = first[b].copy()
            for i, k in zip(*np.nonzero(np.isfinite(s.problem.arrays.dur)), strict=True):
                v = node_of[i, k] = at[s.level[i]]
                at[s.level[i]] += 1
                self.task[v], self.device[v], self.owner[v] = i, k, b
            self.node_of.append(node_of)
            self.nodes.append(np.sort(node_of[node_of >= 0]))

    def graph(self) -> GpNet:
        edges = int(self.into_ptr[-1])
        src, dst, back = (np.empty(edges, np.int64) for _ in range(3))
        x_node, x_edge = np.empty((len(self.task), len(NODE_FEATURES)), np.float32), np.empty((edges, len(EDGE_FEATURES)), np.float32)
        for b, s in enumerate(self.searches):
            a = s.problem.arrays
            gpnet(*a, s.work, s.on, s.start, s.end, s.critical, s.edge_critical, self.node_of[b], s.level, self._into[b].copy(), self._out[b].copy(),
                  src, dst, back, x_node, x_edge)  # fmt: skip
        return GpNet(x_node, src, dst, x_edge, back, self.node_ptr, self.into_ptr, self.out_ptr)

    def allowed(self) -> NDArray[np.bool_]:
        """Nodes that are moves: not where the task is, and not of the task that was moved last. Where that leaves none, the latter are; where no
        task has a choice, all are."""
        found = np.ones(len(self.task), np.bool_)
        for b, s in enumerate(self.searches):
            found[self.node_of[b][np.arange(len(s.on)), s.on]] = False
            mine = self.nodes[b]
            others = found[mine] & (self.task[mine] != s.moved)
            found[mine] = others if others.any() else found[mine] if found[mine].any() else True
        return found


def _places(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of counts [problems, levels]: where each level begins, levels one after the other, and where each problem's part of it does."""
    ptr = np.concatenate([[0], np.cumsum(counts.sum(0))])
    return ptr, ptr[:-1] + np.cumsum(counts, axis=0) - counts
