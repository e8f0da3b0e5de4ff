"""What a folded collective promises, cell by cell, and whether that is the same for all members."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import Unsupported
from ...program.fold import generators, image, image_chunks, plain_buffers
from ...program.fold_part import Lifted
from ...program.program import Contract, Program
from ..program.values import QUANTITY_MASK
from ..program.wellformed import witness
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding

__all__ = ["Claim", "wrong_cell"]

Ints = NDArray[np.int64]
ROOTED = ("broadcast", "reduce")
UNDIVIDED = ("all-reduce", *ROOTED)  # every rank has the whole before and after


def wrong_cell(p: Program, rank: int, buffer: int, chunk: int, have: int, want: int, step: int) -> Finding:
    at = -1 - have if have < 0 else step
    if at < 0:
        facts: dict[str, Any] = {"rank": rank, "lane": -1, "step": -1, "iteration": 0, "chunk": chunk}
        text = f"chunk {chunk} of {p.buffer_name(buffer)} on rank {rank} is never written with what it must hold"
        return Finding(check="values", message=text, witness=facts)
    if have < 0:
        what = "is spoilt: a contribution is added twice, or what does not belong together is added"
    elif (have ^ want) & QUANTITY_MASK:
        what = "holds another chunk's data"
    else:
        what = f"lacks {((want & ~have) >> 32).bit_count()} contributions and has {((have & ~want) >> 32).bit_count()} others"
    text = f"chunk {chunk} of {p.buffer_name(buffer)} on rank {rank} {what}; last written by {p.describe(at)}"
    return Finding(check="values", message=text, witness=witness(p, at, chunk=chunk, buffer=buffer) | {"rank": rank})


class Claim:
    """The contract by cell. Quantity = input chunk plus one, contributions by rank; cells are chunks, of the first iteration."""

    def __init__(self, p: Program, lifted: Lifted, c: Contract) -> None:
        self.p, self.lifted, self.c, self.n = p, lifted, c, p.ranks
        self.buffers = {b for b, _, _ in (*c.inputs, *c.outputs)}
        plain = lifted.fold.plain_buffers(p.buffers.actor)
        if any(not 0 <= b < plain for b in self.buffers) or len(c.inputs) != self.n or len(c.outputs) != self.n:
            raise Unsupported("the contract names buffers that do not exist")
        stored, member = lifted.fold.stored_buffers(p.buffers.actor, np.arange(plain))
        self.stored, self.member = stored.tolist(), member.tolist()  # of every buffer of the plain form
        self.plain = {row: number for number, row in enumerate(zip(self.stored, self.member, strict=True))}
        self.owner: list[int] = plain_buffers(p)[0].tolist()  # rank of every buffer of the plain form
        self.stays = np.isin(p.buffers.actor, lifted.fold.fixed).tolist()  # of every stored buffer
        self.starts = [0, *accumulate(n for _, _, n in c.inputs)]
        self.parts = [0, *accumulate(n for _, _, n in c.outputs)]
        # Contributions of one rank, and of all, in place above a value's quantity: made once, as they are as long as there are ranks.
        self.of = [1 << (32 + rank) for rank in range(self.n)]
        self.every = ((1 << self.n) - 1) << 32
        sizes = {n for _, _, n in c.inputs}
        whole = self.starts[-1] if c.op == "all-gather" else c.inputs[0][2]
        # Equal shares in rank order: otherwise one instance's chunk numbers are not those of the others moved.
        shares = {n for _, _, n in c.outputs}
        outputs = shares if c.op == "reduce-scatter" else {whole}
        self.block = whole // self.n  # all-to-all: of one rank for another
        if c.op == "all-to-all" and whole % self.n:
            raise Unsupported("the contract's inputs are no equal blocks")
        if len(sizes) > 1 or len(shares) > 1 or shares != outputs or (c.op == "reduce-scatter" and self.parts[-1] != whole):
            raise Unsupported("the contract's ranges are no whole collective of equal shares")

    def initial(self, buffer: int, chunk: int) -> int:
        """What a cell holds before the program runs: 0 = nothing known."""
        rank = self.owner[buffer]
        b, first, count = self.c.inputs[rank]
        if b != buffer or not first <= chunk < first + count or (self.c.op == "broadcast" and rank != self.c.root):
            return 0
        return self.of[rank] | (1 + (self.starts[rank] if self.c.op == "all-gather" else 0) + chunk - first)

    def is_output(self, rank: int, buffer: int, chunk: int) -> bool:
        b, first, count = self.c.outputs[rank]
        return b == buffer and first <= chunk < first + count and self.promised(rank)

    def promised(self, rank: int) -> bool:
        """Whether the rank is to have a result: of a reduction only the root is."""
        return self.c.op != "reduce" or rank == self.c.root

    def wanted(self, rank: int, chunk: int) -> int:
        at = chunk - self.c.outputs[rank][1]
        if self.c.op == "all-gather":
            return self.of[at // self.c.inputs[0][2]] | (1 + at)
        if self.c.op == "all-to-all":
            return self.of[at // self.block] | (1 + rank * self.block + at % self.block)
        if self.c.op == "broadcast":
            return self.of[self.c.root] | (1 + at)
        skip = self.parts[rank] if self.c.op == "reduce-scatter" else 0
        return self.every | (1 + skip + at)

    def require_symmetry(self) -> None:
        """The contract is its own image under offsets of which all others are sums.

        An image moves ranks, buffers and chunks. Inputs must go to inputs and outputs to outputs. A quantity is the place of a chunk in
        the concatenation of the inputs (all-gather) or in every input (sums, all-to-all); it must move the same way on both sides.
        Raises: Unsupported.
        """
        lifted, c = self.lifted, self.c
        held = self.p.buffers.chunks.tolist()
        if c.op in ROOTED and c.root not in lifted.fold.fixed:
            raise Unsupported("the contract's root is moved")
        quantities = {"all-gather": self.starts[-1], "reduce-scatter": self.parts[-1]}.get(c.op, max(n for _, _, n in c.inputs))
        if c.op == "all-to-all" and lifted.fold.by_rank:
            self._require_blocks_alike()
            return
        # What holds for these holds for all members: images of images are images.
        for step in generators(lifted.fold):
            goes_to = image(lifted.fold, np.arange(self.n, dtype=np.int32), step)
            shift = lifted.fold.buffer_shift
            quantity = np.full(quantities, -1, np.int64)
            where: dict[tuple[int, ...], Ints] = {}
            known: set[tuple[int, ...]] = set()  # of most ranks the same ranges are the same quantities
            for rank in range(self.n):
                other = int(goes_to[rank])
                for table, place in ((c.inputs, self._in_place), (c.outputs, self._out_place)):
                    b, first, count = table[rank]
                    to, there, _ = table[other]
                    chunks, by = held[self.stored[b]], tuple(shift[:, self.stored[b]].tolist())
                    if self._buffer_image(b, step) != to:
                        raise Unsupported("the contract's buffers are not each other's images")
                    if c.op != "all-to-all":
                        one, two = (int(place(x, np.zeros(1, np.int64))[0]) for x in (rank, other))
                        if (alike := (chunks, *by, first, count, there, one, two)) in known:
                            continue
                        known.add(alike)
                    at = np.arange(first, first + count)
                    if (key := (chunks, *by, first, count)) not in where:
                        column = np.repeat(shift[:, [self.stored[b]]], count, axis=1)
                        where = {key: image_chunks(lifted.fold, self.n, step, np.full(count, chunks), column, at)}
                    moved = where[key]
                    if np.any((moved < there) | (moved >= there + count)):
                        raise Unsupported("the contract's ranges are not each other's images")
                    q, r = place(rank, at - first), place(other, moved - there)
                    if c.op == "all-to-all" and np.any(goes_to[(at - first) // self.block] != (moved - there) // self.block):
                        raise Unsupported("the contract's blocks do not move with their ranks")
                    # A chunk's number must move alike wherever it appears, or the same image would mean different data.
                    if np.any((quantity[q] >= 0) & (quantity[q] != r)):
                        raise Unsupported("the contract's chunks are not each other's images")
                    quantity[q] = r

    def _require_blocks_alike(self) -> None:
        """`require_symmetry` of an all-to-all whose chunks move with their ranks' blocks.

        Chunk i of the block from rank r to rank d lies in r's input and in d's output. Both move it to chunk i of the block from r's image to d's,
        but for what the buffer adds in blocks of ranks that stay: nothing where one of the two moves, and the same in both where none does.
        Raises: Unsupported.
        """
        b, fold, fixed = self.p.buffers, self.lifted.fold, self.lifted.fold.fixed
        shift, chunks = fold.buffer_shift, b.chunks.tolist()
        among: set[tuple[int, ...]] = set()
        for rank in range(self.n):
            for at, first, count in (self.c.inputs[rank], self.c.outputs[rank]):
                stored = self.stored[at]
                if (first, count) != (0, chunks[stored]) or count != self.block * self.n or self.owner[at] != rank:
                    raise Unsupported("the contract's blocks do not move with their ranks")
                by = tuple((shift[:, stored] % self.block).tolist())
                if rank in fixed:
                    among.add(by)
                elif any(by):
                    raise Unsupported("the contract's chunks are not each other's images")
        for table in (self.c.inputs, self.c.outputs):
            for step in generators(fold):
                goes_to = image(fold, np.arange(self.n, dtype=np.int32), step).tolist()
                if any(self._buffer_image(table[rank][0], step) != table[goes_to[rank]][0] for rank in range(self.n)):
                    raise Unsupported("the contract's buffers are not each other's images")
        if len(among) > 1:
            raise Unsupported("the contract's chunks are not each other's images")

    def _in_place(self, rank: int, at: Ints) -> Ints:
        """Quantities of chunks of a rank's input, from its first on."""
        return at + (self.starts[rank] if self.c.op == "all-gather" else 0)

    def _out_place(self, rank: int, at: Ints) -> Ints:
        if self.c.op == "all-to-all":
            return rank * self.block + at % self.block
        return at + (self.parts[rank] if self.c.op == "reduce-scatter" else 0)

    def _buffer_image(self, buffer: int, step: tuple[int, ...]) -> int:
        if self.stays[self.stored[buffer]]:
            return buffer
        here = self.lifted.everyone[self.member[buffer]]
        there = tuple(a ^ b if axis.kind == "xor" else (a + b) % axis.size for axis, a, b in zip(self.lifted.axes, here, step, strict=True))
        return self.plain[self.stored[buffer], self.lifted.number[there]]

    def uncovered(self, written: list[set[tuple[int, int]]]) -> list[Finding]:
        """Output cells of representatives that no component writes and that do not hold the right input."""
        lifted = self.lifted
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
                local = self.stored[self.c.outputs[rank][0]]
                chunks = int(self.p.buffers.chunks[local])
                # What a component writes at rank (first, m), the component's image under m's inverse writes at `first`, moved back.
                covered.setdefault(first, set()).add(int((chunk - np.dot(np.asarray(m, np.int64), shift[:, local])) % chunks))
        found: list[Finding] = []
        for rank in np.unique(self.p.buffers.actor).tolist():
            b, first, count = self.c.outputs[rank]
            for chunk in range(first, first + count):
                if chunk not in covered.get(rank, set()) and self.initial(b, chunk) != self.wanted(rank, chunk):
                    found.append(wrong_cell(self.p, rank, self.stored[b], chunk, 0, 0, -1))
                    if len(found) >= MAX_FINDINGS_OF_A_KIND:
                        return found
        return found

    def require_in_place(self, chunks: int) -> None:
        """Every rank's whole result or input is one buffer of so many chunks, numbered like its quantities, and a share lies at its place in it.

        Raises: Unsupported.
        """
        c = self.c
        for rank in np.unique(self.p.buffers.actor).tolist():  # the others' are images of these
            if any(self.owner[b] != rank or b >= len(self.p.buffers) for b, _, _ in (c.inputs[rank], c.outputs[rank])):
                raise Unsupported("the contract's ranges of a rank lie in another's buffers")
        if c.op == "all-to-all":
            if any((first, count) != (0, chunks) for _, first, count in (*c.inputs, *c.outputs)):
                raise Unsupported("an all-to-all among parts of buffers")
            return
        whole, own = (c.outputs, c.inputs) if c.op == "all-gather" else (c.inputs, c.outputs)
        starts = self.starts if c.op == "all-gather" else self.parts
        in_order = c.op in UNDIVIDED or all(first == starts[rank] for rank, (_, first, _) in enumerate(own))
        if any((first, count) != (0, chunks) for _, first, count in whole) or not in_order or (c.op in UNDIVIDED and whole != own):
            raise Unsupported("a contract that is not in place")
