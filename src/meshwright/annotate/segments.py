"""Every ns of every track, given to the slice that was under way in it, or to nothing. Cost: O(slices)."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..kernels.nesting import exclusive_segments
from ..trace.trace import I64, Trace

__all__ = ["Segments", "segments"]


class Segments(msgspec.Struct, frozen=True, kw_only=True):
    """`row` is -1 where no slice of the track was under way. The segments of a track join without gaps."""

    track: NDArray[np.int32]
    row: I64
    start_ns: I64
    end_ns: I64

    @property
    def length_ns(self) -> I64:
        return self.end_ns - self.start_ns


def segments(trace: Trace, hidden: NDArray[np.bool_]) -> Segments:
    """`hidden[i]`: slices that are not looked at; a track's time runs from the first start to the last end of the others."""
    parts: list[tuple[int, I64, I64, I64]] = []
    largest = int(np.diff(trace.track_start).max(initial=0))
    stack = np.zeros(largest, np.int64)
    row, since, until = (np.zeros(3 * largest, np.int64) for _ in range(3))
    for t in range(len(trace.tracks)):
        rows = np.flatnonzero(~hidden[trace.rows(t)]) + int(trace.track_start[t])
        if not len(rows):
            continue
        count = exclusive_segments(trace.start_ns[rows], trace.end_ns[rows], stack, row, since, until)
        parts.append((t, np.where(row[:count] >= 0, rows[row[:count]], -1), since[:count].copy(), until[:count].copy()))
    none = np.zeros(0, np.int64)
    return Segments(
        track=np.repeat(np.array([p[0] for p in parts], np.int32), [len(p[1]) for p in parts]),
        row=np.concatenate([none, *(p[1] for p in parts)]), start_ns=np.concatenate([none, *(p[2] for p in parts)]),
        end_ns=np.concatenate([none, *(p[3] for p in parts)]),
    )  # fmt: skip
