"""Events of a Chrome trace from bytes to columns, without an object per event.

Only what is plain is read here: whole objects in strict JSON, times as decimals, numbers of at most 18 digits. At the first object that is not
so the kernel stops, and the caller reads that one by other means; so nothing is guessed here. Names, categories and threads become numbers by
hash tables that go on from piece to piece. Cost: O(bytes).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .json_bytes import PARSING, U, blank, closed_by, decimal, digits, key, text, value, word
from .object_code import native

__all__ = [
    "AFTER", "ARGUMENTS", "ARROW_COLUMNS", "COLLECTIVE", "COLUMNS", "END", "FULL", "GAPS", "KIND", "NAME", "NAMES", "PAIRS", "START", "STATE_WORDS",
    "TABLE_ROWS", "TIME", "TRACK", "WORD", "WORDS", "hashed", "pair_place", "plain_events",
]  # fmt: skip

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

# Rows of the table of slices; of that of arrows the first six. An arrow's `DURATION` is its number, its `KIND` 1 where it begins and 2 where it ends,
# its `NAME` a word too.
KIND, NAME, WORD, TRACK, TIME, DURATION, START, END, COLLECTIVE, ARGUMENTS = range(10)
COLUMNS, ARROW_COLUMNS = ARGUMENTS + 10, DURATION + 1
# Words of the state: separators seen, gaps between events that are none; entries and bytes of the tables; whether a table is full.
AFTER, GAPS, NAMES, NAME_BYTES, WORDS, WORD_BYTES, PAIRS, FULL = range(8)
STATE_WORDS = 8
# Rows of a table of texts: slots (entry + 1), and of each entry its place in the arena, its length, its hash.
SLOT, PLACE, LENGTH, HASH = range(4)
TABLE_ROWS = 4
_PROBES = 32  # more is a file made to collide: its events are read one by one
_LONGEST = 4096  # bytes of a text that is interned

_KNOWN = (b"Sequence number", b"Fwd thread id", b"External id", b"correlation", b"device", b"stream", b"Python id", b"Python module id", b"step",
          b"iteration", b"external id", b"Collective name")  # fmt: skip
_KEYS = np.array([list(k.ljust(16)) for k in _KNOWN], np.uint8)
_KEY_LENGTH = np.array([len(k) for k in _KNOWN], np.int64)
_GUESS = np.full(64, -1, np.int64)  # the key that a length and a first byte can be: their sum tells all of them apart
_GUESS[[(len(k) + k[0]) & 63 for k in _KNOWN]] = np.arange(len(_KNOWN))

# Fields of an event, each with what a writer puts before its value, as a word, first byte lowest.
_PH, _NAME, _CAT, _PID, _TID, _TS, _DUR, _ID, _ARGS, _OTHER = range(10)
_FIELDS = (b"ph", b"name", b"cat", b"pid", b"tid", b"ts", b"dur", b"id", b"args")
_FIELD_WORD = np.array([int.from_bytes(b'"' + f + b'":', "little") for f in _FIELDS], np.int64)
_FIELD_KEY = np.array([int.from_bytes(f, "little") for f in _FIELDS], np.int64)
_BYTES_5, _BYTES_6, _BYTES_7 = np.int64((1 << 40) - 1), np.int64((1 << 48) - 1), np.int64((1 << 56) - 1)


def _same(data: U8, at: int, other: U8, place: int, length: int) -> bool:
    different, k = np.int64(0), 0
    while k + 8 <= length:
        different |= word(data, at + k) ^ word(other, place + k)
        k += 8
    while k < length:
        different |= np.int64(data[U(at + k)] ^ other[U(place + k)])
        k += 1
    return bool(different == 0)


def hashed(data: U8, start: int, end: int) -> Any:
    """63 bits of the bytes; all of them count."""
    h, i = np.int64(end - start), start
    while i + 8 <= end:
        h = (h ^ word(data, i)) * np.int64(-7046029254386353131)
        h ^= (h >> 29) & np.int64(0x7FFFFFFFF)
        i += 8
    while i < end:
        h = (h ^ np.int64(data[U(i)])) * np.int64(1099511628211)
        i += 1
    h ^= (h >> 32) & np.int64(0xFFFFFFFF)
    return h & np.int64(0x7FFFFFFFFFFFFFFF)


def _interned(data: U8, start: int, end: int, table: I64, arena: U8, state: I64, count: int) -> int:
    """The number of a text, new or known; -1 where it is too long, collides too often, or (`state[FULL]`) there is no room."""
    length = end - start
    if length > _LONGEST:
        return -1
    h = hashed(data, start, end)
    mask = table.shape[1] - 1
    at = h & mask
    for _ in range(_PROBES):
        entry = table[SLOT, at] - 1
        if entry < 0:
            entry = state[count]
            if 2 * entry + 2 > table.shape[1] or state[count + 1] + length > len(arena):
                state[FULL] = 1
                return -1
            place = state[count + 1]
            for k in range(length):
                arena[place + k] = data[U(start + k)]
            table[SLOT, at], table[PLACE, entry], table[LENGTH, entry], table[HASH, entry] = entry + 1, place, length, h
            state[count], state[count + 1] = entry + 1, place + length
            return int(entry)
        if table[HASH, entry] == h and table[LENGTH, entry] == length and _same(data, start, arena, table[PLACE, entry], length):
            return int(entry)
        at = (at + 1) & mask
    return -1


def pair_place(both: int, mask: int) -> int:
    """Where a pair's slot is looked for first: any number is as good, so the words' low bits are."""
    return ((both >> 32) * 31 + both) & mask


def _pair(first: int, second: int, pairs: I64, state: I64) -> int:
    """The number of a pair of words; -1 and `state[FULL]` where there is no room. `pairs`: slots, and each entry's two words as one."""
    both: Any = (np.int64(first) << 32) | np.int64(second)
    mask = pairs.shape[1] - 1
    at = pair_place(both, mask)
    while True:
        entry = pairs[0, at] - 1
        if entry < 0:
            entry = state[PAIRS]
            if 2 * entry + 2 > pairs.shape[1]:
                state[FULL] = 1
                return -1
            pairs[0, at], pairs[1, entry] = entry + 1, both
            state[PAIRS] = entry + 1
            return int(entry)
        if pairs[1, entry] == both:
            return int(entry)
        at = (at + 1) & mask


