"""List scheduling on serial resources, compiled: one item after the other, each as early as its predecessors and its resources allow.

An item runs on a route: resources held from an offset after its start for a while; it ends a delay after its start. Items wait for the end of
`after` items and only for the placing of items that they stand behind. Which item is next: `eager`: the one that can start first, then the most
urgent; else the most urgent that may be placed, then the one that can start first. Then the lower `tie`, then the lower number.
Candidates wait in a heap by their earliest start; starts only grow, so one that has grown is put back.
Cost: O(items · log) and the putting back, which is at most once per item and placing on its resources.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .compile import allocating, helper
from .effort import count_work

__all__ = ["Csr", "ListProblem", "place_items"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
ITEM_WORK_S = 1e-6  # work of placing an item: about the seconds of a quiet core


@dataclass(frozen=True)
class Csr:
    """Lists: list i is `values[ptr[i]:ptr[i+1]]`."""

    ptr: I64
    values: I64

    @staticmethod
    def of(lists: Any) -> Csr:
        ptr = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(x) for x in lists], out=ptr[1:])
        return Csr(ptr, np.array([v for x in lists for v in x], np.int64))


@dataclass(frozen=True)
class ListProblem:
    """`route[item]`; `resources`, and beside each resource `offset`, `hold`; `delay[route]`. `after`: items that wait for an item's end;
    `behind`: those that wait for its placing; `waits`: how many an item waits for."""

    route: I64
    resources: Csr
    offset: F64
    hold: F64
    delay: F64
    after: Csr
    behind: Csr
    waits: I64


@helper
def _earliest(t, ready, route, ptr, resource, offset, free):  # type: ignore[no-untyped-def]
    at = ready[t]
    for k in range(ptr[route[t]], ptr[route[t] + 1]):
        at = max(at, free[resource[k]] - offset[k])
    return at


@allocating
def _place(  # type: ignore[no-untyped-def]
    route, ptr, resource, offset, hold, delay, after_ptr, after, behind_ptr, behind, waits, urgency, tie, eager, start, end, order
):  # fmt: skip
    n = len(route)
    ready, free, missing = np.zeros(n), np.zeros(resource.max() + 1 if len(resource) else 1), waits.copy()
    heap: Any = [(0.0, 0.0, np.int64(0), np.int64(0))]
    heap.clear()
    for t in range(n):
        if missing[t] == 0:
            at = _earliest(t, ready, route, ptr, resource, offset, free)
            heappush(heap, (at, -urgency[t], tie[t], np.int64(t)) if eager else (-urgency[t], at, tie[t], np.int64(t)))
    placed = 0
    while len(heap) > 0:
        found = heappop(heap)
        t = found[3]
        at = _earliest(t, ready, route, ptr, resource, offset, free)
        now = (at, -urgency[t], tie[t], t) if eager else (-urgency[t], at, tie[t], t)
        # Resources were taken since it was queued, so its start has grown. Starts only grow: whoever still stands first with its true start
        # is first of all.
        if now != found and len(heap) > 0 and now > heap[0]:
            heappush(heap, now)
            continue
        start[t] = at
        end[t] = at + delay[route[t]]
        for k in range(ptr[route[t]], ptr[route[t] + 1]):
            free[resource[k]] = at + offset[k] + hold[k]
        order[placed] = t
        placed += 1
        for j in range(after_ptr[t], after_ptr[t + 1]):
            s = after[j]
            ready[s] = max(ready[s], end[t])
        # `after` also waits for the end, `behind` only for the placing; either way the last one missing lets an item into the heap.
        for lists in range(2):
            first, last = (after_ptr[t], after_ptr[t + 1]) if lists == 0 else (behind_ptr[t], behind_ptr[t + 1])
            for j in range(first, last):
                s = after[j] if lists == 0 else behind[j]
                missing[s] -= 1
                if missing[s] == 0:
                    at = _earliest(s, ready, route, ptr, resource, offset, free)
                    heappush(heap, (at, -urgency[s], tie[s], s) if eager else (-urgency[s], at, tie[s], s))
    return placed


def place_items(problem: ListProblem, urgency: F64, tie: I64, *, eager: bool) -> tuple[F64, F64, I64]:
    """(start, end, order of placing) of every item. Raises: ValueError when items wait for each other."""
    n = len(problem.route)
    start, end, order = np.zeros(n), np.zeros(n), np.zeros(n, np.int64)
    placed = _place(
        problem.route, problem.resources.ptr, problem.resources.values, problem.offset, problem.hold, problem.delay, problem.after.ptr,
        problem.after.values, problem.behind.ptr, problem.behind.values, problem.waits, urgency, tie, eager, start, end, order,
    )  # fmt: skip
    count_work(ITEM_WORK_S * n)
    if placed < n:
        raise ValueError(f"{n - placed} of {n} items wait for each other")
    return start, end, order
