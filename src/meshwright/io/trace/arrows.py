"""Arrows of a Chrome trace (`ph` s and f): which slice each leaves and which it enters, by the number that its two ends share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.pieces import places
from ...trace.trace import I32, I64

__all__ = ["Arrows", "slice_at"]


class Arrows:
    """Ends of arrows as growing columns, in the order of the file. Two ends are of one arrow if they are of one kind and have one number."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.texts: dict[str, int] = {}  # numbers that are none
        self.columns: dict[str, list[NDArray[Any]]] = {"kind": [], "number": [], "track": [], "time_ns": [], "enters": []}

    def kind_code(self, kind: str) -> int:
        """Even; texts instead of numbers are told by the odd code after it."""
        return 2 * self.kinds.setdefault(kind, len(self.kinds))

    def append(self, kind: I64, number: I64, track: I64, time_ns: I64, enters: NDArray[np.bool_]) -> None:
        """`kind` as `kind_code` says."""
        for column, part in zip(self.columns.values(), (kind, number, track, time_ns, enters), strict=True):
            column.append(part.copy())

    def add(self, keys: Iterable[tuple[str, str]], track: Sequence[int], time_ns: NDArray[np.float64], enters: Sequence[bool]) -> None:
        """The same with keys (kind, number) as texts."""
        kind, number = [], []
        for name, text in keys:
            plain = text.isascii() and text.isdigit() and len(text) < 19 and str(int(text)) == text
            kind.append(self.kind_code(name) + (not plain))
            number.append(int(text) if plain else self.texts.setdefault(text, len(self.texts)))
        self.append(np.array(kind, np.int64), np.array(number, np.int64), np.array(track, np.int64), time_ns.astype(np.int64), np.array(enters, bool))

    def joined(self, silent: str = "") -> tuple[dict[str, tuple[tuple[I64, I64], tuple[I64, I64]]], list[tuple[str, str]]]:
        """kind -> ((tracks, times) of the beginnings, the same of the ends), by time of the ends; and the keys of ends without a beginning,
        of kinds other than `silent`.

        An arrow enters from the last beginning with its number; from one that lies later only if there is none before (clocks of two devices).
        """
        if not self.columns["kind"]:
            return {}, []
        kind, number, track, time, enters = (np.concatenate(parts) for parts in self.columns.values())
        by_key = np.lexsort((number, kind))
        new = np.ones(len(kind), bool)
        new[1:] = (np.diff(kind[by_key]) != 0) | (np.diff(number[by_key]) != 0)
        key = np.empty(len(kind), np.int64)
        key[by_key] = np.cumsum(new) - 1
        count = int(new.sum())
        later = np.full(count, -1, np.int64)
        begins = np.flatnonzero(~enters)
        np.maximum.at(later, key[begins], begins)
        order = np.lexsort((enters, time, key))
        sorted_key, ends = key[order], enters[order]
        before = np.maximum.accumulate(np.where(ends, -1, np.arange(len(order))))
        own = before >= places(sorted_key, sorted_key)
        begin = np.where(own, order[np.maximum(before, 0)], later[sorted_key])[ends]
        end = order[ends]
        in_time = np.lexsort((end, time[end]))
        begin, end = begin[in_time], end[in_time]
        names, texts = list(self.kinds), list(self.texts)
        missed = end[(begin < 0) & (kind[end] >> 1 != self.kinds.get(silent, -1))]
        lost = [(names[k >> 1], texts[n] if k & 1 else str(n)) for k, n in zip(kind[missed].tolist(), number[missed].tolist(), strict=True)]
        end, begin = end[begin >= 0], begin[begin >= 0]
        found = {}
        for name in sorted(names):
            mine = kind[end] >> 1 == self.kinds[name]
            if mine.any():
                found[name] = (track[begin[mine]], time[begin[mine]]), (track[end[mine]], time[end[mine]])
        return found, lost


def slice_at(track: I64, time: I64, start: I64, duration: I64, parent: I32, track_start: I64) -> I32:
    """The innermost slice of `track` under way at `time` (its ends included), or -1."""
    row = np.full(len(track), -1, np.int64)
    for t in np.flatnonzero(np.bincount(track)).tolist():
        low, high = int(track_start[t]), int(track_start[t + 1])
        mine = track == t
        at = places(start[low:high], time[mine], right=True) - 1
        row[mine] = np.where(at >= 0, at + low, -1)
    over = np.flatnonzero(row >= 0)
    while len(over):
        over = over[start[row[over]] + duration[row[over]] < time[over]]
        row[over] = parent[row[over]]
        over = over[row[over] >= 0]
    return row.astype(np.int32)
