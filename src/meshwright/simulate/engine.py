"""The event loop: lanes, units, channels, and the network models, compiled.

Order of things at one instant: first all completions and arrivals, by lane, then by channel; then every lane that may go on,
once, in lane order; again until nothing happens any more; then (fair links) new rates. A lane that is visited goes on until it
must wait. Lanes that wait hang in a list on the step, unit, message or credit they wait for, and are visited only when it moves.

A step of a lane: its `after` edges; its unit (compute) or one message from each channel of its receive part; its duration (a
transfer's local part), after which a receive returns its credits; a credit of each channel of its send part; sending on all of
them at once until all are released. Steps with duration 0 take no event. Compute units are granted first asked, first served.
"""

from __future__ import annotations

from numba import njit

from ..kernels.event_heap import heap_pop, heap_put
from .exclusive import exclusive_inject, exclusive_pass
from .fair import fair_begin, fair_end, fair_settle
from .tables import COMPLETE, SENDING, TAKEN

__all__ = ["run"]

# numba freezes these: kinds of steps, phases of a lane
_COMPUTE, _TRANSFER = 0, 1
_AFTER, _ASK, _BUSY, _CREDIT, _SENDING = 0, 1, 2, 3, 4


@njit(cache=True, nogil=True)
def _wake(s, lane):  # type: ignore[no-untyped-def]
    """Visit `lane` in this pass if its turn is yet to come, else in the next."""
    if s.is_ready[lane]:
        return
    s.is_ready[lane] = 1
    number = s.number
    turn = number[0] if lane > number[1] else number[0] + 1
    key = turn * len(s.is_ready) + lane
    heap = s.ready
    at = number[2]
    number[2] += 1
    while at > 0:
        up = (at - 1) >> 1
        if heap[up] <= key:
            break
        heap[at] = heap[up]
        at = up
    heap[at] = key


@njit(cache=True, nogil=True)
def _next_ready(s):  # type: ignore[no-untyped-def]
    """Take the first lane out of the ready heap."""
    heap, lanes = s.ready, len(s.is_ready)
    key = heap[0]
    s.number[2] -= 1
    n = s.number[2]
    if n > 0:
        last, at = heap[n], 0
        while True:
            child = 2 * at + 1
            if child >= n:
                break
            if child + 1 < n and heap[child + 1] < heap[child]:
                child += 1
            if last <= heap[child]:
                break
            heap[at] = heap[child]
            at = child
        heap[at] = last
    lane = key % lanes
    s.is_ready[lane] = 0
    return lane


@njit(cache=True, nogil=True)
def _note(t, s, lane, node):  # type: ignore[no-untyped-def]
    """Record that a node (TAKEN, SENDING, COMPLETE) of the lane's step has happened."""
    s.order[s.number[4]] = 3 * (t.record_at[s.at[lane]] + s.turn[lane]) + node
    s.number[4] += 1


@njit(cache=True, nogil=True)
def _after_local(t, s, lane, now, record):  # type: ignore[no-untyped-def]
    """The local part of the lane's step is done: free the unit or the credits; complete the step unless it sends."""
    step = s.at[lane]
    if t.kind[step] == _COMPUTE:
        unit = t.lane_unit[lane]
        if unit >= 0:
            first = s.unit_first[unit]
            s.unit_owner[unit] = first
            if first >= 0:
                s.unit_first[unit] = s.next_waiting[first]
                _wake(s, first)
    else:
        lo, hi = t.in_ptr[step], t.in_ptr[step + 1]
        for n in range(lo, hi):
            c = t.in_channel[n]
            s.consumed[c] += 1
            if s.wants_credit[c] >= 0:
                _wake(s, s.wants_credit[c])
                s.wants_credit[c] = -1
        if t.out_ptr[step] < t.out_ptr[step + 1]:
            s.phase[lane] = _CREDIT
            s.sub[lane] = t.out_ptr[step]
            if record and lo < hi:
                _note(t, s, lane, TAKEN)
            return
    _complete(t, s, lane, now, record)


