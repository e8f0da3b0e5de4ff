"""An interpreter of MSCCL's executor, written from its rules and sharing no code with meshwright: XML text in, integers out.

What its parser does: `nop`s give their wait to the next step; consecutive `re` with one destination fuse; a wait chain must end in a step
with a wait. What its kernel does: for every slice of a chunk, all steps of a block; a step's chunks travel `batch` at a time; a wait
compares published flags (slice, step), which are monotone; only steps with hasdep publish. Connections hold `depth` messages; a fused step
waits for data and for room to send, and only then gives the slot it received from back.
Blocks advance in random order, so a missing wait shows as a wrong sum sooner or later.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree

Bad = AssertionError
KINDS = {"s": "XS", "r": "RD", "cpy": "XD", "re": "XAD", "rrc": "RXAD", "rrs": "RXAS", "rcs": "RDS", "rrcs": "RXADS"}


class Hang(Exception):
    """All blocks wait."""


@dataclass
class Move:
    parts: str
    src: tuple[str, int]
    dst: tuple[str, int]
    count: int
    waits: list[tuple[int, int]]
    publishes: bool
    sources: list[int] = field(default_factory=list)  # of a fused reduction


@dataclass
class Block:
    gpu: int
    number: int
    send: int
    recv: int
    chan: int
    moves: list[Move]


def transmissions(steps: list[ElementTree.Element]) -> list[Move]:
    moves: list[Move] = []
    waiting: list[tuple[int, int]] = []
    chain: tuple[str, int, str] | None = None
    reductions = 0
    assert len(steps) <= 64
    for k, e in enumerate(steps):
        a = e.attrib
        assert int(a["s"]) == k
        own = [(int(a["depid"]), int(a["deps"]))] if int(a["depid"]) >= 0 else []
        assert all(b <= 127 for b, _ in own)
        waiting += own
        if a["type"] == "nop":
            continue
        src, dst = (a["srcbuf"], int(a["srcoff"])), (a["dstbuf"], int(a["dstoff"]))
        assert 0 <= int(a["cnt"]) < 72
        if a["type"] == "re" and chain == (*dst, src[0]) and not own:
            moves[-1].sources.append(src[1])
            moves[-1].publishes = a["hasdep"] == "1"
            moves[-1].count = int(a["cnt"])
        else:
            assert not waiting or own, "a chain of waits must end in a step with a wait"
            moves.append(Move(KINDS[a["type"]], src, dst, int(a["cnt"]), waiting, a["hasdep"] == "1", [src[1]]))
            waiting = []
        chain = None
        if a["type"] == "re":
            reductions += 1
            assert len(moves[-1].sources) <= 16
            if a["hasdep"] == "0" and reductions != 16:
                chain = (*dst, src[0])
    return moves


class Machine:
    def __init__(self, text: str, *, in_place: bool, root: int = -1, slices: int = 1, batch: int = 1, depth: int = 2, seed: int = 0) -> None:
        top = ElementTree.fromstring(text)
        a = top.attrib
        self.random = random.Random(seed)
        self.slices, self.batch, self.depth = slices, batch, depth
        self.n, self.loop, self.coll = int(a["ngpus"]), int(a["nchunksperloop"]), a["coll"]
        self.root = int(a.get("root", root))
        assert a["inplace" if in_place else "outofplace"] == "1" and a["proto"] in ("Simple", "LL", "LL128")
        assert 1 <= int(a["nchannels"]) <= 32
        self.blocks: list[Block] = []
        self.scratch: dict[int, int] = {}
        declared = {}
        for g in top.findall("gpu"):
            gpu = int(g.attrib["id"])
            self.scratch[gpu] = int(g.attrib["s_chunks"])
            declared[gpu] = {"i": int(g.attrib["i_chunks"]), "o": int(g.attrib["o_chunks"]), "s": self.scratch[gpu]}
            assert [int(t.attrib["id"]) for t in g.findall("tb")] == list(range(len(g.findall("tb"))))
            assert 1 + self.n + len(g.findall("tb")) + len(g.findall("tb/step")) < 4096
            for t in g.findall("tb"):
                b = t.attrib
                assert 0 <= int(b["chan"]) < int(a["nchannels"])
                self.blocks.append(Block(gpu, int(b["id"]), int(b["send"]), int(b["recv"]), int(b["chan"]), transmissions(t.findall("step"))))
        assert sorted(self.scratch) == list(range(self.n))
        self.declared = declared
        self._memory(in_place)
        self._connections()
        self.flags: dict[tuple[int, int], tuple[int, int]] = {}

    def _memory(self, in_place: bool) -> None:
        """Cells `values[gpu][address]`; buffers start at addresses; a chunk has one cell per slice."""
        n, loop = self.n, self.loop
        ins = {"allgather": loop // n, "scatter": loop * n}.get(self.coll, loop)
        outs = {"reducescatter": loop // n, "gather": loop * n}.get(self.coll, loop)
        self.size = {"i": ins, "o": outs}
        self.values: list[dict[tuple[str, int, int], int]] = [{} for _ in range(n)]
        self.alias: list[dict[str, tuple[str, int]]] = []
        for r in range(n):
            same: dict[str, tuple[str, int]] = {}
            if in_place:
                if self.coll in ("allgather", "gather") and not (self.coll == "gather" and r != self.root):
                    same["i"] = ("o", r * ins)
                elif self.coll in ("reducescatter", "scatter") and not (self.coll == "scatter" and r != self.root):
                    same["o"] = ("i", r * outs)
                elif self.coll not in ("gather", "scatter"):
                    same["o"] = ("i", 0)
            self.alias.append(same)
        draw = random.Random(7)
        self.input = [[[draw.randrange(1, 1 << 40) for _ in range(self.slices)] for _ in range(ins)] for _ in range(n)]
        for r in range(n):
            if self.coll in ("broadcast", "scatter") and r != self.root:
                continue
            for c in range(ins):
                for k in range(self.slices):
                    self.values[r][self.cell(r, ("i", c), k)] = self.input[r][c][k]

    def cell(self, gpu: int, at: tuple[str, int], piece: int) -> tuple[str, int, int]:
        letter, offset = at
        if letter in self.alias[gpu]:
            letter, base = self.alias[gpu][letter]
            offset += base
        return letter, offset, piece

    def _connections(self) -> None:
        self.fifo: dict[tuple[int, int, int], deque[list[int]]] = {}
        senders: set[tuple[int, int, int]] = set()
        receivers: set[tuple[int, int, int]] = set()
        for b in self.blocks:
            for mine, key, peer in ((senders, (b.gpu, b.send, b.chan), b.send), (receivers, (b.recv, b.gpu, b.chan), b.recv)):
                if peer >= 0:
                    assert key not in mine and peer != b.gpu, "one block at each end"
                    mine.add(key)
        assert senders == receivers
        self.fifo = {key: deque() for key in senders}

    def read(self, gpu: int, at: tuple[str, int], piece: int, count: int) -> list[int]:
        assert at[1] >= 0 and at[1] + count <= self.declared[gpu][at[0]], "beyond the buffer"
        return [self.values[gpu].get(self.cell(gpu, (at[0], at[1] + c), piece), 0) for c in range(count)]

    def write(self, gpu: int, at: tuple[str, int], piece: int, data: list[int]) -> None:
        assert at[1] >= 0 and at[1] + len(data) <= self.declared[gpu][at[0]], "beyond the buffer"
        for c, value in enumerate(data):
            self.values[gpu][self.cell(gpu, (at[0], at[1] + c), piece)] = value

    def run_block(self, b: Block) -> Iterator[bool]:
        """Yields whether it got on; False is a poll that failed."""
        for piece in range(self.slices):
            step = 0
            for m in b.moves:
                for block, number in m.waits:
                    while self.flags.get((b.gpu, block), (-1, -1)) < (piece, number):
                        yield False
                step += max(0, len(m.waits) - 1)
                for c in range(0, m.count, self.batch):
                    yield from self.transfer(b, m, c, min(self.batch, m.count - c), piece)
                step += len(m.sources) - 1
                if m.publishes:
                    self.flags[b.gpu, b.number] = (piece, step)
                step += 1
                yield True

    def transfer(self, b: Block, m: Move, c: int, count: int, piece: int) -> Iterator[bool]:
        data = [0] * count
        src, dst = (m.src[0], m.src[1] + c), (m.dst[0], m.dst[1] + c)
        incoming = self.fifo[b.recv, b.gpu, b.chan] if "R" in m.parts else None
        outgoing = self.fifo[b.gpu, b.send, b.chan] if "S" in m.parts else None
        # NCCL's genericOp: data and a free slot first, both; then the work; then both posts, so the credit goes back last.
        while (incoming is not None and not incoming) or (outgoing is not None and len(outgoing) >= self.depth):
            yield False
        if incoming is not None:
            data = incoming[0]
            assert len(data) == count, "both ends must agree on the size"
            yield True
        if m.parts == "XAD":
            total = self.read(b.gpu, dst, piece, count)
            for offset in m.sources:
                yield True
                total = [x + y for x, y in zip(total, self.read(b.gpu, (m.src[0], offset + c), piece, count), strict=True)]
            data = total
        elif "X" in m.parts:
            here = self.read(b.gpu, src, piece, count)
            data = [x + y for x, y in zip(data, here, strict=True)] if "A" in m.parts else here
        if "D" in m.parts:
            yield True
            self.write(b.gpu, dst, piece, data)
        if incoming is not None:
            incoming.popleft()
        if outgoing is not None:
            outgoing.append(data)
            yield True

    def run(self) -> Machine:
        running = [self.run_block(b) for b in self.blocks]
        while running:
            self.random.shuffle(running)
            moved, left = False, []
            for block in running:
                got_on = True
                for _ in range(self.random.randrange(1, 6)):  # some run ahead of others
                    try:
                        got_on = next(block)
                    except StopIteration:
                        moved = True
                        break
                    moved |= got_on
                    if not got_on:
                        left.append(block)
                        break
                else:
                    left.append(block)
            running = left
            if not moved:
                raise Hang
        assert not any(self.fifo.values()), "messages left behind"
        return self

    def wanted(self, r: int, c: int, k: int) -> int | None:
        """What chunk c of rank r's output must be."""
        n, x = self.n, self.input
        own = self.size["o"]
        block = self.loop // n if self.coll in ("allgather", "reducescatter", "alltoall") else self.loop
        if self.coll in ("allreduce", "reduce"):
            return sum(x[q][c][k] for q in range(n)) if self.coll == "allreduce" or r == self.root else None
        if self.coll == "reducescatter":
            return sum(x[q][r * own + c][k] for q in range(n))
        if self.coll == "broadcast":
            return x[self.root][c][k]
        if self.coll == "allgather" or (self.coll == "gather" and r == self.root):
            return x[c // block][c % block][k]
        if self.coll == "scatter":
            return x[self.root][r * block + c][k]
        if self.coll == "alltoall":
            return x[c // block][r * block + c % block][k]
        return None

    def wrong(self) -> list[tuple[int, int, int]]:
        """(gpu, chunk, slice) of outputs that are not what they must be."""
        return [
            (r, c, k)
            for r in range(self.n)
            for c in range(self.size["o"])
            for k in range(self.slices)
            if self.wanted(r, c, k) not in (None, self.values[r].get(self.cell(r, ("o", c), k)))
        ]

    def spoilt_inputs(self) -> list[tuple[int, int]]:
        """Inputs that an out-of-place run has changed."""
        return [
            (r, c)
            for r in range(self.n)
            if not self.alias[r] and not (self.coll in ("broadcast", "scatter") and r != self.root)
            for c in range(self.size["i"])
            if any(self.values[r].get(("i", c, k)) != self.input[r][c][k] for k in range(self.slices))
        ]


def smallest_batch(text: str) -> int:
    """Chunks that travel in one message of the biggest call that the file is for."""
    a = ElementTree.fromstring(text).attrib
    room = {"Simple": 4 << 20 >> 1, "LL": (1 << 16) >> 1, "LL128": (4_915_200 // 8) * 15 // 16}[a["proto"]]
    biggest = int(a["maxBytes"])
    return min(71, max(1, room // -(-biggest // int(a["nchunksperloop"])))) if biggest else 1


def replays(text: str, *, seeds: int = 3, root: int = -1, depth: int = 2) -> None:
    """Runs a file in every mode it is enabled for, with different slices and batches; raises where it is wrong."""
    a = ElementTree.fromstring(text).attrib
    least = smallest_batch(text)
    modes = [mode for mode, name in ((False, "outofplace"), (True, "inplace")) if a[name] == "1"]
    assert modes
    for mode in modes:
        for seed in range(seeds):
            m = Machine(text, in_place=mode, root=root, slices=1 + seed % 2, batch=max(least, (1, 71, 2)[seed % 3]), depth=depth, seed=seed).run()
            assert not m.wrong(), (mode, m.wrong()[:5])
            assert mode or not m.spoilt_inputs()


def hangs(text: str, depth: int, *, root: int = -1) -> bool:
    """Whether a file stops with connections of that depth in some mode, with messages as small as they ever get. Timing does not matter."""
    a = ElementTree.fromstring(text).attrib
    for mode, name in ((False, "outofplace"), (True, "inplace")):
        if a[name] == "1":
            try:
                Machine(text, in_place=mode, root=root, batch=smallest_batch(text), depth=depth).run()
            except Hang:
                return True
    return False
