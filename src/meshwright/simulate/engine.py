"""The event loop: lanes, units, channels, and the network models, compiled.

Order of things at one instant: first all completions and arrivals, by lane, then by channel; then every lane that may go on,
once, in lane order; again until nothing happens any more; then (fair links) new rates. A lane that is visited goes on until it
must wait. Lanes that wait hang in a list on the step, unit, message or credit they wait for, and are visited only when it moves.

A step of a lane: its `after` edges; its unit (compute) or one message from each channel of its receive part; its duration (a
transfer's local part), after which a receive returns its credits; a credit of each channel of its send part; sending on all of
them at once until all are released. Steps with duration 0 take no event. Compute units are granted first asked, first served.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..kernels import event_heap
from ..kernels.compile import fingerprint, inlined, kernel
from ..kernels.effort import look
from ..kernels.event_heap import heap_pop, heap_put
from ..kernels.interrupts import raised_on_interrupt
from . import exclusive, fair, processors
from .exclusive import exclusive_inject, exclusive_pass
from .fair import fair_begin, fair_end, fair_settle
from .processors import ask, begin_processors, post, processor_event
from .tables import COMPLETE, SENDING, TAKEN, LinkTables, ProgramTables, State

__all__ = ["finished", "run"]

_STOP = 6  # where `number` has the flag that ends a run

# numba freezes these: kinds of steps, phases of a lane
_COMPUTE, _TRANSFER = 0, 1
_AFTER, _ASK, _BUSY, _CREDIT, _SENDING = 0, 1, 2, 3, 4


@inlined
def _wake(s, lane):  # type: ignore[no-untyped-def]
    """Visit `lane` in this pass if its turn is yet to come, else in the next."""
    if s.lane[lane].is_ready:
        return
    s.lane[lane].is_ready = 1
    number = s.number
    # behind the lane that is visited now: still in this pass, so that each lane is visited once a pass, in lane order
    turn = number[0] if lane > number[1] else number[0] + 1
    heap, at, key = s.ready, number[2], turn * len(s.lane) + lane
    number[2] += 1
    while at > 0:
        up = (at - 1) >> 1
        if heap[up] <= key:
            break
        heap[at] = heap[up]
        at = up
    heap[at] = key


@inlined
def _next_ready(s):  # type: ignore[no-untyped-def]
    """Take the first lane out of the ready heap."""
    heap, lanes, key = s.ready, len(s.lane), s.ready[0]
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
    s.lane[lane].is_ready = 0
    return lane


@inlined
def _note(t, s, lane, node):  # type: ignore[no-untyped-def]
    """Record that a node (TAKEN, SENDING, COMPLETE) of the lane's step has happened."""
    s.order[s.number[4]] = 3 * (t.record_at[s.lane[lane].at] + s.lane[lane].turn) + node
    s.number[4] += 1


@inlined
def _after_local(t, s, lane, now, record):  # type: ignore[no-untyped-def]
    """The local part of the lane's step is done: free the unit or the credits; complete the step unless it sends."""
    step = s.lane[lane].at
    if t.kind[step] == _COMPUTE:
        unit = t.lane_unit[lane]
        if unit >= 0:
            first = np.int64(s.unit[unit].first)
            s.unit[unit].owner = first  # handed on, not freed: whoever asks meanwhile comes behind those that wait
            if first >= 0:
                s.unit[unit].first = s.lane[first].next_waiting
                _wake(s, first)
    else:
        lo, hi = t.in_ptr[step], t.in_ptr[step + 1]
        for n in range(lo, hi):
            c = t.in_channel[n]
            s.channel[c].consumed += 1
            if s.channel[c].wants_credit >= 0:
                _wake(s, np.int64(s.channel[c].wants_credit))
                s.channel[c].wants_credit = -1
        if t.out_ptr[step] < t.out_ptr[step + 1]:
            s.lane[lane].phase = _CREDIT
            s.lane[lane].sub = t.out_ptr[step]
            if record and lo < hi:
                _note(t, s, lane, TAKEN)
            return
    _complete(t, s, lane, now, record)


@inlined
def _complete(t, s, lane, now, record):  # type: ignore[no-untyped-def]
    step = s.lane[lane].at
    s.step[step].last_end = now
    if record:
        s.instance[t.record_at[step] + s.lane[lane].turn].end = now
        _note(t, s, lane, COMPLETE)
    s.step[step].done += 1
    other = np.int64(s.step[step].waiting)
    s.step[step].waiting = -1
    while other >= 0:
        following = np.int64(s.lane[other].next_waiting)
        _wake(s, other)
        other = following
    s.lane[lane].at += 1
    if s.lane[lane].at == t.lane_end[lane]:
        s.lane[lane].at = t.lane_start[lane]
        s.lane[lane].turn += 1
    s.lane[lane].phase = _AFTER
    s.lane[lane].sub = t.after_ptr[s.lane[lane].at]


