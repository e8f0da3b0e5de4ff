"""Numbers of Perfetto's format that its reader and its writer share, as `perfetto/trace/*.proto` defines them."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["COUNTER_SIZE_BYTES", "EventType", "SequenceFlag"]

COUNTER_SIZE_BYTES = 3  # CounterDescriptor.Unit.UNIT_SIZE_BYTES


class EventType(IntEnum):
    """TrackEvent.Type."""

    SLICE_BEGIN = 1
    SLICE_END = 2
    COUNTER = 4


class SequenceFlag(IntEnum):
    """TracePacket.SequenceFlags: the sender's tables of names begin anew; a packet refers to them."""

    STATE_CLEARED = 1
    NEEDS_STATE = 2
