"""Lowers a training layout to a `Program`: one step of training on every rank.

Per rank: a compute lane (segments forward `F` and backward `B` in the schedule's order, tensor-parallel all-reduces as calls, the
optimizer last), pipeline lanes (receive and send activations, receive and send gradients: `lowering_pipeline`), and a lane for the sums of
gradients. Weights, gradients and optimizer state, whole or sharded: `lowering_data`.
Where backward is split, `I` gives the gradients of what a segment reads, and `W` later adds those of its parameters, from what forward kept
(`saved:`, `act:`) and the gradients that `I` left (`left:`). Gradients of values accumulate in `grad:` buffers that start at zero.

Values that are split along the sequence have a buffer of the rank's part (`act:`, `grad:`). Around a split segment, buffers with a slot for every
rank's part, padded to the largest, go through a reduce-scatter (`actsum:` in forward, `gradpart:` in backward) or an all-gather (`actall:`,
`gradall:`, and `actagain:` where backward needs again what forward gathered); local copies join slot and part.

Parameters used by several stages (a tied head) have a gradient buffer of their own, `gradients:<parameter>`, reduced over the data
replicas and then over the stages that hold it. Parameters whose gradients are partial sums on a group of tensor-parallel ranks (shared
key-value heads) have one, `gradients+<tensor indices>`, reduced over that group first. Names of buffers and communicators are part of
the plan format (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from .errors import Unsupported
from .graph import OpGraph
from .layout_sizes import gradient_buffers, inputs_read, shard_bytes, training_works
from .lowering_data import DataParallel, Position
from .lowering_folded import largest_shards, largest_values, representatives, require_foldable, with_fold
from .lowering_kept import kept_values
from .lowering_pipeline import PipelineMessages, RankOrder, require_orders
from .lowering_sequence import ELEMENT_BYTES, SequenceParts, element_of, per_chunk
from .plan import Segment, Stage, TrainingLayout, ValueInfo
from .plan_shards import local_values, sequence_values
from .program import Program, Role, Unit
from .program_builder import LaneBuilder, ProgramBuilder, StepRef
from .program_calls import Callee

__all__ = ["PlanCollective", "gradient_buffers", "lower_training", "shard_bytes", "training_works"]


# (purpose: "tensor" | "gradient" | "weights" | "tied", ranks, size in bytes[, operation if it is not all-reduce]) -> the collective to call
PlanCollective = Callable[..., Callee]
# (stages, micro-batches, stage) -> [("F" | "B", micro-batch)]
Order = Callable[[int, int, int], Sequence[tuple[str, int]]]


def lower_training(
    graph: OpGraph, layout: TrainingLayout, order: Order, all_reduce: PlanCollective, *, folded: bool = False, orders: Sequence[RankOrder] = ()
) -> tuple[Program, dict[str, Program]]:
    """The program of one training step, and the programs it calls by content hash. `folded`: one rank of every stage stands for all its others.

    `orders[p]`: (phase, stage, micro-batch) of every compute step of pipeline index p, in order, phases being F and B, or F, I and W; without it
    stage i is on pipeline index i and runs `order`. Raises: Unsupported where ranks are not alike (`folded`), orders do not fit, or the layout
    cannot be lowered.
    """
    return _Lowering(graph, layout, order, all_reduce, folded=folded, orders=orders).run()


@dataclass
class _Rank:
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
    data: DataParallel = field(init=False)
    buffers: dict[str, int] = field(default_factory=dict)
    produced: dict[tuple[str, int], StepRef] = field(default_factory=dict)
    forward_done: dict[tuple[int, int], StepRef] = field(default_factory=dict)  # by (stage, micro-batch)
    backward_done: dict[tuple[int, int], StepRef] = field(default_factory=dict)


class _Lowering:
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
        self.comms: dict[tuple[str, tuple[int, ...]], int] = {}
        self.callees: dict[str, Program] = {}
        self.buckets: dict[int, int] = {}  # stage -> bytes of its largest bucket
        self.steps_of: dict[tuple[int, int], tuple[Position, ...]] = {}  # by pipeline index and number of micro-batches
        self.apart = sequence_values(layout)
        self.summed = {v for s in layout.segments for v in (*s.sum_writes, *s.sum_grads)} - self.apart
        self.parts = SequenceParts(self.b, layout, all_reduce, self.tensor_call_on)
        self.readers: dict[tuple[int, str], list[str]] = {}  # (pipeline index, value) -> segments there
        for p in range(layout.pipeline):
            for key in layout.held(p).segments:
                for v in self.segment[key].reads:
                    self.readers.setdefault((p, v), []).append(key)

    def run(self) -> tuple[Program, dict[str, Program]]:
        lay = self.layout
        ranks = []
        padded = (largest_shards(self.graph, lay), largest_values(lay)) if self.folded else None
        for number in self.stored:
            pipeline, _, tensor = lay.coordinates(number)
            stage = lay.held(pipeline)
            sizes, values = padded or (shard_bytes(self.graph, lay, tensor), local_values(lay, number))
            facts = (sizes, values, gradient_buffers(self.graph, lay, stage, tensor))
            compute = self.b.lane(number, unit=Unit.COMPUTE, role=Role.COMPUTE)
            recv_act, send_act, recv_grad, send_grad, sync = (self.b.lane(number) for _ in range(5))
            ranks.append(_Rank(number, stage, *facts, compute, recv_act, send_act, recv_grad, send_grad, sync))
        alike: dict[int, list[_Rank]] = {}  # replicas with as many micro-batches
        for r in ranks:
            alike.setdefault(lay.microbatches_of(lay.coordinates(r.number)[1]), []).append(r)
        self.messages = {n: PipelineMessages(self, some, [self.order(p, n) for p in range(lay.pipeline)]) for n, some in alike.items()}
        for r in ranks:
            p, d, _ = lay.coordinates(r.number)
            order = self.order(p, lay.microbatches_of(d))
            r.data = DataParallel(self, r, self.positions(p, d))
            r.data.buffers()
            run = {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weights}
            for phase, k, mb in order:
                run[phase](r, lay.stages[k], mb)
            self.messages_of(r).emit(r)
            r.data.finish()
            self.lifetimes(r)
        program = self.b.build()
        return with_fold(program, lay) if self.folded else program, self.callees

    def order(self, pipeline: int, microbatches: int) -> list[tuple[str, int, int]]:
        """Of a replica with so many micro-batches: that of all, without the others. What each waits for is still before it."""
        return [x for x in self.orders[pipeline] if x[2] < microbatches]

    def messages_of(self, r: _Rank) -> PipelineMessages:
        return self.messages[self.layout.microbatches_of(self.layout.coordinates(r.number)[1])]

    def positions(self, pipeline: int, data: int) -> tuple[Position, ...]:
        """Compute steps of a rank in order, segment by segment."""
        count = self.layout.microbatches_of(data)
        if (pipeline, count) not in self.steps_of:
            found = []
            for phase, k, mb in self.order(pipeline, count):
                keys = self.layout.stages[k].segments
                found += [Position(phase, key, mb) for key in (keys if phase == "F" else keys[::-1])]
            self.steps_of[pipeline, count] = tuple(found)
        return self.steps_of[pipeline, count]

    def largest_bucket(self, r: _Rank) -> int:
        """Bytes of the largest bucket that any tensor part of the stage has: parts of unequal sizes sum some gradients together."""
        index = r.stage.index
        if index not in self.buckets:
            lay, found = self.layout, [0]
            parts = [(r.sizes, r.gradients)] if self.folded else [
                (shard_bytes(self.graph, lay, t), gradient_buffers(self.graph, lay, r.stage, t)) for t in range(lay.tensor)
            ]
            for sizes, gradients in parts:
                found += [sum(sizes[p] for p in params) for name, params in gradients.items() if ":" not in name]
            self.buckets[index] = max(found)
        return self.buckets[index]

    # ---- communication -----------------------------------------------------------------------------------------
    def comm(self, name: str, ranks: tuple[int, ...]) -> int:
        if (name, ranks) not in self.comms:
            self.comms[name, ranks] = self.b.comm(name, ranks)
        return self.comms[name, ranks]

    def call(self, purpose: str, name: str, ranks: tuple[int, ...], rank: int, buffer: int, size_bytes: int, *operation: str) -> int:
        chosen = self.plan_all_reduce(purpose, ranks, size_bytes, *operation)
        self.callees[chosen.name] = chosen.program
        return self.b.call(self.comm(name, ranks), chosen.name, [(chosen.local[ranks.index(rank)], buffer, 0)])

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        p, d, _ = self.layout.coordinates(rank)
        return tuple(self.layout.rank(p, d, t) for t in range(self.layout.tensor))

    # ---- buffers -----------------------------------------------------------------------------------------------
    def batch(self, r: _Rank, mb: int) -> tuple[int, int, int]:
        """What the rank reads of a micro-batch's example inputs: fetched before the step begins, held until the next."""
        name = f"inputs:{mb}"
        if name not in r.buffers:
            lay = self.layout
            stages = [k for k, copy in lay.hosted(lay.coordinates(r.number)[0]) if copy == lay.copy(mb)]
            read = {s: size for k in stages for key in lay.stages[k].segments for s, size in self.inputs[key].items()}
            r.buffers[name] = self.b.buffer(r.number, chunks=1, chunk_bytes=sum(read.values()), role="input", persistent=True, name=name)
        return self.whole(r, name)

    def activation(self, r: _Rank, kind: str, value: str, mb: int, *, segment: str = "") -> int:
        name = f"{kind}:{value}:{segment}:{mb}" if segment else f"{kind}:{value}:{mb}"
        if name not in r.buffers:
            size = r.value[value].size_bytes
            chunks = 1
            if value in self.summed:  # all buffers of a value that is ever summed are cut alike
                chunks = self.plan_all_reduce("tensor", self.tensor_group(r.number), size).chunks
            each = per_chunk(size, chunks, element_of(self.value[value]))
            if value in self.apart:
                chunks, each = self.parts.slot(r.number, value)
            r.buffers[name] = self.b.buffer(r.number, chunks=chunks, chunk_bytes=each, role="activation", name=name)
        return r.buffers[name]

    def tensor_call_on(self, rank: int, lane: LaneBuilder, buffer: int, size: int, *operation: str) -> StepRef:
        p, d, _ = self.layout.coordinates(rank)
        return lane.call(self.call("tensor", f"tp:{p}.{d}", self.tensor_group(rank), rank, buffer, size, *operation))

    def whole(self, r: _Rank, name: str) -> tuple[int, int, int]:
        buffer = r.buffers[name]
        return (buffer, 0, self.b.chunks_of(buffer))

    def sums_directly(self, r: _Rank, value: str) -> bool:
        """The gradient of `value` can be all-reduced in place: one split segment is all that reads it here, and nothing arrives for it."""
        keys = self.readers.get((self.layout.coordinates(r.number)[0], value), [])
        return len(keys) == 1 and value in self.segment[keys[0]].sum_grads and value not in r.stage.sends

    # ---- compute -----------------------------------------------------------------------------------------------
    def forward(self, r: _Rank, stage: Stage, mb: int) -> None:
        waits = self.messages_of(r).arrivals(r, "F", stage.index, mb)
        ref: StepRef | None = None
        for key in stage.segments:
            s = self.segment[key]
            reads, writes, held = r.data.enter()
            reads += [self.batch(r, mb)] if self.inputs[key] else []
            gathered = []
            for v in s.reads:
                part = self.activation(r, "act", v, mb)
                if v in s.gathers:
                    gathered.append(self.parts.buffer(r.number, r.buffers, "actall", v, mb, segment=key))
                    self.parts.gather(r.number, r.compute, part, gathered[-1], v, waits)
                    waits = []
                reads.append(self.whole(r, f"actall:{v}:{key}:{mb}" if v in s.gathers else f"act:{v}:{mb}"))
            for v in s.writes:
                self.activation(r, "act", v, mb)
                if scattered := v in s.sum_writes and v in self.apart:
                    self.parts.buffer(r.number, r.buffers, "actsum", v, mb)
                writes.append(self.whole(r, f"actsum:{v}:{mb}" if scattered else f"act:{v}:{mb}"))
            saved = f"saved:{key}:{mb}"
            r.buffers[saved] = self.b.buffer(r.number, chunks=1, chunk_bytes=s.saved_bytes, role="activation", name=saved)
            writes.append(self.whole(r, saved))
            op = self.op(r, s, "F", mb, reads, writes, s.forward_workspace_bytes)
            ref = r.compute.compute(op, after=[*waits, *held])
            r.data.leave(ref)
            waits = []
            for buffer in gathered:
                self.b.dies_after(buffer, ref)
            for v in s.sum_writes:
                if v in self.apart:
                    ref = self.parts.scatter(r.number, r.compute, r.buffers[f"actsum:{v}:{mb}"], r.buffers[f"act:{v}:{mb}"], v, add=False)
                else:
                    ref = self.tensor_call(r, f"act:{v}:{mb}", v)
            for v in s.writes:
                r.produced[v, mb] = ref
        assert ref is not None
        r.forward_done[stage.index, mb] = ref

    def op(self, r: _Rank, s: Segment, name: str, mb: int, reads: list[tuple[int, int, int]], writes: list[tuple[int, int, int]], temp: int) -> int:
        t = self.layout.coordinates(r.number)[2]
        return self.b.op(
            name, graph=s.key, stage=s.stage, microbatch=mb, part=t if s.split else 0, parts=self.layout.tensor if s.split else 1,
            accumulate=name != "F", copy=self.layout.copy(mb), workspace_bytes=temp, reads=reads, writes=writes,
        )  # fmt: skip

    def tensor_call(self, r: _Rank, buffer: str, value: str) -> StepRef:
        return self.tensor_call_on(r.number, r.compute, r.buffers[buffer], self.value[value].size_bytes)

    def backward(self, r: _Rank, stage: Stage, mb: int) -> None:
        """`B`, or `I` where backward is split."""
        name = "I" if self.layout.split_backward else "B"
        waits = self.messages_of(r).arrivals(r, "B", stage.index, mb)
        ref: StepRef | None = None
        for key in reversed(stage.segments):
            s = self.segment[key]
            read_again = [v for x in s.recompute for v in x.reads] + [*(s.step.kept if s.step is not None else ())]
            own = (f"act:{v}:{mb}" for v in read_again if v not in s.reads)  # written here, read by what runs again
            reads, gradients, held = r.data.enter()
            reads += [self.whole(r, name) for name in dict.fromkeys((f"saved:{key}:{mb}", *own))]
            gathered = self.parts.before_backward(r.number, r.compute, r.buffers, s, mb, self.keeps[key], waits)
            waits = [] if gathered else waits
            for v in s.writes:
                if self.value[v].differentiable and v not in self.graph.outputs:
                    self.activation(r, "grad", v, mb)
                    reads.append(self.whole(r, f"gradall:{v}:{mb}" if v in s.sum_writes and v in self.apart else f"grad:{v}:{mb}"))
            writes, partial = [], []
            for v in s.reads:
                if v in self.keeps[key]:
                    reads.append(self.whole(r, f"actagain:{v}:{key}:{mb}" if v in s.gathers else f"act:{v}:{mb}"))
                if not self.value[v].differentiable:
                    continue
                if v in s.gathers:
                    self.activation(r, "grad", v, mb)
                    self.parts.buffer(r.number, r.buffers, "gradpart", v, mb, segment=key)
                    writes.append(self.whole(r, f"gradpart:{v}:{key}:{mb}"))
                    partial.append(v)
                    continue
                if v in s.sum_grads and not self.sums_directly(r, v):
                    self.activation(r, "gradpart", v, mb, segment=key)
                    writes.append(self.whole(r, f"gradpart:{v}:{key}:{mb}"))
                else:
                    self.activation(r, "grad", v, mb)
                    writes.append(self.whole(r, f"grad:{v}:{mb}"))
                if v in s.sum_grads:
                    partial.append(v)
            if name == "I":
                left = f"left:{key}:{mb}"
                r.buffers[left] = self.b.buffer(r.number, chunks=1, chunk_bytes=s.left_bytes, role="activation", name=left)
                writes.append(self.whole(r, left))
            op = self.op(r, s, name, mb, reads, writes + gradients, s.backward_workspace_bytes)
            ref = r.compute.compute(op, after=[*waits, *held])
            r.data.leave(ref)
            waits = []
            for buffer in gathered:
                self.b.dies_after(buffer, ref)
            for v in partial:
                ref = self.sum_gradient(r, s, v, mb)
        assert ref is not None
        r.backward_done[stage.index, mb] = ref

    def weights(self, r: _Rank, stage: Stage, mb: int) -> None:
        """`W`: gradients of parameters, from what forward kept and `I` left."""
        for key in reversed(stage.segments):
            s = self.segment[key]
            reads, gradients, held = r.data.enter()
            reads += [self.whole(r, f"saved:{key}:{mb}"), self.whole(r, f"left:{key}:{mb}")]
            gathered = {v: r.buffers[f"actagain:{v}:{key}:{mb}"] for v in s.gathers if v in self.keeps[key]}
            reads += [self.whole(r, f"actagain:{v}:{key}:{mb}" if v in gathered else f"act:{v}:{mb}") for v in s.reads if v in self.keeps[key]]
            op = self.op(r, s, "W", mb, reads, gradients, s.backward_workspace_bytes)
            ref = r.compute.compute(op, after=held)
            for buffer in gathered.values():
                self.b.dies_after(buffer, ref)
            r.data.leave(ref)

    def sum_gradient(self, r: _Rank, s: Segment, value: str, mb: int) -> StepRef:
        if value in s.gathers:
            parts, part = r.buffers[f"gradpart:{value}:{s.key}:{mb}"], r.buffers[f"grad:{value}:{mb}"]
            return self.parts.scatter(r.number, r.compute, parts, part, value, add=True, summed=value in s.sum_grads)
        if self.sums_directly(r, value):
            return self.tensor_call(r, f"grad:{value}:{mb}", value)
        self.tensor_call(r, f"gradpart:{value}:{s.key}:{mb}", value)
        part = r.buffers[f"gradpart:{value}:{s.key}:{mb}"]
        whole = self.activation(r, "grad", value, mb)
        ref = r.compute.copy((part, 0), (whole, 0), self.b.chunks_of(part), add=True)
        self.b.dies_after(part, ref)
        return ref

    # ---- lifetimes ---------------------------------------------------------------------------------------------
    def lifetimes(self, r: _Rank) -> None:
        """Deaths of saved values, activations and gradients; sends and local sums have been added where they were made."""
        steps: dict[tuple[str, str, int], StepRef] = {}
        for i, op in r.compute.ops():
            steps[self.b.op_key(op)] = StepRef(r.compute.number, i)
        end, back = ("W", "I") if self.layout.split_backward else ("B", "B")
        for name, buffer in r.buffers.items():
            kind, _, rest = name.partition(":")
            value, _, number = rest.rpartition(":")
            if kind in ("saved", "left"):
                self.b.dies_after(buffer, steps[end, value, int(number)])
            elif kind in ("act", "grad"):
                mb = int(number)
                maker = next((k for k in r.stage.segments if value in self.segment[k].writes), None)
                if kind == "grad":
                    last = [steps[back, maker, mb]] if maker is not None and (back, maker, mb) in steps else []
                else:
                    readers = self.readers.get((self.layout.coordinates(r.number)[0], value), [])
                    keepers = [k for k in r.stage.segments if value in self.keeps[k]]
                    last = [steps[end, k, mb] for k in keepers if (end, k, mb) in steps]
                    last = last or [steps["F", k, mb] for k in (*readers, maker) if k is not None and ("F", k, mb) in steps]
                if last:
                    self.b.dies_after(buffer, max(last))


def _count(shape: Sequence[int]) -> int:
    return prod(shape)
