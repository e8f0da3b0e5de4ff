"""The program of one step of an expert layer, for one choice: gather weights, send tokens, compute, send them back; chunks overlap.

Collectives are calls of planned programs, so whatever plans an all-to-all plans this too. Per rank one lane each for the weights, the way to the
experts, the experts, and the way back; chunk i of the experts waits for chunk i to arrive and (all chunks) for the weights. A call is over when all
of it is. So chunks that are messages between pairs and no more (`Exchanges.direct`) are written out: a lane for each pair and way, in which a chunk
is sent when the one before has gone, whatever has come meanwhile, and whoever computes.
Invariant, proved by `check`: every block of tokens comes back to where it was sent from, once; every gathered slice is in its place before the first
expert reads it; gradients of slices are complete before they are added up.
Cost: O(ranks · chunks) steps and calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import Unsupported
from ...graph.graph import Work
from ...program.builder import LaneBuilder, ProgramBuilder, StepRef
from ...program.program import Contract, Program, Unit
from .problem import Choice, Exchange, Exchanges, ExpertShape

__all__ = ["EXPERT", "layer_program", "work_key"]

EXPERT = "expert"  # the op's name: it works block by block, see `program.CHUNKWISE`
Ranges = tuple[tuple[int, int, int], ...]


def work_key(choice: Choice, capacity: int, *, backward: bool) -> str:
    """`<graph>|<name>` of the experts' step, by which it is priced."""
    return f"{_graph(choice, capacity, backward)}|{EXPERT}"


def _graph(choice: Choice, capacity: int, backward: bool) -> str:
    return f"{'backward' if backward else 'forward'} {choice.text} C={capacity}"


def layer_program(
    shape: ExpertShape, choice: Choice, capacity: int, exchanges: Exchanges, *, backward: bool = False
) -> tuple[Program, dict[str, Work]]:
    """(program, work of its ops by key) of the forward or backward pass of one layer; rank i is rank i of the layer.

    In backward, what is sent to the experts are gradients of what came back from them, and gradients of gathered slices are added up instead.
    Raises: UsageError for a choice that the layer does not have, Unsupported for exchanges in pieces.
    """
    shape.require(choice, capacity)
    made = _Layer(shape, choice, capacity, exchanges, backward)
    return made.build(), {work_key(choice, capacity, backward=backward): shape.work(choice, capacity, backward=backward)}


