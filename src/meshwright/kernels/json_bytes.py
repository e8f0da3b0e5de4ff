"""Values of JSON in bytes, for kernels: blanks, texts, decimals, any value skipped. Strict, and ASCII only: anything else is answered with -1.

Plain functions, to be compiled into a kernel that names them (`object_code.native`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PARSING", "U", "blank", "closed_by", "decimal", "digits", "ending", "key", "text", "value", "word"]

U8 = NDArray[np.uint8]
U = np.uint64  # of a place in bytes: compiled code asks of every signed one whether it counts from the end, which costs as much as the rest
_ONES, _TOPS = np.int64(0x0101010101010101), np.int64(-0x7F7F7F7F7F7F7F80)  # a byte's lowest bit, its top bit, in each byte
_QUOTES, _SLASHES, _BLANKS = (np.int64(byte * 0x0101010101010101) for byte in (34, 92, 32))
_MOST = 4_000_000_000_000_000  # of a number that is scaled: more us than any clock says


def word(data: U8, i: int) -> Any:
    """Eight bytes as one word, the first the lowest."""
    w = np.int64(data[U(i)])
    for k in range(1, 8):
        w |= np.int64(data[U(i + k)]) << (8 * k)
    return w


def first_top(m: Any) -> int:
    """The first byte whose top bit is set; no other bits are. Below the lowest bit set all bits of (m & -m) - 1 are: one in each byte up to that one,
    summed by a product."""
    return int((((((m & -m) - 1) & _ONES) * _ONES) >> 56) & 255) - 1


def blank(data: U8, i: int) -> int:
    while i < len(data) and data[U(i)] <= 32 and (data[U(i)] == 32 or data[U(i)] == 10 or data[U(i)] == 13 or data[U(i)] == 9):
        i += 1
    return i


def ending(data: U8, i: int) -> int:
    """The first byte from `i` on that may end a text or is none of a plain one: a quote, a backslash, below 32, or from 127 on; else the end.

    Eight bytes at once, as one word (low byte first): in `m` the top bit of each such byte is set, and maybe of some after the first.
    """
    while i + 8 <= len(data):
        w = word(data, i)
        quote, slash = w ^ _QUOTES, w ^ _SLASHES
        m = (((quote - _ONES) & ~quote) | ((slash - _ONES) & ~slash) | ((w - _BLANKS) & ~w) | (w + _ONES) | w) & _TOPS
        if m != 0:
            return i + first_top(m)
        i += 8
    while i < len(data) and data[U(i)] != 34 and data[U(i)] != 92 and 32 <= data[U(i)] < 127:
        i += 1
    return i


def text(data: U8, i: int) -> tuple[int, int]:
    """(place of the closing quote, whether there are escapes) of the text that begins at `i`; -1 where it is not ASCII, not closed, or not JSON."""
    escapes = 0
    while True:
        i = ending(data, i)
        if i >= len(data):
            return -1, 0
        if data[U(i)] == 34:
            return i, escapes
        if data[U(i)] != 92 or i + 1 >= len(data):
            return -1, 0
        escapes = 1
        c = data[U(i + 1)]
        if not (c == 34 or c == 92 or c == 47 or c == 98 or c == 102 or c == 110 or c == 114 or c == 116):
            return -1, 0
        i += 2


def closed_by(data: U8, i: int) -> bool:
    """Whether a number or a word may end before `i`."""
    if i >= len(data):
        return False
    c = data[U(i)]
    return bool(c == 44 or c == 125 or c == 93 or c == 32 or c == 10 or c == 13 or c == 9)


def decimal(data: U8, i: int, scale: int) -> tuple[Any, int]:
    """(number times `scale`, a power of ten, rounded half to even; the byte after it); (0, -1) where it is no plain decimal of at most 18 digits."""
    negative = i < len(data) and data[U(i)] == 45
    if negative:
        i += 1
    first, value = i, np.int64(0)
    while i < len(data) and 48 <= data[U(i)] <= 57 and i - first < 19:
        value = value * 10 + (np.int64(data[U(i)]) - 48)
        i += 1
    if i == first or i - first > 18 or (data[U(first)] == 48 and i - first > 1):
        return 0, -1
    if scale > 1 and value >= _MOST:
        return 0, -1
    if scale > 1 or (i < len(data) and data[U(i)] == 46):
        value *= scale
    if i < len(data) and data[U(i)] == 46:
        i += 1
        begin, weight, rest = i, scale, 0  # `rest`: 0 below half, 1 half, 2 above
        while i < len(data) and 48 <= data[U(i)] <= 57:
            digit = np.int64(data[U(i)]) - 48
            if weight > 1:
                weight //= 10
                value += digit * weight
            elif weight == 1:
                weight = 0
                rest = 2 if digit > 5 else 1 if digit == 5 else 0
            elif rest == 1 and digit > 0:
                rest = 2
            i += 1
        if i == begin:
            return 0, -1
        if rest == 2 or (rest == 1 and value & 1):
            value += 1
    if not closed_by(data, i):
        return 0, -1
    return (-value if negative else value), i


def number(data: U8, i: int) -> int:
    """The byte after any JSON number that begins at `i`, or -1."""
    if i < len(data) and data[U(i)] == 45:
        i += 1
    first = i
    while i < len(data) and 48 <= data[U(i)] <= 57:
        i += 1
    if i == first or (data[U(first)] == 48 and i - first > 1):
        return -1
    if i < len(data) and data[U(i)] == 46:
        first = i + 1
        i = first
        while i < len(data) and 48 <= data[U(i)] <= 57:
            i += 1
        if i == first:
            return -1
    if i < len(data) and (data[U(i)] == 101 or data[U(i)] == 69):
        i += 1
        if i < len(data) and (data[U(i)] == 43 or data[U(i)] == 45):
            i += 1
        first = i
        while i < len(data) and 48 <= data[U(i)] <= 57:
            i += 1
        if i == first:
            return -1
    return i if closed_by(data, i) else -1


def value(data: U8, i: int) -> int:
    """The byte after any JSON value that begins at `i`, or -1."""
    depth, lists, expects = 0, np.int64(0), 0  # `lists`: a bit per level, whether it is a list; `expects`: 0 a value, 1 a key, 2 a comma or an end
    empty = False
    while True:
        i = blank(data, i)
        if i >= len(data):
            return -1
        c = data[U(i)]
        if expects == 2 or (empty and (c == 93 or c == 125)):
            is_list = (lists >> (depth - 1)) & 1
            if c == 44 and not empty:
                expects = 0 if is_list else 1
                i += 1
                continue
            if (c == 93 and is_list) or (c == 125 and not is_list):
                depth -= 1
                lists &= (np.int64(1) << depth) - 1
                empty = False
                expects = 2
                i += 1
                if depth == 0:
                    return i
                continue
            return -1
        empty = False
        if expects == 1:
            if c != 34:
                return -1
            i = text(data, i + 1)[0]
            if i < 0:
                return -1
            i = blank(data, i + 1)
            if i >= len(data) or data[U(i)] != 58:
                return -1
            i += 1
            expects = 0
            continue
        if c == 123 or c == 91:
            if depth == 60:
                return -1
            if c == 91:
                lists |= np.int64(1) << depth
            depth += 1
            expects = 0 if c == 91 else 1
            empty = True
            i += 1
            continue
        if c == 34:
            i = text(data, i + 1)[0]
            if i < 0:
                return -1
            i += 1
        elif c == 116 or c == 110 or c == 102:
            length = 5 if c == 102 else 4
            if i + length >= len(data):
                return -1
            a, b, d = data[U(i + 1)], data[U(i + 2)], data[U(i + 3)]
            true, null = c == 116 and a == 114 and b == 117 and d == 101, c == 110 and a == 117 and b == 108 and d == 108
            if not (true or null or (c == 102 and a == 97 and b == 108 and d == 115 and data[U(i + 4)] == 101)):
                return -1
            i += length
        else:
            i = number(data, i)
            if i < 0:
                return -1
        if depth == 0:
            return i
        expects = 2


def key(data: U8, i: int) -> tuple[int, int]:
    """(place of a key's closing quote, place of its value), or (-1, -1)."""
    if i >= len(data) or data[U(i)] != 34:
        return -1, -1
    end, escapes = text(data, i + 1)
    if end < 0 or escapes:
        return -1, -1
    i = blank(data, end + 1)
    if i >= len(data) or data[U(i)] != 58:
        return -1, -1
    return end, blank(data, i + 1)


def digits(data: U8, i: int) -> tuple[Any, int]:
    """A whole number in quotes, and the place of the closing one, or (0, -1)."""
    first, value = i, np.int64(0)
    while i < len(data) and 48 <= data[U(i)] <= 57 and i - first < 18:
        value = value * 10 + (np.int64(data[U(i)]) - 48)
        i += 1
    if i == first or i >= len(data) or data[U(i)] != 34:
        return 0, -1
    return value, i


PARSING = (word, first_top, blank, ending, text, closed_by, decimal, number, value, key, digits)
