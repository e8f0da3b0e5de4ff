"""Arrows of a Chrome trace (`ph` s and f): which slice each leaves and which it enters, by the number that its two ends share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...program.program import I32
from ...trace.trace import I64

__all__ = ["Arrows", "slice_at"]


class Arrows:
    """Ends of arrows as growing columns, in the order of the file. A key is (kind, number), both as text."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, str], int] = {}
        self.columns: dict[str, list[NDArray[Any]]] = {"key": [], "track": [], "time_ns": [], "enters": []}

    def add(self, keys: Iterable[tuple[str, str]], track: Sequence[int], time_ns: NDArray[np.float64], enters: Sequence[bool]) -> None:
        table = self.keys
        numbers = [table.setdefault(key, len(table)) for key in keys]
        parts = (np.array(numbers, np.int64), np.array(track, np.int64), time_ns.astype(np.int64), np.array(enters, bool))
        for column, part in zip(self.columns.values(), parts, strict=True):
            column.append(part)

    def joined(self) -> tuple[dict[str, tuple[tuple[I64, I64], tuple[I64, I64]]], list[tuple[str, str]]]:
        """kind -> ((tracks, times) of the beginnings, the same of the ends), by time of the ends; and the keys of ends without a beginning.

        An arrow enters from the last beginning with its number; from one that lies later only if there is none before (clocks of two devices).
        """
        if not self.keys:
            return {}, []
        key, track, time, enters = (np.concatenate(parts) for parts in self.columns.values())
        later = np.full(len(self.keys), -1, np.int64)
        begins = np.flatnonzero(~enters)
        np.maximum.at(later, key[begins], begins)
        order = np.lexsort((enters, time, key))
        sorted_key, ends = key[order], enters[order]
        before = np.maximum.accumulate(np.where(ends, -1, np.arange(len(order))))
        own = before >= np.searchsorted(sorted_key, sorted_key)
        begin = np.where(own, order[np.maximum(before, 0)], later[sorted_key])[ends]
        end = order[ends]
        in_time = np.lexsort((end, time[end]))
        begin, end = begin[in_time], end[in_time]
        names = list(self.keys)
        lost = [names[k] for k in key[end[begin < 0]].tolist()]
        end, begin = end[begin >= 0], begin[begin >= 0]
        kinds = {kind: i for i, kind in enumerate(sorted({kind for kind, _ in names}))}
        of_key = np.array([kinds[kind] for kind, _ in names], np.int64)
        found = {}
        for kind, number in kinds.items():
            mine = of_key[key[end]] == number
            if mine.any():
                found[kind] = (track[begin[mine]], time[begin[mine]]), (track[end[mine]], time[end[mine]])
        return found, lost


def slice_at(track: I64, time: I64, start: I64, duration: I64, parent: I32, track_start: I64) -> I32:
    """The innermost slice of `track` under way at `time` (its ends included), or -1."""
    row = np.full(len(track), -1, np.int64)
    for t in np.unique(track).tolist():
        low, high = int(track_start[t]), int(track_start[t + 1])
        mine = track == t
        at = np.searchsorted(start[low:high], time[mine], side="right") - 1
        row[mine] = np.where(at >= 0, at + low, -1)
    over = np.flatnonzero(row >= 0)
    while len(over):
        over = over[start[row[over]] + duration[row[over]] < time[over]]
        row[over] = parent[row[over]]
        over = over[row[over] >= 0]
    return row.astype(np.int32)
