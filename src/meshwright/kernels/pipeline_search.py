"""Pipeline orders from priorities, and better priorities by annealing, compiled.

`_schedule` is Giffler and Thompson's generation of schedules (1960) with a look-ahead between 0 (a free device takes what is ready) and 1 (it may
wait for anything that is known to come before it could be done with something else), under caps on what devices hold. The device on which something
can be complete first chooses the most urgent of what competes with that. Actions of one class (kind, stage, copy) follow one another.

Memory: an action takes room from the pool of its device and copy, or gives it back, in the order of its device. A pool has levels, one per stage of
that copy on the device, in model order: a micro-batch must reach the top level before it gives anything back. So what is held is counted by the
highest level that its micro-batch has reached, and a level is entered only while, for each level l from it on, what is held up to l leaves room for
one micro-batch on every level above l: then the oldest can always go on (Dijkstra's banker), and nothing is forbidden that could end.
`_anneal` shifts priorities of a whole class, of a run of micro-batches in it, or of one action; an accepted schedule's starts are the next ones.
Deterministic: its random numbers are its own. Cost: O(actions · classes per device) a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .compile import allocating, helper
from .effort import stop_flag

__all__ = ["Shop", "anneal"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
LOOK_AHEAD_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the stretch in which actions conflict, in which the choice is made
EARLY_DURATIONS = (np.inf, 4.0, 2.0, 1.0, 0.0)  # in mean durations: how long before its priority an action may start
TRIES_PER_START = 1000  # schedules that are tried between two starts of the annealing


@dataclass(frozen=True)
class Shop:
    """Per action: device, duration_s, class, how many it waits for, what it takes (> 0) or gives back (< 0), its pool and level.

    brings: what its micro-batch holds on lower levels.
    succ_ptr, succ, lag_s: who waits for its end, and how long after it. cap[pool]; above[pool, level]: one micro-batch on every higher level.
    Actions of a class are numbered in a row, in the order in which they run: class_ptr.
    """

    device: I64
    duration_s: F64
    klass: I64
    waits: I64
    takes: I64
    brings: I64
    pool: I64
    level: I64
    succ_ptr: I64
    succ: I64
    lag_s: F64
    cap: I64
    above: I64
    class_ptr: I64
    devices: int
    most_classes: int


@helper
def _room(a, takes, pool, level, cap, above, held):  # type: ignore[no-untyped-def]
    """Whether `a` may run now as far as memory goes."""
    if takes[a] <= 0:
        return True
    q, total = pool[a], takes[a]
    for c in range(held.shape[1]):
        total += held[q, c]
        # A micro-batch may start only while one on every higher level still fits: otherwise all that are under way could block each other.
        if c >= level[a] and total + above[q, c] > cap[q]:
            return False
    return True


@helper
def _schedule(  # type: ignore[no-untyped-def]
    device, duration, waits, takes, brings, pool, level, succ_ptr, succ, lag, cap, above, devices, most, prio, look, early, loose, start, order
):  # fmt: skip
    """Fills start and order (actions as they were placed); returns (makespan, mean end of devices), infinite when stuck."""
    n = len(device)
    # Not before `early` ahead of its priority: a schedule that is not greedy can be reached too.
    missing, ready = waits.copy(), np.maximum(0.0, prio - early)
    free, held = np.zeros(devices), np.zeros((len(cap), above.shape[1]), np.int64)
    able, count = np.zeros((devices, most + 1), np.int64), np.zeros(devices, np.int64)
    first = np.full(devices, np.inf)  # earliest possible end on each device
    for a in range(n):
        if missing[a] == 0:
            able[device[a], count[device[a]]] = a
            count[device[a]] += 1
    stale = np.ones(devices, np.bool_)
    for place in range(n):
        best_device, best_end = -1, np.inf
        # The device that can end an action first decides (Giffler and Thompson): on it the choice is made among all that could begin before
        # that end.
        for d in range(devices):
            if stale[d]:
                first[d] = np.inf
                for i in range(count[d]):
                    a = able[d, i]
                    if _room(a, takes, pool, level, cap, above, held):
                        first[d] = min(first[d], max(free[d], ready[a]) + duration[a])
                stale[d] = False
            if first[d] < best_end:
                best_device, best_end = d, first[d]
        if best_device < 0:
            return np.inf, np.inf
        d = best_device
        least = np.inf
        for i in range(count[d]):
            a = able[d, i]
            if _room(a, takes, pool, level, cap, above, held):
                least = min(least, max(free[d], ready[a]))
        # `look` shortens that stretch: 0 takes whoever begins first, 1 all that conflict.
        until = least + look * (best_end - least)
        chosen, at = -1, -1
        for i in range(count[d]):
            a = able[d, i]
            begin = max(free[d], ready[a])
            if (begin > least and begin >= until) or not _room(a, takes, pool, level, cap, above, held):
                continue
            if chosen < 0 or prio[a] < prio[chosen] or (prio[a] == prio[chosen] and a < chosen):
                chosen, at = a, i
        a = chosen
        able[d, at] = able[d, count[d] - 1]
        count[d] -= 1
        start[a] = max(free[d], ready[a])
        end = start[a] + duration[a]
        free[d] = end
        order[place] = a
        at_level = level[a]
        if loose and takes[a] < 0:
            at_level = above.shape[1] - 1
        held[pool[a], at_level] += takes[a]
        if loose and brings[a]:
            held[pool[a], at_level] += brings[a]
            held[pool[a], at_level - 1] -= brings[a]
        stale[d] = True
        for j in range(succ_ptr[a], succ_ptr[a + 1]):
            s = succ[j]
            ready[s] = max(ready[s], end + lag[j])
            missing[s] -= 1
            if missing[s] == 0:
                e = device[s]
                able[e, count[e]] = s
                count[e] += 1
                stale[e] = True
    return free.max(), free.mean()


@helper
def _draw(state, draws):  # type: ignore[no-untyped-def]
    """The next numbers in [0, 1) (xorshift, Marsaglia 2003)."""
    for i in range(len(draws)):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        draws[i] = (state >> np.uint64(11)) / 9007199254740992.0
    return state


@allocating
def _anneal(  # type: ignore[no-untyped-def]
    device, duration, waits, takes, brings, pool, level, succ_ptr, succ, lag, cap, above, class_ptr, devices, most, prio, looks, earlies, rounds,
    tries, seed, least, best_order, stop,
):  # fmt: skip
    n, classes = len(device), len(class_ptr) - 1
    state = np.uint64(seed * 2654435769 + 88172645463325252)
    start, order, draws = np.zeros(n), np.zeros(n, np.int64), np.zeros(8)
    mean = duration.mean()
    best, begin, begin_value, begin_look, begin_loose = np.inf, prio.copy(), np.inf, 0.0, True
    for i in range(2 * len(looks)):
        if stop[0]:
            return best
        look, loose = looks[i // 2], i % 2 == 0
        # First the given priorities, with every look-ahead and both rules of memory.
        span, ends = _schedule(
            device, duration, waits, takes, brings, pool, level, succ_ptr, succ, lag, cap, above, devices, most, prio,
            look, np.inf, loose, start, order,
        )  # fmt: skip
        if span + ends / 1024 < begin_value:
            begin_value, begin_look, begin_loose = span + ends / 1024, look, loose
            begin[:] = start
        if span < best:
            best = span
            best_order[:] = order
    best_start = begin.copy()
    trial = prio.copy()
    for turn in range(rounds):
        # every second round goes on from the best
        current, mine, look, early, loose = begin.copy(), begin_value, begin_look, np.inf, begin_loose if turn == 0 else turn % 4 < 2
        if turn % 2:
            current, mine = best_start.copy(), best + mean
        for step in range(tries):
            if best <= least or stop[0]:
                return best
            state = _draw(state, draws)
            trial[:] = current
            k = int(draws[0] * classes)
            low, high = class_ptr[k], class_ptr[k + 1]
            if draws[1] < 0.7:  # a run of micro-batches, or one
                low += int(draws[2] * (high - low))
                high = low + 1 if draws[1] < 0.4 else min(high, low + 1 + int(draws[3] * (high - low)))
            # Priorities are start times; a neighbour moves one micro-batch, a run of them, or a whole class by up to five mean durations.
            shift = (draws[4] * 2 - 1) * 5 * mean
            for a in range(low, high):
                trial[a] += shift
            now, soon, open_ = look, early, loose
            if draws[5] < 0.2:
                open_ = draws[6] * len(earlies) % 1 < 0.5
                now, soon = looks[int(draws[5] * 5 * len(looks))], mean * earlies[int(draws[6] * len(earlies))]
            span, ends = _schedule(
                device, duration, waits, takes, brings, pool, level, succ_ptr, succ, lag, cap, above, devices, most, trial,
            now, soon, open_, start, order,
            )  # fmt: skip
            if span < best:
                best = span
                best_order[:] = order
                best_start[:] = start
            # The mean end of devices breaks ties between equal makespans.
            value = span + ends / 1024
            # Threshold accepting: the worsening allowed shrinks to nothing over the round; squared draws make small ones likelier.
            if value <= mine + 0.6 * mean * (1 - step / tries) * draws[7] * draws[7]:
                mine, look, early, loose = value, now, soon, open_
                current[:] = start
    return best


def anneal(shop: Shop, priority_s: F64, *, tries: int, seed: int, least_s: float = 0.0) -> tuple[float, I64]:
    """(makespan in s, actions in an order in which they can be placed); infinite when no priorities tried lead to an end.

    `least_s`: stop when this is reached, nothing can be better; so does the end of the time (`effort.stop_flag`).
    """
    order = np.zeros(len(shop.device), np.int64)
    rounds = max(1, tries // TRIES_PER_START)
    with stop_flag() as stop:
        best = _anneal(
            shop.device, shop.duration_s, shop.waits, shop.takes, shop.brings, shop.pool, shop.level, shop.succ_ptr, shop.succ, shop.lag_s, shop.cap,
            shop.above, shop.class_ptr, shop.devices, shop.most_classes, priority_s, np.array(LOOK_AHEAD_SHARES),
            np.array(EARLY_DURATIONS), rounds, tries // rounds, seed, least_s, order, stop,
        )  # fmt: skip
    return float(best), order
