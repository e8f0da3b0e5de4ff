"""All orders of hosts, depth first, compiled: what rank order costs least, proved, for about ten hosts.

Positions are filled from the first on. What the messages between filled positions cost, with the cheapest cost there is for every other message,
never falls when another host is placed, so a start that is no better than the best whole order is given up.

An order's cost is three numbers, compared one after another: time, load, sum (`cloudcollectives.cost.Objective`). Messages stand in passes: a stage
of an algorithm (`tree` 0), or one way through a pipelined tree, root first (`tree` 1, 2, ...: its number). Cost: O(messages) per start looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compile import inlined, kernel
from .effort import count_work

__all__ = ["Passes", "best_order", "cheapest"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MESSAGE_WORK_S = 6e-9  # work of looking at a message: about the seconds of a quiet core
TIE_SHARE = 1e-12  # by which two sums of floats may differ and count as equal


class Passes(NamedTuple):
    """Messages of all passes. A tree's pass goes root first: `src` hears from `dst` or the other way round, `way` 1 where `src` sends."""

    start: I64  # of each pass among the messages, and the end
    times: F64  # how often the pass is done
    single: I64  # 1: nobody sends or receives two messages of it
    tree: I64
    way: I64
    src: I64  # positions; of a tree: below
    dst: I64  # of a tree: above
    size_bytes: F64
    pieces: float  # of trees


@inlined
def _cost(placed, order, passes, least, alpha, beta, group, capacity, known, latest, busy, left, found):  # type: ignore[no-untyped-def]
    start, times, single, tree, way, src, dst, size, pieces = passes
    found[:] = 0.0
    time = load = total = 0.0
    deepest = depth = 0.0
    if tree[0] > 0:
        busy[:] = 0.0
        left[:] = 0.0
    for p in range(len(times)):
        stage = tree[p] == 0
        slowest, crossings = 0.0, 0
        if stage:
            latest[:] = 0.0
            busy[:] = 0.0
            left[:] = 0.0
        else:
            latest[0] = 0.0  # how late a position hears of the root
            if p == 0 or tree[p] != tree[p - 1]:
                depth = 0.0
        for m in range(start[p], start[p + 1]):
            below, above = src[m], dst[m]
            if below >= placed or above >= placed:
                total += times[p] * least[m]
                if stage:
                    slowest = max(slowest, least[m])
                else:
                    latest[0, below] = latest[0, above] + least[m]
                    slowest = max(slowest, latest[0, below])
                continue
            a, b = order[below], order[above]
            if way[p] == 0:
                a, b = b, a
            flow = size[m] * beta[a, b]
            cost = alpha[a, b] + flow
            total += times[p] * cost
            if group[a] != group[b]:
                crossings += 1
                left[0, group[a]] += size[m]
                left[1, group[b]] += size[m]
            if stage and single[p]:
                slowest = max(slowest, cost)
                continue
            busy[0, a] += flow
            busy[1, b] += flow
            if stage:
                latest[0, a] = max(latest[0, a], alpha[a, b])
                latest[1, b] = max(latest[1, b], alpha[a, b])
            else:
                latest[0, below] = latest[0, above] + cost
                slowest = max(slowest, latest[0, below])
        if stage:
            shared = 0.0
            for g in range(len(capacity)):
                shared = max(shared, left[0, g] / capacity[g], left[1, g] / capacity[g])
            if not single[p]:
                for i in range(busy.shape[1]):
                    slowest = max(slowest, latest[0, i] + busy[0, i], latest[1, i] + busy[1, i])
            time += times[p] * max(slowest, shared)
            load += times[p] * (shared if known else crossings)
        else:
            depth += slowest
            deepest = max(deepest, depth)
            load += pieces * crossings
    if tree[0] > 0:
        shared = busiest = 0.0
        for g in range(len(capacity)):
            shared = max(shared, left[0, g] / capacity[g], left[1, g] / capacity[g])
        for i in range(busy.shape[1]):
            busiest = max(busiest, busy[0, i], busy[1, i])
        time = max(deepest + (pieces - 1) * max(busiest, shared), pieces * shared)
        if known:
            load = pieces * shared
    found[0], found[1], found[2] = time, load, total


