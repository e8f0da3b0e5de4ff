"""An MSCCL++ plan as a `Program`: blocks as lanes, one-sided transfers as messages to lanes that act for the peer.

What block T of GPU A writes to GPU B, and how it signals B, are messages of one channel in T's order; a lane of B receives them: stores
what was put, and lets the wait for each signal end when the signal has come in, and so everything put before it. A `get` asks such a lane,
which reads and answers. Port channels work behind the block's back: a lane of A does the puts, and a `flush` waits for it. Semaphores and
barriers are waits between blocks. Puts are not held back by the receiver: channels are as deep as they have messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import FormatError, Unsupported
from ..program.builder import LaneBuilder, ProgramBuilder, StepRef
from ..program.program import Contract, Role
from .from_msccl import buffers_of
from .msccl import MscclAlgo, MscclGpu, chunks_of
from .mscclpp import ImportedMscclpp, MscclppBlock, MscclppGpu, MscclppOp, MscclppPlan, Ref, operation_of

__all__ = ["import_mscclpp"]

# Messages that a channel holds unused: the files say nothing of it, so more than any of them sends.
CHANNEL_DEPTH = 1 << 20


def import_mscclpp(plan: MscclppPlan, *, root: int | None = None, chunk_bytes: int = 4) -> ImportedMscclpp:
    """The program of a plan that keeps the executor's rules (`meshwright.check.foreign.mscclpp` says whether it does).

    Raises: Unsupported for other operations and for counters that several blocks share; FormatError for what is out of range.
    """
    op = operation_of(plan)
    n, gpus = len(plan.gpus), {g.id: g for g in plan.gpus}
    loop = gpus[0].output_chunks if op in ("all-gather", "broadcast") else gpus[0].input_chunks
    b = ProgramBuilder(ranks=n, name=plan.name)
    made = _Importer(b, plan, gpus, _Buffers(b, plan, op, loop, -1 if root is None else root, chunk_bytes))
    for gpu in range(n):
        for block in sorted(gpus[gpu].threadblocks, key=lambda x: x.id):
            made.start(gpus[gpu], block)
    for gpu in range(n):
        for block in sorted(gpus[gpu].threadblocks, key=lambda x: x.id):
            made.run(gpus[gpu], block)
    made.resolve()
    b.contract = made.buffers.contract(root)
    rows = [place for lane in made.places for place in lane]
    table = np.array(rows, dtype=np.int32).reshape(-1, 3)
    return ImportedMscclpp(b.build(), *(np.ascontiguousarray(table[:, k]) for k in range(3)))


class _Buffers:
    def __init__(self, b: ProgramBuilder, plan: MscclppPlan, op: str, loop: int, root: int, chunk_bytes: int) -> None:
        self.op, self.plan = op, plan
        self.counts = chunks_of(op, loop, len(plan.gpus))
        self.at: dict[tuple[int, str], int] = {}
        self.chunks: dict[tuple[int, str], int] = {}
        self.home: dict[int, tuple[int, int]] = {}
        like = MscclAlgo(
            name="", protocol="Simple", channels=1, chunks_per_loop=loop, ranks=len(plan.gpus), collective="", in_place=0, out_of_place=0,
            gpus=tuple(MscclGpu(g.id, 0, 0, g.scratch_chunks, ()) for g in plan.gpus),
        )  # fmt: skip
        for r in range(len(plan.gpus)):
            sizes = buffers_of(like, op, root, r, plan.in_place)
            outer, inner = ("o", "i") if op == "all-gather" else ("i", "o")
            shift = r * sizes[inner] if sizes[inner] < sizes[outer] else 0
            for letter in (outer, inner, "s"):
                inside = letter == inner and plan.in_place
                if sizes[letter]:
                    self.at[r, letter] = b.buffer(
                        r, chunks=sizes[letter], chunk_bytes=chunk_bytes, role={"i": "input", "o": "output", "s": "scratch"}[letter],
                        name=f"{letter}:{r}", alias_of=self.at[r, outer] if inside else -1, alias_offset_bytes=shift * chunk_bytes * inside,
                    )  # fmt: skip
                    self.chunks[r, letter] = sizes[letter]
                    home = self.at[r, outer] if inside else self.at[r, letter]
                    self.home[self.at[r, letter]] = (home, shift if inside else 0)

    def address(self, at: tuple[int, int]) -> tuple[int, int]:
        """Where a chunk really lies: buffers of an in-place call lie in each other."""
        home, shift = self.home[at[0]]
        return home, shift + at[1]

    def of(self, gpu: int, letter: str, ref: Ref, where: str) -> tuple[int, int]:
        size = self.chunks.get((gpu, letter), 0)
        if ref.size < 1 or not 0 <= ref.index <= ref.index + ref.size <= size:
            raise FormatError(f"chunks {ref.index}..{ref.index + ref.size - 1} of {letter!r} of gpu {gpu}, which has {size}", where=where)
        return self.at[gpu, letter], ref.index

    def contract(self, root: int | None) -> Contract:
        ranks = range(len(self.plan.gpus))
        inputs = tuple((self.at.get((r, "i"), self.at[r, "o"]), 0, self.counts[0] if (r, "i") in self.at else 0) for r in ranks)
        outputs = tuple((self.at[r, "o"], 0, self.counts[1]) for r in ranks)
        return Contract(op=self.op, inputs=inputs, outputs=outputs, root=root or 0 if self.op == "broadcast" else -1)


@dataclass
class _Counter:
    """Signals or releases that came in, and the waits for them, each in one block's order."""

    given: list[StepRef] = field(default_factory=list)
    taken: list[StepRef] = field(default_factory=list)
    givers: set[tuple[int, int]] = field(default_factory=set)
    takers: set[tuple[int, int]] = field(default_factory=set)
    initial: int = 0
    where: str = ""