@inlined
def _must_wait_for_steps(t, s, lane):  # type: ignore[no-untyped-def]
    """Check the `after` edges of the lane's step from where it stopped; hang the lane on the first that is not met."""
    step = s.lane[lane].at
    for n in range(s.lane[lane].sub, t.after_ptr[step + 1]):
        other = t.after_step[n]
        # a lane that repeats waits for the turn `lag` before its own, and for no more turns than the other one has
        needed = min(s.lane[lane].turn - t.after_lag[n] + 1, t.repeat[other])
        if s.step[other].done < needed:
            # met edges stay met, so it goes on from this one when it is woken
            s.lane[lane].sub = n
            s.lane[lane].next_waiting = s.step[other].waiting
            s.step[other].waiting = lane
            return True
    return False


@inlined
def _must_wait_for_unit(t, s, lane):  # type: ignore[no-untyped-def]
    unit = t.lane_unit[lane]
    if unit < 0 or s.unit[unit].owner == lane:
        return False
    if s.unit[unit].owner < 0:
        s.unit[unit].owner = lane
        return False
    s.lane[lane].next_waiting = -1
    if s.unit[unit].first < 0:
        s.unit[unit].first = lane
    else:
        s.lane[s.unit[unit].last].next_waiting = lane
    s.unit[unit].last = lane
    return True


@inlined
def _must_wait_for_messages(t, s, lane):  # type: ignore[no-untyped-def]
    step = s.lane[lane].at
    for n in range(s.lane[lane].sub, t.in_ptr[step + 1]):
        c = t.in_channel[n]
        if s.channel[c].arrived <= s.channel[c].consumed:
            s.lane[lane].sub = n
            s.channel[c].wants_message = lane
            return True
    return False


@inlined
def _must_wait_for_credits(t, s, lane):  # type: ignore[no-untyped-def]
    step = s.lane[lane].at
    for n in range(s.lane[lane].sub, t.out_ptr[step + 1]):
        c = t.out_channel[n]
        if s.channel[c].sent - s.channel[c].consumed >= t.depth[c]:
            s.lane[lane].sub = n
            s.channel[c].wants_credit = lane
            return True
    return False


@inlined
def _send(t, k, s, lane, now, record):  # type: ignore[no-untyped-def]
    """Hand the step's message to every channel of its send part."""
    step = s.lane[lane].at
    s.lane[lane].phase = _SENDING
    lo, hi = t.out_ptr[step], t.out_ptr[step + 1]
    s.lane[lane].pending = hi - lo
    s.lane[lane].release = now
    if record:
        s.instance[t.record_at[step] + s.lane[lane].turn].send = now
        _note(t, s, lane, SENDING)
    for n in range(lo, hi):
        c = np.int64(t.out_channel[n])
        s.channel[c].sent += 1
        if k.fair:
            fair_begin(t, k, s, c, t.size[step], now)
        else:
            s.channel[c].left = t.size[step]
            exclusive_inject(t, k, s, c, now)


@inlined
def _first_processor(t, s):  # type: ignore[no-untyped-def]
    return len(t.lane_start) + len(t.depth) + len(s.slot)


@inlined
def _visit(t, k, s, lane, now, record):  # type: ignore[no-untyped-def]
    """Let the lane go on until it waits for something."""
    while s.lane[lane].turn < t.lane_repeat[lane]:
        step = s.lane[lane].at
        phase = s.lane[lane].phase
        if phase == _AFTER:
            if _must_wait_for_steps(t, s, lane):
                return
            phase = _ASK
            s.lane[lane].phase = _ASK
            s.lane[lane].sub = t.in_ptr[step]
            if t.kind[step] != _COMPUTE:
                s.step[step].first_start = min(s.step[step].first_start, now)
                if record:
                    s.instance[t.record_at[step] + s.lane[lane].turn].start = now
        if phase == _ASK:
            if t.kind[step] == _COMPUTE:
                if _must_wait_for_unit(t, s, lane):
                    return
            elif _must_wait_for_messages(t, s, lane):
                return
            processor, instance = np.int64(t.lane_processor[lane]), t.record_at[step] + s.lane[lane].turn
            if processor >= 0 and t.duration[step] > 0.0:
                if t.kind[step] == _COMPUTE or t.in_ptr[step] < t.in_ptr[step + 1] or t.out_ptr[step] == t.out_ptr[step + 1]:
                    s.lane[lane].phase = _BUSY
                    if record:
                        s.instance[instance].behind = s.processor[processor].last
                        s.processor[processor].last = instance
                    ask(t, s, _first_processor(t, s), processor, lane, now, record)
                    return
                post(t, s, _first_processor(t, s), processor, now, t.duration[step])
            end = now + t.duration[step]
            if t.kind[step] == _COMPUTE:
                s.step[step].first_start = min(s.step[step].first_start, now)
            if record:
                s.instance[instance].middle = now
                s.instance[instance].local_end = end
                if t.kind[step] == _COMPUTE:
                    s.instance[instance].start = now
            if t.duration[step] > 0.0:
                s.lane[lane].phase = _BUSY
                heap_put(s.heap, lane, end, lane << 32)
                return
            _after_local(t, s, lane, now, record)
        elif phase == _CREDIT:
            if not _must_wait_for_credits(t, s, lane):
                _send(t, k, s, lane, now, record)
            return
        else:  # busy or sending: an event will tell
            return
    s.number[3] -= 1