def _arguments(data: U8, i: int, found: I64) -> int:
    """Read the arguments at `i` into `found` (ten numbers, the older spelling of one, the place of a collective's name); the byte after them."""
    for k in range(12):
        found[k] = -1
    if i < len(data) and data[U(i)] == 110:
        return value(data, i)
    if i >= len(data) or data[U(i)] != 123:
        return -1
    i = blank(data, i + 1)
    if i < len(data) and data[U(i)] == 125:
        return i + 1
    while True:
        start = i + 1
        end, i = key(data, i)
        if i < 0 or i >= len(data):
            return -1
        length = end - start
        which = _GUESS[(length + data[U(start)]) & 63]
        if which >= 0 and _KEY_LENGTH[which] == length:
            for c in range(length):
                if _KEYS[which, c] != data[U(start + c)]:
                    which = -1
                    break
        else:
            which = -1
        if which == 11:
            found[11] = -1 if data[U(i)] == 110 else i
            i = value(data, i)
        elif which >= 0:
            quoted = data[U(i)] == 34
            number = i + 1 if quoted else i
            what, number_end = decimal(data, number, 1) if not quoted else digits(data, number)
            if number_end < 0:
                return -1
            for c in range(number, number_end):
                if data[U(c)] == 46:
                    return -1
            found[which] = what
            i = number_end + 1 if quoted else number_end
        else:
            i = value(data, i)
        if i < 0:
            return -1
        i = blank(data, i)
        if i >= len(data):
            return -1
        if data[U(i)] == 125:
            return i + 1
        if data[U(i)] != 44:
            return -1
        i = blank(data, i + 1)


