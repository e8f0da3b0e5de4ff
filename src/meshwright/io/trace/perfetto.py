"""Perfetto's own trace format: protobuf, about half the size of the JSON, for traces of many slices.

Written by hand from Perfetto's public `.proto` files (field numbers beside each use); needs no package. Messages used: Trace,
TracePacket, TrackDescriptor, ProcessDescriptor, ThreadDescriptor, CounterDescriptor, TrackEvent, InternedData. Times in ns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from struct import pack

from ..protobuf import block, fixed64, number, text, varint
from .perfetto_words import COUNTER_SIZE_BYTES, EventType, SequenceFlag
from .slices import Trace, batched

__all__ = ["perfetto_bytes"]

_SEQUENCE = 1  # the one sender of packets: any number but 0



def perfetto_bytes(trace: Trace) -> bytes:
    """The trace as a serialized `perfetto.protos.Trace`."""
    out = bytearray()
    for batch in batched(chain([_head(trace)], _descriptors(trace), _slices(trace), _counters(trace))):
        out += b"".join(block(1, packet) for packet in batch)  # Trace.packet
    return bytes(out)


def _head(trace: Trace) -> bytes:
    """Names and categories once, to be referred to by number. InternedData: event_categories 1, event_names 2; each iid 1, name 2."""
    interned = b"".join(block(1, number(1, i + 1) + text(2, name)) for name, i in trace.categories.items())
    interned += b"".join(block(2, number(1, i + 1) + text(2, name)) for name, i in trace.names.items())
    # TracePacket: trusted_packet_sequence_id 10, interned_data 12, sequence_flags 13
    return number(10, _SEQUENCE) + block(12, interned) + number(13, SequenceFlag.STATE_CLEARED)


def _process_uuid(process: int) -> int:
    return process + 1


def _track_uuid(trace: Trace, track: int) -> int:
    return len(trace.processes) + track + 1


def _counter_uuid(trace: Trace, counter: int) -> int:
    return len(trace.processes) + len(trace.tracks) + counter + 1


def _descriptors(trace: Trace) -> list[bytes]:
    """TracePacket.track_descriptor 60. TrackDescriptor: uuid 1, name 2, process 3, thread 4, parent_uuid 5, counter 8."""
    out = []
    for process, name in enumerate(trace.processes):
        described = number(1, process + 1) + text(6, name)  # ProcessDescriptor: pid 1, process_name 6
        out.append(number(1, _process_uuid(process)) + block(3, described))
    for at, track in enumerate(trace.tracks):
        thread = number(1, track.process + 1) + number(2, at + 1) + text(5, track.name)  # ThreadDescriptor: pid 1, tid 2, thread_name 5
        out.append(number(1, _track_uuid(trace, at)) + number(5, _process_uuid(track.process)) + block(4, thread))
    for at, counter in enumerate(trace.counters):
        # CounterDescriptor: unit 3, unit_name 6
        unit = number(3, COUNTER_SIZE_BYTES) if counter.unit == "bytes" else text(6, counter.unit) if counter.unit else b""
        parent = number(5, _process_uuid(counter.process))
        out.append(number(1, _counter_uuid(trace, at)) + text(2, counter.name) + parent + block(8, unit))
    return [number(10, _SEQUENCE) + block(60, descriptor) for descriptor in out]


_TIME, _EVENT = varint(8 << 3), varint(11 << 3 | 2)
_ON_SEQUENCE, _WITH_STATE = number(10, _SEQUENCE), number(13, SequenceFlag.NEEDS_STATE)


def _packet(time_ns: int, event: bytes) -> bytes:
    # TracePacket: timestamp 8, trusted_packet_sequence_id 10, track_event 11, sequence_flags 13
    return b"".join((_TIME, varint(time_ns), _ON_SEQUENCE, _EVENT, varint(len(event)), event, _WITH_STATE))


def _slices(trace: Trace) -> Iterator[bytes]:
    """TrackEvent: category_iids 3, debug_annotations 4, type 9, name_iid 10, track_uuid 11, flow_ids 47, terminating_flow_ids 48."""
    s = trace.slices
    leaving: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    for flow, (source, target) in enumerate(trace.flows.tolist(), 1):
        leaving.setdefault(source, []).append(flow)
        arriving.setdefault(target, []).append(flow)
    places = [number(11, _track_uuid(trace, track)) for track in range(len(trace.tracks))]
    names = [number(10, i + 1) for i in range(len(trace.names))]
    categories = [number(3, i + 1) for i in range(len(trace.categories))]
    columns = (s.track, (s.start_s * 1e9).round().astype("int64"), (s.end_s * 1e9).round().astype("int64"), s.name, s.category, s.step, s.iteration)
    begins, ends = number(9, EventType.SLICE_BEGIN), [number(9, EventType.SLICE_END) + place for place in places]
    step_field, iteration_field = (text(10, word) + varint(4 << 3) for word in ("step", "iteration"))  # DebugAnnotation: name 10, int_value 4
    for i, (track, start, end, name, category, step, iteration) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        event = begins + places[track] + names[name] + categories[category]
        if step >= 0:
            event += block(4, step_field + varint(step)) + block(4, iteration_field + varint(iteration))
        if i in leaving or i in arriving:
            event += fixed64(47, leaving.get(i, ())) + fixed64(48, arriving.get(i, ()))
        yield _packet(start, event)
        yield _packet(end, ends[track])


def _counters(trace: Trace) -> Iterator[bytes]:
    """TrackEvent: type 9, track_uuid 11, counter_value 30 (whole numbers: bytes), double_counter_value 44 (others)."""
    for at, counter in enumerate(trace.counters):
        head = number(9, EventType.COUNTER) + number(11, _counter_uuid(trace, at))
        times = (counter.time_s * 1e9).round().astype("int64").tolist()
        for time_ns, value in zip(times, counter.value.tolist(), strict=True):
            shown = number(30, round(value)) if counter.unit == "bytes" else varint(44 << 3 | 1) + pack("<d", value)
            yield _packet(time_ns, head + shown)
