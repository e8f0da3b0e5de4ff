"""A collective `Program` as an MSCCL algorithm, within the executor's limits, or a refusal that names the limit.

What is chosen: homes of chunks (`interop.to_msccl_buffers`), thread blocks (`interop.to_msccl_blocks`), channels (a colour per chain of connections
that blocks
tie together, so that no two share source, destination and channel), waits as `depid` and preceding `nop`s, numbers in file order.
A program whose lanes repeat is written once: the executor runs all steps for every slice of a chunk, which is what repeating means; `after`
edges that reach back to earlier slices fall away, because slices share no bytes.

Whether the result is right is decided by `meshwright.check.foreign.msccl`; `meshwright.drive.handover.msccl` puts the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import Unsupported
from ..program.fold import expand, image, members
from ..program.program import Kind, Part, Program
from .msccl import MANY_STEPS, ExecutorLimits, MscclAlgo, MscclBlock, MscclGpu, MscclStep, spelling_of
from .to_msccl_blocks import Block, Blocks, Pool, blocks_of
from .to_msccl_buffers import moves_of
from .to_msccl_memory import Memory, Place
from .to_msccl_order import root_of

__all__ = ["MscclOptions", "lower_to_msccl", "most_connections", "refuse_too_large"]

MAX_WRITTEN_STEPS = 1_000_000  # of all gpus, about as many lines, which every gpu reads; half as many, written in three ways, took 105 s of a core
TYPES = {"XS": "s", "RD": "r", "XD": "cpy", "XAD": "re", "RXAD": "rrc", "RXAS": "rrs", "RDS": "rcs", "RXADS": "rrcs"}


@dataclass(frozen=True, kw_only=True)
class MscclOptions:
    """How to write a schedule.

    place: buffers of the call: `in` place, `out` of place, or `both`.
    merge, relaxed, squeeze, stretch: see `interop.to_msccl_blocks.blocks_of`; stretch None = the longest that keeps blocks within the
        step limit.
    pool: messages between two ranks share connections, `stretch` on each; `merge` and `relaxed` then mean nothing.
    blocks: thread blocks per GPU, all of which have to be resident (an A100 has 108 multiprocessors).
    """

    place: Place = "both"
    protocol: str = "Simple"
    min_bytes: int = 0
    max_bytes: int = 0
    merge: bool = True
    relaxed: bool = True
    squeeze: bool = False
    pool: bool = False
    stretch: int | None = None
    blocks: int = 108
    limits: ExecutorLimits = field(default_factory=ExecutorLimits)


def lower_to_msccl(program: Program, options: MscclOptions | None = None) -> MscclAlgo:
    """The algorithm of a collective program.

    Raises: Unsupported for programs and operations that the format cannot say, and, naming it in `data["limit"]`, for a limit exceeded.
    """
    how = options or MscclOptions()
    p = _plain(program)
    spelling = _spelling(p)
    stretches = [how.stretch] if how.stretch is not None else _stretches(p, how)
    squeeze = how.blocks if how.squeeze else 0
    error: Unsupported | None = None
    pool: Pool | None = None
    for stretch in stretches:
        if pool is None:  # what is pooled does not depend on the stretch
            moves, memory = moves_of(p, how.place, how.limits.count, how.limits.depth)
            pool = Pool(moves, memory) if how.pool else None
        if pool is not None:
            made = pool.blocks(stretch, squeeze)
        else:
            made = blocks_of(moves, memory, stretch=stretch, merge=how.merge, relaxed=how.relaxed, squeeze=squeeze)
        try:
            return _Writer(p, memory, made, how, spelling).algo()
        except _TooLong as too_long:
            error = too_long
    assert error is not None, "there is a stretch to try"
    raise Unsupported(error.message, hint="export a schedule with fewer pieces, or for an executor built for 256 steps", data=error.data)


class _TooLong(Unsupported):
    """Some block has too many steps: shorter stretches may help."""


def refuse(what: str, *, limit: str, needed: int, most: int, hint: str = "") -> Unsupported:
    return Unsupported(f"{what}: {needed}, the executor has {most}", hint=hint, data={"limit": limit, "needed": needed, "most": most})


def refuse_too_large(p: Program, limits: ExecutorLimits, blocks: int) -> None:
    """Refuse, before anything is written out, what no way of writing brings within the limits: messages are steps of their own, and a block sends to
    one peer and receives from one.

    Raises: Unsupported, naming the limit.
    """
    if p.ranks > limits.children:
        raise refuse("gpus", limit="children", needed=p.ranks, most=limits.children, hint="plan for fewer devices")
    ends: np.ndarray = np.unique(np.stack([p.channels.src, p.channels.dst])[:, _used(p)], axis=1)
    if p.fold is not None:  # a rank that stays where it is sends to all images of whom it sends to
        ends = np.unique(np.concatenate([image(p.fold, ends, member) for member in members(p.fold)], axis=1), axis=1)
    peers = np.bincount(ends[0], minlength=1)
    needed = int(peers.max())
    if needed > blocks:
        what = f"peers that gpu {int(peers.argmax())} sends to, each by a thread block of its own"
        hint = "raise --blocks if the GPU has the multiprocessors, or plan for fewer devices"
        raise refuse(what, limit="blocks", needed=needed, most=blocks, hint=hint)
    written = len(p.steps) * (p.fold.members if p.fold is not None else 1)
    if written > MAX_WRITTEN_STEPS:
        text = f"{written} steps of all gpus are more than the {MAX_WRITTEN_STEPS} that are written: every gpu reads the whole file before it starts"
        raise Unsupported(text, hint="plan for fewer devices", data={"limit": "written", "needed": written, "most": MAX_WRITTEN_STEPS})
    actor = p.lanes.actor[p.lane_of_step()]
    for part in (Part.RECV, Part.SEND):
        ends = np.bincount(actor[((p.steps.parts & part) != 0) & (p.steps.count > 0)], minlength=1)
        needed = 1 + p.ranks + int(ends.max())
        if needed > limits.nodes:
            hint = "plan with fewer trees or pieces, or for fewer devices"
            raise refuse(f"XML elements of gpu {int(ends.argmax())}", limit="nodes", needed=needed, most=limits.nodes, hint=hint)


def most_connections(p: Program) -> int:
    """The most channels on which one gpu sends: of a folded program a representative, which stands for all."""
    return int(np.bincount(p.channels.src[_used(p)], minlength=1).max())


def _used(p: Program) -> np.ndarray:
    """The stored channels on which somebody sends, without sets."""
    s = p.steps
    return np.unique(s.chan_out[(s.parts & (Part.SEND | Part.OUT_SET)) == Part.SEND])


def _plain(program: Program) -> Program:
    """The unfolded program, if it is a collective of transfers."""
    if program.fold is not None:
        program = expand(program)
    if len(program.calls) or np.any(program.steps.kind == Kind.COMPUTE):
        raise Unsupported("a program that computes or calls others is no MSCCL algorithm", hint="export a collective's own plan")
    if program.switches or len(program.channels.sets) or np.any(program.steps.parts & (Part.IN_SET | Part.OUT_SET)):
        raise Unsupported("multicast and sums inside switches cannot be said in MSCCL XML", hint="plan without in-network abilities")
    if len(program.sizes) or np.any(program.buffers.size >= 0):
        raise Unsupported("messages of sizes known only at run time cannot be said in MSCCL XML")
    if len({int(x) for x in program.lanes.repeat[program.lanes.end > program.lanes.start]}) > 1:
        raise Unsupported("lanes with different numbers of slices cannot be said in MSCCL XML", hint="plan with unrolled pieces")
    return program


def _spelling(p: Program) -> str:
    c = p.contract
    if c is None:
        what = "has several contracts" if len(p.contracts) > 1 else "states no contract"
        raise Unsupported(f"the program {what}", hint="export one collective at a time")
    if c.ranks not in ((), tuple(range(p.ranks))):
        raise Unsupported("the collective is among some of the program's ranks only", hint="plan it on those devices")
    spelling = spelling_of(c.op)
    if spelling is None:
        raise Unsupported(f"MSCCL XML has no {c.op}")
    for word, ranges, op in (("input", c.inputs, "all-gather"), ("output", c.outputs, "reduce-scatter")):
        if len({count for _, _, count in ranges}) > 1 and c.op in (op, {"input": "gather", "output": "scatter"}[word]):
            raise Unsupported(f"{word}s of different sizes cannot be said in MSCCL XML", hint="pad the shards to one size")
    return spelling


def _stretches(p: Program, how: MscclOptions) -> list[int]:
    """All messages, then ever shorter runs of them."""
    s = p.steps
    used = s.chan_out[(s.parts & Part.SEND) != 0]
    if how.pool:  # a block has at least a step per message
        pairs = p.channels.src[used].astype(np.int64) * p.ranks + p.channels.dst[used]
        longest = min(how.limits.steps, int(np.unique(pairs, return_counts=True)[1].max(initial=1)))
        found = [longest]
    else:
        longest = int(np.bincount(used).max()) if len(used) else 1
        found = [1 << 30]
    while longest > 4:
        longest = -(-longest // 2)
        found.append(longest)
    return found


class _Writer:
    """Colours, numbers and writes blocks."""

    def __init__(self, p: Program, memory: Memory, made: Blocks, how: MscclOptions, spelling: str) -> None:
        self.p, self.memory, self.made, self.how, self.spelling = p, memory, made, how, spelling
        self.limits = how.limits
        self.awaited = {d for row in made.waits.values() for d in row}
        self.brief = sum(len(b.moves) for b in made.blocks) > MANY_STEPS

    def algo(self) -> MscclAlgo:
        colour, channels = self._colours()
        blocks = self._numbered_blocks()
        number = {id(b): k for rank in blocks for k, b in enumerate(rank)}
        home = {k: number[id(b)] for b in self.made.blocks for k in b.moves}
        position = {k: at for b in self.made.blocks for k, at in self._positions(b).items()}
        gpus = []
        for rank, mine in enumerate(blocks):
            written = tuple(self._block(k, b, colour, home, position) for k, b in enumerate(mine))
            scratch = max((m[1] + n for b in mine for m, n in self._scratch_used(b)), default=0)
            gpus.append(MscclGpu(rank, *self._declared(rank), scratch, written))
        c = self.memory.contract
        loop = self._loop()
        offset = max((s.src_offset for g in gpus for b in g.blocks for s in b.steps), default=0)
        if offset > self.limits.offset:
            raise refuse("chunks of a buffer", limit="offset", needed=offset, most=self.limits.offset, hint="plan with fewer trees or pieces")
        for g in gpus:
            nodes = 1 + len(gpus) + len(g.blocks) + sum(len(b.steps) for b in g.blocks)
            if nodes > self.limits.nodes:
                hint = "plan with fewer trees or pieces"
                raise refuse(f"XML elements of gpu {g.id}", limit="nodes", needed=nodes, most=self.limits.nodes, hint=hint)
        return MscclAlgo(
            name=(self.p.name or c.op)[: self.limits.characters], protocol=self.how.protocol, channels=channels, chunks_per_loop=loop,
            ranks=self.p.ranks, collective=self.spelling, in_place=int(self.how.place != "out"), out_of_place=int(self.how.place != "in"),
            min_bytes=self.how.min_bytes, max_bytes=self.how.max_bytes, gpus=tuple(gpus),
            root=c.root if c.op in ("broadcast", "reduce", "scatter", "gather") else -1,
        )  # fmt: skip

    def _loop(self) -> int:
        """nchunksperloop: the whole message, or one rank's of a gather or scatter."""
        c, m = self.memory.contract, self.memory
        if c.op in ("all-gather", "broadcast", "scatter"):
            return m.chunks(m.outputs[c.root if c.op == "broadcast" else 0])
        return m.chunks(m.inputs[0])

    def _declared(self, rank: int) -> tuple[int, int]:
        return self.memory.chunks(self.memory.inputs[rank]), self.memory.chunks(self.memory.outputs[rank])

    def _scratch_used(self, b: Block) -> list[tuple[tuple[str, int], int]]:
        found = []
        for k in b.moves:
            m = self.made.moves[k]
            found += [(h, m.count) for part, h in (("X", m.src), ("D", m.dst)) if part in m.parts and h[0] == "s"]
        return found

    # ---- channels ------------------------------------------------------------------------------------------------------
    def _colours(self) -> tuple[dict[int, int], int]:
        """Connection -> channel number, and how many channels that takes."""
        chain = list(range(len(self.made.connections)))
        for b in self.made.blocks:
            if b.send >= 0 and b.recv >= 0:
                chain[root_of(chain, b.send)] = root_of(chain, b.recv)
        members: dict[int, list[int]] = {}
        for c in range(len(chain)):
            members.setdefault(root_of(chain, c), []).append(c)
        taken: set[tuple[int, int, int]] = set()
        ends: dict[tuple[str, int, int], int] = {}
        colour: dict[int, int] = {}
        for group in sorted(members.values(), key=lambda g: (-len(g), g[0])):
            pairs = [(self.made.connections[c].src, self.made.connections[c].dst) for c in group]
            if len(set(pairs)) < len(pairs):
                raise Unsupported("a chain of blocks would use one connection twice", data={"limit": "chain"})
            for number in range(self.limits.channels):
                crowd: dict[tuple[str, int, int], int] = {}
                for a, b_ in pairs:
                    for key in (("send", a, number), ("recv", b_, number)):
                        crowd[key] = crowd.get(key, 0) + 1
                fits = all(ends.get(key, 0) + more <= self.limits.blocks_per_channel for key, more in crowd.items())
                if fits and not any((a, b_, number) in taken for a, b_ in pairs):
                    break
            else:
                busiest = max(pairs, key=lambda pair: sum(1 for a, b_, _ in taken if (a, b_) == pair))
                needed = sum(1 for x in self.made.connections if (x.src, x.dst) == busiest)
                hint = "plan with fewer trees, or fewer pieces"
                raise refuse(f"channels for gpu {busiest[0]} to gpu {busiest[1]}", limit="channels", needed=max(needed, self.limits.channels + 1),
                             most=self.limits.channels, hint=hint)  # fmt: skip
            for c, (a, b_) in zip(group, pairs, strict=True):
                colour[c] = number
                taken.add((a, b_, number))
            for key, more in crowd.items():
                ends[key] = ends.get(key, 0) + more
        return colour, max(colour.values(), default=0) + 1

    # ---- blocks and steps ----------------------------------------------------------------------------------------------
    def _numbered_blocks(self) -> list[list[Block]]:
        """Per rank its blocks; those that others wait for first, because the executor keeps their number in 8 bits."""
        out: list[list[Block]] = [[] for _ in range(self.p.ranks)]
        for b in self.made.blocks:
            out[b.rank].append(b)
        for rank, mine in enumerate(out):
            mine.sort(key=lambda b: not self.awaited.intersection(b.moves))
            if len(mine) > self.how.blocks:
                hint = "plan with fewer trees, or raise --blocks if the GPU has the multiprocessors"
                raise refuse(f"thread blocks of gpu {rank}", limit="blocks", needed=len(mine), most=self.how.blocks, hint=hint)
            awaited = sum(1 for b in mine if self.awaited.intersection(b.moves))
            if awaited > self.limits.dependable_block + 1:
                most = self.limits.dependable_block + 1
                raise refuse(f"blocks of gpu {rank} that others wait for", limit="depid", needed=awaited, most=most, hint="plan with fewer trees")
        return out

    def _positions(self, b: Block) -> dict[int, int]:
        """Per move of the block its number in the file: a nop for every wait but one comes before it."""
        at, out = 0, {}
        for k in b.moves:
            at += max(0, len(self.made.waits.get(k, [])) - 1)
            out[k] = at
            at += 1
        if at > self.limits.steps:
            data = {"limit": "steps", "needed": at, "most": self.limits.steps}
            raise _TooLong(f"steps of a block of gpu {b.rank}: {at}, the executor has {self.limits.steps}", data=data)
        return out

    def _block(self, number: int, b: Block, colour: dict[int, int], home: dict[int, int], position: dict[int, int]) -> MscclBlock:
        steps: list[MscclStep] = []
        for k in b.moves:
            m = self.made.moves[k]
            waits = [(home[d], position[d]) for d in self.made.waits.get(k, [])]
            for wait in waits[:-1]:
                steps.append(MscclStep(len(steps), "nop", "i", -1, "o", -1, 0, *wait))
            src = m.src if "X" in m.parts else m.dst
            dst = m.dst if "D" in m.parts else src
            if self.brief:  # no digits for what is not read
                src, dst = src if "X" in m.parts else (src[0], 0), dst if "D" in m.parts else (dst[0], 0)
            wait = waits[-1] if waits else (-1, 0 if self.brief else -1)
            steps.append(MscclStep(len(steps), TYPES[m.parts], *src, *dst, m.count, *wait, int(k in self.awaited)))
        connections = self.made.connections
        send = connections[b.send].dst if b.send >= 0 else -1
        recv = connections[b.recv].src if b.recv >= 0 else -1
        channel = colour[b.send if b.send >= 0 else b.recv] if max(b.send, b.recv) >= 0 else 0
        return MscclBlock(number, send, recv, channel, tuple(self._unfused(steps)))

    def _unfused(self, steps: list[MscclStep]) -> list[MscclStep]:
        """Reductions that the executor would fuse although their counts differ, or in too long a run, are kept apart by `hasdep`."""
        run = 1
        for k in range(1, len(steps)):
            a, b = steps[k - 1], steps[k]
            joins = a.type == b.type == "re" and b.depid < 0 and not a.hasdep
            joins = joins and (a.dst_buffer, a.dst_offset, a.src_buffer) == (b.dst_buffer, b.dst_offset, b.src_buffer)
            run = run + 1 if joins else 1
            if joins and (a.chunks != b.chunks or run > self.limits.fused_reductions):
                steps[k - 1], run = a._replace(hasdep=1), 1
        return steps
