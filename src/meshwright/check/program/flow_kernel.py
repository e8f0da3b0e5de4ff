"""The maximum flow of `memory`, compiled: Dinic in integers over arrays of arcs, without recursion."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["maximum_flow"]

Ints = NDArray[np.int64]


@njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _levels(first, arc, to, room, source, level, queue):  # type: ignore[no-untyped-def]
    """Fill `level`: arcs with room from the source, -1 where there is no way."""
    level[:] = -1
    level[source] = 0
    queue[0] = source
    head, tail = 0, 1
    while head < tail:
        v = queue[head]
        head += 1
        for k in range(first[v], first[v + 1]):
            w = to[arc[k]]
            if room[arc[k]] and level[w] < 0:
                level[w] = level[v] + 1
                queue[tail] = w
                tail += 1


@njit(cache=True, nogil=True, no_cfunc_wrapper=True)
def _flow(first, arc, to, room, source, sink):  # type: ignore[no-untyped-def]
    """As `maximum_flow`. Arc 2k and its reverse 2k + 1 are neighbours in `to` and `room`; `arc[first[v] : first[v + 1]]` leave node v."""
    n = len(first) - 1
    level, queue, at, path = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    total = 0
    _levels(first, arc, to, room, source, level, queue)
    while level[sink] >= 0:
        at[:] = first[:n]
        depth, v = 0, source
        while True:
            if v == sink:
                amount = room[path[0]]
                for k in range(1, depth):
                    amount = min(amount, room[path[k]])
                total += amount
                keep = -1
                for k in range(depth):
                    e = path[k]
                    room[e] -= amount
                    room[e ^ 1] += amount
                    if keep < 0 and not room[e]:
                        keep = k
                # Go back to before the first arc that is full, not to the source: the path up to there is still open.
                v, depth = to[path[keep] ^ 1], keep
                continue
            while at[v] < first[v + 1]:
                e = arc[at[v]]
                if room[e] and level[to[e]] == level[v] + 1:
                    break
                at[v] += 1
            if at[v] < first[v + 1]:
                # `at` only moves on: an arc that led nowhere in these levels will not do so later.
                path[depth] = arc[at[v]]
                v = to[path[depth]]
                depth += 1
            elif depth:
                depth -= 1
                v = to[path[depth] ^ 1]
                at[v] += 1
            else:
                break
        _levels(first, arc, to, room, source, level, queue)
    return total, level


def maximum_flow(nodes: int, tail: Ints, head: Ints, room: Ints, source: int, sink: int) -> tuple[int, Ints]:
    """(value of a maximum flow, level per node: -1 on the sink's side of the smallest cut that is nearest to the source).

    Arcs lead from `tail` to `head`; the value and any two arcs' rooms together are below 2^63.
    """
    to, leaves, left = (np.zeros(2 * len(tail), np.int64) for _ in range(3))
    to[0::2], to[1::2], leaves[0::2], leaves[1::2], left[0::2] = head, tail, tail, head, room
    first = np.concatenate([[0], np.cumsum(np.bincount(leaves, minlength=nodes))])
    value, level = _flow(first, np.argsort(leaves, kind="stable"), to, left, source, sink)
    return int(value), level
