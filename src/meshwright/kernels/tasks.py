"""Schedules of task graphs, compiled: the time of a sequence, insertion of tasks into gaps, first come first served, and moves that make it shorter.

Tasks are numbered, devices too. `dur[i, k]`: seconds of task i on device k, infinite where it cannot run. Parents are lists in CSR form (`ptr`,
`parent`, `size` in bytes). A message from device k to l takes `delay[k, l] + size * per_byte[k, l]`, nothing within a device. With `route_ptr`,
`route_link` (links of the route from k to l at `k * devices + l`) and `link_per_byte`, a message also waits for the links of its route and keeps them
busy; without links (an empty `link_per_byte`) messages do not share any. A sequence is a topological order of all tasks: each device runs its tasks
in this order, each as early as the data and the device allow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .compile import copy_into

__all__ = ["anneal", "descend", "first_come", "inserted", "timed"]

_kept = njit(cache=True, nogil=True)
_part = njit(nogil=True, inline="never")


@_kept  # type: ignore[untyped-decorator]
def timed(
    seq: Any, on: Any, dur: Any, ptr: Any, parent: Any, size: Any, delay: Any, per_byte: Any, route_ptr: Any, route_link: Any, link_per_byte: Any,
    start: Any, end: Any, arrive: Any,
) -> float:  # fmt: skip
    """Fills `start` and `end` [tasks] and `arrive` [edges] in seconds; the makespan. Messages take links in the order of the tasks that wait for
    them. O(tasks + edges · links of a route)."""
    devices = dur.shape[1]
    free, link_free = np.zeros(devices), np.zeros(len(link_per_byte))
    last = 0.0
    for i in seq:
        k = on[i]
        at = free[k]
        for e in range(ptr[i], ptr[i + 1]):
            p = parent[e]
            t = end[p]
            m = on[p]
            if m != k:
                if len(link_per_byte):
                    for x in range(route_ptr[m * devices + k], route_ptr[m * devices + k + 1]):
                        t = max(t, link_free[route_link[x]])
                    for x in range(route_ptr[m * devices + k], route_ptr[m * devices + k + 1]):
                        link_free[route_link[x]] = t + size[e] * link_per_byte[route_link[x]]
                t += delay[m, k] + size[e] * per_byte[m, k]
            arrive[e] = t
            at = max(at, t)
        start[i] = at
        end[i] = at + dur[i, k]
        free[k] = end[i]
        last = max(last, end[i])
    return last


@_kept  # type: ignore[untyped-decorator]
def inserted(order: Any, fixed: Any, dur: Any, ptr: Any, parent: Any, size: Any, delay: Any, per_byte: Any, on: Any, start: Any, end: Any) -> float:
    """Tasks in this topological order, each on the device where it ends first (`fixed[i]` >= 0: on that one), in the first gap that is long enough.

    A gap lies before, between or after what the device has already. Ties go to the smaller device. O(tasks · devices · (degree + tasks of a
    device))."""
    tasks, devices = dur.shape
    begin, finish = np.empty((devices, tasks)), np.empty((devices, tasks))
    count = np.zeros(devices, np.int64)
    makespan = 0.0
    for i in order:
        best_end, best_start, best_k, best_at = np.inf, 0.0, -1, 0
        for k in range(devices):
            if (fixed[i] >= 0 and fixed[i] != k) or dur[i, k] == np.inf:
                continue
            ready = 0.0
            for e in range(ptr[i], ptr[i + 1]):
                p = parent[e]
                t = end[p]
                if on[p] != k:
                    t += delay[on[p], k] + size[e] * per_byte[on[p], k]
                ready = max(ready, t)
            before, at = 0.0, 0
            while at < count[k] and max(before, ready) + dur[i, k] > begin[k, at]:
                before = finish[k, at]
                at += 1
            here = max(before, ready)
            if here + dur[i, k] < best_end:
                best_end, best_start, best_k, best_at = here + dur[i, k], here, k, at
        k = best_k
        for j in range(count[k], best_at, -1):
            begin[k, j], finish[k, j] = begin[k, j - 1], finish[k, j - 1]
        begin[k, best_at], finish[k, best_at] = best_start, best_end
        count[k] += 1
        on[i], start[i], end[i] = k, best_start, best_end
        makespan = max(makespan, best_end)
    return makespan


@_kept  # type: ignore[untyped-decorator]
def first_come(edge: Any, on: Any, dur: Any, ptr: Any, parent: Any, size: Any, delay: Any, per_byte: Any, start: Any, end: Any) -> float:
    """Each device runs tasks in the order in which their data is complete (GiPH, section 3): the makespan.

    A task that is not yet known to be ready becomes so after one that is, so the earliest among those known is next on its device. Of those that are
    ready at one time it is the one whose last message has the smallest number, as in GiPH's simulator; `edge`: numbers of the edges. O(tasks^2)."""
    tasks = dur.shape[0]
    left = ptr[1:] - ptr[:-1]
    ready, last_edge = np.zeros(tasks), np.arange(tasks) - tasks
    done = np.zeros(tasks, np.bool_)
    free = np.zeros(dur.shape[1])
    last = 0.0
    for _ in range(tasks):
        i = -1
        for j in range(tasks):
            if not done[j] and left[j] == 0 and (i < 0 or (ready[j], last_edge[j]) < (ready[i], last_edge[i])):
                i = j
        done[i] = True
        k = on[i]
        start[i] = max(free[k], ready[i])
        end[i] = start[i] + dur[i, k]
        free[k] = end[i]
        last = max(last, end[i])
        for j in range(tasks):
            for e in range(ptr[j], ptr[j + 1]):
                if parent[e] == i:
                    left[j] -= 1
                    t = end[i]
                    if k != on[j]:
                        t += delay[k, on[j]] + size[e] * per_byte[k, on[j]]
                    if (t, edge[e]) > (ready[j], last_edge[j]):
                        ready[j], last_edge[j] = t, edge[e]
    return last


