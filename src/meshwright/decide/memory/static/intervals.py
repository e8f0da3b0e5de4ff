"""Exact search for one stream: storages alive in intervals of time, placed under a given capacity or shown not to fit.

Storages are placed by rising offset, each as low as what lies beneath it allows. A node of the search holds a partition of the unplaced (no two
partitions share a moment, so each is solved on its own); it is cut off when at some moment those still to come do not fit above where they may lie
at the lowest. Among storages, candidates come by lowest offset, then by one of several orders, taken in turns with a limit on nodes that doubles;
an order by load is made anew for every part. Skipped: places above one where another unplaced storage would fit whole; the same set in another
order at one offset; and, where nothing unplaced lies over the storage just placed, all alternatives to it.
Cite: CITE in `__init__` names MiniMalloc (Moffitt 2023). Beyond it: a fourth order and random ones in every turn, since where one order is stuck for
hours another may be through at once; a storage whose turn has passed will lie on another unplaced one, which raises its lowest place or shows that
there is none; where that alone cuts off the next candidate's node, no later one is tried; and the cut looks at every height that an unplaced storage
may lie at, not at the lowest only.
Invariant: `FITS` comes with offsets; `NEVER` only from a search that ended by itself. Cost: exponential; one node is O(storages · moments).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....kernels.compile import allocating, helper

__all__ = ["FITS", "NEVER", "STOPPED", "MAX_SEARCHED_STORAGES", "mixed_order", "preorders", "search"]

I64 = NDArray[np.int64]
FITS, NEVER, STOPPED = 1, 0, -1
# Storages of one search at most: it keeps tables of storages times frames, and has a frame per storage.
MAX_SEARCHED_STORAGES = 2048


def preorders(lower: I64, upper: I64, size: I64, width: I64) -> list[tuple[I64, bool]]:
    """(ranks of storages, `by_load` of `search`): by (width, area, load), (load, area, width), (load, width, area) and (load, neighbours), largest
    first, those that begin with the load also with that of the unplaced alone.

    `width`: length of the lifetimes on the clock that the storages were given with; area: width x size; load: most bytes alive at once in the
    lifetime; neighbours: storages that share a moment with it.
    """
    load = _load(lower, upper, size)
    neighbours = np.searchsorted(np.sort(lower), upper) - np.searchsorted(np.sort(upper), lower, side="right")
    area = width * size
    rest: tuple[tuple[I64, ...], ...] = ((area, width), (width, area), (neighbours,))
    anew = [(_ranks(keys), True) for keys in rest]
    return [(_ranks((width, area, load)), False), *anew, *((_ranks((load, *keys)), False) for keys in rest)]


def mixed_order(lower: I64, upper: I64, size: I64, width: I64, rng: np.random.Generator) -> I64:
    """Ranks by a product of powers of width, size and load, drawn at random, with some noise: a search that is stuck under one order is not
    under most others."""
    powers = rng.dirichlet((1.0, 1.0, 1.0))
    noise = rng.choice((0.0, 0.05, 0.2))
    logs = [np.log(np.maximum(x, 1).astype(np.float64)) for x in (width, size, _load(lower, upper, size))]
    key = powers[0] * logs[0] + powers[1] * logs[1] + 5 * powers[2] * logs[2] + rng.normal(0, 1, len(size)) * noise
    return _ranks((np.round(key * 1e9).astype(np.int64),))


def _load(lower: I64, upper: I64, size: I64) -> I64:
    alive = np.zeros(int(upper.max(initial=0)) + 1, np.int64)
    np.add.at(alive, lower, size)
    np.subtract.at(alive, upper, size)
    alive = np.cumsum(alive)
    return np.array([alive[a:b].max() for a, b in zip(lower.tolist(), upper.tolist(), strict=True)], np.int64).reshape(-1)


def _ranks(keys: Sequence[I64]) -> I64:
    order = np.lexsort((np.arange(len(keys[0])), *(-k for k in reversed(keys))))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


@helper
def _rest(list_, k, base, base_rank, rank, lower, upper, size, lowest, place, roof):  # type: ignore[no-untyped-def]
    """`place[t]`: no solution puts the unplaced storage t beneath; False if some cannot be put at all.

    One whose turn has passed (its lowest place comes before the last one placed) will lie on another unplaced one. `roof[s]`: the lowest top of an
    unplaced storage at moment s.
    """
    first, last = np.int64(2**62), np.int64(0)
    late = False
    for i in range(k):
        t = list_[i]
        place[t] = max(lowest[t], base)
        late = late or lowest[t] < base or (lowest[t] == base and rank[t] < base_rank)
        first, last = min(first, lower[t]), max(last, upper[t])
    if not late:
        return True
    roof[first:last] = 2**62
    for i in range(k):
        t = list_[i]
        top = place[t] + size[t]
        for s in range(lower[t], upper[t]):
            roof[s] = min(roof[s], top)
    for i in range(k):
        t = list_[i]
        if lowest[t] < base or (lowest[t] == base and rank[t] < base_rank):
            under = np.int64(2**62)
            for s in range(lower[t], upper[t]):
                under = min(under, roof[s])
            if under == base + size[t]:  # its own top, perhaps; `roof` has the tops of before this loop, so has this
                under = np.int64(2**62)
                for j in range(k):
                    m = list_[j]
                    if m != t and lower[m] < upper[t] and lower[t] < upper[m]:
                        under = min(under, max(lowest[m], base) + size[m])
                if under == 2**62:
                    return False
            place[t] = under
    return True


@helper
def _fits(list_, k, base, base_rank, rank, lower, upper, size, lowest, capacity, place, roof, above):  # type: ignore[no-untyped-def]
    """False if at some moment the unplaced storages of list_[:k] that lie at some height or higher do not fit above it together.

    `base`, `base_rank`: where and which the last one placed is. `place`, `roof` and `above` (bytes met so far at each moment) are scratch.
    """
    if not _rest(list_, k, base, base_rank, rank, lower, upper, size, lowest, place, roof):
        return False
    heights = np.empty(k, np.int64)
    first, last = np.int64(2**62), np.int64(0)
    for i in range(k):
        t = list_[i]
        heights[i] = place[t]
        first, last = min(first, lower[t]), max(last, upper[t])
    above[first:last] = 0
    # from the highest lowest place down: all met so far lie at this height or above, so together they must fit above it
    for i in np.argsort(-heights):
        t, bursts = list_[i], False
        for s in range(lower[t], upper[t]):
            above[s] += size[t]
            bursts |= above[s] > capacity - place[t]
        if bursts:
            return False
    return True


@helper
def _candidates(list_, k, rank, size, lowest, base, base_rank, out):  # type: ignore[no-untyped-def]
    """Members that may be placed next, by (lowest place, rank), into `out`; their number. None lies beneath `base`, the offset placed last."""
    ceiling = np.int64(2**62)
    for i in range(k):
        t = list_[i]
        # whoever begins at or above this top leaves a place in which that storage would fit whole: never needed
        ceiling = min(ceiling, max(lowest[t], base) + size[t])
    count = 0
    for i in range(k):
        t = list_[i]
        if lowest[t] < base or lowest[t] >= ceiling or (lowest[t] == base and rank[t] < base_rank):
            continue
        at = count
        while at > 0 and (lowest[out[at - 1]] > lowest[t] or (lowest[out[at - 1]] == lowest[t] and rank[out[at - 1]] > rank[t])):
            out[at] = out[at - 1]
            at -= 1
        out[at] = t
        count += 1
    return count


@helper
def _next_part(rest, first, stop, lower, upper, part):  # type: ignore[no-untyped-def]
    """The storages from rest[first] on that share moments with one another, into `part`: (how many, the first of the next part, their end)."""
    i, k, reach = first, 0, np.int64(0)
    # sorted by when they begin: a part ends where the next one begins after all of it has ended
    while i < stop and (k == 0 or lower[rest[i]] < reach):
        part[k] = rest[i]
        reach = max(reach, upper[rest[i]])
        k, i = k + 1, i + 1
    return k, i, reach


@helper
def _by_load(members, k, rank, lower, upper, total, out):  # type: ignore[no-untyped-def]
    """Ranks of a part's storages by what is unplaced in their lifetimes, most first, then by `rank`."""
    load = np.zeros(k, np.int64)
    for j in range(k):
        for s in range(lower[members[j]], upper[members[j]]):
            load[j] = max(load[j], total[s])
    n = len(rank)
    order = np.argsort(-(load * n + (n - 1 - rank[members[:k]])))
    for j in range(k):
        out[members[order[j]]] = j


