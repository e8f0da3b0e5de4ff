"""List schedules: tasks in the order of a priority, each where it ends first. HEFT, CPOP, and GiPH's baseline of random tasks.

Cite: Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for heterogeneous computing", TPDS 2002 (HEFT, CPOP);
Hu et al., "GiPH", MLSys 2023, section 5 (random task + EFT).
Left open by the paper: ties. Our answer: the smaller task number, then the smaller device.
Deviations: a gap may lie anywhere between two tasks of a device (public code leaves gaps out). CPOP's path processor is the one on which the critical
path takes least and which can run all of it; where there is none, its tasks go where they end first. Mean costs are over the devices that can run a
task; mean messages over pairs of different devices that can run the two tasks, or, as an option, over all such pairs, as in GiPH's public code.
Invariant: sequences are topological; every task is on a device that has a rate for its kind.
Cost: O(tasks · devices · (degree + tasks per device)) a schedule.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...cite import Cite
from ...errors import UsageError
from ...kernels.tasks import first_come, inserted
from .problem import Placement, PlaceProblem

__all__ = ["CPOP_CITE", "HEFT_CITE", "Cpop", "Heft", "RandomEft", "started", "upward_ranks"]

HEFT_CITE = Cite(
    key="heft-tpds02", title="Performance-effective and low-complexity task scheduling for heterogeneous computing", year=2002,
    venue="IEEE TPDS 13(3)",
)  # fmt: skip
CPOP_CITE = HEFT_CITE
GIPH_CITE = Cite(key="giph-mlsys23", title="GiPH: Generalizable Placement Learning for Adaptive Heterogeneous Computing", year=2023, venue="MLSys")


def upward_ranks(problem: PlaceProblem, *, pairs: str = "different") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(upward rank with the task itself, downward rank without it) in seconds, with mean costs; messages over `pairs` of devices: different, all."""
    a = problem.arrays
    finite = np.isfinite(a.dur)
    mean = np.where(finite, a.dur, 0).sum(1) / finite.sum(1)
    message = _mean_messages(problem, finite, pairs)
    up, down = mean.copy(), np.zeros_like(mean)
    order = problem.graph.order
    for j in reversed(order):
        for e in range(a.ptr[j], a.ptr[j + 1]):
            i = a.parent[e]
            up[i] = max(up[i], mean[i] + message[e] + up[j])
    for j in order:
        for e in range(a.ptr[j], a.ptr[j + 1]):
            i = a.parent[e]
            down[j] = max(down[j], down[i] + mean[i] + message[e])
    return up, down


def _mean_messages(problem: PlaceProblem, finite: NDArray[np.bool_], which: str) -> NDArray[np.float64]:
    """Of every edge, in the order of `Arrays.parent`. Tasks of a kind run on the same devices, so means are taken once per pair of kinds."""
    a = problem.arrays
    kinds = {kind: n for n, kind in enumerate(dict.fromkeys(t.kind for t in problem.graph.tasks))}
    kind_of = np.array([kinds[t.kind] for t in problem.graph.tasks])
    can = np.array([finite[np.flatnonzero(kind_of == n)[0]] for n in range(len(kinds))], np.float64)
    same = can @ can.T if which == "different" else 0.0  # within a device there is no message, so tables hold 0
    pairs = np.maximum(can.sum(1)[:, None] * can.sum(1) - same, 1.0)
    delay, per_byte = (can @ table @ can.T / pairs for table in (a.delay, a.per_byte))
    child = np.repeat(np.arange(len(kind_of)), np.diff(a.ptr))
    at = kind_of[a.parent], kind_of[child]
    return np.asarray(delay[at] + a.size * per_byte[at])


def in_order_of(problem: PlaceProblem, priority: NDArray[np.float64]) -> NDArray[np.int64]:
    """Of the tasks whose parents are listed always the one of the highest priority."""
    a = problem.arrays
    child_ptr, child = problem.children
    waits = np.diff(a.ptr)
    ready = [(-float(priority[i]), i) for i in np.flatnonzero(waits == 0).tolist()]
    heapq.heapify(ready)
    found = []
    while ready:
        _, i = heapq.heappop(ready)
        found.append(i)
        for j in child[child_ptr[i] : child_ptr[i + 1]].tolist():
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(ready, (-float(priority[j]), j))
    return np.array(found, np.int64)


