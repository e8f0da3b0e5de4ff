"""Which slice lies in which, and whose time is whose, on tracks of slices. Cost: O(slices) after sorting, times the depth of overlaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .object_code import native

__all__ = ["exclusive_segments", "nearest_ancestors", "parents"]


@native("i8[] i8[] i8 i8[] i4[] -> 1")
def parents(start: NDArray[np.int64], end: NDArray[np.int64], tolerance: int, stack: NDArray[np.int64], parent: NDArray[np.int32]) -> int:
    """Parent row of every slice of one track, -1 for the outermost; returns how many slices overlap another without lying in it.

    Rows are sorted by start, then longest first. The parent is the latest started slice that is not over `tolerance` before this one is.
    `stack` is scratch of the same length.
    """
    top, overlaps = 0, 0
    for i in range(len(start)):
        # The stack holds slices under way, the latest on top; those that ended before this start go.
        while top > 0 and end[stack[top - 1]] <= start[i]:
            top -= 1
        at = top - 1
        # A slice that ends earlier does not hold this one: look further down, and count the overlap.
        while at >= 0 and end[stack[at]] + tolerance < end[i]:
            at -= 1
        if at != top - 1:
            overlaps += 1
        parent[i] = stack[at] if at >= 0 else -1
        stack[top] = i
        top += 1
    return overlaps


@native("i8[] i8[] i8[] i8[] i8[] i8[] -> 1")
def exclusive_segments(
    start: NDArray[np.int64], end: NDArray[np.int64], stack: NDArray[np.int64], row: NDArray[np.int64], since: NDArray[np.int64],
    until: NDArray[np.int64],
) -> int:  # fmt: skip
    """Cut the time of one track, from its first start to its last end, into segments: `row` is the latest started slice under way, -1 where none is.

    Returns how many segments; they join without gaps, so their lengths add up to the track's window exactly, whatever overlaps. Rows are
    sorted by start, then longest first. `stack` has room for all slices, the other three for three times as many.
    """
    top, count = 0, 0
    clock = start[0] if len(start) else np.int64(0)
    for i in range(len(start) + 1):
        now = start[i] if i < len(start) else np.iinfo(np.int64).max
        # Until the next start, time belongs to the top slice as long as it lasts, then to the one under it.
        while top > 0 and clock < now:
            j = stack[top - 1]
            stop = min(end[j], now)
            if stop > clock:
                row[count], since[count], until[count] = j, clock, stop
                count += 1
                clock = stop
            if end[j] <= clock:
                top -= 1
        if i < len(start):
            while top > 0 and end[stack[top - 1]] <= now:
                top -= 1
            # Nothing was under way: a gap of its own, so that segments join.
            if now > clock:
                row[count], since[count], until[count] = -1, clock, now
                count += 1
            clock = now
            stack[top] = i
            top += 1
    return count


@native("i4[] b1[] i4[] -> 0")
def nearest_ancestors(parent: NDArray[np.int32], wanted: NDArray[np.bool_], found: NDArray[np.int32]) -> None:
    """`found[i]`: the nearest row around row i that is wanted, -1 if none is. Parents stand before their children."""
    for i in range(len(parent)):
        p = parent[i]
        if p < 0:
            found[i] = -1
        elif wanted[p]:
            found[i] = p
        else:
            found[i] = found[p]
