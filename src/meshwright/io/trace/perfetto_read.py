"""Reading Perfetto's own trace format: the slices, tracks and flows of track events, as our own `.pftrace` files have them.

Field numbers are of Perfetto's public `.proto` files. Names may be interned (per sequence) or stand in the event. What else a trace holds
(scheduling, counters, samples) is passed over. A file that ends early, or is damaged further on, gives what stands before.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ...errors import FormatError
from ..limits import MaxBytes
from ..protobuf import BYTES, FIXED64, VARINT, fields, signed
from ..strict_json import read_document
from .perfetto_words import EventType, SequenceFlag
from .rows import Args, Event, EventRows

__all__ = ["add_perfetto"]

_BATCH_EVENTS = 20_000  # events that are turned into columns together


@dataclass
class _State:
    rows: EventRows
    names: dict[tuple[int, int], str] = field(default_factory=dict)  # (sequence, iid)
    categories: dict[tuple[int, int], str] = field(default_factory=dict)
    tracks: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # uuid -> pid, tid
    parents: dict[int, int] = field(default_factory=dict)
    open: dict[int, list[Event]] = field(default_factory=dict)
    done: list[Event] = field(default_factory=list)


def add_perfetto(path: str | os.PathLike[str], rows: EventRows) -> None:
    """Append what the file holds. Raises: UsageError if it cannot be read, FormatError if it is larger than 1 GiB or no such trace."""
    data = read_document(path, limit=MaxBytes.PERFETTO)
    state = _State(rows)
    try:
        for number, wire, value, _, after in fields(data, 0, len(data), rows.where):
            if number == 1 and wire == BYTES:  # Trace.packet
                _packet(state, data, value, after)
            if len(state.done) >= _BATCH_EVENTS:
                rows.add(state.done)
                state.done = []
    except FormatError as error:
        # Damage behind good events loses the rest only; damage before any event is no such file.
        if not rows.count and not state.done and not state.open:
            raise
        rows.problems.add("the file ends early, or is damaged", error.message)
    rows.add(state.done)
    for opened in state.open.values():
        for event in opened:
            rows.problems.add("beginning without an end", event.name)


def _packet(state: _State, data: bytes, at: int, end: int) -> None:
    """TracePacket: timestamp 8, trusted_packet_sequence_id 10, track_event 11, interned_data 12, sequence_flags 13, track_descriptor 60."""
    time_ns, sequence, flags = 0, 0, 0
    event = interned = descriptor = None
    for number, wire, value, _, after in fields(data, at, end, state.rows.where):
        if wire == VARINT:
            time_ns = value if number == 8 else time_ns
            sequence = value if number == 10 else sequence
            flags = value if number == 13 else flags
        elif wire == BYTES:
            event = (value, after) if number == 11 else event
            interned = (value, after) if number == 12 else interned
            descriptor = (value, after) if number == 60 else descriptor
    # The sender's numbers for names begin anew; those it gave before mean nothing any more.
    if flags & SequenceFlag.STATE_CLEARED:
        for table in (state.names, state.categories):
            for key in [k for k in table if k[0] == sequence]:
                del table[key]
    # In this order: an event may use names and tracks that its own packet brings.
    if interned is not None:
        _interned(state, data, *interned, sequence)
    if descriptor is not None:
        _descriptor(state, data, *descriptor)
    if event is not None:
        _event(state, data, *event, sequence, time_ns)


def _text(data: bytes, at: int, end: int) -> str:
    return data[at:end].decode("utf-8", "replace")


def _interned(state: _State, data: bytes, at: int, end: int, sequence: int) -> None:
    """InternedData: event_categories 1, event_names 2; each iid 1, name 2."""
    for number, wire, value, _, after in fields(data, at, end, state.rows.where):
        if number in (1, 2) and wire == BYTES:
            iid, name = 0, ""
            for inner, kind, content, _, stop in fields(data, value, after, state.rows.where):
                iid = content if inner == 1 and kind == VARINT else iid
                name = _text(data, content, stop) if inner == 2 and kind == BYTES else name
            (state.categories if number == 1 else state.names)[sequence, iid] = name


def _descriptor(state: _State, data: bytes, at: int, end: int) -> None:
    """TrackDescriptor: uuid 1, name 2, process 3 (pid 1, name 6), thread 4 (pid 1, tid 2, name 5), parent_uuid 5."""
    uuid, parent, name = 0, 0, ""
    process: dict[int, Any] = {}
    thread: dict[int, Any] = {}
    for number, wire, value, _, after in fields(data, at, end, state.rows.where):
        if wire == VARINT:
            uuid = value if number == 1 else uuid
            parent = value if number == 5 else parent
        elif wire == BYTES and number == 2:
            name = _text(data, value, after)
        elif wire == BYTES and number in (3, 4):
            for inner, kind, content, _, stop in fields(data, value, after, state.rows.where):
                (process if number == 3 else thread)[inner] = _text(data, content, stop) if kind == BYTES else content
    # A thread without a pid of its own is of its parent's process.
    around = state.tracks.get(parent, ("", ""))[0]
    pid = process.get(1, thread.get(1, around))
    tid = thread.get(2, 0 if process else name or uuid)
    state.tracks[uuid] = (pid, tid)
    if process:
        state.done.append(Event(ph="M", name="process_name", pid=pid, tid=0, args=Args(name=process.get(6, name))))
    else:
        state.done.append(Event(ph="M", name="thread_name", pid=pid, tid=tid, args=Args(name=thread.get(5, name))))


def _event(state: _State, data: bytes, at: int, end: int, sequence: int, time_ns: int) -> None:
    """TrackEvent: category_iids 3, debug_annotations 4 (name 10, int_value 4), type 9, name_iid 10, track_uuid 11, name 23, flow_ids 47 and 48."""
    kind, track, name, category = 0, 0, "", ""
    notes: dict[str, int] = {}
    flows: list[tuple[str, int]] = []
    for number, wire, value, _, after in fields(data, at, end, state.rows.where):
        if wire == VARINT:
            kind = value if number == 9 else kind
            track = value if number == 11 else track
            name = state.names.get((sequence, value), "") if number == 10 else name
            category = state.categories.get((sequence, value), "") if number == 3 else category
        elif wire == BYTES and number == 23:
            name = _text(data, value, after)
        elif wire == BYTES and number == 4:
            key, said = "", None
            for inner, form, content, _, stop in fields(data, value, after, state.rows.where):
                key = _text(data, content, stop) if inner == 10 and form == BYTES else key
                said = signed(content) if inner == 4 and form == VARINT else said
            if said is not None:
                notes[key] = said
        elif wire == FIXED64 and number in (47, 48):
            flows.append(("s" if number == 47 else "f", int.from_bytes(data[value:after], "little")))
    if kind not in (EventType.SLICE_BEGIN, EventType.SLICE_END):
        return
    pid, tid = state.tracks.get(track, ("", track))
    # Ends carry no name: on each track the last slice begun ends first.
    stack = state.open.setdefault(track, [])
    if kind == EventType.SLICE_BEGIN:
        args = Args(step=notes.get("step", -1), iteration=notes.get("iteration", -1))
        stack.append(Event(ph="X", name=name, cat=category, pid=pid, tid=tid, ts=time_ns / 1000, args=args))
        state.done += [Event(ph=ph, name="flow", cat="flow", id=flow, pid=pid, tid=tid, ts=time_ns / 1000) for ph, flow in flows]
    elif stack:
        begun = stack.pop()
        begun.dur = time_ns / 1000 - begun.ts
        state.done.append(begun)
    else:
        state.rows.problems.add("end without a beginning", f"track {tid}")
