"""Processors of ranks: one piece of work after the other, under a quota, on cores that several of them share.

A processor serves what lanes ask for, first come, first served. A send's work (`post`) is served alike, but its message does not wait for it. Under a
quota it runs until `left` is used up, and `overrun` more if it was running already; then it stands still. At `refill` it gets `quota` again, of which
what was overdrawn is taken off. Processors of the pool run on `cores` cores: while k of them run, each gets min(1, cores / k) of one, as from the
kernel's fair scheduler over a few of its slices. Busy cores share memory and caches too: a core does its kind of work at `speeds` of one alone, so a
second of its time, which a quota counts, is less than one of work.

A processor has one event at most, in the heap's slot `first_slot + processor`: the end of its work, of what it may use, or of its period. When one
of the pool begins or stops, the events of the others that run are put anew. The slot behind the last processor is the moment that steps of
`waits_in` wait for. Cost: O(1) per event, O(processors) where the pool is full.
"""

from __future__ import annotations

import numpy as np

from ..kernels.compile import called, inlined
from ..kernels.event_heap import heap_put
from .tables import WAKE_S

__all__ = ["ask", "begin_processors", "post", "processor_event"]

# numba freezes these: who is served, and where a processor stands
_NOBODY, _SEND = -1, -2
_STILL, _RUNS, _PARKED = 0, 1, 2


@inlined
def _speed(t, s, p, k):  # type: ignore[no-untyped-def]
    """Seconds of its work that a processor does per second of its time while `k` of the pool run."""
    return t.speeds[s.processor[p].row, min(max(k, 1), t.speeds.shape[1]) - 1] if t.pooled[p] else 1.0


@inlined
def _rate(t, s, p, k):  # type: ignore[no-untyped-def]
    """Seconds of its work per second."""
    speed = _speed(t, s, p, k)
    return speed if not t.pooled[p] or t.cores <= 0.0 or k <= t.cores else speed * (t.cores / k)


@inlined
def _spend(t, s, p, spent_s, speed):  # type: ignore[no-untyped-def]
    s.processor[p].rest -= spent_s
    s.processor[p].part -= spent_s
    if t.quota[p] > 0.0:
        s.processor[p].left -= spent_s / speed


@inlined
def _plan(t, s, first_slot, p, now, rate):  # type: ignore[no-untyped-def]
    """Put the event of a processor that runs."""
    s.processor[p].since = now
    head = np.int64(s.processor[p].head)
    key = -1 if head < 0 else head << 32
    heap_put(s.heap, first_slot + p, min(now + s.processor[p].part / rate, s.processor[p].refill), key)


@called
def _set_running(t, s, first_slot, p, runs, now):  # type: ignore[no-untyped-def]
    """Note that `p` runs now or no longer; the others of the pool get other shares of the cores then."""
    was, s.processor[p].state = s.processor[p].state == _RUNS, runs
    if not t.pooled[p] or was == (runs == _RUNS):
        return
    before = s.pool[0]
    s.pool[0] += 1 if runs == _RUNS else -1
    after = s.pool[0]
    if t.speeds.shape[1] == 1 and (t.cores <= 0.0 or max(before, after) <= t.cores):
        return
    for other in range(len(t.quota)):
        if other != p and t.pooled[other] and s.processor[other].state == _RUNS:
            rate = _rate(t, s, other, before)
            if _rate(t, s, other, after) != rate:
                _spend(t, s, other, min(s.processor[other].part, (now - s.processor[other].since) * rate), _speed(t, s, other, before))
                if t.quota[other] > 0.0 and t.speeds.shape[1] > 1:
                    may_s = max(0.0, s.processor[other].left + t.overrun[other])
                    s.processor[other].part = min(may_s * _speed(t, s, other, after), s.processor[other].rest)
                _plan(t, s, first_slot, other, now, _rate(t, s, other, after))


@called
def _go_on(t, s, first_slot, p, now, running, record):  # type: ignore[no-untyped-def]
    """Run, or stand still until the next period. It goes on past its quota only where it is `running`: what begins anew, or after a pause, waits
    until something is left of it."""
    may_s = np.inf
    if t.quota[p] > 0.0:
        if now >= s.processor[p].refill:  # what was overdrawn is paid by as many periods as it takes
            periods = np.floor((now - s.processor[p].refill) / t.period[p]) + 1.0
            s.processor[p].refill += t.period[p] * periods
            s.processor[p].left = min(t.quota[p], s.processor[p].left + t.quota[p] * periods)
        may_s = max(0.0, s.processor[p].left + t.overrun[p]) if running or s.processor[p].left > 0.0 else 0.0
    if may_s <= 0.0:
        _set_running(t, s, first_slot, p, np.int64(_STILL), now)
        heap_put(s.heap, first_slot + p, s.processor[p].refill, np.int64(-1))
        return
    lane = np.int64(s.processor[p].head)
    if not s.processor[p].begun and lane >= 0:
        step = s.lane[lane].at
        if t.kind[step] == 0:
            s.step[step].first_start = min(s.step[step].first_start, now)
        if record:
            instance = t.record_at[step] + s.lane[lane].turn
            s.instance[instance].middle = now
            if t.kind[step] == 0:
                s.instance[instance].start = now
    s.processor[p].begun = 1
    _set_running(t, s, first_slot, p, np.int64(_RUNS), now)
    s.processor[p].part = min(may_s * _speed(t, s, p, s.pool[0]), s.processor[p].rest)
    _plan(t, s, first_slot, p, now, _rate(t, s, p, s.pool[0]))


