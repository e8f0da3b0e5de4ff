"""Sparse sums in the switch: per round of a block one packet from each worker, one packet on. The protocol stays that of dense chunks.

Cite: Flare (see `kernels.sparse_block`), section 7.
Left open by the paper: who says that a block is over, and what a lost part of one costs. Our answer: rounds. A round is a chunk of `protocol`: each
worker sends the next part of its block, the switch answers with the next part of the sum; flags say whether more comes. So a packet that is lost,
doubled or late is handled as a dense one is, per hop, by the functions that the state checker enumerates.
Deviations: contributions of a round are added in order of workers once all are in, so the bits depend on data and tree alone, not on arrival. The
switch at the top keeps arrays from the beginning; those below a table that spills, where that takes less memory.
Invariant: what all rounds of a block send on adds up to what came in.
Cost: memory of a slot: all workers' packets, a table, an array; per round a header each way without pairs.

Payload, 32-bit words: flags and count (from bit 8 on), block, then pairs of index and number, or the first index within the block and numbers in a
row.
"""

from __future__ import annotations

import numpy as np

from ...kernels.compile import called, inlined
from ...kernels.sparse_block import AT, BLOCK, DENSE, HOLD, WAITING, clear, empty, insert, pop

__all__ = [
    "ARRAY", "FRAME_WORDS", "HOLDS", "MAX_INDEX", "MIN_WORDS", "MORE", "SPARSE", "combine_round", "float_of", "heard_above", "most_pairs", "pack",
    "sane", "sparse_mode", "span_of", "word_of",
]  # fmt: skip

SPARSE = 6  # what the loop does, beside the kinds of `operators`
ARRAY, MORE, HOLDS = 1, 2, 4  # flags: numbers in a row; more of this block comes; send nothing of it in the next round
FRAME_WORDS = 2  # flags and count, block
MIN_WORDS = 4  # of a packet: one pair
MAX_INDEX = 1 << 31  # indices are words


def sparse_mode(span: int) -> str:
    """What workers join with, for blocks of `span` indices."""
    return f"sparse:{span}"


def span_of(mode: str) -> int:
    """Indices of a block; 0 for another mode."""
    name, _, digits = mode.partition(":")
    return int(digits) if name == "sparse" and digits.isascii() and digits.isdigit() and len(digits) < 10 else 0


@inlined
def float_of(word):  # type: ignore[no-untyped-def]
    return np.int32(word).view(np.float32)


@inlined
def word_of(value):  # type: ignore[no-untyped-def]
    return np.float32(value).view(np.int32)


@inlined  # type: ignore[untyped-decorator]
def most_pairs(words: int) -> int:
    """Of a packet of so many words."""
    return (words - FRAME_WORDS) // 2


@inlined
def pack(flags, count):  # type: ignore[no-untyped-def]
    return np.int32(flags | count << 8)


@called
def sane(numbers, i, at, words, span):  # type: ignore[no-untyped-def]
    """Is the payload of `words` words at `numbers[i, at]` whole, and are its indices those of its block?"""
    if words < FRAME_WORDS:
        return False
    flags, count, block = numbers[i, at] & 255, numbers[i, at] >> 8, np.int64(numbers[i, at + 1])
    if count < 0 or block < 0 or block * span >= MAX_INDEX:
        return False
    if flags & ARRAY:
        return words == FRAME_WORDS + 1 + count and numbers[i, at + 2] >= 0 and numbers[i, at + 2] + count <= span
    if words != FRAME_WORDS + 2 * count:
        return False
    for x in range(count):
        index = np.int64(numbers[i, at + 2 + 2 * x])
        if index < block * span or index >= (block + 1) * span:
            return False
    return True