@helper
def _put(t, members, k, lower, upper, size, lowest, total, rest):  # type: ignore[no-untyped-def]
    """Places `t` as low as it may lie. `rest`: the others; returns (how many, whether none of them shares a moment with it)."""
    top, r, alone = lowest[t] + size[t], 0, True
    for j in range(k):
        m = members[j]
        if m == t:
            continue
        rest[r] = m
        r += 1
        if lower[m] < upper[t] and lower[t] < upper[m]:
            alone = False
            lowest[m] = max(lowest[m], top)
    for s in range(lower[t], upper[t]):
        total[s] -= size[t]
    return r, alone


@helper
def _keep(members, k, first, last, lowest, total, kept_lowest, kept_total):  # type: ignore[no-untyped-def]
    for j in range(k):
        kept_lowest[j] = lowest[members[j]]
    for s in range(first, last):
        kept_total[s] = total[s]


@helper
def _undo(members, k, first, last, lowest, total, kept_lowest, kept_total):  # type: ignore[no-untyped-def]
    for j in range(k):
        lowest[members[j]] = kept_lowest[j]
    for s in range(first, last):
        total[s] = kept_total[s]


@allocating
def search(lower, upper, size, rank, by_load, capacity, node_limit, offset, stop):  # type: ignore[no-untyped-def]
    """FITS with `offset`, NEVER, or STOPPED after `node_limit` nodes or at `stop[0]`. `lower`, `upper`: moments from 0. Returns (verdict, nodes).

    `by_load`: the load goes before `rank`, and is counted anew among the unplaced wherever these fall into parts.

    Frame f has a part's unplaced storages (`members`, `count`), of whose `found` candidates `tried` were tried; the one it has `placed` leaves
    `rest`, whose parts are solved one by one: the next begins at `next_`. Its order is row `row` of `ranks`. Frame 0 places nothing; its rest is
    everything.
    """
    n, moments = len(size), np.int64(0)
    for t in range(n):
        moments = max(moments, upper[t])
    lowest, place = np.zeros((2, n), np.int64)
    total, roof, above = np.zeros((3, moments), np.int64)
    for t in range(n):
        for s in range(lower[t], upper[t]):
            total[s] += size[t]
    depth = n + 2
    members, cands, rest = np.zeros((depth, n), np.int64), np.zeros((depth, n), np.int64), np.zeros((depth, n), np.int64)
    kept_lowest, kept_total = np.zeros((depth, n), np.int64), np.zeros((depth, moments), np.int64)
    count, found, tried, rest_count, next_ = np.zeros((5, depth), np.int64)
    first, last = np.zeros((2, depth), np.int64)
    placed, alone = np.full(depth, -1, np.int64), np.zeros(depth, np.bool_)
    rest[0] = np.argsort(lower, kind="mergesort")
    rest_count[0] = n
    ranks, row = np.zeros((depth, n), np.int64), np.zeros(depth, np.int64)
    ranks[0] = rank
    if by_load:
        _by_load(rest[0], n, rank, lower, upper, total, ranks[0])
    if n and not _fits(rest[0], n, np.int64(0), np.int64(-1), ranks[0], lower, upper, size, lowest, capacity, place, roof, above):
        return NEVER, np.int64(0)
    nodes, f, stands = np.int64(0), 0, True
    # each turn either goes into the next part of what stands, or tries the next candidate of frame f
    while True:
        if stands and next_[f] == rest_count[f]:  # every part of its rest is solved, and so is the part that its parent was in
            if f == 0:
                return FITS, nodes
            f -= 1
            continue
        if stands:  # go into its next part
            g = f + 1
            count[g], next_[f], last[g] = _next_part(rest[f], next_[f], rest_count[f], lower, upper, members[g])
            first[g], tried[g] = lower[members[g, 0]], 0
            base, base_rank = (offset[placed[f]], ranks[row[f], placed[f]]) if f else (np.int64(0), np.int64(-1))
            row[g] = row[f]
            if by_load and count[g] < rest_count[f]:
                row[g], base_rank = g, np.int64(-1)
                _by_load(members[g], count[g], rank, lower, upper, total, ranks[g])
            _keep(members[g], count[g], first[g], last[g], lowest, total, kept_lowest[g], kept_total[g])
            found[g] = _candidates(members[g], count[g], ranks[row[g]], size, lowest, base, base_rank, cands[g])
            f = g
        else:  # what it has placed cannot stay
            _undo(members[f], count[f], first[f], last[f], lowest, total, kept_lowest[f], kept_total[f])
            if alone[f]:  # nothing unplaced lay over it, so it was in nobody's way: no other choice here saves the rest
                tried[f] = found[f]
        stands = False
        if 0 < tried[f] < found[f]:  # were the next one placed, those before it would have missed their turn: where that alone bursts, none is left
            t, order = cands[f, tried[f]], ranks[row[f]]
            if not _fits(members[f], count[f], lowest[t], order[t], order, lower, upper, size, lowest, capacity, place, roof, above):
                tried[f] = found[f]
        if tried[f] == found[f]:
            f -= 1
            if f == 0:
                return NEVER, nodes
            continue
        t, order = cands[f, tried[f]], ranks[row[f]]
        tried[f] += 1
        nodes += 1
        if nodes > node_limit or stop[0]:
            return STOPPED, nodes
        at = lowest[t]
        offset[t], placed[f], next_[f] = at, t, 0
        rest_count[f], alone[f] = _put(t, members[f], count[f], lower, upper, size, lowest, total, rest[f])
        stands = at + size[t] <= capacity and (
            rest_count[f] == 0
            or _fits(rest[f], rest_count[f], at, order[t], order, lower, upper, size, lowest, capacity, place, roof, above)
        )