def _word(data: U8, start: int, end: int, last: I64, words: I64, word_arena: U8, state: I64) -> int:
    """The number of a word; `last`: place, end and number of the one before it in the same role, which most often is the same."""
    if last[2] >= 0 and end - start == last[1] - last[0] and _same(data, start, data, last[0], end - start):
        return int(last[2])
    found = _interned(data, start, end, words, word_arena, state, WORDS)
    last[0], last[1], last[2] = start, end, found
    return found


def _field(data: U8, i: int) -> tuple[int, int]:
    """(which field of an event a key at `i` names, place of its value); (-1, -1) where there is no plain key."""
    if i + 8 <= len(data):
        w = word(data, i)
        for which in (_PH, _TS, _ID):
            if w & _BYTES_5 == _FIELD_WORD[which]:
                return which, blank(data, i + 5)
        for which in (_CAT, _PID, _TID, _DUR):
            if w & _BYTES_6 == _FIELD_WORD[which]:
                return which, blank(data, i + 6)
        for which in (_NAME, _ARGS):
            if w & _BYTES_7 == _FIELD_WORD[which]:
                return which, blank(data, i + 7)
    start = i + 1
    end, i = key(data, i)
    if i < 0 or i >= len(data):
        return -1, -1
    said = np.int64(0)
    for k in range(min(end - start, 8)):
        said |= np.int64(data[U(start + k)]) << (8 * k)
    for which in range(_OTHER):
        if end - start <= 4 and said == _FIELD_KEY[which]:
            return which, i
    return _OTHER, i


_USES: tuple[Any, ...] = (*PARSING, _same, hashed, _interned, pair_place, _pair, _arguments, _word, _field)


