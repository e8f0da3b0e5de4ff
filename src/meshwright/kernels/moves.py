"""The graph on which GiPH scores moves of tasks, and how critical tasks are, compiled (decide/place/giph).

Tasks, devices and messages are numbered as in `kernels.tasks`. A node is a task on a device that can run it: `node_of[i, k]`, -1 where it cannot.
The node of a task's own device is its pivot. Edges join nodes with pivots of the task's parents and children.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["EDGE_FEATURES", "NODE_FEATURES", "criticality", "followed", "gpnet"]

NODE_FEATURES = ("work", "seconds of an operation", "seconds", "earlier start", "criticality")
EDGE_FEATURES = ("bytes", "delay", "seconds", "seconds of a byte", "criticality")

_kept = njit(cache=True, nogil=True)
_part = njit(nogil=True, inline="never")


@_part  # type: ignore[untyped-decorator]
def _scaled(x: Any, rows: Any) -> None:
    """Columns of these rows to [-1, 1]; one that is constant to 0."""
    for c in range(x.shape[1]):
        low, high = np.inf, -np.inf
        for r in rows:
            low, high = min(low, x[r, c]), max(high, x[r, c])
        for r in rows:
            x[r, c] = (x[r, c] - low) * 2 / (high - low) - 1 if high > low else 0.0


@_kept  # type: ignore[untyped-decorator]
def gpnet(
    dur: Any, ptr: Any, parent: Any, size: Any, delay: Any, per_byte: Any, work: Any, on: Any, start: Any, end: Any, critical: Any,
    edge_critical: Any, node_of: Any, level: Any, into: Any, out_of: Any, src: Any, dst: Any, back: Any, x_node: Any, x_edge: Any,
) -> None:  # fmt: skip
    """Fills one problem's part of a graph that several may share.

    `into[l]`, `out_of[l]`: first free place among edges that end, or begin, at tasks of level l; they are moved on. Fills `src`, `dst` and `x_edge`
    by level of the end, `back` (places in that order) by level of the begin, and `x_node`. O(devices · edges)."""
    tasks, devices = dur.shape
    rows = np.empty(tasks * devices, np.int64)
    count = 0
    for i in range(tasks):
        for k in range(devices):
            v = node_of[i, k]
            if v < 0:
                continue
            earlier = 0.0
            if on[i] != k and ptr[i + 1] > ptr[i]:
                ready = 0.0
                for e in range(ptr[i], ptr[i + 1]):
                    m = on[parent[e]]
                    ready = max(ready, end[parent[e]] + (delay[m, k] + size[e] * per_byte[m, k] if m != k else 0.0))
                earlier = ready - start[i]
            x_node[v, 0], x_node[v, 1], x_node[v, 2] = work[i], dur[i, k] / work[i] if work[i] > 0 else 0.0, dur[i, k]
            x_node[v, 3], x_node[v, 4] = earlier, critical[i]
            rows[count] = v
            count += 1
    _scaled(x_node, rows[:count])
    rows = np.empty(2 * devices * len(parent), np.int64)
    count = 0
    for j in range(tasks):
        for e in range(ptr[j], ptr[j + 1]):
            i = parent[e]
            for way in range(2):
                for k in range(devices):
                    if (way == 0 and node_of[j, k] < 0) or (way == 1 and (node_of[i, k] < 0 or k == on[i])):
                        continue
                    a, b = (on[i], k) if way == 0 else (k, on[j])
                    at = into[level[j]]
                    into[level[j]] += 1
                    back[out_of[level[i]]] = at
                    out_of[level[i]] += 1
                    src[at], dst[at] = node_of[i, a], node_of[j, b]
                    x_edge[at, 0], x_edge[at, 1], x_edge[at, 3] = size[e], delay[a, b], per_byte[a, b]
                    x_edge[at, 2], x_edge[at, 4] = delay[a, b] + size[e] * per_byte[a, b] if a != b else 0.0, edge_critical[e]
                    rows[count] = at
                    count += 1
    _scaled(x_edge, rows[:count])


@_kept  # type: ignore[untyped-decorator]
def criticality(order: Any, ptr: Any, parent: Any, edge_critical: Any, critical: Any) -> None:
    """Fills `critical`: of every task the sum over its parents' times their edges'; 1 without parents."""
    for i in order:
        critical[i] = 1.0 if ptr[i] == ptr[i + 1] else 0.0
        for e in range(ptr[i], ptr[i + 1]):
            critical[i] += critical[parent[e]] * edge_critical[e]


@_kept  # type: ignore[untyped-decorator]
def followed(
    on: Any, end: Any, ptr: Any, parent: Any, size: Any, delay: Any, per_byte: Any, out_ptr: Any, out_edge: Any, step: float, edge_critical: Any,
    path: Any,
) -> int:  # fmt: skip
    """Back from the task that ends last, always along the message that came last: these edges become more critical by `step`, their siblings less.
    Fills `path` with the tasks, the last one first; how many."""
    i = int(np.argmax(end))
    found = 0
    while True:
        path[found] = i
        found += 1
        if ptr[i] == ptr[i + 1]:
            return found
        best, latest = ptr[i], -1.0
        for e in range(ptr[i], ptr[i + 1]):
            m = on[parent[e]]
            arrives = end[parent[e]] + (delay[m, on[i]] + size[e] * per_byte[m, on[i]] if m != on[i] else 0.0)
            if arrives > latest:
                best, latest = e, arrives
        p = parent[best]
        if out_ptr[p + 1] - out_ptr[p] > 1:
            for x in range(out_ptr[p], out_ptr[p + 1]):
                e = out_edge[x]
                edge_critical[e] += step * (1 - edge_critical[e]) if e == best else -step * edge_critical[e]
        i = p