@dataclass
class _Layer:
    shape: ExpertShape
    choice: Choice
    capacity: int
    exchanges: Exchanges
    backward: bool
    contracts: list[Contract] = field(default_factory=list)

    def build(self) -> Program:
        shape, choice = self.shape, self.choice
        graph = _graph(choice, self.capacity, self.backward)
        self.b = b = ProgramBuilder(ranks=shape.ranks, name=f"experts {graph}")
        self.weights: list[list[tuple[int, int, int]]] = [[] for _ in range(shape.ranks)]
        self.weight_lane: list[LaneBuilder] = [b.lane(r) for r in range(shape.ranks)]
        self.ready: list[list[StepRef]] = [[] for _ in range(shape.ranks)]
        sliced = ("slices", shape.group(choice.degree), shape.slice_elements)
        groups = (sliced, ("whole", shape.whole_group(choice.degree), shape.whole_slice_elements))
        for name, size, elements in groups:
            if elements:
                self._gathered(name, size, elements)
        last = self._tokens(graph) if choice.degree else self._stay(graph)
        if self.backward:
            self._scatter(groups, last)
        b.contracts = tuple(self.contracts)
        return b.build()

    def _gathered(self, name: str, size: int, elements: int) -> None:
        """Buffers of the gathered slices (their gradients in backward), and in forward the calls that gather them."""
        b, ranks = self.b, self.shape.ranks
        role = "gradient" if self.backward else "weight"
        made = [b.buffer(r, chunks=size, chunk_bytes=elements * self.shape.element_bytes, role=role, name=name) for r in range(ranks)]
        for r in range(ranks):
            self.weights[r].append((made[r], 0, size))
        if self.backward or size == 1:
            return
        called = self.exchanges.gather if name == "slices" else self.exchanges.whole_gather
        for members, comm in self._groups(name, size):
            self._call_group(comm, members, called, made, self.ready)
            inputs = tuple((made[r], m, 1) for m, r in enumerate(members))
            self.contracts.append(Contract(op="all-gather", inputs=inputs, outputs=tuple((made[r], 0, size) for r in members), ranks=tuple(members)))

    def _scatter(self, groups: tuple[tuple[str, int, int], ...], last: list[StepRef]) -> None:
        for number, (name, size, _) in enumerate([g for g in groups if g[2]]):
            if size == 1:
                continue
            made = [self.weights[r][number][0] for r in range(self.shape.ranks)]
            called = self.exchanges.scatter if name == "slices" else self.exchanges.whole_scatter
            for members, comm in self._groups(name, size):
                self._call_group(comm, members, called, made, None, last)
                inputs = tuple((made[r], 0, size) for r in members)
                outputs = tuple((made[r], m, 1) for m, r in enumerate(members))
                self.contracts.append(Contract(op="reduce-scatter", inputs=inputs, outputs=outputs, ranks=tuple(members)))

    def _groups(self, name: str, size: int) -> list[tuple[list[int], int]]:
        every = [list(range(first, first + size)) for first in range(0, self.shape.ranks, size)]
        return [(members, self.b.comm(f"{name}:{members[0]}", members)) for members in every]

    def _call_group(
        self, comm: int, members: list[int], called: Exchange | None, buffers: list[int], ready: list[list[StepRef]] | None,
        after: list[StepRef] | None = None,
    ) -> None:  # fmt: skip
        """One call of a collective in place by each member."""
        program = _given(called, len(members))
        for m, r in enumerate(members):
            (local,) = _locals(program, m, program.contracts[0].inputs[m][:1])
            ref = self.weight_lane[r].call(
                self.b.call(comm, called.name, [(local, buffers[r], 0)]), after=[after[r]] if after is not None else []  # type: ignore[union-attr]
            )
            if ready is not None:
                ready[r].append(ref)

    def _tokens(self, graph: str) -> list[StepRef]:
        """The chunks: there, through the experts, back. Gives the last expert step of every rank."""
        shape, b, n = self.shape, self.b, self.shape.ranks
        program = _given(self.exchanges.tokens, n) if n > 1 else None
        there, back = (shape.block_elements(self.choice, self.capacity, out=out) * shape.element_bytes for out in (self.backward, not self.backward))
        comms = [b.comm(way, list(range(n))) for way in ("there", "back")] if n > 1 else []
        lanes = [(b.lane(r), b.lane(r, unit=Unit.COMPUTE), b.lane(r)) for r in range(n)]
        pairs = _Pairs(b, n, comms, self.choice.chunks) if self.exchanges.direct and program is not None and self.choice.chunks > 1 else None
        last: list[StepRef] = []
        for i in range(self.choice.chunks):
            sizes = (("tokens", there, "input"), ("arrived", there, "scratch"), ("computed", back, "scratch"), ("returned", back, "output"))
            bufs = [
                [b.buffer(r, chunks=n, chunk_bytes=max(size, shape.element_bytes), role=role, name=f"{name}:{i}") for name, size, role in sizes]
                for r in range(n)
            ]
            done = []
            for r in range(n) if pairs is not None else ():
                pairs.send(0, r, bufs[r][0], [], bufs[r][1])  # type: ignore[union-attr]
            for r in range(n):
                tokens, arrived, computed, returned = bufs[r]
                way, compute, home = lanes[r]
                if pairs is not None:
                    came = pairs.receive(0, r, arrived)
                else:
                    came = [self._exchange(way, comms[0], program, r, tokens, arrived, [])] if program is not None else []
                reads = ((arrived if came else tokens, 0, n), *(self.weights[r] if not self.backward else ()))
                writes = ((computed if came else returned, 0, n), *(self.weights[r] if self.backward else ()))
                op = b.op(EXPERT, graph=graph, microbatch=i, reads=reads, writes=writes)
                ran = compute.compute(op, after=[*came, *(self.ready[r] if i == 0 else [])])
                done.append(ran)
                if pairs is not None:
                    pairs.send(1, r, computed, [ran], returned)
                elif program is not None:
                    self._exchange(home, comms[1], program, r, computed, returned, [ran])
            for r in range(n) if pairs is not None else ():
                pairs.receive(1, r, bufs[r][3])  # type: ignore[union-attr]
            last = done
            ins, outs = (tuple((x[side], 0, n) for x in bufs) for side in (0, 3))
            self.contracts.append(Contract(op="permute", inputs=ins, outputs=outs, peers=tuple(range(n))))
        return last

    def _exchange(self, lane: LaneBuilder, comm: int, program: Program, r: int, source: int, target: int, after: list[StepRef]) -> StepRef:
        contract = program.contracts[0]
        local_in, local_out = _locals(program, r, (contract.inputs[r][0], contract.outputs[r][0]))
        assert self.exchanges.tokens is not None
        return lane.call(self.b.call(comm, self.exchanges.tokens.name, [(local_in, source, 0), (local_out, target, 0)]), after=after)

    def _stay(self, graph: str) -> list[StepRef]:
        """r = 0: all experts come to the tokens."""
        shape, b, done = self.shape, self.b, []
        elements = shape.experts * self.capacity
        sizes = [elements * width * shape.element_bytes for width in (shape.model, shape.output)]
        there, back = reversed(sizes) if self.backward else sizes
        ends = []
        for r in range(shape.ranks):
            tokens = b.buffer(r, chunks=1, chunk_bytes=max(there, shape.element_bytes), role="input", name="tokens:0")
            returned = b.buffer(r, chunks=1, chunk_bytes=max(back, shape.element_bytes), role="output", name="returned:0")
            reads = ((tokens, 0, 1), *(self.weights[r] if not self.backward else ()))
            writes = ((returned, 0, 1), *(self.weights[r] if self.backward else ()))
            op = b.op(EXPERT, graph=graph, microbatch=0, reads=reads, writes=writes)
            done.append(b.lane(r, unit=Unit.COMPUTE).compute(op, after=self.ready[r]))
            ends.append((tokens, returned))
        ins, outs = (tuple((x[side], 0, 1) for x in ends) for side in (0, 1))
        self.contracts.append(Contract(op="permute", inputs=ins, outputs=outs, peers=tuple(range(shape.ranks))))
        return done