@native("u1[] i8 i8[] i8[,] i8[,] i8[,] u1[] i8[,] u1[] i8[,] i8[] i8[] -> 3", uses=_USES)
def plain_events(
    data: U8, position: int, state: I64, out: I64, arrows: I64, names: I64, name_arena: U8, words: I64, word_arena: U8, pairs: I64, ignored: I64,
    found: I64,
) -> tuple[int, int, int]:  # fmt: skip
    """Events from `position` on into the columns of `out` and `arrows`; returns (slices, arrows, position of what is no plain event, or the end).

    Complete slices and the beginnings and ends of arrows become rows; other phases are counted in `ignored` by their letter;
    metadata and open slices are left to the caller. `found` is scratch of 29. `state[AFTER]`: 0 at first, 1 after an event, 2 after its comma.
    """
    i, row, drawn = position, 0, 0
    span, process, thread, category = found[12:20], found[20:23], found[23:26], found[26:29]
    for k in range(20, 29):
        found[k] = -1
    while True:
        i = blank(data, i)
        while i < len(data) and data[U(i)] == 44:
            if state[AFTER] == 2:
                state[GAPS] += 1
            state[AFTER] = 2 if state[AFTER] else 0
            i = blank(data, i + 1)
        if i >= len(data) or data[U(i)] != 123 or row == out.shape[1] or drawn == arrows.shape[1]:
            return row, drawn, i
        begin = i
        # Places of name, category, process and thread: start and end, bare of quotes for the first two.
        for k in range(8):
            span[k] = 0
        phase: Any = 0
        time, duration, number, said = np.int64(0), np.int64(0), np.int64(0), 0
        for k in range(12):
            found[k] = -1
        i = blank(data, i + 1)
        fine = True
        while fine:
            field, i = _field(data, i)
            if i < 0 or i >= len(data):
                fine = False
                break
            if field == _PH:
                fine = i + 2 < len(data) and data[U(i)] == 34 and data[U(i + 2)] == 34 and 33 <= data[U(i + 1)] < 127 and data[U(i + 1)] != 92
                phase = np.int64(data[U(i + 1)]) if fine else 0
                i += 3
            elif field in (_NAME, _CAT):
                which = 0 if field == _NAME else 2
                fine = data[U(i)] == 34
                if fine:
                    close, _ = text(data, i + 1)
                    fine = close >= 0
                    span[which], span[which + 1] = i + 1, close
                    i = close + 1
            elif field in (_PID, _TID):
                which, before = (4, process) if field == _PID else (6, thread)
                span[which] = i
                close = i + before[1] - before[0]
                if before[2] >= 0 and closed_by(data, close) and _same(data, i, data, before[0], close - i):
                    i = close  # as in the event before
                elif data[U(i)] == 34:
                    close, escapes = text(data, i + 1)
                    fine = close >= 0 and escapes == 0
                    i = close + 1
                else:
                    _, close = decimal(data, i, 1)
                    fine = close >= 0
                    for k in range(i, close):
                        fine = fine and data[U(k)] != 46
                    i = close
                span[which + 1] = i
            elif field == _TS:
                time, close = decimal(data, i, 1000)
                said = said | 1 if close >= 0 else said & ~1
                i = close if close >= 0 else value(data, i)
            elif field == _DUR:
                duration, close = decimal(data, i, 1000)
                said = said | 2 if close >= 0 and duration >= 0 and data[U(i)] != 45 else said & ~2
                i = close if close >= 0 else value(data, i)
            elif field == _ID:
                number, close = decimal(data, i, 1)
                said = said | 4 if close >= 0 else said & ~4
                for k in range(i, close):
                    said = said & ~4 if data[U(k)] == 46 or data[U(k)] == 45 else said
                i = close if close >= 0 else value(data, i)
            elif field == _ARGS:
                i = _arguments(data, i, found)
            else:
                i = value(data, i)
            if not fine or i < 0:
                fine = False
                break
            i = blank(data, i)
            if i >= len(data):
                fine = False
            elif data[U(i)] == 125:
                i += 1
                break
            elif data[U(i)] == 44:
                i = blank(data, i + 1)
            else:
                fine = False
        # M, B and E are rare, and what is left of a slice or an arrow without its time is not plain.
        slice_, arrow = phase == 88, phase == 115 or phase == 102
        if not fine or phase == 0 or phase == 77 or phase == 66 or phase == 69 or (slice_ and said & 3 != 3) or (arrow and said & 5 != 5):
            return row, drawn, begin
        if slice_ or arrow:
            if span[4] == 0 or span[6] == 0:
                return row, drawn, begin
            first = _word(data, span[4], span[5], process, words, word_arena, state)
            second = _word(data, span[6], span[7], thread, words, word_arena, state) if first >= 0 else -1
            kind = _word(data, span[2], span[3], category, words, word_arena, state) if second >= 0 else -1
            name = -1
            if kind >= 0 and arrow:
                name = _interned(data, span[0], span[1], words, word_arena, state, WORDS)
            elif kind >= 0:
                name = _interned(data, span[0], span[1], names, name_arena, state, NAMES)
            track = _pair(first, second, pairs, state) if name >= 0 else -1
            if track < 0:
                return row, drawn, begin
            if arrow:
                arrows[KIND, drawn], arrows[NAME, drawn], arrows[WORD, drawn] = 1 if phase == 115 else 2, name, kind
                arrows[TRACK, drawn], arrows[TIME, drawn], arrows[DURATION, drawn] = track, time, number
                drawn += 1
            else:
                out[NAME, row], out[WORD, row], out[TRACK, row], out[TIME, row], out[DURATION, row] = name, kind, track, time, duration
                out[START, row], out[END, row], out[COLLECTIVE, row] = begin, i, found[11]
                if found[10] != -1:
                    found[2] = found[10]
                for k in range(10):
                    out[ARGUMENTS + k, row] = found[k]
                row += 1
        elif phase != 116:
            ignored[phase] += 1
        state[GAPS] += 1 if state[AFTER] == 1 else 0
        state[AFTER] = 1
