"""One block of a sparse sum in a switch: a table with a place per hash, pairs that wait, an array once that is smaller. For simulator and sockets.

Cite: D. De Sensi, S. Di Girolamo, S. Ashkboos, S. Li, T. Hoefler, "Flare: Flexible In-Network Allreduce" (SC 2021, arXiv 2106.15565), section 7.
Left open by the paper: when the table gives way to an array. Our answer: from the pair on with which what was sent, is held and waits would take as
many bytes as the array. Deviations: a pair of value 0 is dropped where an array is read out.
Invariant: what is popped from a block adds up to what was inserted, index by index.
Cost: O(1) per pair; the array O(span) per block.

`Blocks` are arrays of their own; `b` is a block's row in them, `base` its first index, `span` its number of indices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .compile import called

__all__ = [
    "AT", "BLOCK", "DENSE", "HELD", "HOLD", "KNUTH", "NUMBER_BYTES", "PAIR_BYTES", "SENT", "STATES", "WAITING", "Blocks", "clear", "empty", "insert",
    "made_blocks", "pop",
]  # fmt: skip

PAIR_BYTES, NUMBER_BYTES = 8, 4
KNUTH = 2654435761  # of multiplicative hashing: golden ratio times 2^32
HELD, WAITING, SENT, DENSE, AT, BLOCK, HOLD = range(7)  # columns of `Blocks.state`; the last two are for whoever serves blocks
STATES = 7


class Blocks(NamedTuple):
    """Per block: table (`keys` -1: free, `sums`), `array`, pairs that wait. `state`: pairs in the table, that wait, that were popped; whether the
    array serves; how far reading out has come; which block of the message; whether the next above asks to wait."""

    keys: Any
    sums: Any
    array: Any
    waiting_keys: Any
    waiting: Any
    state: Any


def made_blocks(count: int, *, span: int, places: int, waiting: int, keys: Any = np.int32, values: Any = np.float32) -> Blocks:
    """Fresh ones: tables of `places`, arrays of `span`, room for so many `waiting` pairs."""
    return Blocks(
        np.full((count, places), -1, keys), np.zeros((count, places), values), np.zeros((count, span), values), np.zeros((count, waiting), keys),
        np.zeros((count, waiting), values), np.zeros((count, STATES), np.int64),
    )  # fmt: skip


@called
def clear(blocks, b, span, dense):  # type: ignore[no-untyped-def]
    """Make an empty block ready for the next. It begins as an array with `dense`, and where its table takes no less memory than one."""
    for x in range(AT + 1):
        blocks.state[b, x] = 0
    if dense or blocks.keys.shape[1] * PAIR_BYTES >= span * NUMBER_BYTES:
        blocks.state[b, DENSE] = 1


@called
def _to_array(blocks, b, base):  # type: ignore[no-untyped-def]
    for place in range(blocks.keys.shape[1]):
        if blocks.keys[b, place] >= 0:
            blocks.array[b, blocks.keys[b, place] - base] += blocks.sums[b, place]
            blocks.keys[b, place] = -1
    for w in range(blocks.state[b, WAITING]):
        blocks.array[b, blocks.waiting_keys[b, w] - base] += blocks.waiting[b, w]
    blocks.state[b, HELD] = blocks.state[b, WAITING] = 0
    blocks.state[b, DENSE] = 1


@called
def insert(blocks, b, base, span, index, value):  # type: ignore[no-untyped-def]
    """Add a pair. Its place is free, its own, or another's: then it waits."""
    state = blocks.state
    if state[b, DENSE]:
        blocks.array[b, index - base] += value
        return
    place = (index * KNUTH & 0xFFFFFFFF) * blocks.keys.shape[1] >> 32
    if blocks.keys[b, place] == index:
        blocks.sums[b, place] += value
        return
    if blocks.keys[b, place] < 0:
        blocks.keys[b, place], blocks.sums[b, place] = index, value
        state[b, HELD] += 1
    else:
        blocks.waiting_keys[b, state[b, WAITING]], blocks.waiting[b, state[b, WAITING]] = index, value
        state[b, WAITING] += 1
    if (state[b, SENT] + state[b, HELD] + state[b, WAITING]) * PAIR_BYTES >= span * NUMBER_BYTES:
        _to_array(blocks, b, base)


@called
def empty(blocks, b, span):  # type: ignore[no-untyped-def]
    """Is nothing left, now that nothing more comes in? Steps over zeros."""
    state = blocks.state
    if not state[b, DENSE]:
        return state[b, WAITING] + state[b, HELD] == 0
    while state[b, AT] < span and blocks.array[b, state[b, AT]] == 0:
        state[b, AT] += 1
    return state[b, AT] >= span


@called
def pop(blocks, b, base, span):  # type: ignore[no-untyped-def]
    """Take a pair out: one that waits, else one of the table or of the array, in order of places. Index -1: none is left."""
    state = blocks.state
    state[b, SENT] += 1
    if state[b, WAITING] > 0:
        state[b, WAITING] -= 1
        return np.int64(blocks.waiting_keys[b, state[b, WAITING]]), blocks.waiting[b, state[b, WAITING]]
    if state[b, DENSE]:
        while state[b, AT] < span:
            x = state[b, AT]
            state[b, AT] += 1
            if blocks.array[b, x] != 0:
                value = blocks.array[b, x]
                blocks.array[b, x] = 0
                return np.int64(base + x), value
    else:
        while state[b, AT] < blocks.keys.shape[1]:
            place = state[b, AT]
            state[b, AT] += 1
            if blocks.keys[b, place] >= 0:
                index = np.int64(blocks.keys[b, place])
                blocks.keys[b, place] = -1
                state[b, HELD] -= 1
                return index, blocks.sums[b, place]
    return np.int64(-1), blocks.sums[b, 0]
