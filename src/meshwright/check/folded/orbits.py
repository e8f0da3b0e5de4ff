"""Folded collectives proved on the stored lanes alone, whatever hangs together: nothing is written out.

Members of a fold along one axis do the same, moved. So:
1. Form: the quotient, in which every message goes to the representative of its receiver, is checked like any program.
2. Deadlock: a circle of waits among members' steps would be one in the quotient; it has none.
3. Races: two accesses to a cell are ordered by lanes and waits of its own rank, without messages: more than is needed, and the same for all members.
4. Values: steps run in an order of the quotient, all members of a step at once. That is an order of the whole program, since what a step waits for
   comes before it there too, and without races any order gives the same. A representative's memory stands for all: what it receives from a member
   is what the representative sent, moved to that member: contributions move by ranks, quantities by chunks.
   A rank that no member moves (`Fold.fixed`) runs all images of its lanes itself, each on chunks of its own: its stored lanes touch one run of as
   many chunks as an image moves, which no other image's do (so no two race), and the rest of its memory is that run's images.
5. The contract is its own image (`Claim.require_symmetry`), so the representatives' outputs are enough.

Raises Unsupported where one of these does not hold or does not apply, which says nothing about the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...errors import FormatError, Unsupported
from ...program.fold import coordinates, folded_axes, representative, require_folded
from ...program.program import Fold, Kind, Part, Program
from ...program.validate import validate
from ..program.deadlock import find_cycle
from ..program.order import Accesses, Order, accesses
from ..program.races import check_races
from ..program.values import QUANTITY_MASK
from ..program.wellformed import check_form
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .claim import Claim, wrong_cell

__all__ = ["check_orbits"]

MAX_MOVES = 20_000_000  # chunks moved by the stored steps: each is followed by an interpreted loop


def check_orbits(p: Program, claim: Claim) -> list[Finding]:
    """Findings; empty when the folded program keeps its contract. Raises: Unsupported."""
    try:
        validate(p)
    except FormatError as error:
        return [Finding(check="format", message=str(error), witness={"field": error.where})]
    quotient = _quotient(p)
    found = check_form(quotient)
    if found:
        return found
    if find_cycle(quotient):
        raise Unsupported("the waits of representatives go round in a circle, perhaps through other members")
    if check_races(_alone(quotient)):
        raise Unsupported("accesses are ordered through other ranks, if at all")
    return _values(p, quotient, claim)


def _quotient(p: Program) -> Program:
    """The stored lanes as a program among representatives. Raises: Unsupported where the proof does not apply."""
    fold = require_folded(p)
    axes = folded_axes(fold)
    if len(axes) != 1 or axes[0].kind != "shift" or axes[0].size * axes[0].stride != p.ranks - len(fold.fixed):
        raise Unsupported("more than one folded axis, or one that is not the outermost")
    s, b = p.steps, p.buffers
    if np.any(s.kind != Kind.TRANSFER) or np.any(s.parts & (Part.IN_SET | Part.OUT_SET)) or np.any(p.channels.route >= 0) or np.any(s.after_lag):
        raise Unsupported("computing steps, channel sets, pinned routes or waits for earlier iterations")
    if len(set(p.lanes.repeat.tolist())) != 1 or len(set(b.chunks.tolist())) != 1 or len(set(fold.buffer_shift[0].tolist())) != 1:
        raise Unsupported("lanes or buffers of several kinds")
    chunks, shift = int(b.chunks[0]), int(fold.buffer_shift[0, 0]) % int(b.chunks[0])
    a = accesses(p)
    if np.any(b.alias_of >= 0) or (shift and (chunks % shift or np.any(a.chunk % shift + a.count > shift))):
        raise Unsupported("aliases, or ranges that members' images do not keep whole")
    if int(s.count.astype(np.int64).sum()) > MAX_MOVES:
        raise Unsupported("too many chunks to follow one by one")
    _require_runs_apart(p, fold, a, shift)
    return replace(p, fold=None, contracts=(), channels=replace(p.channels, dst=representative(fold, p.channels.dst).astype(np.int32)))


def _require_runs_apart(p: Program, fold: Fold, a: Accesses, shift: int) -> None:
    """Raises: Unsupported unless a rank that stays touches one run of `shift` chunks only, and has as many such runs as there are members."""
    stays = np.isin(p.buffers.actor[a.buffer], fold.fixed)
    if not stays.any():
        return
    if not shift or int(p.buffers.chunks[0]) != shift * fold.members:
        raise Unsupported("the chunks of ranks that stay do not move once round")
    runs = np.unique(np.stack([a.buffer[stays], a.chunk[stays] // shift]), axis=1)
    if len(np.unique(runs[0])) < runs.shape[1]:
        raise Unsupported("images of a lane of a rank that stays touch the same chunks")


def _alone(quotient: Program) -> Program:
    """Every rank without its messages: what is received is written, what is sent is read."""
    s = quotient.steps
    none, parts = np.full_like(s.chan_in, -1), s.parts & ~(Part.RECV | Part.SEND)
    return replace(quotient, steps=replace(s, parts=parts.astype(s.parts.dtype), chan_in=none, chan_out=none))


def _values(p: Program, quotient: Program, claim: Claim) -> list[Finding]:
    fold = require_folded(p)
    axis = folded_axes(fold)[0]
    chunks, shift = int(p.buffers.chunks[0]), int(fold.buffer_shift[0, 0])
    claim.require_in_place(chunks)
    n = p.ranks - len(fold.fixed)
    full = (1 << n) - 1
    still = sum(1 << rank for rank in fold.fixed)
    hops = coordinates(fold, p.channels.dst)[:, 0].tolist()  # a message of the representative arrives at so many members further on

    def moved(value: int, back: int) -> int:
        """The value as the member `back` before has it, if the representative has it so."""
        if value <= 0 or not back:
            return value
        turn, quantity = back * axis.stride % n, (value & QUANTITY_MASK) - 1
        mask = value >> 32
        moving = _without(mask, fold.fixed)
        moving = (moving >> turn | moving << (n - turn)) & full
        return (_with_gaps(moving, fold.fixed) | mask & still) << 32 | 1 + (quantity - back * shift) % chunks

    memory = [[claim.initial(b, c) for c in range(chunks)] for b in range(len(p.buffers))]
    writer = [[-1] * chunks for _ in memory]
    queue: list[deque[list[int]]] = [deque() for _ in hops]
    s, order = p.steps, Order(quotient)
    columns = [x.tolist() for x in (s.parts, s.count, s.src_buffer, s.src_chunk, s.dst_buffer, s.dst_chunk, s.chan_in, s.chan_out)]
    recv, read, store, add, send = (int(x) for x in (Part.RECV, Part.READ, Part.STORE, Part.ADD, Part.SEND))
    for step in order.step[order.order].tolist():
        part, count, src, src_chunk, dst, dst_chunk, chan_in, chan_out = (column[step] for column in columns)
        value: list[int] = []
        if part & recv:
            value = [moved(x, hops[chan_in]) for x in queue[chan_in].popleft()]
        if part & read:
            here = memory[src][src_chunk : src_chunk + count]
            value = [_sum(x, y, step) for x, y in zip(value, here, strict=True)] if part & recv else here
        if part & store:
            if part & add and not part & recv:
                value = [_sum(x, y, step) for x, y in zip(value, memory[dst][dst_chunk : dst_chunk + count], strict=True)]
            memory[dst][dst_chunk : dst_chunk + count] = value
            writer[dst][dst_chunk : dst_chunk + count] = [step] * count
        if part & send:
            queue[chan_out].append(value)
    a = accesses(quotient)
    run = dict(zip(a.buffer.tolist(), (a.chunk // shift).tolist(), strict=True)) if fold.fixed and shift else {}
    found: list[Finding] = []
    for rank in np.unique(p.buffers.actor).tolist():
        buffer, first, count = claim.c.outputs[rank]
        for chunk in range(first, first + count) if claim.promised(rank) else ():
            if claim.stays[buffer] and chunk // shift != run.get(buffer, chunk // shift):
                continue  # an image of a chunk of the run
            have, want = memory[buffer][chunk], claim.wanted(rank, chunk)
            if have != want and len(found) < MAX_FINDINGS_OF_A_KIND:
                found.append(wrong_cell(p, rank, buffer, chunk, have, want, writer[buffer][chunk]))
    return found


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
