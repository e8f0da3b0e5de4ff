"""Which slice lies in which, and whose time is whose, on tracks of slices. Cost: O(slices) after sorting, times the depth of overlaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import kernel

__all__ = ["exclusive_times", "parents"]


@kernel  # type: ignore[untyped-decorator]
def parents(start: NDArray[np.int64], end: NDArray[np.int64], tolerance: int, stack: NDArray[np.int64], parent: NDArray[np.int32]) -> int:
    """Parent row of every slice of one track, -1 for the outermost; returns how many slices overlap another without lying in it.

    Rows are sorted by start, then longest first. The parent is the latest started slice that is not over `tolerance` before this one is.
    `stack` is scratch of the same length.
    """
    top, overlaps = 0, 0
    for i in range(len(start)):
        while top > 0 and end[stack[top - 1]] <= start[i]:
            top -= 1
        at = top - 1
        while at >= 0 and end[stack[at]] + tolerance < end[i]:
            at -= 1
        if at != top - 1:
            overlaps += 1
        parent[i] = stack[at] if at >= 0 else -1
        stack[top] = i
        top += 1
    return overlaps


@kernel  # type: ignore[untyped-decorator]
def exclusive_times(start: NDArray[np.int64], end: NDArray[np.int64], stack: NDArray[np.int64], own: NDArray[np.int64]) -> int:
    """`own[i]`: time of one track in which slice i is the latest started one under way; returns the union, which is the sum of `own`.

    Rows are sorted by start, then longest first; overlapping slices may be nested or not. `stack` is scratch of the same length.
    """
    top = 0
    clock = np.int64(0)
    total = np.int64(0)
    for i in range(len(start) + 1):
        until = start[i] if i < len(start) else np.iinfo(np.int64).max
        while top > 0 and clock < until:
            j = stack[top - 1]
            stop = min(end[j], until)
            if stop > clock:
                own[j] += stop - clock
                total += stop - clock
                clock = stop
            if end[j] <= clock:
                top -= 1
        if i < len(start):
            while top > 0 and end[stack[top - 1]] <= start[i]:
                top -= 1
            clock = start[i]
            stack[top] = i
            top += 1
    return int(total)