@_part  # type: ignore[untyped-decorator]
def _place_of(seq: Any, place: Any) -> None:
    for at in range(len(seq)):
        place[seq[at]] = at


@_part  # type: ignore[untyped-decorator]
def _shifted(seq: Any, place: Any, source: int, target: int) -> None:
    """Moves the task at `source` to `target`; those between close the gap."""
    task = seq[source]
    step = 1 if target > source else -1
    for at in range(source, target, step):
        seq[at] = seq[at + step]
        place[seq[at]] = at
    seq[target] = task
    place[task] = target


@_part  # type: ignore[untyped-decorator]
def _window(i: int, place: Any, ptr: Any, parent: Any, child_ptr: Any, child: Any, tasks: int) -> tuple[int, int]:
    """First and last place in the sequence that task i may have, the others being where they are."""
    low, high = 0, tasks - 1
    for e in range(ptr[i], ptr[i + 1]):
        low = max(low, place[parent[e]] + 1)
    for e in range(child_ptr[i], child_ptr[i + 1]):
        high = min(high, place[child[e]] - 1)
    return low, high


@_part  # type: ignore[untyped-decorator]
def _critical(seq: Any, place: Any, on: Any, start: Any, end: Any, arrive: Any, ptr: Any, parent: Any, chain: Any) -> int:
    """Tasks that nothing may delay, from the last one back: each began when its device or its last message let it. How many."""
    i = 0
    for j in range(len(seq)):
        if end[j] > end[i]:
            i = j
    found = 0
    while i >= 0:
        chain[found] = i
        found += 1
        follows = -1
        for at in range(place[i] - 1, -1, -1):
            j = seq[at]
            if on[j] == on[i]:
                if end[j] >= start[i]:
                    follows = j
                break
        for e in range(ptr[i], ptr[i + 1]):
            if arrive[e] >= start[i]:
                follows = parent[e]
        i = follows if start[i] > 0 else -1
    return found


