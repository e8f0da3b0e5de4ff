"""The arrays that the compiled engine reads and writes: program tables, link tables, state. Made once per simulation.

Slots of the event heap: lane l -> l; channel c -> lanes + c (end of a flow, or next segment to inject); message in flight ->
lanes + channels + its channel's first slot + number mod places; behind these one per processor and one for all of them. A channel
has `depth` places (times its segments), since no more than `depth` messages are sent and not yet consumed. So all sizes are known
here and nothing can overflow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckFailed, UsageError
from ..kernels.event_heap import EventHeap, make_heap
from ..program.program import Kind, Part, Program
from ..program.tables import I32
from .network import Network

__all__ = [
    "COMPLETE", "MAX_IN_FLIGHT", "SENDING", "TAKEN", "LinkTables", "Processors", "ProgramTables", "State", "link_tables", "make_state",
    "program_tables",
]  # fmt: skip

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
# Messages and segments in flight, of which each has a place in memory.
MAX_IN_FLIGHT = 50_000_000
WAKE_S = 1e-5  # of a processor, that a step which has waited for the others needs to end
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
    lane_processor: I32  # actor whose processor does the lane's local parts one after the other, -1: they take no turns
    quota: F64  # per processor: seconds of it that each period gives, 0 = no quota
    period: F64
    overrun: F64  # seconds that it runs on past its quota; what was overdrawn, the next periods lack
    begin: F64  # seconds of it that are used before any step
    waits_in: I32  # step that ends, in its first iteration, no sooner than `begin_wait` after the last such processor has begun; -1: none
    begin_wait: float
    begin_sum: float  # seconds of such a processor that it spends once it has begun, and that no step waits for
    pooled: I32  # 1 where a processor runs on the `cores` that all of these share
    cores: float  # 0 = as many as run
    speeds: F64  # [kind of work, k - 1]: of a processor's work of that kind while k of the pool run, by one alone; beyond the last as the last
    work_row: I32  # per step: its kind of work
    copy_row: I32  # per processor: that of what sends post


class LinkTables(NamedTuple):
    route_ptr: I32
    route_link: I32
    rate: F64
    latency: F64
    burst: F64
    library: F64  # per channel: added to the arrival
    flight: F64  # per channel: all latencies of its route and the library's
    bundle: I32  # per channel: channels that share the same links under the same cap are one bundle; their flows always have the same rate
    shared_ptr: I32  # per bundle: the links of its routes that others may use too, or that have a bucket
    shared_link: I32
    cap: F64  # per bundle: least rate of the other links, inf if there are none
    segment: float  # bytes, 0 = whole messages
    fair: bool


# A lane: where it stands (`turn` = iteration), what it waits in (`next_waiting` of a step's or unit's list, position `sub` of the
# step's own list), of its send part the messages `pending` and the latest `release`, and the work that sends have posted `before` its own.
LANE = np.dtype(
    [
        ("at", "i4"), ("turn", "i4"), ("phase", "i4"), ("sub", "i4"), ("pending", "i4"), ("next_waiting", "i4"), ("is_ready", "i4"),
        ("release", "f8"), ("before", "f8"),
    ], align=True,
)  # fmt: skip
STEP = np.dtype([("done", "i4"), ("waiting", "i4"), ("first_start", "f8"), ("last_end", "f8")], align=True)
UNIT = np.dtype([("owner", "i4"), ("first", "i4"), ("last", "i4")], align=True)
# A channel: messages counted; lanes that wait; bytes `left` to inject (exclusive) or to send (fair); `injected` segments; its slots;
# its flow (0 idle, 1 active, 2 ended at this instant, 3 passes at once) with rate since when, and its `place` among its bundle's.
CHANNEL = np.dtype(
    [
        ("sent", "i8"), ("arrived", "i8"), ("consumed", "i8"), ("injected", "i8"), ("place_first", "i8"), ("place_count", "i8"), ("message_at", "i8"),
        ("left", "f8"), ("rate", "f8"), ("since", "f8"), ("wants_message", "i4"), ("wants_credit", "i4"), ("flow", "i4"), ("listed", "i4"),
        ("place", "i4"),
    ], align=True,
)  # fmt: skip
SLOT = np.dtype([("channel", "i4"), ("hop", "i4"), ("last", "i4"), ("size", "f8"), ("tail", "f8")], align=True)
# A bundle: its `flows` are as many places of `active` from `first` on; their rate, the fresh one, marks of the fair model.
BUNDLE = np.dtype([("mark", "i8"), ("rate", "f8"), ("fresh_rate", "f8"), ("first", "i4"), ("flows", "i4")], align=True)
# A link: free from when (exclusive), busy so long, its bucket; `left` = rate not in use (fair); its `bundles` with flows are as many places of
# `member` from `first` on; `open_flows` of its `flows` have no new rate.
LINK = np.dtype(
    [
        ("free", "f8"), ("busy", "f8"), ("tokens", "f8"), ("tokens_at", "f8"), ("left", "f8"), ("mark", "i8"), ("first", "i4"), ("bundles", "i4"),
        ("flows", "i4"), ("open_flows", "i4"),
    ], align=True,
)  # fmt: skip
INSTANCE = np.dtype([("start", "f8"), ("middle", "f8"), ("local_end", "f8"), ("send", "f8"), ("end", "f8"), ("behind", "i8")], align=True)
# A processor (`processors`): free from when; seconds `left` of the quota, below 0 where it is overdrawn, until it is filled at `refill`. Of what
# it serves: the `rest`, the `part` that it may run for, `since` when, `begun` or not. What sends have `posted` behind the `final` one that asked; the
# instance asked for last; the lane that is served (`head`, below 0 none), the `first` that waits, -1 none; `opens`: before its first step; the
# `row` of speeds of what is served.
PROCESSOR = np.dtype(
    [
        ("free", "f8"), ("left", "f8"), ("refill", "f8"), ("rest", "f8"), ("part", "f8"), ("since", "f8"), ("posted", "f8"), ("last", "i8"),
        ("head", "i4"), ("first", "i4"), ("final", "i4"), ("state", "i4"), ("begun", "i4"), ("opens", "i4"), ("row", "i4"),
    ], align=True,
)  # fmt: skip
Records = NDArray[Any]  # of one of the dtypes above


class State(NamedTuple):
    """Everything that changes. `number`: 0 round, 1 lane being visited (-1 none), 2 ready lanes, 3 lanes not finished, 4 order length,
    5 fingerprint of the engine's sources, 6 whether to stop;
    `work`: 0 touched channels, 1 epoch of the marks, 2 links and flows looked at to find rates."""

    heap: EventHeap
    number: I64
    work: I64
    ready: I64  # heap of round · lanes + lane
    lane: Records
    step: Records
    unit: Records
    channel: Records
    slot: Records
    link: Records
    bundle: Records
    active: I32  # channels with a flow, bundle after bundle
    member: I32  # bundles with flows of the links one after the other: (bundle, hop) entries of `shared_link` ...
    member_bundle: I32  # ... their bundles ...
    member_place: I32  # ... and where each entry is
    touched: I32  # channels whose flow began or ended at this instant
    stack_links: I32
    stack_bundles: I32
    processor: Records
    known: F64  # one: when what steps of `waits_in` wait for is known
    pool: I64  # 0 processors of the pool that run, 1 those of `waits_in` that have not begun
    instance: Records  # `middle`: the local part begins; `send`: the send part; `behind`: the instance before it on the processor, -1 none
    arrival: F64  # message: when it arrived
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


class Processors(NamedTuple):
    """By actor: whether its local parts take turns, and the quota, see `ProgramTables`."""

    taken: NDArray[np.bool_]
    quota_s: F64
    period_s: F64
    overrun_s: F64
    begin_s: F64
    waits_in: I64
    begin_wait_s: float
    begin_sum_s: float
    pooled: NDArray[np.bool_]
    cores: float
    speeds: F64 | None = None  # none: cores do not slow each other down
    work_row: I64 | None = None
    copy_row: I64 | None = None


_NONE = Processors(np.zeros(0, bool), *(np.zeros(0),) * 4, np.zeros(0, np.int64), 0.0, 0.0, np.zeros(0, bool), 0.0)


def program_tables(p: Program, durations_s: F64, size_bytes: Any, depth: I64, processors: Processors | None = None) -> tuple[ProgramTables, I64]:
    """Tables of a plain program (no calls, not folded) and the number of messages per channel.

    Raises: CheckFailed when two lanes send to, or receive from, one channel.
    """
    la, s = p.lanes, p.steps
    lane_of = p.lane_of_step()
    # units of actors, numbered actor by actor; -1 is none
    unique, unit = np.unique(la.actor.astype(np.int64) * (int(la.unit.max(initial=0)) + 2) + la.unit, return_inverse=True)
    in_ptr, in_channel = _channel_lists(p, Part.RECV, Part.IN_SET, s.chan_in)
    out_ptr, out_channel = _channel_lists(p, Part.SEND, Part.OUT_SET, s.chan_out)
    sender, messages = _only_lane(p, out_ptr, out_channel, lane_of, "is sent to")
    _only_lane(p, in_ptr, in_channel, lane_of, "is received from")
    repeat = la.repeat[lane_of]
    record_at = np.zeros(len(s) + 1, np.int64)
    np.cumsum(repeat, out=record_at[1:])
    of_lane = np.full(len(la), -1) if processors is None else np.where(processors.taken[la.actor], la.actor, -1)
    tables = ProgramTables(
        _c32(la.start), _c32(la.end), _c32(la.repeat), _c32(np.where(la.unit >= 0, unit.reshape(-1), -1)), _c32(s.kind),
        np.ascontiguousarray(durations_s, np.float64), np.ascontiguousarray(size_bytes, np.float64), in_ptr, in_channel, out_ptr, out_channel,
        _c32(s.after_ptr), _c32(s.after_step), _c32(s.after_lag), _c32(repeat), record_at, np.ascontiguousarray(depth, np.int64), sender, len(unique),
        _c32(of_lane), *_of_processors(processors or _NONE, len(s)),
    )  # fmt: skip
    return tables, messages


def _of_processors(of: Processors, steps: int) -> tuple[Any, ...]:
    speeds = np.ones((1, 1)) if of.speeds is None else np.ascontiguousarray(of.speeds, np.float64)
    rows = [np.zeros(n) if row is None else row for row, n in ((of.work_row, steps), (of.copy_row, len(of.taken)))]
    return *of[1:5], _c32(of.waits_in), float(of.begin_wait_s), float(of.begin_sum_s), _c32(of.pooled), float(of.cores), speeds, *map(_c32, rows)


def link_tables(network: Network) -> LinkTables:
    ptr, route = network.route_ptr, network.route_link
    owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    private = (np.bincount(route, minlength=len(network.rate_Bps)) <= 1) & (network.burst_bytes <= 0)
    alone = private[route]
    cap = np.full(len(ptr) - 1, np.inf)
    np.minimum.at(cap, owner[alone], network.rate_Bps[route[alone]])
    shared = np.ascontiguousarray(route[~alone], np.int32)
    ends = np.cumsum(np.bincount(owner[~alone], minlength=len(ptr) - 1)).tolist()
    # Channels that share the same links under the same cap.
    number: dict[tuple[float, bytes], int] = {}
    begin, bundle = 0, np.zeros(len(cap), np.int32)
    for c, (end, most) in enumerate(zip(ends, cap.tolist(), strict=True)):
        bundle[c] = number.setdefault((most, shared[begin:end].tobytes()), len(number))
        begin = end
    shared_ptr = np.zeros(len(number) + 1, np.int32)
    np.cumsum([len(links) // shared.itemsize for _, links in number], out=shared_ptr[1:])
    return LinkTables(
        network.route_ptr, network.route_link, network.rate_Bps, network.latency_s, network.burst_bytes, network.library_latency_s,
        network.flight_s, bundle, shared_ptr, np.frombuffer(b"".join(links for _, links in number), np.int32), np.array([most for most, _ in number]),
        float(network.segment_bytes or 0), network.mode == "fair",
    )  # fmt: skip


def _c32(values: Any) -> I32:
    return np.ascontiguousarray(values, dtype=np.int32)


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
    entries = len(k.shared_link)
    lane, step, unit, channel = (_records(dtype, n) for dtype, n in ((LANE, lanes), (STEP, steps), (UNIT, t.units), (CHANNEL, channels)))
    lane["at"] = t.lane_start
    lane["next_waiting"] = -1
    step["waiting"] = -1
    step["first_start"], step["last_end"] = np.inf, -np.inf
    for name in ("owner", "first", "last"):
        unit[name] = -1
    channel["wants_message"] = channel["wants_credit"] = -1
    channel["place_first"], channel["place_count"], channel["message_at"] = first[:-1], np.maximum(places, 1), message_at[:-1]
    link = _records(LINK, links)
    uses = np.bincount(k.shared_link, minlength=links)
    link["tokens"], link["left"], link["first"] = k.burst, k.rate, np.cumsum(uses) - uses
    bundle, own = _records(BUNDLE, len(k.cap)), np.bincount(k.bundle, minlength=len(k.cap))
    bundle["first"] = np.cumsum(own) - own
    processor, instance = _records(PROCESSOR, len(t.quota)), _records(INSTANCE, instances)
    processor["left"], processor["refill"], instance["behind"] = t.quota, t.period, -1
    for name in ("last", "head", "first"):
        processor[name] = -1
    return State(
        heap=make_heap(lanes + channels + slots + len(t.quota) + 1), number=np.array([0, -1, 0, lanes, 0, 0, 0], np.int64),
        work=np.zeros(3, np.int64),
        ready=np.zeros(max(lanes, 1), np.int64), lane=lane, step=step, unit=unit, channel=channel, slot=_records(SLOT, slots), link=link,
        bundle=bundle, active=np.zeros(channels, np.int32),
        member=np.zeros(entries, np.int32), member_bundle=np.zeros(entries, np.int32), member_place=np.zeros(entries, np.int32),
        touched=np.zeros(channels, np.int32), stack_links=np.zeros(links, np.int32), stack_bundles=np.zeros(len(k.cap), np.int32),
        processor=processor, known=np.zeros(1), pool=np.zeros(2, np.int64), instance=instance, arrival=np.zeros(int(message_at[-1]) if record else 0),
        order=np.zeros(_nodes(t) if record else 0, np.int64),
    )  # fmt: skip


def _records(dtype: np.dtype[Any], n: int) -> Records:
    return np.zeros(n, dtype)


def _nodes(t: ProgramTables) -> int:
    """One per instance, one more for a send part, one more for a receive part before a send part."""
    receives, sends = np.diff(t.in_ptr) > 0, np.diff(t.out_ptr) > 0
    return int((t.repeat.astype(np.int64) * (1 + sends.astype(np.int64) + (receives & sends))).sum())
