"""The arrays that the compiled engine reads and writes: program tables, link tables, state. Made once per simulation.

Slots of the event heap: lane l -> l; channel c -> lanes + c (end of a flow, or next segment to inject); message in flight ->
lanes + channels + its channel's first slot + number mod places. A channel has `depth` places (times its segments), since no
more than `depth` messages are sent and not yet consumed. So all sizes are known here and nothing can overflow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckFailed, UsageError
from ..kernels.event_heap import EventHeap, make_heap
from ..program import I32, Kind, Part, Program
from .network import Network

__all__ = ["COMPLETE", "MAX_IN_FLIGHT", "SENDING", "TAKEN", "LinkTables", "ProgramTables", "State", "link_tables", "make_state", "program_tables"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MAX_IN_FLIGHT = 50_000_000  # places for messages and segments in flight
TAKEN, SENDING, COMPLETE = 0, 1, 2


class ProgramTables(NamedTuple):
    """Per lane, per step and per channel; channel lists of a step are CSR, so a set and a single channel look alike."""

    lane_start: I32
    lane_end: I32
    lane_repeat: I32
    lane_unit: I32  # number of the (actor, unit) pair, -1 none
    kind: I32
    duration: F64  # of a compute step, or of a transfer's local part
    size: F64  # bytes of the message
    in_ptr: I32
    in_channel: I32
    out_ptr: I32
    out_channel: I32
    after_ptr: I32
    after_step: I32
    after_lag: I32
    repeat: I32  # of the step's lane
    record_at: I64  # number of the step's first instance
    depth: I64  # per channel
    sender: I32  # per channel: lane, -1 unused
    units: int


class LinkTables(NamedTuple):
    route_ptr: I32
    route_link: I32
    rate: F64
    latency: F64
    burst: F64
    library: F64  # per channel: added to the arrival
    flight: F64  # per channel: all latencies of its route and the library's
    segment: float  # bytes, 0 = whole messages
    fair: bool


class State(NamedTuple):
    """Everything that changes. `number`: 0 round, 1 lane being visited (-1 none), 2 ready lanes, 3 lanes not finished, 4 order length."""

    heap: EventHeap
    number: I64
    ready: I64  # heap of round · lanes + lane
    is_ready: NDArray[np.int8]
    at: I32  # lane: step it stands at
    turn: I32  # lane: iteration
    phase: I32
    sub: I32  # lane: position in the list it waits on
    pending: I32  # lane: messages of its send part not yet released
    release: F64
    next_waiting: I32  # lane: next lane in the same waiting list
    done: I32  # step: iterations completed
    waiting: I32  # step: first lane that waits for it
    unit_owner: I32
    unit_first: I32
    unit_last: I32
    sent: I64  # channel: messages
    arrived: I64
    consumed: I64
    wants_message: I32  # channel: lane that waits for a message, -1
    wants_credit: I32
    left: F64  # channel: bytes of the message not yet injected (exclusive) or not yet sent (fair)
    injected: I64  # channel: segments so far
    place_first: I64  # channel: first slot
    place_count: I64
    slot_channel: I32
    slot_hop: I32
    slot_bytes: F64
    slot_tail: F64
    slot_last: NDArray[np.int8]
    link_free: F64
    link_busy: F64
    tokens: F64
    tokens_at: F64
    flow: NDArray[np.int8]  # channel: 0 idle, 1 active, 2 ended at this instant, 3 passes at once
    flow_rate: F64
    flow_since: F64
    flow_mark: I64
    touched: I32  # channels whose flow began or ended at this instant
    listed: NDArray[np.int8]  # channel: it is among them
    entry_next: I32  # (channel, hop) entries of every link's list of flows
    entry_previous: I32
    entry_channel: I32
    link_first: I32
    link_flows: I32
    link_mark: I64
    link_left: F64  # rate not in use
    link_open: I32
    stack_links: I32
    stack_flows: I32
    fresh_rate: F64
    work: I64  # 0 touched, 1 epoch
    first_start: F64  # step: start of iteration 0
    last_end: F64  # step: end of the last iteration
    start: F64  # instance
    middle: F64  # instance: its message is there (receives)
    send: F64  # instance: its send part begins
    end: F64
    arrival: F64  # message: when it arrived
    message_at: I64  # channel: number of its first message
    order: I64  # 3 · instance + (TAKEN | SENDING | COMPLETE) in the order in which it happened; see `critical`


def _channel_lists(p: Program, part: Part, set_flag: Part, column: I32) -> tuple[I32, I32]:
    """Channels of every step as CSR; a channel set is spelled out."""
    has = (p.steps.kind == Kind.TRANSFER) & ((p.steps.parts & part) != 0)
    many = has & ((p.steps.parts & set_flag) != 0)
    width = has.astype(np.int32)
    sets = p.channels.sets
    if np.any(many):
        width[many] = np.diff(sets.ptr)[column[many]]
    ptr = np.zeros(len(p.steps) + 1, np.int32)
    np.cumsum(width, out=ptr[1:])
    values = np.zeros(int(ptr[-1]), np.int32)
    single = has & ~many
    values[ptr[:-1][single]] = column[single]
    for step in np.flatnonzero(many):
        values[ptr[step] : ptr[step + 1]] = sets[int(column[step])]
    return ptr, values


def _only_lane(p: Program, ptr: I32, values: I32, lane_of: I32, what: str) -> tuple[I32, I64]:
    """The one lane that uses each channel at this end, and its messages in all iterations."""
    owner = np.repeat(lane_of, np.diff(ptr))
    lane = np.full(len(p.channels), -1, np.int32)
    lane[values] = owner
    if np.any(lane[values] != owner):
        at = int(np.argmax(lane[values] != owner))
        raise CheckFailed(
            f"channel {int(values[at])} {what} from lane {int(owner[at])} and lane {int(lane[values[at]])}",
            where=p.name, hint="a channel has exactly one sending and one receiving lane",
            data={"channel": int(values[at]), "lanes": sorted({int(owner[at]), int(lane[values[at]])})},
        )  # fmt: skip
    messages = np.bincount(values, weights=p.lanes.repeat[owner], minlength=len(p.channels)).astype(np.int64)
    return lane, messages


def program_tables(p: Program, durations_s: F64, size_bytes: Any, depth: I64) -> tuple[ProgramTables, I64]:
    """Tables of a plain program (no calls, not folded) and the number of messages per channel.

    Raises: CheckFailed when two lanes send to, or receive from, one channel.
    """
    la, s = p.lanes, p.steps
    lane_of = p.lane_of_step()
    pairs = np.stack([la.actor, la.unit], axis=1) if len(la) else np.zeros((0, 2), np.int32)
    unique, unit = np.unique(pairs, axis=0, return_inverse=True) if len(la) else (pairs, np.zeros(0, np.int64))
    in_ptr, in_channel = _channel_lists(p, Part.RECV, Part.IN_SET, s.chan_in)
    out_ptr, out_channel = _channel_lists(p, Part.SEND, Part.OUT_SET, s.chan_out)
    sender, messages = _only_lane(p, out_ptr, out_channel, lane_of, "is sent to")
    _only_lane(p, in_ptr, in_channel, lane_of, "is received from")
    repeat = la.repeat[lane_of]
    record_at = np.zeros(len(s) + 1, np.int64)
    np.cumsum(repeat, out=record_at[1:])
    tables = ProgramTables(
        _c32(la.start), _c32(la.end), _c32(la.repeat), _c32(np.where(la.unit >= 0, unit.reshape(-1), -1)), _c32(s.kind),
        np.ascontiguousarray(durations_s, np.float64), np.ascontiguousarray(size_bytes, np.float64), in_ptr, in_channel, out_ptr, out_channel,
        _c32(s.after_ptr), _c32(s.after_step), _c32(s.after_lag), _c32(repeat), record_at, np.ascontiguousarray(depth, np.int64), sender, len(unique),
    )  # fmt: skip
    return tables, messages


def link_tables(network: Network) -> LinkTables:
    return LinkTables(
        network.route_ptr, network.route_link, network.rate_Bps, network.latency_s, network.burst_bytes, network.library_latency_s,
        network.flight_s, float(network.segment_bytes or 0), network.mode == "fair",
    )  # fmt: skip


def _c32(values: Any) -> I32:
    return np.ascontiguousarray(values, dtype=np.int32)


def _nodes(t: ProgramTables) -> int:
    """One per instance, one more for a send part, one more for a receive part before a send part."""
    receives, sends = np.diff(t.in_ptr) > 0, np.diff(t.out_ptr) > 0
    return int((t.repeat.astype(np.int64) * (1 + sends.astype(np.int64) + (receives & sends))).sum())


def _none(n: int) -> I32:
    return np.full(n, -1, np.int32)


def make_state(t: ProgramTables, k: LinkTables, messages: I64, *, record: bool) -> State:
    """Fresh state, all arrays at their final size.

    Raises: UsageError when more than MAX_IN_FLIGHT messages and segments could be in flight.
    """
    lanes, steps, channels, links = len(t.lane_start), len(t.kind), len(t.depth), len(k.rate)
    places = np.minimum(t.depth, messages)
    if k.segment > 0:
        largest = np.zeros(channels)
        np.maximum.at(largest, t.out_channel, np.repeat(t.size, np.diff(t.out_ptr)))
        places = places * np.maximum(1, np.ceil(largest / k.segment).astype(np.int64))
    first = np.zeros(channels + 1, np.int64)
    np.cumsum(places, out=first[1:])
    slots = int(first[-1])
    if slots > MAX_IN_FLIGHT:
        raise UsageError(
            f"{slots} messages and segments may be in flight, the limit is {MAX_IN_FLIGHT}",
            where="segment_bytes",
            hint="use larger segments or smaller depths",
        )
    instances = int(t.record_at[-1]) if record else 0
    message_at = np.zeros(channels + 1, np.int64)
    np.cumsum(messages, out=message_at[1:])
    entries = len(k.route_link)

    def f(n: int) -> F64:
        return np.zeros(n, np.float64)

    def i(n: int) -> I32:
        return np.zeros(n, np.int32)

    def j(n: int) -> I64:
        return np.zeros(n, np.int64)

    entry_channel = np.repeat(np.arange(channels, dtype=np.int32), np.diff(k.route_ptr))
    return State(
        heap=make_heap(lanes + channels + slots), number=np.array([0, -1, 0, lanes, 0], np.int64), ready=j(max(lanes, 1)),
        is_ready=np.zeros(lanes, np.int8), at=t.lane_start.copy(), turn=i(lanes), phase=i(lanes), sub=i(lanes), pending=i(lanes),
        release=f(lanes), next_waiting=_none(lanes), done=i(steps), waiting=_none(steps), unit_owner=_none(t.units),
        unit_first=_none(t.units), unit_last=_none(t.units), sent=j(channels), arrived=j(channels), consumed=j(channels),
        wants_message=_none(channels), wants_credit=_none(channels), left=f(channels), injected=j(channels), place_first=first[:-1].copy(),
        place_count=np.maximum(places, 1), slot_channel=i(slots), slot_hop=i(slots), slot_bytes=f(slots), slot_tail=f(slots),
        slot_last=np.zeros(slots, np.int8), link_free=f(links), link_busy=f(links), tokens=k.burst.copy(), tokens_at=f(links),
        flow=np.zeros(channels, np.int8), flow_rate=f(channels), flow_since=f(channels), flow_mark=j(channels), touched=i(channels),
        listed=np.zeros(channels, np.int8), entry_next=_none(entries), entry_previous=_none(entries), entry_channel=entry_channel,
        link_first=_none(links), link_flows=i(links), link_mark=j(links), link_left=k.rate.copy(), link_open=i(links), stack_links=i(links),
        stack_flows=i(channels), fresh_rate=f(channels), work=j(2), first_start=np.full(steps, np.inf), last_end=np.full(steps, -np.inf),
        start=f(instances), middle=f(instances), send=f(instances), end=f(instances), arrival=f(int(message_at[-1]) if record else 0),
        message_at=message_at[:-1].copy(), order=j(_nodes(t) if record else 0),
    )  # fmt: skip