@njit(cache=True, nogil=True)
def _complete(t, s, lane, now, record):  # type: ignore[no-untyped-def]
    step = s.at[lane]
    s.last_end[step] = now
    if record:
        s.end[t.record_at[step] + s.turn[lane]] = now
        _note(t, s, lane, COMPLETE)
    s.done[step] += 1
    other = s.waiting[step]
    s.waiting[step] = -1
    while other >= 0:
        following = s.next_waiting[other]
        _wake(s, other)
        other = following
    s.at[lane] += 1
    if s.at[lane] == t.lane_end[lane]:
        s.at[lane] = t.lane_start[lane]
        s.turn[lane] += 1
    s.phase[lane] = _AFTER
    s.sub[lane] = t.after_ptr[s.at[lane]]


@njit(cache=True, nogil=True)
def _must_wait_for_steps(t, s, lane):  # type: ignore[no-untyped-def]
    """Check the `after` edges of the lane's step from where it stopped; hang the lane on the first that is not met."""
    step = s.at[lane]
    for n in range(s.sub[lane], t.after_ptr[step + 1]):
        other = t.after_step[n]
        needed = min(s.turn[lane] - t.after_lag[n] + 1, t.repeat[other])
        if s.done[other] < needed:
            s.sub[lane] = n
            s.next_waiting[lane] = s.waiting[other]
            s.waiting[other] = lane
            return True
    return False


@njit(cache=True, nogil=True)
def _must_wait_for_unit(t, s, lane):  # type: ignore[no-untyped-def]
    unit = t.lane_unit[lane]
    if unit < 0 or s.unit_owner[unit] == lane:
        return False
    if s.unit_owner[unit] < 0:
        s.unit_owner[unit] = lane
        return False
    s.next_waiting[lane] = -1
    if s.unit_first[unit] < 0:
        s.unit_first[unit] = lane
    else:
        s.next_waiting[s.unit_last[unit]] = lane
    s.unit_last[unit] = lane
    return True


@njit(cache=True, nogil=True)
def _must_wait_for_messages(t, s, lane):  # type: ignore[no-untyped-def]
    step = s.at[lane]
    for n in range(s.sub[lane], t.in_ptr[step + 1]):
        c = t.in_channel[n]
        if s.arrived[c] <= s.consumed[c]:
            s.sub[lane] = n
            s.wants_message[c] = lane
            return True
    return False


@njit(cache=True, nogil=True)
def _must_wait_for_credits(t, s, lane):  # type: ignore[no-untyped-def]
    step = s.at[lane]
    for n in range(s.sub[lane], t.out_ptr[step + 1]):
        c = t.out_channel[n]
        if s.sent[c] - s.consumed[c] >= t.depth[c]:
            s.sub[lane] = n
            s.wants_credit[c] = lane
            return True
    return False


@njit(cache=True, nogil=True)
def _send(t, k, s, lane, now, record):  # type: ignore[no-untyped-def]
    """Hand the step's message to every channel of its send part."""
    step = s.at[lane]
    s.phase[lane] = _SENDING
    lo, hi = t.out_ptr[step], t.out_ptr[step + 1]
    s.pending[lane] = hi - lo
    s.release[lane] = now
    if record:
        s.send[t.record_at[step] + s.turn[lane]] = now
        _note(t, s, lane, SENDING)
    for n in range(lo, hi):
        c = t.out_channel[n]
        s.sent[c] += 1
        if k.fair:
            fair_begin(t, k, s, c, t.size[step], now)
        else:
            s.left[c] = t.size[step]
            exclusive_inject(t, k, s, c, now)


