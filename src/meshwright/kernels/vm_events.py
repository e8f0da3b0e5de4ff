"""Machines on hosts in virtual time: arrivals, departures, resizes, moves with their copies, and ticks, on the shared event heap, compiled.

A rule decides (`vm_fleet`), or the caller: `advance` then comes back with the machine that wants a host. What hosts hold is counted here again, apart
from the rule's own columns: a host that is given more than it has ends the run. Cost: O(log machines) per event, and what the rule takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import event_heap, vm_drain, vm_fleet
from .compile import fingerprint, inlined, kernel
from .event_heap import EventHeap, heap_pop, heap_put, make_heap
from .vm_drain import next_move
from .vm_fleet import WHOLE, choose, leave, left_of, put, release, review, unlink

__all__ = ["ASKED", "OVERFULL", "Events", "advance", "make_events"]

DONE, ASKED, OVERFULL = -1, 0, -2  # what `advance` answers: at an end, the number of a machine (0 and up), a host was given too much
AT_ARRIVAL, AT_TICK, AT_RESIZE, AT_COPIES = range(4)  # slots of the heap behind those of the machines
NEXT, RESIZE, STAYS, TICKS, BUSY, LOW, INVERSIONS, REFUSED, MOVES, PENDING, OVER, SOURCES = range(12)  # places in `counts`


class Events(NamedTuple):
    """`until_s`, `from_s`: end of the run, and of its warm-up. `order`: machines by arrival. `ticks`: a row per tick: when, hosts in use, machines,
    guard, share overdue, loads. `sums`: seconds, host seconds in use, and load seconds of each resource since `from_s`."""

    until_s: float
    from_s: float
    tick_s: float
    copy_s: float
    ask: bool
    heap: EventHeap
    size: NDArray[np.int64]
    left: NDArray[np.int64]
    hosts: NDArray[np.void]
    machines: NDArray[np.void]
    order: NDArray[np.int32]
    stays: NDArray[np.void]
    copies: NDArray[np.void]
    resizes: NDArray[np.void]
    ticks: NDArray[np.float64]
    sums: NDArray[np.float64]
    counts: NDArray[np.int64]


HOST = np.dtype([("kind", "i4"), ("there", "i4")], align=True)
# its present stay, -1: none; priority
MACHINE = np.dtype([("arrival_s", "f8"), ("end_s", "f8"), ("shape", "i4"), ("low", "i4"), ("stay", "i4")], align=True)
STAY = np.dtype([("from_s", "f8"), ("to_s", "f8"), ("vm", "i4"), ("host", "i4")], align=True)  # `to_s` not finite: still there
COPY = np.dtype([("row", "i4"), ("shape", "i4"), ("vm", "i4")], align=True)  # stay that ends with the copy, -1: none
RESIZE_TO = np.dtype([("at_s", "f8"), ("vm", "i4"), ("shape", "i4"), ("done", "i4")], align=True)


def make_events(
    machines: NDArray[np.void], size: NDArray[np.int64], kind: NDArray[np.int32], resizes: NDArray[np.void], *, since_s: float, from_s: float,
    until_s: float, tick_s: float, copy_s: float, copies: int, moves: int, ask: bool,
) -> Events:  # fmt: skip
    """`machines`: of MACHINE, `resizes`: of RESIZE_TO, by time. `moves`: at most; `copies`: at a time. Machines that came before `since_s` come at
    it, the oldest first."""
    n, h, d = len(machines), len(kind), size.shape[2]
    order = np.lexsort((np.arange(n), machines["arrival_s"])).astype(np.int32)
    machines = machines.copy()
    machines["arrival_s"] = np.maximum(machines["arrival_s"], since_s)
    machines["stay"] = -1
    hosts, stays, going = np.zeros(h, HOST), np.zeros(n + moves + len(resizes), STAY), np.zeros(copies, COPY)
    hosts["kind"], stays["to_s"], going["row"] = kind, np.inf, -1
    heap, count = make_heap(n + AT_COPIES + copies), np.zeros(SOURCES + 1, np.int64)
    count[PENDING] = count[OVER] = -1
    if n:
        heap_put(heap, n + AT_ARRIVAL, float(machines["arrival_s"][order[0]]), 2)
    heap_put(heap, n + AT_TICK, since_s + tick_s, 3)
    if len(resizes):
        heap_put(heap, n + AT_RESIZE, float(resizes["at_s"][0]), 1)
    sums = np.zeros(3 + d)
    sums[-1] = since_s
    return Events(
        until_s=until_s, from_s=from_s, tick_s=tick_s, copy_s=copy_s, ask=ask, heap=heap, size=size, left=np.full((h, d), WHOLE,
            np.int64), hosts=hosts,
        machines=machines, order=order, stays=stays, copies=going, resizes=resizes.copy(), ticks=np.zeros((int((until_s - since_s) / tick_s) + 2,
            5 + d)),
        sums=sums, counts=count,
    )  # fmt: skip


@inlined
def _take(e, v, h, now_s):  # type: ignore[no-untyped-def]
    """A stay begins; whether the host has the room."""
    k, s, fits = e.hosts[h].kind, e.machines[v].shape, True
    for j in range(e.left.shape[1]):
        e.left[h, j] -= e.size[s, k, j]
        fits = fits and e.left[h, j] >= 0
    e.counts[BUSY] += e.hosts[h].there == 0
    e.hosts[h].there += 1
    row = e.counts[STAYS]
    e.machines[v].stay, e.stays[row].vm, e.stays[row].host, e.stays[row].from_s = row, v, h, now_s
    e.counts[STAYS] += 1
    if not fits:
        e.counts[OVER] = v
    return fits


@inlined
def _give(e, row, s, now_s):  # type: ignore[no-untyped-def]
    """A stay ends."""
    h = e.stays[row].host
    k = e.hosts[h].kind
    for j in range(e.left.shape[1]):
        e.left[h, j] += e.size[s, k, j]
    e.hosts[h].there -= 1
    e.counts[BUSY] -= e.hosts[h].there == 0
    e.stays[row].to_s = now_s


@inlined
def _account(e, now_s):  # type: ignore[no-untyped-def]
    """Sums up to now."""
    span = min(now_s, e.until_s) - max(e.sums[-1], e.from_s)
    if span > 0.0:
        e.sums[0] += span
        e.sums[1] += span * e.counts[BUSY]
        for j in range(e.left.shape[1]):
            used = 0
            for h in range(len(e.hosts)):
                used += WHOLE - e.left[h, j]
            e.sums[2 + j] += span * used / WHOLE
    e.sums[-1] = now_s


@inlined
def _placed(e, fleet, outlook, rule, v, h, now_s):  # type: ignore[no-untyped-def]
    """The answer for a machine that arrived; whether it was possible."""
    if h < 0:
        if now_s >= e.from_s:
            e.counts[REFUSED] += 1
            e.counts[INVERSIONS] += not e.machines[v].low and e.counts[LOW] > 0
        return True
    fits = _take(e, v, h, now_s)
    put(fleet, outlook, rule, v, h, now_s)
    e.counts[LOW] += e.machines[v].low
    if e.machines[v].end_s < np.inf:
        heap_put(e.heap, np.int64(v), e.machines[v].end_s, np.int64(0))
    return fits


@inlined
def _resize(e, fleet, outlook, rule, r, now_s):  # type: ignore[no-untyped-def]
    """In place where it fits, else on another host, else not at all."""
    v, s = np.int64(e.resizes[r].vm), e.resizes[r].shape
    if e.machines[v].stay < 0 or now_s >= e.machines[v].end_s:
        return
    h, before = np.int64(fleet.machines[v].host), fleet.machines[v].shape
    leave(fleet, outlook, rule, v, now_s)
    fleet.machines[v].shape = s
    fits, k = True, fleet.hosts[h].kind
    for j in range(fleet.free.shape[1]):
        fits = fits and fleet.free[h, j] >= fleet.size[s, k, j]
    if not fits:
        left_s = fleet.machines[v].arrival_s + fleet.machines[v].predicted_s - now_s
        other = choose(fleet, outlook, rule, v, now_s, max(left_s, 0.0), np.bool_(False))
        if other < 0:
            fleet.machines[v].shape = before
        h = other if other >= 0 else h
    if fleet.machines[v].shape == s:
        _give(e, e.machines[v].stay, before, now_s)
        e.machines[v].shape = s
        e.resizes[r].done = 1
        _take(e, v, h, now_s)
    put(fleet, outlook, rule, v, h, now_s)


@inlined
def _moves(e, fleet, outlook, rule, drain, now_s):  # type: ignore[no-untyped-def]
    """As many moves as copies may run at a time."""
    n = len(e.machines)
    for c in range(len(e.copies)):
        if e.copies[c].row >= 0:
            continue
        if e.counts[STAYS] >= len(e.stays) - len(e.resizes) - (n - e.counts[NEXT]):
            return  # no more moves may be written down
        v, h = next_move(fleet, outlook, rule, drain, now_s)
        if v < 0:
            return
        e.copies[c].row, e.copies[c].shape, e.copies[c].vm = e.machines[v].stay, e.machines[v].shape, v
        unlink(fleet, v)
        _take(e, v, h, now_s)
        put(fleet, outlook, rule, v, h, now_s)
        e.counts[MOVES] += now_s >= e.from_s
        heap_put(e.heap, np.int64(n + AT_COPIES + c), now_s + e.copy_s, np.int64(0))


@inlined
def _tick(e, fleet, outlook, rule, drain, now_s):  # type: ignore[no-untyped-def]
    review(fleet, outlook, rule, now_s)
    if drain.per_day > 0.0:
        _moves(e, fleet, outlook, rule, drain, now_s)
    row = e.counts[TICKS]
    e.ticks[row, 0] = now_s
    machines = 0
    for h in range(len(e.hosts)):
        machines += e.hosts[h].there
        for j in range(e.left.shape[1]):
            e.ticks[row, 5 + j] += (WHOLE - e.left[h, j]) / WHOLE
    e.ticks[row, 1], e.ticks[row, 2], e.ticks[row, 3], e.ticks[row, 4] = e.counts[BUSY], machines, fleet.told[0], fleet.told[1]
    e.counts[TICKS] += 1
    heap_put(e.heap, np.int64(len(e.machines) + AT_TICK), now_s + e.tick_s, np.int64(3))


@inlined
def _left(e, fleet, outlook, rule, v, now_s):  # type: ignore[no-untyped-def]
    _give(e, e.machines[v].stay, e.machines[v].shape, now_s)
    e.counts[LOW] -= e.machines[v].low
    e.machines[v].stay = -1
    leave(fleet, outlook, rule, v, now_s)
    for c in range(len(e.copies)):
        if e.copies[c].row >= 0 and e.copies[c].vm == v:  # the copy ends with it
            heap_put(e.heap, np.int64(len(e.machines) + AT_COPIES + c), now_s, np.int64(0))


def _entry(sources: int):  # type: ignore[no-untyped-def]
    """`advance`, kept on disk for as long as the sources it is made of stay as they are."""

    @kernel
    def advance(e, fleet, outlook, rule, drain, answer):  # type: ignore[no-untyped-def]
        """Run to the end, or to a machine that wants a host where the caller decides. `answer`: the host for the machine that was asked for, -1:
        none."""
        n, heap = len(e.machines), e.heap
        e.counts[SOURCES] = sources
        if e.counts[PENDING] >= 0:
            v = e.counts[PENDING]
            e.counts[PENDING] = -1
            if not _placed(e, fleet, outlook, rule, v, answer, e.sums[-1]):
                return OVERFULL
        while heap.queued[0] > 0 and heap.time[heap.order[0]] <= e.until_s:
            slot = heap_pop(heap)
            now_s = heap.time[slot]
            _account(e, now_s)
            if slot < n:
                _left(e, fleet, outlook, rule, slot, now_s)
            elif slot == n + AT_ARRIVAL:
                v = np.int64(e.order[e.counts[NEXT]])
                e.counts[NEXT] += 1
                if e.counts[NEXT] < n:
                    heap_put(heap, np.int64(n + AT_ARRIVAL), e.machines[e.order[e.counts[NEXT]]].arrival_s, np.int64(2))
                if e.machines[v].end_s <= now_s:
                    continue
                if e.ask:
                    e.counts[PENDING] = v
                    return v
                h = choose(fleet, outlook, rule, v, now_s, left_of(outlook, v, now_s - fleet.machines[v].arrival_s, now_s), np.bool_(False))
                if not _placed(e, fleet, outlook, rule, v, h, now_s):
                    return OVERFULL
            elif slot == n + AT_TICK:
                _tick(e, fleet, outlook, rule, drain, now_s)
            elif slot == n + AT_RESIZE:
                r = e.counts[RESIZE]
                e.counts[RESIZE] += 1
                if r + 1 < len(e.resizes):
                    heap_put(heap, np.int64(n + AT_RESIZE), e.resizes[r + 1].at_s, np.int64(1))
                _resize(e, fleet, outlook, rule, r, now_s)
            else:
                c = slot - n - AT_COPIES
                row = e.copies[c].row
                e.copies[c].row = -1
                _give(e, row, e.copies[c].shape, now_s)
                release(fleet, outlook, rule, e.stays[row].host, e.copies[c].shape, now_s)
        _account(e, e.until_s)
        return DONE

    return advance


advance = _entry(fingerprint(__file__, vm_fleet.__file__, vm_drain.__file__, event_heap.__file__))
