"""Exact search for one stream: storages alive in intervals of time, placed under a given capacity or shown not to fit.

Storages are placed by rising offset, each as low as what lies beneath it allows. A node of the search holds a partition of the unplaced (no two
partitions share a moment, so each is solved on its own); it is cut off when at some moment what is certainly taken up plus what is still to come
exceeds the capacity. Among storages, candidates come by lowest offset, then by one of three static orders, taken in turns with a limit on nodes
that doubles. Skipped: places above one where another unplaced storage would fit whole; the same set in another order at one offset; and, where
nothing unplaced lies over the storage just placed, all alternatives to it.
Cite: CITE in `__init__` names MiniMalloc (Moffitt 2023). Left open: its alternatives at equal offsets; here they go in one order only.
Invariant: `FITS` comes with offsets; `NEVER` only from a search that ended by itself. Cost: exponential; one node is O(storages · moments).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["FITS", "NEVER", "STOPPED", "TARGETS", "preorders", "search"]

I64 = NDArray[np.int64]
FITS, NEVER, STOPPED = 1, 0, -1
TARGETS = 2048  # storages at most: a frame of the search keeps a column of them


def preorders(lower: I64, upper: I64, size: I64) -> list[I64]:
    """Ranks of storages by (span, area, load), (load, area, span) and (load, span, area), largest first; load: most bytes alive at once in it."""
    n = len(size)
    moments = int(upper.max()) if n else 0
    alive = np.zeros(moments + 1, np.int64)
    np.add.at(alive, lower, size)
    np.subtract.at(alive, upper, size)
    alive = np.cumsum(alive)
    load = np.array([alive[a:b].max() for a, b in zip(lower.tolist(), upper.tolist(), strict=True)], np.int64).reshape(-1)
    span, area = upper - lower, (upper - lower) * size
    ranks = []
    for keys in ((span, area, load), (load, area, span), (load, span, area)):
        order = np.lexsort((np.arange(n), *(-k for k in reversed(keys))))
        rank = np.empty(n, np.int64)
        rank[order] = np.arange(n)
        ranks.append(rank)
    return ranks


@njit(cache=True, nogil=True)
def _tighten(list_, a, b, floor_of, lower, upper, size, lowest, floor, total, capacity, least):  # type: ignore[no-untyped-def]
    """Raises the floors of the moments of the unplaced storages list_[a:b] to the lowest place of any of them there; False if some moment bursts.

    `floor_of`: no unplaced storage goes beneath. `least` is scratch, one a moment.
    """
    first, last = np.int64(2**62), np.int64(0)
    for i in range(a, b):
        t = list_[i]
        first, last = min(first, lower[t]), max(last, upper[t])
    for s in range(first, last):
        least[s] = 2**62
    for i in range(a, b):
        t = list_[i]
        at = max(lowest[t], floor_of)
        if at + size[t] > capacity:
            return False
        for s in range(lower[t], upper[t]):
            if at < least[s]:
                least[s] = at
    for s in range(first, last):
        if total[s] > 0:
            if least[s] > floor[s]:
                floor[s] = least[s]
            if floor[s] + total[s] > capacity:
                return False
    return True


@njit(cache=True, nogil=True)
def _candidates(list_, a, b, rank, size, lowest, base, base_rank, out):  # type: ignore[no-untyped-def]
    """Members that may be placed next, by (lowest place, rank), into `out`; their number. None lies beneath `base`, the offset placed last."""
    ceiling = np.int64(2**62)
    for i in range(a, b):
        t = list_[i]
        ceiling = min(ceiling, max(lowest[t], base) + size[t])
    count = 0
    for i in range(a, b):
        t = list_[i]
        if lowest[t] < base or lowest[t] >= ceiling or (lowest[t] == base and rank[t] < base_rank):
            continue
        k = count
        while k > 0 and (lowest[out[k - 1]] > lowest[t] or (lowest[out[k - 1]] == lowest[t] and rank[out[k - 1]] > rank[t])):
            out[k] = out[k - 1]
            k -= 1
        out[k] = t
        count += 1
    return count


@njit(cache=True, nogil=True)
def search(lower, upper, size, rank, capacity, node_limit, offset):  # type: ignore[no-untyped-def]
    """FITS with `offset`, NEVER, or STOPPED after `node_limit` nodes. `lower`, `upper`: moments from 0. Returns (verdict, nodes).

    Frames: `begin[f]:end[f]` in `members` are its unplaced storages, by lower; `tried[f]` of its `found[f]` candidates were tried. The storage it has
    placed leaves children, parts [`part[f]`, `parts[f]`) of `part_begin`, solved one by one: `part[f]` is the next.
    """
    n = len(size)
    moments = np.int64(0)
    for t in range(n):
        moments = max(moments, upper[t])
    lowest, floor, total = np.zeros(n, np.int64), np.zeros(moments, np.int64), np.zeros(moments, np.int64)
    least = np.zeros(moments, np.int64)
    for t in range(n):
        for s in range(lower[t], upper[t]):
            total[s] += size[t]
    depth_limit = n + 2
    members, cands = np.zeros((depth_limit, n), np.int64), np.zeros((depth_limit, n), np.int64)
    saved_lowest = np.zeros((depth_limit, n), np.int64)
    saved_floor, saved_total = np.zeros((depth_limit, moments), np.int64), np.zeros((depth_limit, moments), np.int64)
    count, found, tried = np.zeros(depth_limit, np.int64), np.zeros(depth_limit, np.int64), np.zeros(depth_limit, np.int64)
    base, base_rank = np.zeros(depth_limit, np.int64), np.zeros(depth_limit, np.int64)
    first, last = np.zeros(depth_limit, np.int64), np.zeros(depth_limit, np.int64)
    rest, rest_count, next_ = np.zeros((depth_limit, n), np.int64), np.zeros(depth_limit, np.int64), np.zeros(depth_limit, np.int64)
    placed, alone = np.full(depth_limit, -1, np.int64), np.zeros(depth_limit, np.int64)
    nodes = np.int64(0)
    # Frame 0 places nothing: its rest is everything, and its parts are the partitions of the whole problem.
    order = np.argsort(lower, kind="mergesort")
    for i in range(n):
        rest[0, i] = order[i]
    rest_count[0], base_rank[0] = n, -1
    if n and not _tighten(rest[0], 0, n, np.int64(0), lower, upper, size, lowest, floor, total, capacity, least):
        return NEVER, nodes
    f = 0
    while True:
        # Frame f stands with a storage placed (or is frame 0): go into its next part, or if none is left, it is solved.
        if next_[f] < rest_count[f]:
            i = next_[f]
            g = f + 1
            k, reach = 0, upper[rest[f, i]]
            while i < rest_count[f] and (k == 0 or lower[rest[f, i]] < reach):
                members[g, k] = rest[f, i]
                reach = max(reach, upper[rest[f, i]])
                k, i = k + 1, i + 1
            next_[f] = i
            count[g], tried[g], placed[g] = k, 0, -1
            base[g] = offset[placed[f]] if f else 0
            base_rank[g] = rank[placed[f]] if f else -1
            first[g], last[g] = lower[members[g, 0]], reach
            for j in range(k):
                saved_lowest[g, j] = lowest[members[g, j]]
            for s in range(first[g], last[g]):
                saved_floor[g, s], saved_total[g, s] = floor[s], total[s]
            found[g] = _candidates(members[g], 0, k, rank, size, lowest, base[g], base_rank[g], cands[g])
            f = g
        else:
            # Solved: so is the part its parent was in.
            if f == 0:
                return FITS, nodes
            f -= 1
            continue
        # Frame f is new or its candidate failed: try candidates until one stands.
        while True:
            stands = False
            while tried[f] < found[f]:
                t = cands[f, tried[f]]
                tried[f] += 1
                nodes += 1
                if nodes > node_limit:
                    return STOPPED, nodes
                at = lowest[t]
                offset[t], placed[f] = at, t
                top = at + size[t]
                free = True
                r = 0
                for j in range(count[f]):
                    m = members[f, j]
                    if m == t:
                        continue
                    rest[f, r] = m
                    r += 1
                    if lower[m] < upper[t] and lower[t] < upper[m]:
                        free = False
                        if lowest[m] < top:
                            lowest[m] = top
                rest_count[f], next_[f] = r, 0
                alone[f] = free
                for s in range(lower[t], upper[t]):
                    total[s] -= size[t]
                    if floor[s] < top:
                        floor[s] = top
                if top <= capacity and (r == 0 or _tighten(rest[f], 0, r, at, lower, upper, size, lowest, floor, total, capacity, least)):
                    stands = True
                    break
                for j in range(count[f]):
                    lowest[members[f, j]] = saved_lowest[f, j]
                for s in range(first[f], last[f]):
                    floor[s], total[s] = saved_floor[f, s], saved_total[f, s]
                if free:
                    tried[f] = found[f]
            if stands:
                break
            # Frame f fails, and with it what its parent has placed.
            f -= 1
            if f == 0:
                return NEVER, nodes
            for j in range(count[f]):
                lowest[members[f, j]] = saved_lowest[f, j]
            for s in range(first[f], last[f]):
                floor[s], total[s] = saved_floor[f, s], saved_total[f, s]
            if alone[f]:
                tried[f] = found[f]
    return STOPPED, nodes
