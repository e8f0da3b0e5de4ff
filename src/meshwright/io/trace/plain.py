"""Plain events of a Chrome trace, from bytes to columns: keeps the tables of `kernels.trace_events` and hands its rows to `EventRows`."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...kernels import trace_events as kernel
from ...trace.vocabulary import arrow_of
from .rows import EventRows, decoded_args

__all__ = ["PlainEvents"]

I64 = NDArray[np.int64]
_ROWS = 1 << 16  # of the table that the kernel fills at once
_PH = 128  # ASCII


class _Table:
    """Texts by number, as the kernel keeps them; it grows by doubling."""

    def __init__(self, slots: int, arena_bytes: int) -> None:
        self.rows = np.zeros((kernel.TABLE_ROWS, slots), np.int64)
        self.arena = np.zeros(arena_bytes, np.uint8)
        self.known = np.zeros(0, np.int64)  # our number of each entry that was asked for; -1: not asked for yet

    def grow(self, count: int) -> None:
        old, size = self.rows, self.rows.shape[1]
        self.arena = np.concatenate([self.arena, np.zeros(len(self.arena), np.uint8)])
        if 4 * count < size:  # only the arena was full
            return
        self.rows = np.zeros((kernel.TABLE_ROWS, 2 * size), np.int64)
        self.rows[kernel.PLACE : kernel.HASH + 1, :count] = old[kernel.PLACE : kernel.HASH + 1, :count]
        _insert(self.rows[0], [h & (2 * size - 1) for h in old[kernel.HASH, :count].tolist()])

    def text(self, entry: int) -> bytes:
        place, length = self.rows[kernel.PLACE, entry], self.rows[kernel.LENGTH, entry]
        return self.arena[place : place + length].tobytes()


def _insert(slots: I64, places: list[int]) -> None:
    """Entries 0, 1, ... into the free slot at or behind their places."""
    mask, taken = len(slots) - 1, set[int]()
    for entry, at in enumerate(places):
        while at in taken:
            at = (at + 1) & mask
        taken.add(at)
        slots[at] = entry + 1


class PlainEvents:
    """Call it with a buffer and a position between events: it reads as many plain events as follow and returns the position of what is none."""

    def __init__(self, rows: EventRows) -> None:
        self.rows = rows
        self.state = np.zeros(kernel.STATE_WORDS, np.int64)
        self.names, self.words = _Table(1 << 13, 1 << 20), _Table(1 << 10, 1 << 16)
        self.pairs = np.zeros((2, 1 << 8), np.int64)
        self.tracks = np.zeros(0, np.int64)  # ours, by the kernel's number of a pair
        self.ignored = np.zeros(_PH, np.int64)
        self.kinds: dict[int, int] = {}  # of arrows, by category and name
        self.out, self.arrows = np.empty((kernel.COLUMNS, _ROWS), np.int64), np.empty((kernel.ARROW_COLUMNS, _ROWS), np.int64)
        self.scratch = np.zeros(29, np.int64)

    def __call__(self, buffer: bytes, position: int) -> int:
        data = np.frombuffer(buffer, np.uint8)
        while True:
            self.state[kernel.FULL] = 0
            count, drawn, position = kernel.plain_events(
                data, position, self.state, self.out, self.arrows, self.names.rows, self.names.arena, self.words.rows, self.words.arena, self.pairs,
                self.ignored, self.scratch,
            )  # fmt: skip
            if count:
                self._slices(self.out[:, :count], buffer)
            if drawn:
                self._arrows(self.arrows[:, :drawn])
            if self.state[kernel.FULL]:
                self._grow()
            elif max(count, drawn) < _ROWS:
                return position

    def other(self, clean: bool) -> None:
        """The caller read an event itself; `clean`: nothing but blanks and commas stood before it."""
        self.state[kernel.GAPS] += not clean or self.state[kernel.AFTER] == 1
        self.state[kernel.AFTER] = 1

    def finish(self) -> None:
        """Counts of the whole file go to the rows."""
        for letter in np.flatnonzero(self.ignored).tolist():
            self.rows.ignored[chr(letter)] += int(self.ignored[letter])
        gaps = int(self.state[kernel.GAPS])
        self.rows.problems.add("not JSON between events, repaired", "a comma that is missing, or one too many", gaps)

    def _grow(self) -> None:
        """Every table that may be the full one; a table of texts has room for half its slots."""
        counts = self.state[[kernel.NAMES, kernel.WORDS]].tolist()
        for table, count, used in zip((self.names, self.words), counts, self.state[[kernel.NAME_BYTES, kernel.WORD_BYTES]].tolist(), strict=True):
            if 2 * count + 2 > table.rows.shape[1] or used + 4096 > len(table.arena):
                table.grow(count)
        count, size = int(self.state[kernel.PAIRS]), self.pairs.shape[1]
        if 2 * count + 2 > size:
            old, self.pairs = self.pairs, np.zeros((2, 2 * size), np.int64)
            self.pairs[1, :count] = old[1, :count]
            _insert(self.pairs[0], [kernel.pair_place(k, 2 * size - 1) for k in old[1, :count].tolist()])

    # ---- rows ------------------------------------------------------------------------------------------------------------
    def _slices(self, out: I64, buffer: bytes) -> None:
        rows, track = self.rows, self._tracks()[out[kernel.TRACK]]
        name = self._ours(self.names, int(self.state[kernel.NAMES]), out[kernel.NAME], rows.name_id)
        category = self._ours(self.words, int(self.state[kernel.WORDS]), out[kernel.WORD], rows.category_id)
        if rows.origin_us is None:
            rows.origin_us = float(out[kernel.TIME, 0] // 1000)
        first = rows.count
        rows.append_columns(name, category, track, out[kernel.TIME] - int(rows.origin_us) * 1000, out[kernel.DURATION], out[kernel.ARGUMENTS :])
        for row in np.flatnonzero(out[kernel.COLLECTIVE] >= 0).tolist():
            rows.collectives.append((first + row, decoded_args(buffer[int(out[kernel.START, row]) : int(out[kernel.END, row])])))

    def _arrows(self, out: I64) -> None:
        rows, track = self.rows, self._tracks()[out[kernel.TRACK]]
        if rows.origin_us is None:
            rows.origin_us = float(out[kernel.TIME, 0] // 1000)
        both = (out[kernel.WORD] << 32) | out[kernel.NAME]
        found, which = np.unique(both, return_inverse=True)
        codes = [self.kinds[k] if k in self.kinds else self._kind(k) for k in found.tolist()]
        kind = np.array(codes, np.int64)[which]
        rows.arrows.append(kind, out[kernel.DURATION], track, out[kernel.TIME] - int(rows.origin_us) * 1000, out[kernel.KIND] == 2)

    def _kind(self, both: int) -> int:
        category, name = _decoded(self.words.text(both >> 32)), _decoded(self.words.text(both & 0xFFFFFFFF))
        self.kinds[both] = self.rows.arrows.kind_code(arrow_of(category, name))
        return self.kinds[both]

    def _ours(self, table: _Table, count: int, entries: I64, number: Any) -> I64:
        if len(table.known) < count:
            table.known = np.concatenate([table.known, np.full(count - len(table.known), -1, np.int64)])
        ours = table.known[entries]
        if (ours < 0).any():
            for entry in dict.fromkeys(entries[ours < 0].tolist()):
                table.known[entry] = number(_decoded(table.text(entry)))
            ours = table.known[entries]
        return ours

    def _tracks(self) -> I64:
        count = int(self.state[kernel.PAIRS])
        if len(self.tracks) < count:
            keys = self.pairs[1, len(self.tracks) : count].tolist()
            values = [(msgspec.json.decode(self.words.text(k >> 32)), msgspec.json.decode(self.words.text(k & 0xFFFFFFFF))) for k in keys]
            self.tracks = np.concatenate([self.tracks, np.array([self.rows.track_id(*v) for v in values], np.int64)])
        return self.tracks


def _decoded(text: bytes) -> str:
    decoded: str = msgspec.json.decode(b'"' + text + b'"')
    return decoded
