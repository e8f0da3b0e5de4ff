"""Where the objects of a JSON array begin and end, in bytes that arrive in pieces.

A state machine over bytes that knows strings, escapes and brackets and nothing else: what it finds is decoded elsewhere. Cost: O(bytes).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .object_code import native

__all__ = ["DEPTH", "DONE", "ESCAPE", "LISTS", "OPEN", "STATE_WORDS", "TEXT", "scan_objects"]

STATE_WORDS = 6  # numbers of the scanner's state, named by the line below
# Nesting; inside a string; after a backslash; start of the open object or -1; array closed; lists open between objects.
DEPTH, TEXT, ESCAPE, OPEN, DONE, LISTS = range(STATE_WORDS)

_QUOTE, _BACKSLASH, _OPEN_BRACE, _CLOSE_BRACE, _OPEN_BRACKET, _CLOSE_BRACKET = (ord(c) for c in '"\\{}[]')
_BRACKET_BITS = 0b01011001  # common to [ ] { }


@native("u1[] i8 i8[] i8[] i8[] -> 2")
def scan_objects(
    data: NDArray[np.uint8], position: int, state: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[int, int]:
    """Go on from `position`; fill `starts` and `ends` (exclusive) with objects of the outermost level. Returns (objects found, position).

    Stops at the end of `data`, when `starts` is full, or behind the bracket that closes the array (`state[DONE]`). `state` is kept
    between calls; its `OPEN` is a position in `data`, to be shifted by the caller when bytes before it are dropped.
    """
    found = 0
    depth, text, escape, open_at = state[DEPTH], state[TEXT], state[ESCAPE], state[OPEN]
    i = position
    while i < len(data) and found < len(starts):
        if text and not escape:
            while i < len(data) and data[i] != _QUOTE and data[i] != _BACKSLASH:
                i += 1
        elif not text:
            # Brackets, braces and the quote, and few other bytes, have these bits: letters that pass are looked at below.
            while i < len(data) and data[i] != _QUOTE and (data[i] < _OPEN_BRACKET or data[i] & _BRACKET_BITS != _BRACKET_BITS):
                i += 1
        if i == len(data):
            break
        byte = data[i]
        if text:
            if escape:
                escape = 0
            elif byte == _BACKSLASH:
                escape = 1
            else:
                text = 0
        elif byte == _QUOTE:
            text = 1 if depth > 0 else 0  # between objects there are no strings: a stray quote must not hide what follows
        elif byte in (_OPEN_BRACE, _OPEN_BRACKET):
            if depth == 0 and byte == _OPEN_BRACE:
                open_at = i
            if depth > 0 or byte == _OPEN_BRACE:
                depth += 1
            else:
                state[LISTS] += 1  # a list that is no event: its end is not that of the events
        elif byte in (_CLOSE_BRACE, _CLOSE_BRACKET):
            if depth > 0:
                depth -= 1
                if depth == 0:
                    starts[found], ends[found] = open_at, i + 1
                    found += 1
                    open_at = -1
            elif byte == _CLOSE_BRACKET and state[LISTS] > 0:
                state[LISTS] -= 1
            elif byte == _CLOSE_BRACKET:
                state[DONE] = 1
                i += 1
                break
        i += 1
    state[DEPTH], state[TEXT], state[ESCAPE], state[OPEN] = depth, text, escape, open_at
    return found, i