@njit(cache=True, nogil=True)
def _visit(t, k, s, lane, now, record):  # type: ignore[no-untyped-def]
    """Let the lane go on until it waits for something."""
    while s.turn[lane] < t.lane_repeat[lane]:
        step = s.at[lane]
        phase = s.phase[lane]
        if phase == _AFTER:
            if _must_wait_for_steps(t, s, lane):
                return
            phase = _ASK
            s.phase[lane] = _ASK
            s.sub[lane] = t.in_ptr[step]
            if t.kind[step] != _COMPUTE:
                s.first_start[step] = min(s.first_start[step], now)
                if record:
                    s.start[t.record_at[step] + s.turn[lane]] = now
        if phase == _ASK:
            if t.kind[step] == _COMPUTE:
                if _must_wait_for_unit(t, s, lane):
                    return
                s.first_start[step] = min(s.first_start[step], now)
                if record:
                    s.start[t.record_at[step] + s.turn[lane]] = now
            elif _must_wait_for_messages(t, s, lane):
                return
            if record:
                s.middle[t.record_at[step] + s.turn[lane]] = now
            if t.duration[step] > 0.0:
                s.phase[lane] = _BUSY
                heap_put(s.heap, lane, now + t.duration[step], lane << 32)
                return
            _after_local(t, s, lane, now, record)
        elif phase == _CREDIT:
            if not _must_wait_for_credits(t, s, lane):
                _send(t, k, s, lane, now, record)
            return
        else:  # busy or sending: an event will tell
            return
    s.number[3] -= 1


@njit(cache=True, nogil=True)
def _event(t, k, s, slot, now, record):  # type: ignore[no-untyped-def]
    """A slot's event: a lane's duration or release, a channel's next segment or end of flow, a message's next hop or arrival."""
    lanes, channels = len(t.lane_start), len(t.depth)
    if slot < lanes:
        if s.phase[slot] == _BUSY:
            _after_local(t, s, slot, now, record)
        else:
            _complete(t, s, slot, now, record)
        _wake(s, slot)
    elif slot < lanes + channels:
        c = slot - lanes
        if not k.fair:
            exclusive_inject(t, k, s, c, now)
            return
        fair_end(s, c)
        sequence = s.injected[c]
        s.injected[c] += 1
        place = s.place_first[c] + sequence % s.place_count[c]
        s.slot_channel[place] = c
        s.slot_hop[place] = k.route_ptr[c + 1] - k.route_ptr[c]
        heap_put(s.heap, lanes + channels + place, now + k.flight[c], ((lanes + c) << 32) | ((sequence + 1) & 0xFFFFFFFF))
        lane = t.sender[c]
        s.pending[lane] -= 1
        if s.pending[lane] == 0:
            _complete(t, s, lane, now, record)
            _wake(s, lane)
    else:
        place = slot - lanes - channels
        c = s.slot_channel[place]
        if s.slot_hop[place] < k.route_ptr[c + 1] - k.route_ptr[c]:
            exclusive_pass(k, s, lanes + channels, place, s.heap.key[slot], now)
            return
        if record:
            s.arrival[s.message_at[c] + s.arrived[c]] = now
        s.arrived[c] += 1
        if s.wants_message[c] >= 0:
            _wake(s, s.wants_message[c])
            s.wants_message[c] = -1


@njit(cache=True, nogil=True)
def run(t, k, s, record):  # type: ignore[no-untyped-def]
    """Simulate until nothing can happen any more. Returns the time of the last event; `s.number[3]` lanes are not finished."""
    now = 0.0
    number = s.number
    lanes = len(t.lane_start)
    for lane in range(lanes):
        if t.lane_start[lane] == t.lane_end[lane]:
            s.turn[lane] = t.lane_repeat[lane]
        else:
            s.sub[lane] = t.after_ptr[t.lane_start[lane]]
        _wake(s, lane)
    while True:
        while s.heap.queued[0] > 0 and s.heap.time[s.heap.order[0]] <= now:
            _event(t, k, s, heap_pop(s.heap), now, record)
        if number[2] > 0:
            limit = (number[0] + 1) * lanes
            while number[2] > 0 and s.ready[0] < limit:
                number[1] = _next_ready(s)
                _visit(t, k, s, number[1], now, record)
            number[0] += 1
            number[1] = -1
        elif s.work[0] > 0:
            fair_settle(t, k, s, now)
        elif s.heap.queued[0] > 0:
            now = s.heap.time[s.heap.order[0]]
        else:
            return now