def listed(problem: PlaceProblem, order: NDArray[np.int64], fixed: NDArray[np.int64] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(sequence, device of every task) of the schedule with insertion."""
    n = len(problem.graph.tasks)
    on, start, end = np.full(n, -1, np.int64), np.zeros(n), np.zeros(n)
    inserted(order, np.full(n, -1, np.int64) if fixed is None else fixed, *problem.arrays, on, start, end)
    return problem.by_start(start), on


def started(problem: PlaceProblem) -> Placement | None:
    """The placement of `problem.start`: tasks that it leaves out, or whose device has left or cannot run them, go where they end first, in HEFT's
    order."""
    if problem.start is None:
        return None
    number = {d.name: k for k, d in enumerate(problem.fabric.devices)}
    fixed = np.array([number.get(problem.start.get(t.name, ""), -1) for t in problem.graph.tasks], np.int64)
    fixed[~np.isfinite(problem.arrays.dur[np.arange(len(fixed)), fixed])] = -1
    return problem.placement(Heft(), *listed(problem, in_order_of(problem, upward_ranks(problem)[0]), fixed), evaluations=1)


@dataclass(frozen=True, kw_only=True)
class Heft:
    """Heterogeneous earliest finish time. pairs: of devices over which a message's mean is taken: different (default, as published), or all."""

    name: ClassVar[str] = "heft"
    cite: ClassVar[Cite] = HEFT_CITE
    aliases: ClassVar[tuple[str, ...]] = ()

    pairs: str = "different"

    def plan(self, problem: PlaceProblem, *, rng: np.random.Generator) -> Placement:
        """Raises: UsageError for other pairs."""
        if self.pairs not in ("different", "all"):
            raise UsageError(f"must be different or all, got {self.pairs!r}", where="heft.pairs")
        return problem.placement(self, *listed(problem, in_order_of(problem, upward_ranks(problem, pairs=self.pairs)[0])), evaluations=1)


@dataclass(frozen=True, kw_only=True)
class Cpop:
    """Critical path on a processor: tasks of the longest path by mean costs on one device, the others where they end first. No options."""

    name: ClassVar[str] = "cpop"
    cite: ClassVar[Cite] = CPOP_CITE
    aliases: ClassVar[tuple[str, ...]] = ()

    def plan(self, problem: PlaceProblem, *, rng: np.random.Generator) -> Placement:
        up, down = upward_ranks(problem)
        path = self._path(problem, up, down)
        on_one = problem.arrays.dur[path].sum(0)
        fixed = np.full(len(up), -1, np.int64)
        if np.isfinite(on_one).any():
            fixed[path] = int(np.argmin(on_one))
        return problem.placement(self, *listed(problem, in_order_of(problem, up + down), fixed), evaluations=1)

    @staticmethod
    def _path(problem: PlaceProblem, up: NDArray[np.float64], down: NDArray[np.float64]) -> list[int]:
        """From the entry task of the highest rank on, always the child of the highest rank on a longest path."""
        child_ptr, child = problem.children
        both = up + down
        entries = np.flatnonzero(np.diff(problem.arrays.ptr) == 0)
        at = int(entries[np.argmax(both[entries])])
        path = [at]
        while child_ptr[at] < child_ptr[at + 1]:
            children = child[child_ptr[at] : child_ptr[at + 1]]
            at = int(children[np.argmax(both[children])])
            path.append(at)
        return path


@dataclass(frozen=True, kw_only=True)
class RandomEft:
    """From a random placement: a random task goes where it would end first, given when the others ran; again and again. Devices run tasks first come,
    first served; the best that was seen is handed out. evaluations: schedules looked at, 0: 20 for every task."""

    name: ClassVar[str] = "random-eft"
    cite: ClassVar[Cite] = GIPH_CITE
    aliases: ClassVar[tuple[str, ...]] = ()

    evaluations: int = 0

    def plan(self, problem: PlaceProblem, *, rng: np.random.Generator) -> Placement:
        a = problem.arrays
        n = len(problem.graph.tasks)
        on = np.array([rng.choice(np.flatnonzero(np.isfinite(row))) for row in a.dur], np.int64)
        start, end = np.empty(n), np.empty(n)
        looked = self.evaluations or 20 * n
        best, found = np.inf, (on.copy(), start.copy())
        for _ in range(looked):
            makespan_s = first_come(problem.edge_numbers, on, *a, start, end)
            if makespan_s < best:
                best, found = makespan_s, (on.copy(), start.copy())
            i = int(rng.integers(n))
            on[i] = _ends_first(a, i, on, start, end)
        return problem.placement(self, problem.by_start(found[1]), found[0], evaluations=looked)


def _ends_first(a: Any, i: int, on: NDArray[np.int64], start: NDArray[np.float64], end: NDArray[np.float64]) -> int:
    """The device where task i would end first: after its data, and after the tasks that began there before the data was complete."""
    best, where = np.inf, int(on[i])
    for k in np.flatnonzero(np.isfinite(a.dur[i])).tolist():
        ready = 0.0
        for e in range(a.ptr[i], a.ptr[i + 1]):
            p = int(a.parent[e])
            ready = max(ready, end[p] + (a.delay[on[p], k] + a.size[e] * a.per_byte[on[p], k] if on[p] != k else 0.0))
        before = [end[j] for j in np.flatnonzero(on == k).tolist() if j != i and start[j] <= ready]
        finish = max([ready, *before]) + a.dur[i, k]
        if finish < best:
            best, where = finish, k
    return where