class _Pairs:
    """Messages between all pairs of ranks, in lanes of their own for each pair, there (0) and back (1); what a rank keeps is copied."""

    def __init__(self, b: ProgramBuilder, ranks: int, comms: list[int], chunks: int) -> None:
        self.ranks, pairs = ranks, [(way, r, peer) for way in (0, 1) for r in range(ranks) for peer in range(ranks) if peer != r]
        self.channel = {(way, r, peer): b.channel(r, peer, depth=chunks, tag=comms[way]) for way, r, peer in pairs}
        self.sends, self.receives = ({x: b.lane(x[1]) for x in pairs} for _ in range(2))
        self.copies = {(way, r): b.lane(r) for way in (0, 1) for r in range(ranks)}
        self.kept: dict[tuple[int, int], StepRef] = {}

    def send(self, way: int, r: int, source: int, after: list[StepRef], own: int) -> None:
        """Block i of `source` to rank i; a rank's own goes into `own`."""
        self.kept[way, r] = self.copies[way, r].copy((source, r), (own, r), after=after)
        for peer in [(r + k) % self.ranks for k in range(1, self.ranks)]:
            self.sends[way, r, peer].send(self.channel[way, r, peer], source, peer, after=after)

    def receive(self, way: int, r: int, target: int) -> list[StepRef]:
        others = [(r - k) % self.ranks for k in range(1, self.ranks)]
        return [self.kept[way, r], *(self.receives[way, r, peer].recv(self.channel[way, peer, r], target, peer) for peer in others)]


def _given(exchange: Exchange | None, members: int) -> Program:
    """The exchange's program, whose chunks are one per member."""
    if exchange is None:
        raise Unsupported("an exchange that the layer needs is not planned", where="experts", hint="plan it for the layer's groups")
    program: Program = exchange.program
    buffer = program.contracts[0].inputs[0][0]
    if program.ranks != members or int(program.buffers.chunks[buffer]) != members or program.fold is not None or program.lanes.repeat.max() > 1:
        text = f"{program.name} is not one message per pair of {members} ranks"
        raise Unsupported(text, where="experts", hint="a strategy without pieces: direct, hierarchical, ring")
    return program


def _locals(program: Program, member: int, buffers: tuple[int, ...]) -> list[int]:
    """Numbers, among the member's own buffers, of these."""
    return [int((program.buffers.actor[:x] == member).sum()) for x in buffers]
