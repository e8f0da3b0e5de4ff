"""An MSCCL algorithm as a `Program`: every thread block a lane, every step a step, with the executor's rules for waiting and addressing.

Waits. A step numbered k by the executor is the k-th of its block, `nop`s that carry a wait counted with the step they precede. A wait for
(block, d) ends when the block completes its first step numbered >= d that has `hasdep`: only those publish. A `nop` at the end of a block
waits for nothing. A `nop` between reductions that fuse into one delays the next step that is not fused: the executor's own order.
Addresses. In place, input and output are one memory: all-gather and gather, the input lies in the output; reduce-scatter and scatter, the
output in the input (on the root); otherwise they coincide. Slices need no iterations: every slice has its own bytes of every buffer,
scratch too, so what holds for one holds for all.
Messages. A step of several chunks travels as one message or several of at most `batch` chunks, the fewer the bigger the call
(`ExecutorLimits.batch`). Smaller batches are harder: what cannot deadlock with one batch cannot with any bigger one, and what is free of
races chunk by chunk is so with any batch, because a credit or an order that exists then has its image in the coarser form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import FormatError, Unsupported
from ..program.builder import LaneBuilder, ProgramBuilder, StepRef
from ..program.program import Contract, Role
from .msccl import ImportedMsccl, MscclAlgo, MscclBlock, MscclGpu, MscclStep, chunks_of, collective_of

__all__ = ["PublishedStep", "buffers_of", "import_msccl", "root_of", "waits_of"]


@dataclass(frozen=True)
class PublishedStep:
    """What the executor makes of one step: its number, and the positions of the steps (block, position) that it waits for.

    `missing`: waits (block, number) that no step ever ends. `fused`: continues the reduction before it.
    """

    number: int
    waits: tuple[tuple[int, int], ...]
    missing: tuple[tuple[int, int], ...]
    fused: bool


def root_of(algo: MscclAlgo) -> int:
    """The root that the file states, or the only rank that can be it; -1 where the operation has none.

    Broadcast and scatter: the only rank that receives nothing; reduce and gather: the only one that sends nothing.
    Raises: Unsupported where that leaves none or several.
    """
    op = collective_of(algo)
    if op not in ("broadcast", "reduce", "scatter", "gather"):
        return -1
    if 0 <= algo.root < algo.ranks:
        return algo.root
    part = "R" if op in ("broadcast", "scatter") else "S"
    busy = {gpu.id for gpu, _, step in algo.steps() if part in step.parts}
    left = [gpu.id for gpu in algo.gpus if gpu.id not in busy]
    if len(left) != 1:
        raise Unsupported(f"{len(left)} ranks could be the root of this {op}", hint='state it: root="0" in <algo>, or --root')
    return left[0]


def waits_of(gpu: MscclGpu) -> dict[int, list[PublishedStep]]:
    """Per block what the executor makes of its steps. Blocks must have different ids."""
    numbered = {b.id: _numbered(b) for b in gpu.blocks}
    flags = {b.id: [(numbered[b.id][0][k], k) for k, s in enumerate(b.steps) if s.hasdep and s.type != "nop"] for b in gpu.blocks}

    def ends(block: int, number: int) -> int:
        return next((k for published, k in flags.get(block, []) if published >= number), -1)

    out: dict[int, list[PublishedStep]] = {}
    for b in gpu.blocks:
        numbers, waits, fused = numbered[b.id]
        rows = []
        for k in range(len(b.steps)):
            wanted = [(w, ends(*w)) for w in waits[k]]
            met = tuple((block, at) for (block, _), at in wanted if at >= 0)
            rows.append(PublishedStep(numbers[k], met, tuple(w for w, at in wanted if at < 0), fused[k]))
        out[b.id] = rows
    return out


def _numbered(block: MscclBlock) -> tuple[list[int], list[list[tuple[int, int]]], list[bool]]:
    """Per step: the number that the executor counts to, the (block, number) it waits for, and whether it continues a fused reduction."""
    numbers, fused = [-1] * len(block.steps), [False] * len(block.steps)
    waits: list[list[tuple[int, int]]] = [[] for _ in block.steps]
    pending: list[tuple[int, int]] = []
    at = total = 0
    chain: tuple[str, int, str] | None = None
    for k, s in enumerate(block.steps):
        wait = [(s.depid, s.deps)] if s.depid >= 0 else []
        if s.type == "nop":
            pending += wait
            continue
        fused[k] = s.type == "re" and not wait and chain == (s.dst_buffer, s.dst_offset, s.src_buffer)
        if not fused[k]:
            waits[k], pending = pending + wait, []
            at += max(0, len(waits[k]) - 1)
        numbers[k] = at
        at += 1
        chain = None
        if s.type == "re":
            total += 1
            if not s.hasdep and total != 16:  # the executor counts all reductions of the block here
                chain = (s.dst_buffer, s.dst_offset, s.src_buffer)
    return numbers, waits, fused


# ---- the program -------------------------------------------------------------------------------------------------------
def import_msccl(
    algo: MscclAlgo, *, in_place: bool, chunk_bytes: int = 4, batch: int = 0, run_copies: bool = False, depth: int = 2
) -> ImportedMsccl:
    """The program of an algorithm that keeps the executor's rules (`meshwright.check.foreign.msccl` says whether it does).

    Args:
        in_place: as the executor runs it when the call's buffers coincide.
        chunk_bytes: of one chunk; the message is `chunks_per_loop` of them.
        batch: chunks that travel in one message; steps with more become several steps of the program. 0: every step is one.
        run_copies: also make the local copies of `<copy>` elements, as runtimes of TACCL and TE-CCL do; the executor ignores them.
        depth: messages that fit into a channel.
    Raises: Unsupported for an operation without a contract, or whose root is not known; FormatError where a step cannot be written as one.
    """
    op = collective_of(algo)
    if op is None:
        raise Unsupported(f"what a {algo.collective} file promises is not known", hint="files of whole collectives can be checked")
    b = ProgramBuilder(ranks=algo.ranks, name=algo.name or f"msccl {op}")
    memory = _Memory(b, algo, op, root_of(algo), in_place, chunk_bytes)
    lowering = _Lowering(b, algo, memory, batch, depth)
    for gpu in sorted(algo.gpus, key=lambda g: g.id):
        lowering.gpu(gpu, gpu.copies if run_copies else ())
    b.contract = memory.contract()
    table = np.array(lowering.places, dtype=np.int32).reshape(-1, 4)
    return ImportedMsccl(b.build(), *(np.ascontiguousarray(table[:, k]) for k in range(4)))


def buffers_of(algo: MscclAlgo, op: str, root: int, gpu: int, in_place: bool) -> dict[str, int]:
    """Chunks of the buffers that a rank has: what only the root is given is nobody else's, except in place, where it coincides."""
    inputs, outputs = chunks_of(op, algo.chunks_per_loop, algo.ranks)
    scratch = next((g.s_chunks for g in algo.gpus if g.id == gpu), 0)
    if gpu != root and (op == "scatter" or (op == "broadcast" and not in_place)):
        inputs = 0
    if gpu != root and (op == "gather" or (op == "reduce" and not in_place)):
        outputs = 0
    return {"i": inputs, "o": outputs, "s": scratch}