@inlined
def _better(found, best):  # type: ignore[no-untyped-def]
    for k in range(3):
        if found[k] < best[k] * (1 - TIE_SHARE):
            return True
        if found[k] > best[k] * (1 + TIE_SHARE):
            return False
    return False


@kernel
def _search(  # type: ignore[no-untyped-def]
    fixed, host_start, members, passes, least, alpha, beta, group, capacity, known, order, best_order, best, found, chosen, used, latest, busy,
    left, seen, most,
):  # fmt: skip
    hosts = len(host_start) - 1
    depth, placed = 0, 0
    chosen[0] = -1
    while depth >= 0:
        # The next host for this place; the one that stands there leaves first.
        h = chosen[depth]
        if h >= 0:
            used[h] = 0
            placed -= host_start[h + 1] - host_start[h]
        h += 1
        while h < hosts and (used[h] or (depth < fixed and h != depth)):
            h += 1
        if h == hosts:
            depth -= 1
            continue
        chosen[depth] = h
        used[h] = 1
        for m in range(host_start[h], host_start[h + 1]):
            order[placed] = members[m]
            placed += 1
        seen[0] += 1
        if seen[0] > most:
            return False
        _cost(placed, order, passes, least, alpha, beta, group, capacity, known, latest, busy, left, found)
        if not _better(found, best):
            continue
        if depth == hosts - 1:
            seen[1] += 1
            for k in range(3):
                best[k] = found[k]
            for i in range(len(order)):
                best_order[i] = order[i]
            continue
        depth += 1
        chosen[depth] = -1
    return True


def cheapest(passes: Passes, alpha_s: F64, beta_s_per_byte: F64) -> F64:
    """Seconds of every message between the two endpoints where its size is cheapest."""
    off = ~np.eye(len(alpha_s), dtype=bool)
    sizes, which = np.unique(passes.size_bytes, return_inverse=True)
    return np.array([float((alpha_s + x * beta_s_per_byte)[off].min()) for x in sizes])[which]


def best_order(
    hosts: list[list[int]], fixed: int, passes: Passes, alpha_s: F64, beta_s_per_byte: F64, group: I64, capacity_Bps: F64, start: tuple[int, ...],
    *, most: int,
) -> tuple[tuple[int, ...], bool, int]:  # fmt: skip
    """(the least order of endpoints, whether every order was looked at or ruled out, starts looked at); `start` where nothing is less.

    Args: hosts: the endpoints of each, which stay together, in this order; fixed: so many first hosts stay first; group: of every endpoint;
    capacity_Bps: of every group's uplink, infinite where unknown; most: starts looked at.
    """
    n = len(alpha_s)
    least = cheapest(passes, alpha_s, beta_s_per_byte)
    best, found = np.zeros(3), np.zeros(3)
    order, answer = np.array(start, np.int64), np.array(start, np.int64)
    host_start = np.cumsum([0, *(len(h) for h in hosts)]).astype(np.int64)
    members = np.array([e for h in hosts for e in h], np.int64)
    known = bool(np.isfinite(capacity_Bps).any())
    shape = (2, n)
    rooms = np.zeros(shape), np.zeros(shape), np.zeros((2, len(capacity_Bps)))
    given = (passes, least, alpha_s, beta_s_per_byte, group, capacity_Bps, known)
    _first(order, *given, best, *rooms)
    seen = np.zeros(2, np.int64)
    chosen, used = np.full(len(hosts) + 1, -1, np.int64), np.zeros(len(hosts), np.int64)
    whole = _search(fixed, host_start, members, *given, order, answer, best, found, chosen, used, *rooms, seen, most)
    count_work(MESSAGE_WORK_S * int(seen[0]) * len(least))
    return tuple(answer.tolist()), bool(whole), int(seen[0])


@kernel
def _first(order, passes, least, alpha, beta, group, capacity, known, best, latest, busy, left):  # type: ignore[no-untyped-def]
    _cost(len(order), order, passes, least, alpha, beta, group, capacity, known, latest, busy, left, best)