@called
def _add(blocks, b, base, span, pool, row):  # type: ignore[no-untyped-def]
    """One worker's packet into the block."""
    flags, count = pool[row, 0] & 255, pool[row, 0] >> 8
    for x in range(count):
        if flags & ARRAY:
            index, value = base + pool[row, 2] + x, float_of(pool[row, 3 + x])
        else:
            index, value = np.int64(pool[row, 2 + 2 * x]), float_of(pool[row, 3 + 2 * x])
        if value != 0:
            insert(blocks, b, base, span, index, value)


@called
def _array_is_less(blocks, b, span, words):  # type: ignore[no-untyped-def]
    """(numbers of the next packet as an array, whether more of the block fits so than as pairs). Begins at the first that is not zero."""
    empty(blocks, b, span)
    first = blocks.state[b, AT]
    run, filled = min(words - FRAME_WORDS - 1, span - first), 0
    for x in range(first, first + run):
        filled += blocks.array[b, x] != 0
    return run, filled > most_pairs(words) or (first + run == span and 1 + run < 2 * filled)


@called
def _emit(blocks, b, base, span, pool, row, final):  # type: ignore[no-untyped-def]
    """The next packet of the block into `pool[row]`: its flags, its count, its words."""
    words = pool.shape[1]
    flags, count = 0, 0
    if final and blocks.state[b, DENSE]:
        run, less = _array_is_less(blocks, b, span, words)
        if less:
            first = blocks.state[b, AT]
            pool[row, 2] = first
            for x in range(run):
                pool[row, 3 + x] = word_of(blocks.array[b, first + x])
                blocks.array[b, first + x] = 0
            blocks.state[b, AT] += run
            return ARRAY, run, FRAME_WORDS + 1 + run
    if final or blocks.state[b, WAITING] >= most_pairs(words):
        while count < most_pairs(words):
            index, value = pop(blocks, b, base, span)
            if index < 0:
                break
            pool[row, 2 + 2 * count], pool[row, 3 + 2 * count] = index, word_of(value)
            count += 1
    return flags, count, FRAME_WORDS + 2 * count


@called
def combine_round(blocks, b, pool, first, workers, span, top):  # type: ignore[no-untyped-def]
    """All workers' packets of a round lie in `pool[first:]`: add them up, and lay the packet that goes on into `pool[first]`.

    Returns its bytes; -1: the workers are not in the same block.
    """
    number = pool[first, 1]
    final: np.bool_ = np.bool_(True)
    state = blocks.state
    for w in range(workers):
        if pool[first + w, 1] != number:
            return -1
        if pool[first + w, 0] & MORE:
            final = np.bool_(False)
    base = np.int64(number) * span
    if state[b, BLOCK] != number + 1:
        clear(blocks, b, span, top)
        state[b, BLOCK], state[b, HOLD] = number + 1, 0
    for w in range(workers):
        _add(blocks, b, base, span, pool, first + w)
    flags, count, words = 0, 0, FRAME_WORDS
    if not state[b, HOLD]:
        flags, count, words = _emit(blocks, b, base, span, pool, first, final)
    if not final or not empty(blocks, b, span):
        flags |= MORE
    elif top:
        state[b, BLOCK] = 0
    if _full(blocks, b, workers, pool.shape[1]):
        flags |= HOLDS
    pool[first, 0], pool[first, 1] = pack(flags, count), number
    return 4 * words


@inlined
def _full(blocks, b, workers, words):  # type: ignore[no-untyped-def]
    """Might what waits no longer fit after another round?"""
    return blocks.state[b, WAITING] + 2 * workers * words > blocks.waiting.shape[1]


@called
def heard_above(blocks, b, pool, row, workers):  # type: ignore[no-untyped-def]
    """The switch above has answered, into `pool[row]`: what it means for this one's block, and for the workers, who are told to wait for both."""
    flags = pool[row, 0] & 255
    blocks.state[b, HOLD] = flags & HOLDS
    if _full(blocks, b, workers, pool.shape[1]):
        pool[row, 0] |= HOLDS
    if not flags & MORE:
        blocks.state[b, BLOCK] = 0