class _Memory:
    """The buffers of every rank, by letter."""

    def __init__(self, b: ProgramBuilder, algo: MscclAlgo, op: str, root: int, in_place: bool, chunk_bytes: int) -> None:
        self.op, self.root, self.algo = op, root, algo
        self.inputs, self.outputs = chunks_of(op, algo.chunks_per_loop, algo.ranks)
        self.at: dict[tuple[int, str], int] = {}
        self.chunks: dict[tuple[int, str], int] = {}
        roles = {"i": "input", "o": "output", "s": "scratch"}
        for r in range(algo.ranks):
            sizes = buffers_of(algo, op, root, r, in_place)
            outer, inner = ("o", "i") if op in ("all-gather", "gather") else ("i", "o")
            shift = r * sizes[inner] if sizes[inner] < sizes[outer] else 0
            for letter in (outer, inner, "s"):
                inside = letter == inner and in_place and sizes["i"] > 0 and sizes["o"] > 0
                if sizes[letter]:
                    self.at[r, letter] = b.buffer(
                        r, chunks=sizes[letter], chunk_bytes=chunk_bytes, role=roles[letter], name=f"{letter}:{r}",
                        alias_of=self.at[r, outer] if inside else -1, alias_offset_bytes=shift * chunk_bytes if inside else 0,
                    )  # fmt: skip
                    self.chunks[r, letter] = sizes[letter]

    def range(self, gpu: int, letter: str, offset: int, count: int) -> tuple[int, int]:
        size = self.chunks.get((gpu, letter), 0)
        if not 0 <= offset <= offset + count <= size:
            raise FormatError(f"chunks {offset}..{offset + count - 1} of {letter!r}, which has {size}", where=f"gpu {gpu}")
        return self.at[gpu, letter], offset

    def contract(self) -> Contract:
        def ranges(letter: str, other: str, count: int) -> tuple[tuple[int, int, int], ...]:
            rows = []
            for r in range(self.algo.ranks):
                present = (r, letter) in self.at
                rows.append((self.at[r, letter if present else other], 0, count if present else 0))
            return tuple(rows)

        return Contract(op=self.op, inputs=ranges("i", "o", self.inputs), outputs=ranges("o", "i", self.outputs), root=self.root)


