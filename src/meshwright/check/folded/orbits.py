"""Folded collectives proved on the stored lanes alone, whatever hangs together: nothing is written out.

Members of a fold along one axis do the same, moved. So:
1. Form: the quotient, in which every message goes to the representative of its receiver, is checked like any program.
2. Deadlock: a circle of waits among members' steps would be one in the quotient; it has none.
3. Races: two accesses to a cell are ordered by lanes and waits of its own rank, without messages: more than is needed, and the same for all members.
4. Values: steps run in an order of the quotient, all members of a step at once. That is an order of the whole program, since what a step waits for
   comes before it there too, and without races any order gives the same. A representative's memory stands for all: what it receives from a member
   is what the representative sent, moved to that member: contributions move by ranks, quantities by chunks.
   A rank that no member moves (`Fold.fixed`) runs all images of its lanes itself, each on chunks of its own: of a chunk and its images its stored
   lanes touch one at most, so no two images race, and the others' chunks are images of what the stored lanes hold.
5. The contract is its own image (`Claim.require_symmetry`), so the representatives' outputs are enough.

Raises Unsupported where one of these does not hold or does not apply, which says nothing about the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError, Unsupported
from ...program.fold import coordinates, folded_axes, image, members, representative, require_folded
from ...program.program import Fold, Kind, Part, Program
from ...program.tables import I32
from ...program.validate import validate
from ..program.deadlock import find_cycle
from ..program.order import Accesses, Order, accesses
from ..program.races import check_races
from ..program.values import QUANTITY_MASK
from ..program.wellformed import check_form
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .cells import Cells
from .claim import Claim, wrong_cell

__all__ = ["check_orbits"]

Ints = NDArray[np.int64]

MAX_MOVES = 20_000_000  # cells (`cells`) moved by the stored steps: each is followed by an interpreted loop


def check_orbits(p: Program, claim: Claim) -> list[Finding]:
    """Findings; empty when the folded program keeps its contract. Raises: Unsupported."""
    try:
        validate(p)
    except FormatError as error:
        return [Finding(check="format", message=str(error), witness={"field": error.where})]
    quotient, a = _quotient(p)
    found = check_form(quotient)
    if found:
        return found
    cells, touched = _cells(p, quotient, a)
    if find_cycle(quotient):
        raise Unsupported("the waits of representatives go round in a circle, perhaps through other members")
    if check_races(_alone(quotient)):
        raise Unsupported("accesses are ordered through other ranks, if at all")
    return _values(p, quotient, claim, cells, touched)


def _quotient(p: Program) -> tuple[Program, Accesses]:
    """The stored lanes as a program among representatives, and what they touch. Raises: Unsupported where the proof does not apply."""
    fold = require_folded(p)
    axes = folded_axes(fold)
    if len(axes) != 1 or axes[0].kind != "shift" or axes[0].size * axes[0].stride != p.ranks - len(fold.fixed):
        raise Unsupported("more than one folded axis, or one that is not the outermost")
    s, b = p.steps, p.buffers
    if np.any(s.kind != Kind.TRANSFER) or np.any(s.parts & (Part.IN_SET | Part.OUT_SET)) or np.any(p.channels.route >= 0) or np.any(s.after_lag):
        raise Unsupported("computing steps, channel sets, pinned routes or waits for earlier iterations")
    if len(set(p.lanes.repeat.tolist())) != 1 or (len(set(b.chunks.tolist())) != 1 and not fold.by_rank):
        raise Unsupported("lanes or buffers of several kinds")
    if not fold.by_rank and len(set(fold.buffer_shift[0].tolist())) != 1:
        raise Unsupported("buffers whose chunks move differently")
    a = accesses(p)
    if np.any(b.alias_of >= 0) or not _keeps_ranges(p, fold, a):
        raise Unsupported("aliases, or ranges that members' images do not keep whole")
    return replace(p, fold=None, contracts=(), channels=replace(p.channels, dst=representative(fold, p.channels.dst).astype(np.int32))), a


def _cells(p: Program, quotient: Program, a: Accesses) -> tuple[Cells, tuple[Ints, Ints]]:
    """The cells, and what is touched of them at ranks that stay. Raises: Unsupported where they are too many, or where images meet."""
    fold = require_folded(p)
    cells = Cells(p, fold, a, quotient)
    if int((cells.high(a.chunk, a.count) - cells.low(a.chunk)).sum()) > MAX_MOVES:
        raise Unsupported("too many chunks to follow one by one")
    buffer, chunk = _touched(p, fold, a, cells)
    if fold.fixed and len(np.unique(_orbits(p, fold, buffer, chunk))) < len(chunk):
        raise Unsupported("images of a lane of a rank that stays touch the same chunks")
    return cells, (buffer, chunk)


def _keeps_ranges(p: Program, fold: Fold, a: Accesses) -> bool:
    """Whether every range's images are ranges: none crosses a border between chunks that move differently, or the end of a turn."""
    chunks, shift = p.buffers.chunks.astype(np.int64)[a.buffer], np.abs(fold.buffer_shift[0].astype(np.int64))[a.buffer]
    if not fold.by_rank:
        turn = np.where(shift % chunks, shift % chunks, chunks)
        return bool(np.all((chunks % turn == 0) & (a.chunk % turn + a.count <= turn)))
    own = chunks // p.ranks
    turn = np.where(np.isin(a.chunk // own, fold.fixed) & (shift % own != 0), shift % own, own)
    return bool(np.all((own % turn == 0) & (a.chunk % own % turn + a.count <= turn)))


def _touched(p: Program, fold: Fold, a: Accesses, cells: Cells) -> tuple[Ints, Ints]:
    """Buffers and first chunks of cells that stored lanes touch at ranks that stay, each once."""
    stays = np.isin(p.buffers.actor[a.buffer], fold.fixed)
    buffer, low, high = np.unique(np.stack([a.buffer[stays], cells.low(a.chunk[stays]), cells.high(a.chunk[stays], a.count[stays])]), axis=1)
    width = high - low
    inner = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
    found = np.unique(np.stack([np.repeat(buffer, width), np.repeat(low, width) + inner]), axis=1)
    return found[0], cells.start[found[1]]


def _orbits(p: Program, fold: Fold, buffer: Ints, chunk: Ints) -> Ints:
    """Equal numbers for chunks that are images of each other in the buffers of ranks that stay, rising with the buffer.

    Raises: Unsupported where an image is the chunk itself.
    """
    span = int(p.buffers.chunks.max(initial=1))
    chunks, shift = p.buffers.chunks.astype(np.int64)[buffer], fold.buffer_shift[0].astype(np.int64)[buffer]
    if fold.by_rank:
        own = chunks // p.ranks
        block, inner = chunk // own, chunk % own
        still = np.isin(block, fold.fixed)
        first = representative(fold, np.where(still, fold.fixed[0] if fold.fixed else 0, block)) * own + inner
    else:
        own, block, inner, still, first = chunks, np.zeros_like(chunk), chunk, np.ones(len(chunk), bool), chunk
    if np.any(still & ((shift < 1) | (own != shift * fold.members))):
        raise Unsupported("the chunks of ranks that stay do not move once round")
    return buffer * span + np.where(still, block * own + inner % np.maximum(shift, 1), first)


def _alone(quotient: Program) -> Program:
    """Every rank without its messages: what is received is written, what is sent is read."""
    s = quotient.steps
    none, parts = np.full_like(s.chan_in, -1), s.parts & ~(Part.RECV | Part.SEND)
    return replace(quotient, steps=replace(s, parts=parts.astype(s.parts.dtype), chan_in=none, chan_out=none))


def _values(p: Program, quotient: Program, claim: Claim, cells: Cells, touched: tuple[Ints, Ints]) -> list[Finding]:
    fold = require_folded(p)
    claim.require_in_place(int(p.buffers.chunks[0]))
    hops = coordinates(fold, p.channels.dst)[:, 0].tolist()  # a message of the representative arrives at so many members further on
    moved = _Moved(p, fold, each=claim.c.op == "all-to-all")
    starts = cells.start.tolist()
    memory = [[claim.initial(b, c) for c in starts] for b in range(len(p.buffers))]
    writer = [[-1] * len(row) for row in memory]
    queue: list[deque[list[int]]] = [deque() for _ in hops]
    s, order = p.steps, Order(quotient)
    ranges = [x for chunk in (s.src_chunk, s.dst_chunk) for x in (cells.low(chunk), cells.high(chunk, s.count))]
    columns = (s.parts, s.src_buffer, s.dst_buffer, s.chan_in, s.chan_out)
    rows = list(zip(*(x.tolist() for x in columns), *(x.tolist() for x in ranges), strict=True))
    recv, read, store, add, send = (int(x) for x in (Part.RECV, Part.READ, Part.STORE, Part.ADD, Part.SEND))
    for step in order.step[order.order].tolist():
        part, src, dst, chan_in, chan_out, src_low, src_high, low, high = rows[step]
        value: list[int] = []
        if part & recv:
            value = moved(queue[chan_in].popleft(), hops[chan_in])
        if part & read:
            here = memory[src][src_low:src_high]
            value = [_sum(x, y, step) for x, y in zip(value, here, strict=True)] if part & recv else here
        if part & store:
            if part & add and not part & recv:
                value = [_sum(x, y, step) for x, y in zip(value, memory[dst][low:high], strict=True)]
            memory[dst][low:high] = value
            writer[dst][low:high] = [step] * (high - low)
        if part & send:
            queue[chan_out].append(value)
    return _wrong(p, fold, claim, (cells, starts), memory, writer, touched)


def _wrong(
    p: Program, fold: Fold, claim: Claim, at: tuple[Cells, list[int]], memory: list[list[int]], writer: list[list[int]], touched: tuple[Ints, Ints]
) -> list[Finding]:  # fmt: skip
    """Cells of outputs of stored ranks that do not hold what they must."""
    (cells, starts), known = at, set(zip(*(x.tolist() for x in touched), strict=True))
    orbits = np.unique(_orbits(p, fold, *touched)) if known else np.zeros(0, np.int64)
    found: list[Finding] = []
    for rank in np.unique(p.buffers.actor).tolist():
        buffer, first, count = claim.c.outputs[rank]
        low, high = (int(np.searchsorted(cells.start, x)) for x in (first, first + count if claim.promised(rank) else first))
        wrong = [i for i in range(low, high) if memory[buffer][i] != claim.wanted(rank, starts[i])]
        if known and claim.stays[buffer] and wrong:
            # An image of a chunk that is looked at holds the image of what that one holds.
            seen = np.isin(_orbits(p, fold, np.full(len(wrong), buffer), cells.start[wrong]), orbits).tolist()
            wrong = [i for i, image_of in zip(wrong, seen, strict=True) if not image_of or (buffer, starts[i]) in known]
        for i in wrong[: MAX_FINDINGS_OF_A_KIND - len(found)]:
            found.append(wrong_cell(p, rank, buffer, starts[i], memory[buffer][i], claim.wanted(rank, starts[i]), writer[buffer][i]))
    return found


class _Moved:
    """Values that the representative has, as the member `back` before has them. `each`: chunks are numbered by their origin, not in all."""

    def __init__(self, p: Program, fold: Fold, *, each: bool) -> None:
        self.fold, self.n, self.stride = fold, p.ranks - len(fold.fixed), folded_axes(fold)[0].stride
        self.still = sum(1 << rank for rank in fold.fixed)
        self.chunks = int(p.buffers.chunks[0])
        self.own = self.chunks // p.ranks
        stays = np.isin(p.buffers.actor, fold.fixed)
        # of chunks of ranks that move, and of those that stay
        self.shift = [self._shift(fold.buffer_shift[0, stays == kind if each else slice(None)]) for kind in (False, True)]
        self.masks: dict[tuple[int, int], int] = {}
        self.blocks: dict[int, list[int]] = {}

    def _shift(self, found: I32) -> int:
        """Raises: Unsupported where buffers move chunks of one number differently."""
        if len(set(found.tolist())) > 1:
            raise Unsupported("buffers whose chunks move differently")
        return int(found[0]) if len(found) else 0

    def __call__(self, values: list[int], back: int) -> list[int]:
        return [self._one(x, back) if x > 0 else x for x in values] if back else values

    def _one(self, value: int, back: int) -> int:
        mask, chunk = value >> 32, (value & QUANTITY_MASK) - 1
        if (mask, back) not in self.masks:
            self.masks[mask, back] = self._mask(mask, back)
        shift = self.shift[bool(mask & self.still)]
        if not self.fold.by_rank:
            return self.masks[mask, back] | 1 + (chunk - back * shift) % self.chunks
        if back not in self.blocks:
            by = members(self.fold)[-back % self.fold.members]
            self.blocks[back] = image(self.fold, np.arange(self.n + len(self.fold.fixed)), by).tolist()
        block, inner = divmod(chunk, self.own)
        there = self.blocks[back][block]
        return self.masks[mask, back] | 1 + there * self.own + ((inner - back * shift) % self.own if block in self.fold.fixed else inner)

    def _mask(self, mask: int, back: int) -> int:
        """The contributions' ranks moved, in place above a value's quantity."""
        turn, n, fixed = back * self.stride % self.n, self.n, self.fold.fixed
        moving = _without(mask, fixed)
        moving = (moving >> turn | moving << (n - turn)) & ((1 << n) - 1)
        return (_with_gaps(moving, fixed) | mask & self.still) << 32


def _without(mask: int, ranks: Sequence[int]) -> int:
    """The bits of all other ranks, moved together."""
    for rank in reversed(ranks):
        mask = mask >> (rank + 1) << rank | mask & (1 << rank) - 1
    return mask


def _with_gaps(mask: int, ranks: Sequence[int]) -> int:
    """`_without` undone, with 0 for these ranks."""
    for rank in ranks:
        mask = mask >> rank << (rank + 1) | mask & (1 << rank) - 1
    return mask


def _sum(a: int, b: int, step: int) -> int:
    """The union of contributions to one quantity; a negative number where that is none, which stays."""
    if a < 0 or b < 0:
        return a if a < 0 else b
    if not a or not b or (a ^ b) & QUANTITY_MASK or (a >> 32) & (b >> 32):
        return -1 - step
    return a | b
