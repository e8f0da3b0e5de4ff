"""Pairs of a schedule on a training layout: a forward and the backward beside it run as one row of compute steps, in which one computes while what
the other exchanges among experts is on its way (`decide.pipeline.weave`).

Every rank of a pipeline index has the same row, so the members of a group exchange in one order. Times are the planner's view: compute steps by the
cost, sums over tensor ranks as rings, an exchange as long as it takes alone, with those of the groups on the same servers; the step that is judged
comes from the lowered program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...cost import Cost
from ...decide.layout import LayoutCandidate
from ...decide.pipeline import Schedule
from ...decide.pipeline.weave import Piece, weave
from ...fabric.fabric import Fabric
from ...fabric.servers import ring_Bps
from ...graph.graph import OpGraph
from ...plan.context import exchange_parts, layout_exchanges
from ...plan.copies import COPIED
from ...plan.forward_again import group_ends, remade_values, steps_of_pass
from ...plan.plan import ContextExchange, Segment, TrainingLayout
from ...plan.shards import sequence_values
from ...plan.sizes import training_works
from ...program.builder import ProgramBuilder
from .schedules import Orders

__all__ = ["ExchangeTimes", "exchanges_s", "pairs_of", "woven_orders"]

# (devices, messages of each rank, hops, bytes of one) -> seconds
ExchangeTimes = dict[tuple[tuple[str, ...], int, int, int], float]


def pairs_of(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """By device, the places in its order (`actions_of`) of forwards that run beside the backward behind them."""
    found = []
    for order in schedule.orders:
        at, mine = 0, list[int]()
        for a in order:
            if a.beside >= 0 and a.kind == "F":
                mine.append(at)
            at += a.count
        found.append(tuple(mine))
    return tuple(found)


def woven_orders(
    candidate: LayoutCandidate, graph: OpGraph, fabric: Fabric, cost: Cost, placement: Sequence[str], known: ExchangeTimes
) -> Orders:  # fmt: skip
    """The candidate's orders with its pairs as rows of compute steps (`lower_training` says how); as they are where ranks exchange nothing.

    `known`: times of exchanges that were looked at, kept for others.
    """
    layout = candidate.layout
    assert layout is not None
    if not any(candidate.pairs) or not layout_exchanges(layout):
        return candidate.orders
    halves, found = _Halves(layout, graph, fabric, cost, placement, known), []
    for p, (order, places) in enumerate(zip(candidate.orders, candidate.pairs, strict=True)):
        row, begin = list[tuple[str, int, int]](), 0
        for place in places:
            pair = order[place : place + (3 if layout.split_backward else 2)]
            row += order[begin:place]
            row += [pair[turn] for turn in weave(*(halves.chain(p, phase, stage) for phase, stage, _ in pair))]
            begin = place + len(pair)
        found.append((*row, *order[begin:]))
    return tuple(found)


def exchanges_s(layout: TrainingLayout, fabric: Fabric, cost: Cost, placement: Sequence[str], known: ExchangeTimes) -> list[float]:
    """Seconds of all exchanges of a forward, by stage, of a layout with a pipeline index per stage; those of a backward take as long."""
    times, maker = _Exchanges(layout, fabric, cost, placement, known), {v: s.stage for s in layout.segments for v in s.writes}
    found = [0.0] * len(layout.stages)
    for x in layout_exchanges(layout):
        stage = maker.get(x.source, maker.get(times.targets[x.source].source, 0) if x.source in times.targets else 0)
        found[stage] += times.seconds(0, x)
    return found


@dataclass
class _Exchanges:
    layout: TrainingLayout
    fabric: Fabric
    cost: Cost
    placement: Sequence[str]
    known: ExchangeTimes

    def __post_init__(self) -> None:
        exchanges = layout_exchanges(self.layout)
        self.targets, self.sources = {x.target: x for x in exchanges}, {x.source: x for x in exchanges}
        self.value = {v.name: v for v in self.layout.values}

    def seconds(self, pipeline: int, x: ContextExchange) -> float:
        if x.kind == COPIED:  # weights of copies of experts, which nothing in front of them asks for soon
            return 0.0
        parts, v = exchange_parts(self.layout, x), self.value[x.source]
        among = self.layout.tensor if v.split is not None else 1
        block = v.size_bytes if x.kind == "shift" else v.size_bytes // parts
        if not isinstance(x.expected_bytes, tuple):
            return self.alone_s(pipeline, parts, 1 if x.kind == "shift" else parts - 1, block // among)
        return self.alone_s(pipeline, parts, parts - 1, min(block, max(x.expected_bytes)) // among)

    def alone_s(self, pipeline: int, parts: int, hops: int, size_bytes: int) -> float:
        """Every member of the groups sends so many messages of a size, to the members behind it in turn. Of a pipeline index, the first group and
        those with ranks on its servers."""
        from ...simulate import simulate_program

        lay, server = self.layout, {d.name: d.group or d.name for d in self.fabric.devices}
        groups = [
            [self.placement[lay.rank(pipeline, d + i, t)] for i in range(parts)] for d in range(0, lay.data, parts) for t in range(lay.tensor)
        ]
        near = {server[name] for name in groups[0]}
        devices = tuple(name for group in groups if near & {server[n] for n in group} for name in group)
        key = devices, parts, hops, size_bytes
        if key not in self.known:
            b = ProgramBuilder(ranks=len(devices), name="exchange")
            ends = [(g + i, g + (i + k) % parts) for g in range(0, len(devices), parts) for i in range(parts) for k in range(1, hops + 1)]
            channels = {pair: b.channel(*pair) for pair in ends}
            for rank in range(len(devices)):
                first, me = rank - rank % parts, rank % parts
                own = b.buffer(rank, chunks=1, chunk_bytes=size_bytes, role="activation")
                came = b.buffer(rank, chunks=parts, chunk_bytes=size_bytes, role="activation")
                send, receive = b.lane(rank), b.lane(rank)
                for k in range(1, hops + 1):
                    send.send(channels[rank, first + (me + k) % parts], own, 0)
                    receive.recv(channels[first + (me - k) % parts, rank], came, k)
            self.known[key] = simulate_program(b.build(), self.fabric, devices, self.cost, record=False, memory=False).makespan_s
        return self.known[key]


@dataclass
class _Halves:
    """Of a layout's passes: the compute steps with their seconds and what they exchange."""

    layout: TrainingLayout
    graph: OpGraph
    fabric: Fabric
    cost: Cost
    placement: Sequence[str]
    known: ExchangeTimes
    made: dict[tuple[int, str, int], tuple[Piece, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lay = self.layout
        self.exchanges = _Exchanges(lay, self.fabric, self.cost, self.placement, self.known)
        self.works, self.segment = training_works(self.graph, lay), {s.key: s for s in lay.segments}
        self.ends, self.remade, self.apart = group_ends(lay), remade_values(lay), sequence_values(lay)
        number = {d.name: i for i, d in enumerate(self.fabric.devices)}
        self.members = [[number[self.placement[lay.rank(p, 0, t)]] for t in range(lay.tensor)] for p in range(lay.pipeline)]

    def chain(self, pipeline: int, phase: str, stage: int) -> tuple[Piece, ...]:
        key = pipeline, phase, stage
        if key not in self.made:
            steps = steps_of_pass(self.layout.stages[stage], phase, self.ends)
            if phase == "W":
                before = {k: i + 1 for i, (at, k) in enumerate(steps_of_pass(self.layout.stages[stage], "I", self.ends)) if at == "I"}
                self.made[key] = tuple(Piece(self.compute_s(pipeline, "W", k), after=before[k]) for _, k in steps)
            else:
                self.made[key] = tuple(self.piece(pipeline, at, self.segment[k]) for at, k in steps)
        return self.made[key]

    def compute_s(self, pipeline: int, phase: str, key: str) -> float:
        device, name = self.fabric.device(self.placement[self.layout.rank(pipeline, 0, 0)]), f"{key}|{phase}"
        return self.cost.price(name, self.works.get(name), device).time_s

    def piece(self, pipeline: int, phase: str, s: Segment) -> Piece:
        targets, sources = self.exchanges.targets, self.exchanges.sources
        if phase in ("F", "R"):
            again = self.remade[s.key] if phase == "R" else None
            waits = any(v in targets and (again is None or v in again) for v in s.reads)
            sent = list[ContextExchange]()
            for value in s.writes:
                while (x := sources.get(value)) is not None and (again is None or x.target in again):
                    sent.append(x)
                    value = x.target
        else:  # gradients go the other way
            waits = any(v in sources for v in s.writes)
            sent = [targets[v] for v in s.reads if v in targets and self.exchanges.value[v].differentiable]
        seconds = self.compute_s(pipeline, phase, s.key) + self.sums_s(pipeline, phase, s)
        return Piece(seconds, sum(self.exchanges.seconds(pipeline, x) for x in sent), waits)

    def sums_s(self, pipeline: int, phase: str, s: Segment) -> float:
        """Gathers, scatters and sums over tensor ranks, which stand in the row of compute steps."""
        n, size = self.layout.tensor, {v: self.exchanges.value[v].size_bytes for v in (*s.reads, *s.writes)}
        if n == 1 or not s.split:
            return 0.0
        halves = sum(size[v] for v in s.gathers) + sum(size[v] * (1 if v in self.apart else 2) for v in s.sum_writes)
        if phase not in ("F", "R"):  # what was gathered comes again, and its gradients are scattered
            halves = sum(2 * size[v] for v in s.gathers) + sum(size[v] for v in s.sum_writes if v in self.apart)
            halves += sum(2 * size[v] for v in s.sum_grads if v not in s.gathers)
        return halves * (n - 1) / n / ring_Bps(self.fabric, self.members[pipeline], n)