class _Lowering:
    def __init__(self, b: ProgramBuilder, algo: MscclAlgo, memory: _Memory, batch: int, depth: int) -> None:
        self.b, self.algo, self.memory, self.batch, self.depth = b, algo, memory, batch, depth
        self.channels: dict[tuple[int, int, int], int] = {}
        self.places: list[tuple[int, int, int, int]] = []

    def channel(self, src: int, dst: int, number: int) -> int:
        if min(src, dst) < 0 or max(src, dst) >= self.algo.ranks or src == dst:
            raise FormatError(f"no channel leads from gpu {src} to gpu {dst}", where=self.algo.name)
        key = (src, dst, number)
        if key not in self.channels:
            self.channels[key] = self.b.channel(src, dst, depth=self.depth)
        return self.channels[key]

    def pieces(self, step: MscclStep) -> int:
        """Steps of the program that one step of the file becomes."""
        return -(-step.chunks // self.batch) if self.batch and ("R" in step.parts or "S" in step.parts) else 1

    def gpu(self, gpu: MscclGpu, copies: tuple[tuple[int, int], ...]) -> None:
        published = waits_of(gpu)
        copied: list[StepRef] = []
        if copies:
            lane = self.b.lane(gpu.id, role=Role.BLOCK)
            for k, (i, o) in enumerate(copies):
                copied = [lane.copy(self.memory.range(gpu.id, "i", i, 1), self.memory.range(gpu.id, "o", o, 1))]
                self.places.append((gpu.id, -1, k, 0))
        blocks = sorted(gpu.blocks, key=lambda x: x.id)
        lanes = {x.id: self.b.lane(gpu.id, role=Role.BLOCK) for x in blocks}
        cut: dict[int, list[int]] = {}  # per block the pieces of each step
        last: dict[tuple[int, int], StepRef] = {}  # where each step's last piece will stand
        for x in blocks:
            pieces, made = [self.pieces(s) for s in x.steps], 0
            cut[x.id] = pieces
            for k, n in enumerate(pieces):
                made += n
                last[x.id, k] = StepRef(lanes[x.id].number, made - 1)
        for x in blocks:
            lane, block = lanes[x.id], x.id
            for k, (s, n) in enumerate(zip(x.steps, cut[block], strict=True)):
                waits = published[block][k].waits
                after = [last[w] for w in dict.fromkeys(waits)] if waits else []
                if k == 0:
                    after += copied
                for piece in range(n):
                    self._step(lane, gpu.id, x, s, piece, n, after)
                    self.places.append((gpu.id, block, k, piece))
                    after = []

    def _step(self, lane: LaneBuilder, gpu: int, x: MscclBlock, s: MscclStep, piece: int, pieces: int, after: list[StepRef]) -> None:
        parts = s.parts
        if not parts:
            lane.nop(after=after)
            return
        first = piece * self.batch
        count = min(self.batch, s.chunks - first) if pieces > 1 else s.chunks
        lane.transfer(
            recv=self.channel(x.recv, gpu, x.channel) if "R" in parts else -1, send=self.channel(gpu, x.send, x.channel) if "S" in parts else -1,
            src=self.memory.range(gpu, s.src_buffer, s.src_offset + first, count) if "X" in parts else (-1, 0),
            dst=self.memory.range(gpu, s.dst_buffer, s.dst_offset + first, count) if "D" in parts else (-1, 0),
            count=count, add="A" in parts, store="D" in parts, after=after,
        )  # fmt: skip
