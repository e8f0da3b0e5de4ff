"""What lowers a training step knows of it: the layout, its orders, the builder, and every rank's lanes, buffers and steps so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ..errors import Unsupported
from ..graph.graph import OpGraph
from ..plan.batch_statistics import batch_sums
from ..plan.context import exchange_parts, layout_exchanges
from ..plan.copies import COPIED
from ..plan.experts import of_experts
from ..plan.forward_again import group_ends, remade_values, run_again, steps_of_pass
from ..plan.plan import Stage, TrainingLayout, ValueInfo
from ..plan.shards import sequence_values
from ..plan.sizes import gradient_buffers, inputs_read, padded_size, shard_bytes
from ..program.builder import LaneBuilder, ProgramBuilder, StepRef
from ..program.calls import Callee
from ..program.program import Program
from .connections import RankOrder
from .folded import representatives, require_foldable
from .kept_values import kept_values
from .sequence import ELEMENT_BYTES, SequenceParts, element_of, per_chunk

__all__ = ["Order", "PlanCollective", "Position", "RankLanes", "StepLowering", "require_orders"]

# (purpose: "tensor" | "statistics" | "gradient" | "weights" | "tied", ranks, size in bytes[, operation if no all-reduce]) -> the collective
PlanCollective = Callable[..., Callee]
# (stages, micro-batches, stage) -> [("F" | "B", micro-batch)]
Order = Callable[[int, int, int], Sequence[tuple[str, int]]]


def require_orders(layout: TrainingLayout, orders: Sequence[RankOrder]) -> None:
    """Every pipeline index runs every phase of its micro-batches in its stages once, whole or in at most as many parts as it has steps. Raises:
    Unsupported."""
    phases = "FIW" if layout.split_backward else "FB"
    ends = group_ends(layout)
    steps = {(phase, s.index): len(steps_of_pass(s, phase, ends)) for s in layout.stages for phase in phases}
    for p, order in enumerate(orders):
        wanted = {
            (phase, s, m) for s, c in layout.hosted(p) for m in range(layout.microbatches) if layout.copy(m) == c for phase in phases
        }  # fmt: skip
        parts = Counter(order)
        if odd := sorted(parts.keys() ^ wanted) or sorted(action for action, n in parts.items() if n > steps[action[:2]]):
            what = f"{odd[0][1]}{odd[0][0]}{odd[0][2]}" + (f" in {parts[odd[0]]} parts" if odd[0] in wanted and parts[odd[0]] else "")
            raise Unsupported(f"the order of pipeline index {p} does not fit the layout: {what}", hint="plan order and layout together")


class Position(NamedTuple):
    """A compute step of the rank, before it is made."""

    phase: str  # "F", "B", or "I" and "W" of a backward in two parts; "R" for a second forward pass
    segment: str
    microbatch: int


@dataclass
class RankLanes:
    """What is known about one rank while its lanes are built. `stage`: all that it holds."""

    number: int
    stage: Stage
    sizes: dict[str, int]  # of its parameters
    value: dict[str, ValueInfo]  # border values as it holds them
    gradients: dict[str, tuple[str, ...]]
    compute: LaneBuilder
    recv_act: LaneBuilder
    send_act: LaneBuilder
    recv_grad: LaneBuilder
    send_grad: LaneBuilder
    sync: LaneBuilder
    buffers: dict[str, int] = field(default_factory=dict)
    produced: dict[tuple[str, int], StepRef] = field(default_factory=dict)
    forward_done: dict[tuple[int, int], StepRef] = field(default_factory=dict)  # by (stage, micro-batch)
    backward_done: dict[tuple[int, int], StepRef] = field(default_factory=dict)


class StepLowering:
    """Buffers are made when first named, communicators when first called."""

    def __init__(
        self, graph: OpGraph, layout: TrainingLayout, order: Order, all_reduce: PlanCollective, *, folded: bool = False,
        orders: Sequence[RankOrder] = (),
    ) -> None:  # fmt: skip
        self.graph, self.layout, self.plan_all_reduce, self.folded = graph, layout, all_reduce, folded
        if not orders and (layout.placement or layout.split_backward):
            raise Unsupported("a layout with several stages per rank or backward in two parts is lowered by the orders of its schedule")
        self.orders = list(orders) or [
            [(phase, p, mb) for phase, mb in order(layout.pipeline, layout.microbatches, p)] for p in range(layout.pipeline)
        ]
        require_orders(layout, self.orders)
        if any(s.step is not None and (s.step.weights >= 0) != layout.split_backward for s in layout.segments):
            raise Unsupported("plans of step graphs are of whole backwards, or all of ones in two parts", hint="plan schedule and steps together")
        if layout.replica_microbatches and (layout.zero_level > 1 or len(layout.placement) > 1):
            what = "copies of the stages" if len(layout.placement) > 1 else f"sharding level {layout.zero_level}"
            raise Unsupported(f"{what} with unequal numbers of micro-batches: their collectives are one per micro-batch or copy on every replica")
        if folded:
            require_foldable(layout)
        self.stored = representatives(layout) if folded else list(range(layout.ranks))
        self.b = ProgramBuilder(ranks=layout.ranks, name="training step")
        self.segment = {s.key: s for s in layout.segments}
        self.inputs = inputs_read(graph, layout)
        self.value: dict[str, ValueInfo] = {v.name: v for v in layout.values}
        self.element_bytes = max([ELEMENT_BYTES, *(p.size_bytes // max(1, _count(p.shape)) for p in graph.parameters)])
        self.keeps = kept_values(graph, layout)
        self.run_again, self.group_ends, self.remade = run_again(layout), group_ends(layout), remade_values(layout)
        self.comms: dict[tuple[str, tuple[int, ...]], int] = {}
        self.callees: dict[str, Program] = {}
        self.groups: dict[int, tuple[int, ...]] = {}  # rank -> its tensor-parallel group
        self.sums: dict[tuple[int, bool], tuple[str, tuple[int, ...], str]] = {}  # `summing` by rank, and whether it is over replicas
        self.buckets: dict[int, int] = {}  # stage -> bytes of its largest bucket
        self.steps_of: dict[tuple[int, int], tuple[Position, ...]] = {}  # by pipeline index and number of micro-batches
        self.last_of: dict[tuple[int, int, frozenset[str], bool], list[int]] = {}  # of these, `groups.last_steps` of segments, one or each
        self.apart = sequence_values(layout)
        self.summed = {v for s in layout.segments for v in (*s.sum_writes, *s.sum_grads)} - self.apart
        self.over_replicas = {*batch_sums(layout)}
        self.in_blocks = {v: exchange_parts(layout, x) for x in layout_exchanges(layout) if x.kind == "all-to-all" for v in (x.source, x.target)}
        self.in_blocks |= {v: self.value[v].shape[0] for x in layout_exchanges(layout) if x.kind == COPIED for v in (x.source, x.target)}
        self.parts = SequenceParts(self.b, layout, all_reduce, self.tensor_call_on)
        self.readers: dict[tuple[int, str], list[str]] = {}  # (pipeline index, value) -> segments there
        for p in range(layout.pipeline):
            for key in layout.held(p).segments:
                for v in self.segment[key].reads:
                    self.readers.setdefault((p, v), []).append(key)

    def order(self, pipeline: int, microbatches: int) -> list[tuple[str, int, int]]:
        """Of a replica with so many micro-batches, by when actions begin: that of all, without the others. What each waits for is still before it."""
        return [x for x in dict.fromkeys(self.orders[pipeline]) if x[2] < microbatches]

    def positions(self, pipeline: int, data: int) -> tuple[Position, ...]:
        """Compute steps of a rank in order, segment by segment: of an action that stands in its order n times the next one each time, at the last
        time all that are left."""
        count = self.layout.microbatches_of(data)
        if (pipeline, count) not in self.steps_of:
            parts, found = Counter(self.orders[pipeline]), list[Position]()
            left: dict[tuple[str, int, int], list[Position]] = {}
            for action in self.orders[pipeline]:
                phase, k, mb = action
                if mb >= count:
                    continue
                if action not in left:
                    left[action] = [Position(at, key, mb) for at, key in steps_of_pass(self.layout.stages[k], phase, self.group_ends)]
                parts[action] -= 1
                now = 1 if parts[action] else len(left[action])
                found += left[action][:now]
                del left[action][:now]
            self.steps_of[pipeline, count] = tuple(found)
        return self.steps_of[pipeline, count]

    def largest_bucket(self, r: RankLanes) -> int:
        """Bytes of the largest bucket that any tensor part of the stage has: parts of unequal sizes sum some gradients together."""
        index = r.stage.index
        if index not in self.buckets:
            lay, found = self.layout, [0]
            parts = [(r.sizes, r.gradients)] if self.folded else [
                (shard_bytes(self.graph, lay, t), gradient_buffers(self.graph, lay, r.stage, t)) for t in range(lay.tensor)
            ]
            for sizes, gradients in parts:
                of = {name: [sizes[p] for p in params] for name, params in gradients.items() if ":" not in name and not of_experts(name)}
                found += [padded_size(lay, name, x) if lay.whole_parameters else sum(x) for name, x in of.items()]
            self.buckets[index] = max(found)
        return self.buckets[index]

    def comm(self, name: str, ranks: tuple[int, ...]) -> int:
        if (name, ranks) not in self.comms:
            self.comms[name, ranks] = self.b.comm(name, ranks)
        return self.comms[name, ranks]

    def call(self, purpose: str, name: str, ranks: tuple[int, ...], rank: int, buffer: int, size_bytes: int, *operation: str) -> int:
        chosen = self.plan_all_reduce(purpose, ranks, size_bytes, *operation)
        self.callees[chosen.name] = chosen.program
        return self.b.call(self.comm(name, ranks), chosen.name, [(chosen.local[ranks.index(rank)], buffer, 0)])

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        if rank not in self.groups:
            p, d, _ = self.layout.coordinates(rank)
            self.groups[rank] = tuple(self.layout.rank(p, d, t) for t in range(self.layout.tensor))
        return self.groups[rank]

    def summing(self, rank: int, value: str) -> tuple[str, tuple[int, ...], str]:
        """(purpose, ranks, communicator) of the sum that completes a value."""
        key = (rank, value in self.over_replicas)
        if key not in self.sums:
            p, d, t = self.layout.coordinates(rank)
            replicas = tuple(self.layout.rank(p, x, t) for x in range(self.layout.data))
            self.sums[key] = ("statistics", replicas, f"batch:{p}.{t}") if key[1] else ("tensor", self.tensor_group(rank), f"tp:{p}.{d}")
        return self.sums[key]

    def activation(self, r: RankLanes, kind: str, value: str, mb: int, *, segment: str = "") -> int:
        name = f"{kind}:{value}:{segment}:{mb}" if segment else f"{kind}:{value}:{mb}"
        if name not in r.buffers:
            size = r.value[value].size_bytes
            chunks = 1
            if value in self.summed:  # all buffers of a value that is ever summed are cut alike
                chunks = self.plan_all_reduce(*self.summing(r.number, value)[:2], size).chunks
            each = per_chunk(size, chunks, element_of(self.value[value]))
            if value in self.in_blocks:
                chunks, each = self.in_blocks[value], size // self.in_blocks[value]
            if value in self.apart:
                chunks, each = self.parts.slot(r.number, value)
            r.buffers[name] = self.b.buffer(r.number, chunks=chunks, chunk_bytes=each, role="activation", name=name)
        return r.buffers[name]

    def kind(self, segment: str, value: str) -> str:
        """Of the buffer in which a segment that runs a second time, or its backward, finds a value."""
        return "remade" if value in self.remade.get(segment, ()) else "act"

    def tensor_call_on(self, rank: int, lane: LaneBuilder, buffer: int, size: int, *operation: str) -> StepRef:
        p, d, _ = self.layout.coordinates(rank)
        return lane.call(self.call("tensor", f"tp:{p}.{d}", self.tensor_group(rank), rank, buffer, size, *operation))

    def whole(self, r: RankLanes, name: str) -> tuple[int, int, int]:
        buffer = r.buffers[name]
        return (buffer, 0, self.b.chunks_of(buffer))


def _count(shape: Sequence[int]) -> int:
    return prod(shape)