@called
def _take(t, s, first_slot, p, now, running, record):  # type: ignore[no-untyped-def]
    """Serve what was asked for next, if anything was."""
    lane = np.int64(s.processor[p].first)
    s.processor[p].begun = 0
    s.processor[p].row = t.copy_row[p]
    if lane >= 0 and s.lane[lane].before > 0.0:
        s.processor[p].head, s.processor[p].rest, s.lane[lane].before = _SEND, s.lane[lane].before, 0.0
    elif lane >= 0:
        s.processor[p].head, s.processor[p].rest, s.processor[p].first = lane, t.duration[s.lane[lane].at], s.lane[lane].next_waiting
        s.processor[p].row = t.work_row[s.lane[lane].at]
    elif s.processor[p].posted > 0.0:
        s.processor[p].head, s.processor[p].rest, s.processor[p].posted = _SEND, s.processor[p].posted, 0.0
    else:
        s.processor[p].head, s.processor[p].free = _NOBODY, now
        _set_running(t, s, first_slot, p, np.int64(_STILL), now)
        return
    _go_on(t, s, first_slot, p, now, running, record)


@called
def ask(t, s, first_slot, p, lane, now, record):  # type: ignore[no-untyped-def]
    """A lane asks for its step's duration, behind all that was asked for before."""
    s.lane[lane].before, s.processor[p].posted = s.processor[p].posted, 0.0
    s.lane[lane].next_waiting = -1
    if s.processor[p].first < 0:
        s.processor[p].first = lane
    else:
        s.lane[s.processor[p].final].next_waiting = lane
    s.processor[p].final = lane
    if s.processor[p].head == _NOBODY:
        _take(t, s, first_slot, p, now, now <= s.processor[p].free, record)


@called
def post(t, s, first_slot, p, now, work_s):  # type: ignore[no-untyped-def]
    """A send's work: nobody waits for it, what is asked for later comes behind it."""
    s.processor[p].posted += work_s
    if s.processor[p].head == _NOBODY:
        _take(t, s, first_slot, p, now, now <= s.processor[p].free, np.bool_(False))


@inlined
def _has_begun(t, s, first_slot, p, now):  # type: ignore[no-untyped-def]
    """What a rank does before its first step is done; the last one says when its loss is known."""
    s.processor[p].opens = 0
    if t.waits_in[p] >= 0:
        s.processor[p].posted += t.begin_sum
        s.pool[1] -= 1
        if s.pool[1] == 0:
            s.known[0] = now + t.begin_wait
            heap_put(s.heap, first_slot + len(t.quota), s.known[0], np.int64(-1))


@called
def begin_processors(t, s, first_slot):  # type: ignore[no-untyped-def]
    """Everything at the moment 0: what ranks do before their first step."""
    s.known[0] = np.inf
    for p in range(len(t.quota)):
        if t.quota[p] <= 0.0:
            s.processor[p].refill = np.inf
        if t.waits_in[p] >= 0:
            s.pool[1] += 1
    for p in range(len(t.quota)):
        s.processor[p].opens = 1
        if t.begin[p] > 0.0:
            post(t, s, first_slot, np.int64(p), 0.0, t.begin[p])
        else:
            _has_begun(t, s, first_slot, p, 0.0)
            if s.processor[p].posted > 0.0:
                _take(t, s, first_slot, np.int64(p), 0.0, np.bool_(True), np.bool_(False))


@called
def processor_event(t, s, first_slot, p, now, record):  # type: ignore[no-untyped-def]
    """What the event of a slot from `first_slot` on means. Returns the lane whose local part is over, or -1."""
    if p == len(t.quota):
        for other in range(len(t.quota)):
            if s.processor[other].state == _PARKED:
                s.processor[other].rest = WAKE_S
                _go_on(t, s, first_slot, np.int64(other), now, np.bool_(False), record)
        return np.int64(-1)
    if s.processor[p].state != _RUNS:
        _go_on(t, s, first_slot, p, now, np.bool_(False), record)
        return np.int64(-1)
    rate = _rate(t, s, p, s.pool[0])
    ends = s.processor[p].since + s.processor[p].part / rate <= s.processor[p].refill
    spent_s = s.processor[p].part if ends else min(s.processor[p].part, (now - s.processor[p].since) * rate)
    _spend(t, s, p, spent_s, _speed(t, s, p, s.pool[0]))
    if s.processor[p].rest > 0.0:
        _go_on(t, s, first_slot, p, now, now >= s.processor[p].refill, record)
        return np.int64(-1)
    lane = np.int64(s.processor[p].head)
    if lane >= 0:
        step = s.lane[lane].at
        if t.waits_in[p] == step and s.lane[lane].turn == 0 and now < s.known[0]:
            _set_running(t, s, first_slot, p, np.int64(_PARKED), now)
            return np.int64(-1)
        if record:
            s.instance[t.record_at[step] + s.lane[lane].turn].local_end = now
    elif s.processor[p].opens:
        _has_begun(t, s, first_slot, p, now)
    _take(t, s, first_slot, p, now, np.bool_(True), record)
    return lane if lane >= 0 else np.int64(-1)