@_kept  # type: ignore[untyped-decorator]
def descend(
    seq: Any, on: Any, dur: Any, ptr: Any, parent: Any, size: Any, delay: Any, per_byte: Any, route_ptr: Any, route_link: Any, link_per_byte: Any,
    child_ptr: Any, child: Any, budget: int,
) -> tuple[float, int]:  # fmt: skip
    """Moves of one critical task (another device; earlier in the sequence; both), the first that makes the schedule shorter is kept, until none does.

    Changes `seq` and `on`. Returns the makespan and how many schedules were looked at, `budget` at most (one for the start)."""
    tasks, devices = dur.shape
    start, end, arrive = np.empty(tasks), np.empty(tasks), np.empty(len(parent))
    place, chain = np.empty(tasks, np.int64), np.empty(tasks, np.int64)
    best = timed(seq, on, dur, ptr, parent, size, delay, per_byte, route_ptr, route_link, link_per_byte, start, end, arrive)
    _place_of(seq, place)
    looked, better = 1, True
    while better and looked < budget:
        better = False
        timed(seq, on, dur, ptr, parent, size, delay, per_byte, route_ptr, route_link, link_per_byte, start, end, arrive)
        length = _critical(seq, place, on, start, end, arrive, ptr, parent, chain)
        for c in range(length):
            i = chain[c]
            home, old = place[i], on[i]
            low, _ = _window(i, place, ptr, parent, child_ptr, child, tasks)
            for how in range(2):
                target = home if how == 0 else low
                if how == 1 and low == home:
                    continue
                for k in range(devices):
                    if dur[i, k] == np.inf or (how == 0 and k == old) or looked >= budget:
                        continue
                    if target != home:
                        _shifted(seq, place, home, target)
                    on[i] = k
                    found = timed(seq, on, dur, ptr, parent, size, delay, per_byte, route_ptr, route_link, link_per_byte, start, end, arrive)
                    looked += 1
                    if found < best:
                        best, better = found, True
                        break
                    on[i] = old
                    if target != home:
                        _shifted(seq, place, target, home)
                if better:
                    break
            if better:
                break
    return best, looked


@_part  # type: ignore[untyped-decorator]
def _random(state: Any) -> float:
    """xorshift64*, in [0, 1)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@_kept  # type: ignore[untyped-decorator]
def anneal(
    seq: Any, on: Any, dur: Any, ptr: Any, parent: Any, size: Any, delay: Any, per_byte: Any, route_ptr: Any, route_link: Any, link_per_byte: Any,
    child_ptr: Any, child: Any, budget: int, hot: float, cold: float, seed: int,
) -> float:  # fmt: skip
    """`budget` random moves of one task to another device, another place in the sequence, or both. What makes the schedule longer by d is kept with
    probability exp(-d / temperature), which falls from `hot` to `cold` seconds. Leaves the best schedule in `seq` and `on`; its makespan."""
    tasks, devices = dur.shape
    start, end, arrive, place = np.empty(tasks), np.empty(tasks), np.empty(len(parent)), np.empty(tasks, np.int64)
    state = np.array([seed | 1], np.uint64)
    for _ in range(8):
        _random(state)
    now = timed(seq, on, dur, ptr, parent, size, delay, per_byte, route_ptr, route_link, link_per_byte, start, end, arrive)
    best, best_seq, best_on = now, seq.copy(), on.copy()
    _place_of(seq, place)
    for step in range(budget):
        temperature = hot * (cold / hot) ** (step / budget)
        i = int(_random(state) * tasks)
        home, old = place[i], on[i]
        k = old
        if devices > 1 and _random(state) < 0.6:
            k = int(_random(state) * devices)
            if dur[i, k] == np.inf:
                continue
        low, high = _window(i, place, ptr, parent, child_ptr, child, tasks)
        target = home
        if k == old or _random(state) < 0.7:
            target = low + int(_random(state) * (high - low + 1))
        if k == old and target == home:
            continue
        _shifted(seq, place, home, target)
        on[i] = k
        found = timed(seq, on, dur, ptr, parent, size, delay, per_byte, route_ptr, route_link, link_per_byte, start, end, arrive)
        if found <= now or _random(state) < np.exp((now - found) / temperature):
            now = found
            if now < best:
                best = now
                copy_into(best_seq, seq)
                copy_into(best_on, on)
        else:
            on[i] = old
            _shifted(seq, place, target, home)
    copy_into(seq, best_seq)
    copy_into(on, best_on)
    return float(best)
