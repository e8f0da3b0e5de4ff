"""Which elements of a tensor are a chunk of a program, for tensors of any length.

A program cuts each rank's message into equal chunks; tensors rarely divide. Chunk borders are therefore rounded down to whole elements, block by
block (a block is one rank's share of an all-gather, reduce-scatter, all-to-all, scatter or gather), so every element belongs to exactly one chunk,
blocks lie where torch puts them, nothing is padded and nothing is copied. Both ends of a message compute the same borders.

A program that parks chunks in scratch needs them all to be of one size. It gets padded buffers (`ChunkMap.padded`), which costs a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import Unsupported
from ...program.program import Program
from ...program.unroll import slices

__all__ = ["BLOCKED", "ChunkMap", "Region", "regions"]

# Operations whose full buffer is one block per rank; the others treat the whole tensor as one block.
BLOCKED = ("all-gather", "reduce-scatter", "all-to-all", "scatter", "gather")
Span = tuple[int, int]  # elements [first, end)


@dataclass(frozen=True)
class ChunkMap:
    """Chunks of one buffer: `slices` repetitions of `chunks` chunks, over `blocks` blocks of `elements` elements each.

    Chunk i · chunks + c is chunk c of slice i. Within its block, slices follow each other, so a block is contiguous whatever the slices.
    """

    chunks: int
    slices: int
    blocks: int
    elements: int

    @property
    def per_block(self) -> int:
        """Chunks of a block, all slices counted."""
        return self.chunks // self.blocks * self.slices

    @property
    def total(self) -> int:
        return self.blocks * self.elements

    @property
    def padded(self) -> ChunkMap:
        """The smallest map with equal chunks that holds this one's elements."""
        each = -(-self.elements // max(self.per_block, 1))
        return ChunkMap(self.chunks, self.slices, self.blocks, each * self.per_block)

    def span(self, chunk: int) -> Span:
        within, place = divmod(chunk, self.chunks)
        own = self.chunks // self.blocks
        block, unit = divmod(place, own)
        position, parts = within * own + unit, own * self.slices
        return block * self.elements + position * self.elements // parts, block * self.elements + (position + 1) * self.elements // parts

    def spans(self, first: int, count: int) -> tuple[Span, ...]:
        """Elements of `count` chunks in order, as few contiguous runs as they are; empty runs are left out."""
        out: list[Span] = []
        for chunk in range(first, first + count):
            low, high = self.span(chunk)
            if low == high:
                continue
            if out and out[-1][1] == low:
                out[-1] = (out[-1][0], high)
            else:
                out.append((low, high))
        return tuple(out)


@dataclass(frozen=True)
class Region:
    """One buffer of one rank. `role`: "data" (input and output in one place), "input", "output" or "scratch"; `local`: its number at its rank."""

    rank: int
    local: int
    role: str
    map: ChunkMap


def regions(program: Program, elements: int) -> dict[int, Region]:
    """Every buffer of `program` (repeats kept), for `elements` elements per block, or in all where the operation has no blocks.

    Programs with scratch get equal chunks. Raises: Unsupported (no contract, unequal blocks, several groups).
    """
    contract = program.contract
    if contract is None or contract.ranks:
        raise Unsupported("only a program with one contract over all its ranks can run as a collective", where=program.name)
    b, n = program.buffers, program.ranks
    blocks = n if contract.op in BLOCKED else 1
    role: dict[int, str] = {}
    for kind, rows in (("input", contract.inputs), ("output", contract.outputs)):
        for buffer, _, _ in rows:
            role[buffer] = "data" if role.get(buffer, kind) != kind else kind
    made: dict[int, Region] = {}
    seen = [0] * n
    for buffer, rank in enumerate(b.actor.tolist()):
        if rank >= n:
            raise Unsupported("a switch has a buffer", where=program.name, hint="such programs run on the simulator only")
        local, seen[rank] = seen[rank], seen[rank] + 1
        kind, chunks = role.get(buffer, "scratch"), int(b.chunks[buffer])
        has = 1 if kind == "scratch" else _blocks(program, buffer, kind, chunks, blocks)
        made[buffer] = Region(rank, local, kind, ChunkMap(chunks, slices(program, buffer), has, elements))
    if any(r.role == "scratch" for r in made.values()):
        full = next(r.map for r in made.values() if r.role != "scratch")
        each = full.padded.elements // full.per_block
        made = {
            k: Region(r.rank, r.local, r.role, ChunkMap(r.map.chunks, r.map.slices, r.map.blocks, each * r.map.per_block)) for k, r in made.items()
        }
    return made


def _blocks(program: Program, buffer: int, role: str, chunks: int, blocks: int) -> int:
    """Blocks in a buffer: all of them, or one where it holds only a rank's own."""
    contract = program.contract
    assert contract is not None
    if blocks == 1:
        return 1
    both = (*contract.inputs, *contract.outputs)
    most, rank = max(count for _, _, count in both), int(program.buffers.actor[buffer])
    own = most // blocks
    rows = {(first, count) for at, first, count in both if at == buffer and count}
    if most % blocks == 0 and chunks == most and rows <= {(0, most), (rank * own, own)}:
        return blocks
    if most % blocks == 0 and chunks == own and rows <= {(0, own)} and role != "data":
        return 1
    hint = "unequal shards run through the built-in backend"
    raise Unsupported(f"buffer {buffer} is no {blocks} equal blocks in rank order, nor one rank's block", where=program.name, hint=hint)
