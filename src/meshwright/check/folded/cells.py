"""Cells: runs of chunks that no access of a folded program divides, so that the first chunk of one tells what all of them hold.

Where chunks move with their ranks' blocks (`Fold.by_rank`), a shard of an alike server may be cut as finely as one of a server that stays, and yet
always travel whole. Cells end where an access or its image ends, and with every block. Data must keep its place: what is read, sent, received, added
and stored in one step has the same chunk numbers, a member's moved to it. Then all chunks of a cell have the same story, each of its own quantity.
Anything else has cells of one chunk.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...program.fold import coordinates, image_chunks, members, representative
from ...program.program import Fold, Part, Program
from ..program.order import Accesses, messages

__all__ = ["Cells"]

Ints = NDArray[np.int64]
Numbers = NDArray[np.integer[Any]]


class Cells:
    """`start`: the first chunk of every cell, the same in all buffers; `low`, `high`: numbers of the cells of ranges."""

    def __init__(self, p: Program, fold: Fold, a: Accesses, quotient: Program) -> None:
        chunks = set(p.buffers.chunks.tolist())
        most = max(chunks, default=1)
        alike = fold.by_rank and len(chunks) == 1 and _keeps_places(p, fold, quotient)
        self.start: Ints = _starts(p, fold, a, most) if alike else np.arange(most, dtype=np.int64)

    def low(self, chunk: Numbers) -> Ints:
        return np.searchsorted(self.start, chunk)

    def high(self, chunk: Numbers, count: Numbers) -> Ints:
        return np.searchsorted(self.start, chunk + count)


def _starts(p: Program, fold: Fold, a: Accesses, chunks: int) -> Ints:
    own = chunks // p.ranks
    turn = gcd(own, *fold.buffer_shift[0].tolist())  # in the blocks of ranks that stay, images are multiples of it apart
    block, first = np.divmod(a.chunk, own)
    found: dict[int, Ints] = {}
    ends = np.unique(np.concatenate([np.stack([representative(fold, block), x % own]) for x in (first, first + a.count)], axis=1), axis=1)
    of = representative(fold, np.arange(p.ranks))
    for rank in np.unique(of).tolist():
        borders = np.append(ends[1, ends[0] == rank], 0)
        stays = rank in fold.fixed
        found[rank] = (np.unique(borders % turn) + np.arange(0, own, turn)[:, None]).reshape(-1) if stays else np.unique(borders)
    return np.concatenate([number * own + found[rank] for number, rank in enumerate(of.tolist())])


def _keeps_places(p: Program, fold: Fold, quotient: Program) -> bool:
    """Whether all data stays at its chunk number, moved to the member that it is sent to."""
    s = p.steps
    both = ((s.parts & Part.READ) != 0) & ((s.parts & Part.STORE) != 0)
    if np.any(both & (s.src_chunk != s.dst_chunk)):
        return False
    place = np.where((s.parts & Part.STORE) != 0, s.dst_chunk, s.src_chunk).astype(np.int64)
    buffer = np.where((s.parts & Part.STORE) != 0, s.dst_buffer, s.src_buffer).astype(np.int64)
    held = (s.parts & (Part.STORE | Part.READ)) != 0  # a step that only passes on what it receives has no place
    m = messages(quotient)
    if not held[m.send].all() or not held[m.recv].all():
        return False
    hops = coordinates(fold, p.channels.dst)[:, 0][m.channel]
    everyone = members(fold)
    for hop in np.unique(hops).tolist():
        back = everyone[-hop % fold.members]
        at = hops == hop
        send, recv = m.send[at], m.recv[at]
        number = buffer[send]
        moved = image_chunks(fold, p.ranks, back, p.buffers.chunks[number], fold.buffer_shift[:, number], place[send])
        if not np.array_equal(moved, place[recv]) or not np.array_equal(s.count[send], s.count[recv]):
            return False
    return True