class _Importer:
    def __init__(self, b: ProgramBuilder, plan: MscclppPlan, gpus: dict[int, MscclppGpu], buffers: _Buffers) -> None:
        self.b, self.plan, self.gpus, self.buffers = b, plan, gpus, buffers
        self.lanes: dict[tuple[int, int], LaneBuilder] = {}
        self.agents: dict[tuple[int, int, int, str], tuple[int, LaneBuilder, LaneBuilder]] = {}
        self.counters: dict[tuple[object, ...], _Counter] = {}
        self.barriers: dict[tuple[int, int], list[list[tuple[StepRef, StepRef]]]] = {}
        self.late: list[tuple[StepRef, StepRef]] = []
        self.all_lanes: list[LaneBuilder] = []
        self.places: list[list[tuple[int, int, int]]] = []
        self.here = (0, 0, 0)

    # ---- lanes ---------------------------------------------------------------------------------------------------------
    def lane(self, actor: int) -> LaneBuilder:
        lane = self.b.lane(actor, role=Role.BLOCK)
        self.all_lanes.append(lane)
        self.places.append([])
        return lane

    def note(self, ref: StepRef) -> StepRef:
        self.places[ref.lane].append(self.here)
        return ref

    def start(self, gpu: MscclppGpu, block: MscclppBlock) -> None:
        self.lanes[gpu.id, block.id] = self.lane(gpu.id)

    def agent(self, gpu: int, block: int, peer: int, kind: str) -> tuple[int, LaneBuilder, LaneBuilder]:
        """(channel, sending lane, receiving lane) for what a block does to a peer; over a port the sender is a lane of its own."""
        key = (gpu, block, peer, kind)
        if key not in self.agents:
            sender = self.lanes[gpu, block] if kind == "memory" else self.lane(gpu)
            self.agents[key] = (self.b.channel(gpu, peer, depth=CHANNEL_DEPTH), sender, self.lane(peer))
        return self.agents[key]

    # ---- names ---------------------------------------------------------------------------------------------------------
    def where(self) -> str:
        return f"gpu {self.here[0]} tb {self.here[1]} op {self.here[2]}"

    def peer(self, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp, local: int) -> tuple[int, int]:
        """(peer, connection of the GPU) of one of the block's channels."""
        ids = [x for c in block.channels if c.channel_type == op.channel_type for x in c.channel_ids]
        peers = gpu.peers(str(op.channel_type))
        if not 0 <= local < len(ids) or not 0 <= ids[local] < len(peers):
            raise FormatError(f"channel {local} of type {op.channel_type} does not exist", where=self.where())
        return peers[ids[local]], ids[local]

    def twin(self, gpu: int, peer: int, connection: int, kind: str) -> tuple[int, int, str]:
        """The peer's end of a connection: the k-th of one to the other is the k-th of the other."""
        mine = self.gpus[gpu].peers(kind)
        k = mine[:connection].count(peer)
        theirs = [j for j, p in enumerate(self.gpus[peer].peers(kind)) if p == gpu]
        if k >= len(theirs):
            raise FormatError(f"gpu {peer} has no {kind} connection {k} to gpu {gpu}", where=self.where())
        return peer, theirs[k], kind

    def remote(self, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp, ref: Ref) -> tuple[int, int, int]:
        """(rank, buffer, chunk) of a remote reference."""
        ids = [x for refs in block.remote_buffer_refs if refs.access_channel_type == op.channel_type for x in refs.remote_buffer_ids]
        number = -1 if ref.buffer_id is None else ref.buffer_id
        if not 0 <= number < len(ids) or not 0 <= ids[number] < len(gpu.remote_buffers):
            raise FormatError(f"remote buffer {number} does not exist", where=self.where())
        there = gpu.remote_buffers[ids[number]]
        if not 0 <= there.rank < len(self.gpus) or there.rank == gpu.id:
            raise FormatError(f"remote buffer {number} is of gpu {there.rank}", where=self.where())
        return (there.rank, *self.buffers.of(there.rank, there.type, ref, self.where()))

    def local(self, gpu: MscclppGpu, ref: Ref) -> tuple[int, int]:
        if ref.type is None:
            raise FormatError("must be a buffer of the gpu itself", where=self.where())
        return self.buffers.of(gpu.id, ref.type, ref, self.where())

    # ---- operations ----------------------------------------------------------------------------------------------------
    def run(self, gpu: MscclppGpu, block: MscclppBlock) -> None:
        for k, op in enumerate(block.ops):
            self.here = (gpu.id, block.id, k)
            if op.name in ("signal", "rlxsignal", "wait", "rlxwait"):
                for local in op.channel_ids:
                    (self._signal if op.name.endswith("signal") else self._wait)(gpu, block, op, local)
            elif op.name in ("sem_acquire", "sem_release"):
                self._semaphores(gpu, block, op)
            elif op.name == "barrier":
                self._barrier(gpu, block, op)
            elif op.name == "flush":
                self._flush(gpu, block)
            elif op.name != "nop":
                self._data(gpu, block, op)

    def _send(self, gpu: int, block: int, peer: int, kind: str, src: tuple[int, int], dst: tuple[int, int], count: int) -> StepRef:
        """A message (of no chunks: a signal) from a block to a lane that acts for the peer; returns its receipt."""
        channel, sender, receiver = self.agent(gpu, block, peer, kind)
        after = []
        if kind == "port":  # posted by the block, carried out by the proxy
            after = [self.note(self.lanes[gpu, block].nop())]
        if count:
            self.note(sender.send(channel, *src, count, after=after))
            return self.note(receiver.recv(channel, *dst, count))
        self.note(sender.transfer(send=channel, count=0, after=after))
        return self.note(receiver.transfer(recv=channel, count=0))

    def _signal(self, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp, local: int) -> None:
        peer, connection = self.peer(gpu, block, op, local)
        end = self.twin(gpu.id, peer, connection, str(op.channel_type))
        counter = self.counters.setdefault(("signal", *end), _Counter())
        counter.given.append(self._send(gpu.id, block.id, peer, str(op.channel_type), (-1, 0), (-1, 0), 0))
        counter.givers.add((gpu.id, block.id))

    def _wait(self, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp, local: int) -> None:
        _, connection = self.peer(gpu, block, op, local)
        counter = self.counters.setdefault(("signal", gpu.id, connection, str(op.channel_type)), _Counter())
        self._take(counter, gpu.id, block.id)

    def _take(self, counter: _Counter, gpu: int, block: int) -> None:
        counter.taken.append(self.note(self.lanes[gpu, block].nop()))
        counter.takers.add((gpu, block))
        counter.where = counter.where or self.where()

    def _semaphores(self, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp) -> None:
        for number in op.semaphore_ids:
            if not 0 <= number < len(gpu.semaphores):
                raise FormatError(f"semaphore {number} does not exist", where=self.where())
            counter = self.counters.setdefault(("semaphore", gpu.id, number), _Counter(initial=gpu.semaphores[number].init_value))
            if op.name == "sem_acquire":
                self._take(counter, gpu.id, block.id)
            else:
                counter.given.append(self.note(self.lanes[gpu.id, block.id].nop()))
                counter.givers.add((gpu.id, block.id))

    def _barrier(self, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp) -> None:
        """The k-th arrival of every block that uses a barrier; all leave when `num_threadblocks` have come."""
        if op.barrier_id is None or not op.num_threadblocks:
            raise FormatError("a barrier needs barrier_id and num_threadblocks", where=self.where())
        users = {x.id: sum(1 for y in x.ops if y.name == "barrier" and y.barrier_id == op.barrier_id) for x in gpu.threadblocks}
        users = {x: times for x, times in users.items() if times}
        if len(users) != op.num_threadblocks or len(set(users.values())) > 1:
            text = f"barrier {op.barrier_id} is for {op.num_threadblocks} blocks; blocks come to it so often: {users}"
            raise FormatError(text, where=self.where())
        rounds = self.barriers.setdefault((gpu.id, op.barrier_id), [])
        lane = self.lanes[gpu.id, block.id]
        mine = (self.note(lane.nop()), self.note(lane.nop()))
        k = sum(1 for one in rounds for arrived, _ in one if arrived.lane == lane.number)
        while len(rounds) <= k:
            rounds.append([])
        rounds[k].append(mine)

    def _flush(self, gpu: MscclppGpu, block: MscclppBlock) -> None:
        after = []
        for (g, t, _, kind), (_, sender, _) in self.agents.items():
            if (g, t, kind) == (gpu.id, block.id, "port") and len(sender):
                after.append(sender.last)
        self.note(self.lanes[gpu.id, block.id].nop(after=after))

    def _data(self, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp) -> None:
        sizes = {ref.size for ref in (*op.src_buff, *op.dst_buff)}
        if len(sizes) != 1 or not op.src_buff or not op.dst_buff:
            raise FormatError("needs source and destination of one size", where=self.where())
        count = sizes.pop()
        lane = self.lanes[gpu.id, block.id]
        if op.name == "copy":
            for src, dst in zip(op.src_buff, op.dst_buff, strict=False):
                self.note(lane.copy(self.local(gpu, src), self.local(gpu, dst), count))
        elif op.name in ("put", "pws", "pwsf"):
            for src, ref in zip(op.src_buff, op.dst_buff, strict=False):
                peer, *there = self.remote(gpu, block, op, ref)
                self._send(gpu.id, block.id, peer, str(op.channel_type), self.local(gpu, src), (there[0], there[1]), count)
            if op.name != "put":
                for number in op.channel_ids:
                    self._signal(gpu, block, op, number)
            if op.name == "pwsf":
                self._flush(gpu, block)
        elif op.name == "get":
            for ref, own in zip(op.src_buff, op.dst_buff, strict=False):
                self._get(gpu, block, op, ref, None, self.local(gpu, own), count)
        else:
            self._sum(gpu, block, op, count)

    def _get(
        self, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp, ref: Ref, add: tuple[int, int] | None, dst: tuple[int, int], count: int
    ) -> None:
        """Ask the peer's lane, which reads and answers; the answer is stored, or added to `add` and stored."""
        peer, *src = self.remote(gpu, block, op, ref)
        asked = self._send(gpu.id, block.id, peer, "memory", (-1, 0), (-1, 0), 0)
        _, _, acting = self.agent(gpu.id, block.id, peer, "memory")
        key = (peer, -1 - block.id, gpu.id, "answers")
        if key not in self.agents:
            self.agents[key] = (self.b.channel(peer, gpu.id, depth=CHANNEL_DEPTH), acting, self.lanes[gpu.id, block.id])
        back = self.agents[key][0]
        assert asked.lane == acting.number, "the lane that was asked answers"
        self.note(acting.send(back, src[0], src[1], count))
        lane = self.lanes[gpu.id, block.id]
        if add is None:
            self.note(lane.recv(back, *dst, count))
        else:
            self.note(lane.transfer(recv=back, src=add, dst=dst, count=count, add=True, store=True))

    def _sum(self, gpu: MscclppGpu, block: MscclppBlock, op: MscclppOp, count: int) -> None:
        """re, res, rre, rres: the sum of all sources goes to the first destination, and from there to the remote ones."""
        lane = self.lanes[gpu.id, block.id]
        dst = self.local(gpu, op.dst_buff[0])
        own = [self.local(gpu, ref) for ref in op.src_buff if ref.buffer_id is None]
        far = [ref for ref in op.src_buff if ref.buffer_id is not None]
        if not own:
            raise FormatError("sums need a source of the gpu itself", where=self.where())
        same = next((x for x in own if self.buffers.address(x) == self.buffers.address(dst)), None)
        if same is not None:  # element by element all operands are read before the sum is stored
            own.remove(same)
        elif far or len(own) > 1:
            self.note(lane.copy(own.pop(0), dst, count))
        for src in own:
            self.note(lane.copy(src, dst, count, add=True))
        for asked in far:
            self._get(gpu, block, op, asked, dst, dst, count)
        for target in op.dst_buff[1:]:
            if target.buffer_id is None:
                self.note(lane.copy(dst, self.local(gpu, target), count))
            else:
                peer, *there = self.remote(gpu, block, op, target)
                self._send(gpu.id, block.id, peer, str(op.channel_type), dst, (there[0], there[1]), count)

    # ---- waits ---------------------------------------------------------------------------------------------------------
    def resolve(self) -> None:
        """Join waits with what ends them, now that all steps exist."""
        for name, c in self.counters.items():
            if len(c.takers) > 1 or (len(c.givers) > 1 and c.taken):
                text = f"{name[0]} counter {name[1:]} is shared by blocks {sorted(c.givers)} and {sorted(c.takers)}: its order is not known"
                raise Unsupported(text, hint="give every pair of blocks a channel or semaphore of its own")
            if len(c.taken) > len(c.given) + c.initial:
                have = len(c.given) + c.initial
                raise FormatError(f"waits {len(c.taken)} times for a {name[0]} that comes {have} times: it never goes on", where=c.where)
            for wait, giving in zip(c.taken[c.initial :], c.given, strict=False):
                self._edge(wait, giving)
        for rounds in self.barriers.values():
            for one in rounds:
                for _, leaves in one:
                    for arrived, _ in one:
                        if arrived.lane != leaves.lane:
                            self._edge(leaves, arrived)

    def _edge(self, step: StepRef, on: StepRef) -> None:
        self.all_lanes[step.lane].wait(step.position, on)