@inlined
def _event(t, k, s, slot, now, record):  # type: ignore[no-untyped-def]
    """A slot's event: a lane's duration or release, a channel's next segment or end of flow, a message's next hop or arrival."""
    lanes, channels = len(t.lane_start), len(t.depth)
    if slot < lanes:
        if s.lane[slot].phase == _BUSY:
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
        sequence = s.channel[c].injected
        s.channel[c].injected += 1
        place = s.channel[c].place_first + sequence % s.channel[c].place_count
        s.slot[place].channel = c
        s.slot[place].hop = k.route_ptr[c + 1] - k.route_ptr[c]
        heap_put(s.heap, lanes + channels + place, now + k.flight[c], ((lanes + c) << 32) | ((sequence + 1) & 0xFFFFFFFF))
        lane = np.int64(t.sender[c])
        s.lane[lane].pending -= 1
        if s.lane[lane].pending == 0:
            _complete(t, s, lane, now, record)
            _wake(s, lane)
    elif slot >= lanes + channels + len(s.slot):
        first_slot = _first_processor(t, s)
        lane = processor_event(t, s, first_slot, slot - first_slot, now, record)
        if lane >= 0:
            _after_local(t, s, lane, now, record)
            _wake(s, lane)
    else:
        place = slot - lanes - channels
        c = np.int64(s.slot[place].channel)
        if s.slot[place].hop < k.route_ptr[c + 1] - k.route_ptr[c]:
            exclusive_pass(k, s, lanes + channels, place, s.heap.key[slot], now)
            return
        if record:
            s.arrival[s.channel[c].message_at + s.channel[c].arrived] = now
        s.channel[c].arrived += 1
        if s.channel[c].wants_message >= 0:
            _wake(s, np.int64(s.channel[c].wants_message))
            s.channel[c].wants_message = -1


def _entry(sources: int):  # type: ignore[no-untyped-def]
    """`run`, kept on disk for as long as the sources it is made of stay as they are."""

    @kernel
    def run(t, k, s, record):  # type: ignore[no-untyped-def]
        """Simulate until nothing can happen any more, or the flag is raised. Returns the time of the last event; `s.number[3]` lanes are not
        finished."""
        now = 0.0
        number = s.number
        number[5] = sources
        lanes = len(t.lane_start)
        if len(t.quota) > 0:
            begin_processors(t, s, _first_processor(t, s))
        for lane in range(lanes):
            if t.lane_start[lane] == t.lane_end[lane]:
                s.lane[lane].turn = t.lane_repeat[lane]
            else:
                s.lane[lane].sub = t.after_ptr[t.lane_start[lane]]
            _wake(s, lane)
        while number[_STOP] == 0:
            while s.heap.queued[0] > 0 and s.heap.time[s.heap.order[0]] <= now:
                _event(t, k, s, heap_pop(s.heap), now, record)
            if number[2] > 0:
                limit = (number[0] + 1) * lanes
                while number[2] > 0 and s.ready[0] < limit:
                    number[1] = _next_ready(s)
                    _visit(t, k, s, number[1], now, record)
                number[0] += 1
                number[1] = -1
            # only when the instant is over: rates depend on all flows that begin or end in it
            elif s.work[0] > 0:
                fair_settle(t, k, s, now)
            elif s.heap.queued[0] > 0:
                now = s.heap.time[s.heap.order[0]]
            else:
                break
        return now

    return run


run = _entry(fingerprint(__file__, exclusive.__file__, fair.__file__, processors.__file__, event_heap.__file__))


def finished(t: ProgramTables, k: LinkTables, make: Callable[[], State], record: bool) -> State:
    """The state in which nothing can happen any more, from the one that `make` gives. Raises: TimeLimit where an interrupt ends the search."""
    while True:
        state = make()
        with raised_on_interrupt(state.number[_STOP:]):
            run(t, k, state, record)
        if not state.number[_STOP]:
            return state
        look()  # the interrupt was for something that is over: again
