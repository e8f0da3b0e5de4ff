"""Slices of one track flattened into pieces that do not overlap, and places of times among sorted ones. Cost: O(slices)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .object_code import native

__all__ = ["flatten", "inherit", "places"]


@native("i8[] i8[] i8[] i8[] i8[] i8[] -> 1")
def flatten(
    start: NDArray[np.int64], end: NDArray[np.int64], stack: NDArray[np.int64], piece_start: NDArray[np.int64], piece_end: NDArray[np.int64],
    piece_row: NDArray[np.int64],
) -> int:  # fmt: skip
    """Pieces of time, each with the latest started slice under way in it; returns how many there are (at most 2 per slice).

    Rows are sorted by start, then longest first. Time in which nothing is under way is left out.
    """
    top, made, clock = 0, 0, np.int64(0)
    last = np.iinfo(np.int64).max
    i = 0
    while i < len(start) or top > 0:
        arrives = start[i] if i < len(start) else last
        # The latest started slice that is not over is on top.
        while top > 0 and end[stack[top - 1]] <= clock:
            top -= 1
        if top > 0 and clock < arrives:
            row = stack[top - 1]
            until = min(end[row], arrives)
            # A child of no length left no gap: the piece before goes on.
            if made > 0 and piece_row[made - 1] == row and piece_end[made - 1] == clock:
                piece_end[made - 1] = until
            else:
                piece_start[made], piece_end[made], piece_row[made] = clock, until, row
                made += 1
            clock = until
        elif i < len(start):
            clock = max(clock, np.int64(arrives))
            stack[top] = i
            top += 1
            i += 1
    return made


@native("i4[] i4[] -> 0")
def inherit(parent: NDArray[np.int32], value: NDArray[np.int32]) -> None:
    """Every row with a negative value takes its parent's; parents come before their children."""
    for i in range(len(parent)):
        if value[i] < 0 and parent[i] >= 0:
            value[i] = value[parent[i]]


def places(values: NDArray[np.int64], wanted: NDArray[np.int64], *, right: bool = False) -> NDArray[np.int64]:
    """`np.searchsorted` for wanted values that are sorted themselves, or nearly: each is looked for from the place of the one before it."""
    found = np.empty(len(wanted), np.int64)
    _places(np.ascontiguousarray(values), np.ascontiguousarray(wanted), int(right), found)
    return found


@native("i8[] i8[] i8 i8[] -> 0")
def _places(values: NDArray[np.int64], wanted: NDArray[np.int64], right: int, found: NDArray[np.int64]) -> None:
    at, count = 0, len(values)
    for i in range(len(wanted)):
        w, step = wanted[i], 1
        # Steps that double lead away from the last place, then halving finds the place between the last two.
        if at < count and (values[at] < w or (right != 0 and values[at] == w)):
            low = at + 1
            while low + step <= count and (values[low + step - 1] < w or (right != 0 and values[low + step - 1] == w)):
                low += step
                step *= 2
            high = min(low + step - 1, count)
        else:
            high = at
            while high >= step and not (values[high - step] < w or (right != 0 and values[high - step] == w)):
                high -= step
                step *= 2
            low = max(high - step + 1, 0)
        while low < high:
            middle = (low + high) >> 1
            if values[middle] < w or (right != 0 and values[middle] == w):
                low = middle + 1
            else:
                high = middle
        at = low
        found[i] = at
