"""Folded collectives that are too big to write out: proved class by class, every member's part being the image of one that is written out.

1. Lanes tied by channels and waits form components; members' images of a component are components. One of each class is written out
   (`program.fold_part`) and checked like any program: form, deadlock, races inside it, and the value of every cell that it writes.
2. Different components share no cell that one of them writes. Every access at a representative is at hand, and every rank is the image of a
   representative, so it is enough to look there.
3. The contract is the image of itself under every member, so what holds for one instance of a class holds for all.
4. Every cell of every output is written by some component, or holds the right input from the start; again representatives suffice.

The proof holds for collectives without computing steps, aliases and rings of slots; anything else is left open.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import Unsupported
from ...program.fold import image
from ...program.fold_part import Lifted, part
from ...program.program import Contract, Program
from ..program.deadlock import check_deadlock
from ..program.order import Order, accesses
from ..program.races import check_races, turns_needed
from ..program.values import QUANTITY_MASK, Machine
from ..program.wellformed import check_wellformed, witness
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding

__all__ = ["check_folded"]

MAX_COMPONENT_LANES = 200_000  # lanes that hang together and are written out at once: memory and time grow with them
Ints = NDArray[np.int64]


def check_folded(p: Program) -> list[Finding]:
    """Findings; empty when the folded program keeps its contract. Raises: Unsupported where this proof does not apply."""
    if len(p.contracts) != 1 or p.contracts[0].op not in ("all-gather", "reduce-scatter", "all-reduce") or p.contracts[0].ranks:
        raise Unsupported("only all-gather, reduce-scatter and all-reduce of all ranks are proved folded")
    if np.any(p.buffers.window > 0) or np.any(np.diff(p.buffers.last.ptr) > 0):
        raise Unsupported("buffers that are used again are not proved folded")
    lifted = Lifted(p)
    claim = _Claim(p, lifted, p.contracts[0])
    claim.require_symmetry()
    instance = np.full(len(p.lanes), -1, np.int64)  # of every stored lane: class · members + offset
    written: list[set[tuple[int, int]]] = []
    found: list[Finding] = []
    k = len(lifted.everyone)
    for lane in range(len(p.lanes)):
        if instance[lane] >= 0:
            continue
        # One component for each class: the lanes it holds are named with it, so their images are not written out again.
        nodes = lifted.component(lane, MAX_COMPONENT_LANES)
        if nodes is None:
            raise Unsupported(f"more than {MAX_COMPONENT_LANES} lanes hang together")
        _number(instance, nodes, len(written), k)
        cells, wrong = _check_component(part(lifted, nodes), claim)
        found += wrong
        written.append(cells)
        if len(found) >= MAX_FINDINGS_OF_A_KIND:
            return found
    return found or _shared_cells(p, instance) or claim.uncovered(written)


def _number(instance: Ints, nodes: list[tuple[int, int]], number: int, k: int) -> None:
    """Name the instance that each stored lane (its member 0) lies in. An orbit that comes back to itself must be one whole."""
    by_lane: dict[int, list[int]] = {}
    for lane, member in nodes:
        by_lane.setdefault(lane, []).append(member)
    for lane, found in by_lane.items():
        # Member m of the component is its image under m; a lane that it holds under some members only would lie in several of them.
        if len(found) not in (1, k):
            raise Unsupported("a component is its own image under some members only")
        instance[lane] = number * k + (found[0] if len(found) == 1 else 0)


def _check_component(plain: Program, claim: _Claim) -> tuple[set[tuple[int, int]], list[Finding]]:
    """(rank, chunk) that the component writes, and what is wrong with it."""
    found = check_wellformed(plain) or check_deadlock(plain)
    if found:
        return set(), found
    order = Order(plain, iterations=turns_needed(plain))
    found = check_races(plain, order)
    if found:
        return set(), found
    grain = np.zeros(len(plain.buffers), np.int64)
    grain[list(claim.buffers)] = plain.buffers.chunk_bytes[list(claim.buffers)]
    machine = Machine(plain, order, nothing_is_zero=False, grain=grain)
    a = accesses(plain)
    touched = {(b, c + i) for b, c, n in set(zip(a.buffer.tolist(), a.chunk.tolist(), a.count.tolist(), strict=True)) for i in range(n)}
    # Cells that the component does not write hold inputs or nothing known; what other components write there is excluded by step 2.
    for buffer, chunk in touched:
        machine.memory[buffer][chunk] = claim.initial(buffer, chunk)
    machine.run()
    cells: set[tuple[int, int]] = set()
    for buffer, chunk in sorted(touched):
        step = machine.writer[buffer][chunk]
        rank = int(plain.buffers.actor[buffer])
        if step < 0 or not claim.is_output(rank, buffer, chunk):
            continue
        cells.add((rank, chunk))
        have, want = machine.memory[buffer][chunk], claim.wanted(rank, chunk)
        if have != want and len(found) < MAX_FINDINGS_OF_A_KIND:
            found.append(_wrong(plain, rank, buffer, chunk, have, want, step))
    return cells, found


def _wrong(p: Program, rank: int, buffer: int, chunk: int, have: int, want: int, step: int) -> Finding:
    at = -1 - have if have < 0 else step
    if have < 0:
        what = "is spoilt: a contribution is added twice, or what does not belong together is added"
    elif (have ^ want) & QUANTITY_MASK:
        what = "holds another chunk's data"
    else:
        what = f"lacks {((want & ~have) >> 32).bit_count()} contributions and has {((have & ~want) >> 32).bit_count()} others"
    text = f"chunk {chunk} of {p.buffer_name(buffer)} on rank {rank} {what}; last written by {p.describe(at)}"
    return Finding(check="values", message=text, witness=witness(p, at, chunk=chunk, buffer=buffer) | {"rank": rank})


def _shared_cells(p: Program, instance: Ints) -> list[Finding]:
    """Cells at representatives that two components touch, one of them writing."""
    a = accesses(p)
    lane = p.lane_of_step()[a.step]
    span = int(p.buffers.chunks.max(initial=1)) + 1
    # One row per cell; who = the instance of the component that touches it.
    step = np.repeat(np.arange(len(a.step)), a.count)
    inner = np.arange(len(step)) - np.repeat(np.cumsum(a.count) - a.count, a.count)
    cell = a.buffer[step] * span + a.chunk[step] + inner
    who, write = instance[lane[step]], a.write[step]
    by = np.lexsort((who, cell))
    cell, who, write, step = cell[by], who[by], write[by], step[by]
    first = np.concatenate([[True], cell[1:] != cell[:-1]]) if len(cell) else np.zeros(0, bool)
    group = np.cumsum(first) - 1
    mixed = np.zeros(int(group[-1]) + 1 if len(group) else 0, bool)
    # Sorted by instance within a cell, two instances show as two unlike neighbours.
    differ = np.flatnonzero(~first & (who != np.concatenate([[-1], who[:-1]])))
    mixed[group[differ]] = True
    wrote = np.zeros(len(mixed), bool)
    np.logical_or.at(wrote, group, write)
    found = []
    for g in np.flatnonzero(mixed & wrote)[:MAX_FINDINGS_OF_A_KIND].tolist():
        rows = np.flatnonzero(group == g)
        one = int(a.step[step[rows[np.argmax(write[rows])]]])
        other = int(a.step[step[rows[np.argmax(who[rows] != who[rows[np.argmax(write[rows])]])]]])
        chunk = int(cell[rows[0]] % span)
        text = f"{p.describe(one)} writes and {p.describe(other)} touches chunk {chunk}, and nothing orders them"
        found.append(Finding(check="races", message=text, witness=witness(p, one, chunk=chunk, other_step=other)))
    return found


class _Claim:
    """The contract by cell. Quantity = input chunk plus one, contributions by rank; cells are chunks, of the first iteration."""

    def __init__(self, p: Program, lifted: Lifted, c: Contract) -> None:
        self.p, self.lifted, self.c, self.n = p, lifted, c, p.ranks
        self.buffers = {b for b, _, _ in (*c.inputs, *c.outputs)}
        stored, k = len(p.buffers), len(lifted.everyone)
        if any(not 0 <= b < stored * k for b in self.buffers) or len(c.inputs) != self.n or len(c.outputs) != self.n:
            raise Unsupported("the contract names buffers that do not exist")
        self.starts = [0, *accumulate(n for _, _, n in c.inputs)]
        self.parts = [0, *accumulate(n for _, _, n in c.outputs)]
        sizes = {n for _, _, n in c.inputs}
        whole = self.starts[-1] if c.op == "all-gather" else c.inputs[0][2]
        # Equal shares in rank order: otherwise one instance's chunk numbers are not those of the others moved.
        outputs = {"all-gather": {whole}, "all-reduce": {whole}, "reduce-scatter": {n for _, _, n in c.outputs}}[c.op]
        shares = {n for _, _, n in c.outputs}
        if len(sizes) > 1 or len(shares) > 1 or shares != outputs or (c.op == "reduce-scatter" and self.parts[-1] != whole):
            raise Unsupported("the contract's ranges are no whole collective of equal shares")

    def initial(self, buffer: int, chunk: int) -> int:
        """What a cell holds before the program runs: 0 = nothing known."""
        for rank in self._owners(buffer):
            b, first, count = self.c.inputs[rank]
            if b == buffer and first <= chunk < first + count:
                quantity = (self.starts[rank] if self.c.op == "all-gather" else 0) + chunk - first
                return (1 << (32 + rank)) | (1 + quantity)
        return 0

    def _owners(self, buffer: int) -> tuple[int, ...]:
        stored = len(self.p.buffers)
        return (int(image(self.lifted.fold, int(self.p.buffers.actor[buffer % stored]), self.lifted.everyone[buffer // stored])),)

    def is_output(self, rank: int, buffer: int, chunk: int) -> bool:
        b, first, count = self.c.outputs[rank]
        return b == buffer and first <= chunk < first + count

    def wanted(self, rank: int, chunk: int) -> int:
        at = chunk - self.c.outputs[rank][1]
        if self.c.op == "all-gather":
            return (1 << (32 + at // self.c.inputs[0][2])) | (1 + at)
        skip = self.parts[rank] if self.c.op == "reduce-scatter" else 0
        return ((1 << self.n) - 1) << 32 | (1 + skip + at)

    def require_symmetry(self) -> None:
        """The contract is its own image: one offset of one step along every folded axis is enough, they generate all.

        An image moves ranks, buffers and chunks. Inputs must go to inputs and outputs to outputs. A quantity is the place of a chunk in
        the concatenation of the inputs (all-gather) or in every input (sums); it must move the same way on both sides.
        Raises: Unsupported.
        """
        lifted, c = self.lifted, self.c
        stored = len(self.p.buffers)
        # One step along each axis generates the whole group of members, and images of images are images.
        for number in range(len(lifted.axes)):
            step = tuple(int(i == number) for i in range(len(lifted.axes)))
            goes_to = image(lifted.fold, np.arange(self.n, dtype=np.int32), step)
            shift = np.asarray(step, np.int64) @ lifted.fold.buffer_shift.astype(np.int64)
            quantity: dict[int, int] = {}
            for rank in range(self.n):
                other = int(goes_to[rank])
                for table, base in ((c.inputs, self._in_base), (c.outputs, self._out_base)):
                    b, first, count = table[rank]
                    to, there, _ = table[other]
                    chunks = int(self.p.buffers.chunks[b % stored])
                    if self._buffer_image(b, step) != to:
                        raise Unsupported("the contract's buffers are not each other's images")
                    at = np.arange(first, first + count)
                    moved = (at + shift[b % stored]) % chunks if count < chunks or shift[b % stored] else at
                    if np.any((moved < there) | (moved >= there + count)):
                        raise Unsupported("the contract's ranges are not each other's images")
                    for q, r in zip((base(rank) + at - first).tolist(), (base(other) + moved - there).tolist(), strict=True):
                        # A chunk's number must move alike wherever it appears, or the same image would mean different data.
                        if quantity.setdefault(q, r) != r:
                            raise Unsupported("the contract's chunks are not each other's images")

    def _in_base(self, rank: int) -> int:
        return self.starts[rank] if self.c.op == "all-gather" else 0

    def _out_base(self, rank: int) -> int:
        return self.parts[rank] if self.c.op == "reduce-scatter" else 0

    def _buffer_image(self, buffer: int, step: tuple[int, ...]) -> int:
        stored = len(self.p.buffers)
        here = self.lifted.everyone[buffer // stored]
        there = tuple(a ^ b if axis.kind == "xor" else (a + b) % axis.size for axis, a, b in zip(self.lifted.axes, here, step, strict=True))
        return self.lifted.number[there] * stored + buffer % stored

    def uncovered(self, written: list[set[tuple[int, int]]]) -> list[Finding]:
        """Output cells of representatives that no component writes and that do not hold the right input."""
        lifted, stored = self.lifted, len(self.p.buffers)
        # Each rank is the image of one representative under one member.
        home: dict[int, tuple[int, tuple[int, ...]]] = {}
        for rank in np.unique(self.p.buffers.actor).tolist():
            for m in lifted.everyone:
                home[int(image(lifted.fold, rank, m))] = rank, m
        covered: dict[int, set[int]] = {}
        shift = lifted.fold.buffer_shift.astype(np.int64)
        for cells in written:
            for rank, chunk in cells:
                first, m = home[rank]
                local = self.c.outputs[rank][0] % stored
                chunks = int(self.p.buffers.chunks[local])
                # What a component writes at rank (first, m), the component's image under m's inverse writes at `first`, moved back.
                covered.setdefault(first, set()).add(int((chunk - np.dot(np.asarray(m, np.int64), shift[:, local])) % chunks))
        found: list[Finding] = []
        for rank in np.unique(self.p.buffers.actor).tolist():
            b, first, count = self.c.outputs[rank]
            for chunk in range(first, first + count):
                if chunk not in covered.get(rank, set()) and self.initial(b, chunk) != self.wanted(rank, chunk):
                    facts: dict[str, Any] = {"rank": rank, "lane": -1, "step": -1, "iteration": 0, "chunk": chunk}
                    text = f"chunk {chunk} of {self.p.buffer_name(b % stored)} on rank {rank} is never written with what it must hold"
                    found.append(Finding(check="values", message=text, witness=facts))
                    if len(found) >= MAX_FINDINGS_OF_A_KIND:
                        return found
        return found
