"""Scheduled transfers to a `Program`.

In-place operations: one buffer per rank, chunk `block · parts + part`. The others: an input and an output buffer, and scratch at ranks that relay,
with slots in the order in which they leave. A rank has one sending lane per first link (a port serves one message at a time, in the schedule's
order) and one receiving lane per logical link. Runs of transfers whose addresses adjoin at both ends become one message. A send waits for what
wrote its chunk; a receive for what wrote or read the place before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....kernels.effort import count_work
from ....program.builder import LaneBuilder, ProgramBuilder, StepRef
from ....program.program import Contract, Program
from ..problem import CollectiveProblem
from ..trees.lower import contract
from .chunks import IN_PLACE, Chunk
from .schedule import Schedule, Transfer
from .topology import LogicalTopology

__all__ = ["Layout", "adjoining", "lower_transfers"]

Place = tuple[int, int, int]  # rank, buffer kind (0 input or in place, 1 output, 2 scratch), chunk
WORK_PER_TRANSFER_S = 2e-5  # counted work (`kernels.effort`) of lowering a transfer, in seconds of a quiet core


@dataclass(frozen=True)
class Layout:
    """Where every chunk lies at every rank; `parts` = chunks per block, `per_buffer` = blocks of a rank's buffer."""

    problem: CollectiveProblem
    chunks: tuple[Chunk, ...]
    instances: int
    parts: int
    per_buffer: int
    slots: dict[tuple[int, int], int]  # (rank, chunk) -> scratch slot
    scratch: tuple[int, ...]  # slots of every rank

    @staticmethod
    def of(
        problem: CollectiveProblem, topology: LogicalTopology, chunks: Sequence[Chunk], per_buffer: int, chunkup: int, instances: int,
        transfers: Sequence[Transfer], order: Sequence[int],
    ) -> Layout:  # fmt: skip
        """Slots for relayed chunks, numbered per rank in the order of (link out, time)."""
        slots: dict[tuple[int, int], int] = {}
        used = [0] * len(problem.ranks)
        place = {t: i for i, t in enumerate(order)}
        if problem.op not in IN_PLACE:
            for t in sorted(range(len(transfers)), key=lambda t: (transfers[t].link, place[t])):
                rank, c = topology.links[transfers[t].link].src, transfers[t].chunk
                chunk = chunks[c // instances]
                if rank != chunk.source and rank not in chunk.dests and (rank, c) not in slots:
                    slots[rank, c] = used[rank]
                    used[rank] += 1
        return Layout(problem, tuple(chunks), instances, chunkup * instances, per_buffer, slots, tuple(used))

    def part(self, c: int) -> int:
        return self.chunks[c // self.instances].part * self.instances + c % self.instances

    def place(self, rank: int, c: int) -> Place:
        chunk, n, op = self.chunks[c // self.instances], len(self.problem.ranks), self.problem.op
        part = self.part(c)
        if op in IN_PLACE:
            return rank, 0, chunk.block * self.parts + part
        if (rank, c) in self.slots:
            return rank, 2, self.slots[rank, c]
        if rank == chunk.source:
            return rank, 0, (chunk.block % n if op == "all-to-all" else 0) * self.parts + part
        return rank, 1, (chunk.block // n if op == "all-to-all" else 0) * self.parts + part


def adjoining(layout: Layout, topology: LogicalTopology, transfers: Sequence[Transfer], a: int, b: int) -> bool:
    """Whether transfer b could join a message that ends with transfer a."""
    x, y = transfers[a], transfers[b]
    if x.link != y.link or x.adds != y.adds:
        return False
    link = topology.links[x.link]
    for rank in (link.src, link.dst):
        (_, kind, at), (_, other, follows) = layout.place(rank, x.chunk), layout.place(rank, y.chunk)
        if kind != other or follows != at + 1:
            return False
    return True


def lower_transfers(
    layout: Layout, topology: LogicalTopology, transfers: Sequence[Transfer], runs: Sequence[Sequence[int]], schedule: Schedule,
    chunk_bytes: int, name: str,
) -> Program:  # fmt: skip
    """`runs`: the messages, each the transfers it joins in order; `schedule` says when each begins."""
    count_work(WORK_PER_TRANSFER_S * len(transfers))
    return _Lowering(layout, topology, transfers, chunk_bytes, name).build(runs, schedule)


class _Lowering:
    def __init__(self, layout: Layout, topology: LogicalTopology, transfers: Sequence[Transfer], chunk_bytes: int, name: str) -> None:
        self.layout, self.topology, self.transfers = layout, topology, transfers
        self.n = len(layout.problem.ranks)
        self.b = ProgramBuilder(ranks=self.n, name=name)
        self.buffers = self._buffers(chunk_bytes)
        self.senders: dict[tuple[int, int], LaneBuilder] = {}
        self.receivers: dict[int, LaneBuilder] = {}
        self.channels: dict[int, int] = {}
        self.writer: dict[Place, StepRef] = {}
        self.readers: dict[Place, list[StepRef]] = {}

    def _buffers(self, chunk_bytes: int) -> dict[tuple[int, int], int]:
        op, parts, n = self.layout.problem.op, self.layout.parts, self.n
        found: dict[tuple[int, int], int] = {}
        if op in IN_PLACE:
            role = "output" if op in ("all-gather", "broadcast", "gather") else "input"
            for r in range(n):
                found[r, 0] = self.b.buffer(r, chunks=self.layout.per_buffer * parts, chunk_bytes=chunk_bytes, role=role, name=f"data:{r}")
            return found
        whole = n * parts if op == "all-to-all" else parts
        for r in range(n):
            found[r, 0] = self.b.buffer(r, chunks=whole, chunk_bytes=chunk_bytes, role="input", name=f"in:{r}")
            found[r, 1] = self.b.buffer(r, chunks=whole, chunk_bytes=chunk_bytes, role="output", name=f"out:{r}")
            if self.layout.scratch[r]:
                found[r, 2] = self.b.buffer(r, chunks=self.layout.scratch[r], chunk_bytes=chunk_bytes, name=f"relay:{r}")
        return found

    def build(self, runs: Sequence[Sequence[int]], schedule: Schedule) -> Program:
        place = {t: i for i, t in enumerate(schedule.order)}
        ordered = sorted(runs, key=lambda run: place[run[0]])
        count: dict[int, int] = {}
        for run in ordered:
            count[self.transfers[run[0]].link] = count.get(self.transfers[run[0]].link, 0) + 1
        for run in ordered:
            self._message(run, count)
        self._own_blocks()
        self.b.contract = self._contract()
        return self.b.build()

    def _message(self, run: Sequence[int], count: dict[int, int]) -> None:
        x = self.transfers[run[0]]
        link = self.topology.links[x.link]
        if x.link not in self.channels:
            names = self.topology.fabric.actor_names
            ends = self.topology.fabric.link_ends
            route = [names[ends[x_][0]] for x_ in link.route[:1]] + [names[ends[k][1]] for k in link.route]
            self.channels[x.link] = self.b.channel(link.src, link.dst, depth=count[x.link], route=route)
            self.receivers[x.link] = self.b.lane(link.dst)
        port = (link.src, link.route[0])
        if port not in self.senders:
            self.senders[port] = self.b.lane(link.src)
        sending, receiving, channel = self.senders[port], self.receivers[x.link], self.channels[x.link]
        sources = [self.layout.place(link.src, self.transfers[t].chunk) for t in run]
        dests = [self.layout.place(link.dst, self.transfers[t].chunk) for t in run]
        after = [self.writer[p] for p in sources if p in self.writer]
        sent = sending.send(channel, self.buffers[sources[0][:2]], sources[0][2], len(run), after=self._others(after, sending))
        for p in sources:
            self.readers.setdefault(p, []).append(sent)
        # A place is written again only after what wrote it and all that read it: chunks of one buffer may pass in any order.
        busy = [self.writer[p] for p in dests if p in self.writer] + [s for p in dests for s in self.readers.get(p, ())]
        take = receiving.recv_add if x.adds else receiving.recv
        got = take(channel, self.buffers[dests[0][:2]], dests[0][2], len(run), after=self._others(busy, receiving))
        for p in dests:
            self.writer[p] = got
            self.readers[p] = []

    def _others(self, steps: Sequence[StepRef], lane: LaneBuilder) -> list[StepRef]:
        """The last step of every other lane: earlier ones of a lane are done before it."""
        last: dict[int, StepRef] = {}
        for s in steps:
            if s.lane != lane.number and (s.lane not in last or last[s.lane].position < s.position):
                last[s.lane] = s
        return list(last.values())

    def _own_blocks(self) -> None:
        """What a rank sends to itself is copied."""
        op, parts = self.layout.problem.op, self.layout.parts
        if op in IN_PLACE:
            return
        for r in range(self.n):
            if op == "all-to-all" or self.layout.problem.peers[r] == r:
                at = r * parts if op == "all-to-all" else 0
                self.b.lane(r).copy((self.buffers[r, 0], at), (self.buffers[r, 1], at), parts)

    def _contract(self) -> Contract:
        problem, parts, n = self.layout.problem, self.layout.parts, self.n
        own = [self.buffers[r, 0] for r in range(n)]
        whole = tuple((b, 0, n * parts) for b in own)
        block = tuple((b, r * parts, parts) for r, b in enumerate(own))
        if problem.op == "scatter":
            root_only = tuple((b, 0, n * parts if r == problem.root else 0) for r, b in enumerate(own))
            return Contract(op="scatter", inputs=root_only, outputs=block, root=problem.root)
        if problem.op == "gather":
            return Contract(op="gather", inputs=block, outputs=whole, root=problem.root)
        if problem.op in IN_PLACE:
            return contract(problem.op, own, self.layout.per_buffer * parts, problem.root)
        count = n * parts if problem.op == "all-to-all" else parts
        out = [0 if problem.op == "permute" and problem.peers[r] < 0 else count for r in range(n)]
        inputs = tuple((b, 0, count) for b in own)
        outputs = tuple((self.buffers[r, 1], 0, out[r]) for r in range(n))
        return Contract(op=problem.op, inputs=inputs, outputs=outputs, peers=problem.peers)
