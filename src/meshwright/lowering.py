"""Lowers a training layout to a `Program`: one step of training on every rank.

Per rank: a compute lane (segments forward `F` and backward `B` in the schedule's order, tensor-parallel all-reduces as calls, the
optimizer last), four pipeline lanes (receive and send activations, receive and send gradients; each in micro-batch order, which is the
producer's order), and a lane for the sums of gradients.
Weights, gradients and optimizer state, whole or sharded: `lowering_data`.

Every receive waits for the micro-batch two before it to be used, so at most two received micro-batches are ever unused, whatever
the speed of the stages. Gradients of values accumulate in `grad:` buffers that start at zero; one that arrives over the pipeline is
stored first.

Values that are split along the sequence have a buffer of the rank's part (`act:`, `grad:`). Around a split segment, buffers with a slot for every
rank's part, padded to the largest, go through a reduce-scatter (`actsum:` in forward, `gradpart:` in backward) or an all-gather (`actall:`,
`gradall:`, and `actagain:` where backward needs again what forward gathered); local copies join slot and part.

Parameters used by several stages (a tied head) have a gradient buffer of their own, `gradients:<parameter>`, reduced over the data
replicas and then over the stages that hold it. Parameters whose gradients are partial sums on a group of tensor-parallel ranks (shared
key-value heads) have one, `gradients+<tensor indices>`, reduced over that group first. Names of buffers and communicators are part of
the plan format (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from .graph import OpGraph
from .layout_sizes import gradient_buffers, shard_bytes, training_works
from .lowering_data import DataParallel, Position
from .lowering_folded import largest_shards, largest_values, representatives, require_foldable, with_fold
from .lowering_kept import kept_values
from .lowering_sequence import ELEMENT_BYTES, SequenceParts, element_of, per_chunk
from .plan import Segment, Stage, TrainingLayout, ValueInfo
from .plan_shards import local_values, sequence_values
from .program import Program, Role, Unit
from .program_builder import LaneBuilder, ProgramBuilder, StepRef
from .program_calls import Callee

__all__ = ["PlanCollective", "gradient_buffers", "lower_training", "shard_bytes", "training_works"]

RECEIVES_AHEAD = 2


# (purpose: "tensor" | "gradient" | "weights" | "tied", ranks, size in bytes[, operation if it is not all-reduce]) -> the collective to call
PlanCollective = Callable[..., Callee]
# (stages, micro-batches, stage) -> [("F" | "B", micro-batch)]
Order = Callable[[int, int, int], Sequence[tuple[str, int]]]


def lower_training(
    graph: OpGraph, layout: TrainingLayout, order: Order, all_reduce: PlanCollective, *, folded: bool = False
) -> tuple[Program, dict[str, Program]]:
    """The program of one training step, and the programs it calls by content hash. `folded`: one rank of every stage stands for all its others.

    Raises: Unsupported where ranks are not alike (`folded`), or the layout cannot be lowered.
    """
    return _Lowering(graph, layout, order, all_reduce, folded=folded).run()


@dataclass
class _Rank:
    """What is known about one rank while its lanes are built."""

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
    forward_done: dict[int, StepRef] = field(default_factory=dict)
    backward_done: dict[int, StepRef] = field(default_factory=dict)


class _Lowering:
    def __init__(self, graph: OpGraph, layout: TrainingLayout, order: Order, all_reduce: PlanCollective, *, folded: bool = False) -> None:
        self.graph, self.layout, self.order, self.plan_all_reduce, self.folded = graph, layout, order, all_reduce, folded
        if folded:
            require_foldable(layout)
        self.stored = representatives(layout) if folded else list(range(layout.ranks))
        self.b = ProgramBuilder(ranks=layout.ranks, name="training step")
        self.segment = {s.key: s for s in layout.segments}
        self.value: dict[str, ValueInfo] = {v.name: v for v in layout.values}
        self.element_bytes = max([ELEMENT_BYTES, *(p.size_bytes // max(1, _count(p.shape)) for p in graph.parameters)])
        self.keeps = kept_values(graph, layout)
        self.comms: dict[tuple[str, tuple[int, ...]], int] = {}
        self.callees: dict[str, Program] = {}
        self.apart = sequence_values(layout)
        self.summed = {v for s in layout.segments for v in (*s.sum_writes, *s.sum_grads)} - self.apart
        self.parts = SequenceParts(self.b, layout, all_reduce, self.tensor_call_on)
        self.readers: dict[tuple[int, str], list[str]] = {}
        for s in layout.segments:
            for v in s.reads:
                self.readers.setdefault((s.stage, v), []).append(s.key)

    def run(self) -> tuple[Program, dict[str, Program]]:
        lay = self.layout
        ranks = []
        padded = (largest_shards(self.graph, lay), largest_values(lay)) if self.folded else None
        for number in self.stored:
            pipeline, _, tensor = lay.coordinates(number)
            stage = lay.stages[pipeline]
            sizes, values = padded or (shard_bytes(self.graph, lay, tensor), local_values(lay, number))
            facts = (sizes, values, gradient_buffers(self.graph, lay, stage, tensor))
            compute = self.b.lane(number, unit=Unit.COMPUTE, role=Role.COMPUTE)
            recv_act, send_act, recv_grad, send_grad, sync = (self.b.lane(number) for _ in range(5))
            ranks.append(_Rank(number, stage, *facts, compute, recv_act, send_act, recv_grad, send_grad, sync))
        channels = self.channels()
        for r in ranks:
            order = self.order(lay.pipeline, lay.microbatches, r.stage.index)
            keys = {"F": r.stage.segments, "B": r.stage.segments[::-1]}
            r.data = DataParallel(self, r, [Position(phase, key, mb) for phase, mb in order for key in keys[phase]])
            r.data.buffers()
            for phase, mb in order:
                if phase == "F":
                    self.forward(r, mb)
                else:
                    self.backward(r, mb)
            self.pipeline_lanes(r, channels)
            r.data.finish()
            self.lifetimes(r)
        program = self.b.build()
        return with_fold(program, lay) if self.folded else program, self.callees

    # ---- communication -----------------------------------------------------------------------------------------
    def channels(self) -> dict[tuple[int, int], int]:
        lay, found = self.layout, {}
        for number in self.stored:
            p, d, t = lay.coordinates(number)
            if p + 1 < lay.pipeline:
                peer = lay.rank(p + 1, d, t)
                found[number, peer] = self.b.channel(number, peer, depth=RECEIVES_AHEAD)
                found[peer, number] = self.b.channel(peer, number, depth=RECEIVES_AHEAD)
        return found

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

    def keeper(self, stage: Stage, value: str) -> str | None:
        """The stage's segment whose backward is the last to need the value: the first, in forward order, for which autograd keeps its storage."""
        return next((key for key in stage.segments if value in self.keeps[key]), None)

    def sums_directly(self, r: _Rank, value: str) -> bool:
        """The gradient of `value` can be all-reduced in place: one split segment is all that reads it here, and nothing arrives for it."""
        keys = self.readers.get((r.stage.index, value), [])
        return len(keys) == 1 and value in self.segment[keys[0]].sum_grads and value not in r.stage.sends

    # ---- compute -----------------------------------------------------------------------------------------------
    def forward(self, r: _Rank, mb: int) -> None:
        waits = self.arrivals(r.recv_act, r.stage.receives, mb)
        ref: StepRef | None = None
        for key in r.stage.segments:
            s = self.segment[key]
            reads, writes, held = r.data.enter()
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
        r.forward_done[mb] = ref

    def op(self, r: _Rank, s: Segment, name: str, mb: int, reads: list[tuple[int, int, int]], writes: list[tuple[int, int, int]], temp: int) -> int:
        t = self.layout.coordinates(r.number)[2]
        return self.b.op(
            name, graph=s.key, stage=s.stage, microbatch=mb, part=t if s.split else 0, parts=self.layout.tensor if s.split else 1,
            accumulate=name == "B", workspace_bytes=temp, reads=reads, writes=writes,
        )  # fmt: skip

    def tensor_call(self, r: _Rank, buffer: str, value: str) -> StepRef:
        return self.tensor_call_on(r.number, r.compute, r.buffers[buffer], self.value[value].size_bytes)

    def backward(self, r: _Rank, mb: int) -> None:
        stage = r.stage
        waits = self.arrivals(r.recv_grad, self.gradients_in(stage), mb)
        ref: StepRef | None = None
        for key in reversed(stage.segments):
            s = self.segment[key]
            own = (f"act:{v}:{mb}" for x in s.recompute for v in x.reads if v not in s.reads)  # written here, read by what runs again
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
            op = self.op(r, s, "B", mb, reads, writes + gradients, s.backward_workspace_bytes)
            ref = r.compute.compute(op, after=[*waits, *held])
            r.data.leave(ref)
            waits = []
            for buffer in gathered:
                self.b.dies_after(buffer, ref)
            for v in partial:
                ref = self.sum_gradient(r, s, v, mb)
            r.backward_done[mb] = ref
        assert ref is not None

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

    # ---- pipeline lanes ----------------------------------------------------------------------------------------
    def gradients_in(self, stage: Stage) -> tuple[str, ...]:
        return tuple(v for v in stage.sends if self.value[v].differentiable)

    def gradients_out(self, stage: Stage) -> tuple[str, ...]:
        return tuple(v for v in stage.receives if self.value[v].differentiable)

    def arrivals(self, lane: LaneBuilder, messages: Sequence[str], mb: int) -> list[StepRef]:
        """The receives of micro-batch `mb` on `lane`; they are appended later, in micro-batch order, one per message."""
        return [StepRef(lane.number, mb * len(messages) + i) for i in range(len(messages))]

    def pipeline_lanes(self, r: _Rank, channels: Mapping[tuple[int, int], int]) -> None:
        lay = self.layout
        p, d, t = lay.coordinates(r.number)
        before = lay.rank(p - 1, d, t) if p else -1
        behind = lay.rank(p + 1, d, t) if p + 1 < lay.pipeline else -1
        for mb in range(lay.microbatches):
            freed = [r.forward_done[mb - RECEIVES_AHEAD]] if mb >= RECEIVES_AHEAD else []
            for v in r.stage.receives:
                buffer = self.activation(r, "act", v, mb)
                ref = r.recv_act.recv(channels[before, r.number], buffer, 0, self.b.chunks_of(buffer), after=freed)
                r.produced.setdefault((v, mb), ref)
            for v in r.stage.sends:
                buffer = self.activation(r, "act", v, mb)
                sent = r.send_act.send(channels[r.number, behind], buffer, 0, self.b.chunks_of(buffer), after=[r.produced[v, mb]])
                self.b.dies_after(buffer, sent)
            freed = [r.backward_done[mb - RECEIVES_AHEAD]] if mb >= RECEIVES_AHEAD else []
            for v in self.gradients_in(r.stage):
                buffer = self.activation(r, "grad", v, mb)
                r.recv_grad.recv(channels[behind, r.number], buffer, 0, self.b.chunks_of(buffer), after=freed)
            for v in self.gradients_out(r.stage):
                buffer = self.activation(r, "grad", v, mb)
                sent = r.send_grad.send(channels[r.number, before], buffer, 0, self.b.chunks_of(buffer), after=[r.backward_done[mb]])
                self.b.dies_after(buffer, sent)

    # ---- lifetimes ---------------------------------------------------------------------------------------------
    def lifetimes(self, r: _Rank) -> None:
        """Deaths of saved values, activations and gradients; sends and local sums have been added where they were made."""
        position = {key: i for i, key in enumerate(r.stage.segments)}
        steps: dict[tuple[str, str, int], StepRef] = {}
        for i, op in r.compute.ops():
            steps[self.b.op_key(op)] = StepRef(r.compute.number, i)
        for name, buffer in r.buffers.items():
            kind, _, rest = name.partition(":")
            if kind == "saved":
                key, _, mb_text = rest.rpartition(":")
                self.b.dies_after(buffer, steps["B", key, int(mb_text)])
            elif kind in ("act", "grad"):
                value, _, mb_text = rest.rpartition(":")
                mb = int(mb_text)
                readers = sorted(self.readers.get((r.stage.index, value), []), key=position.__getitem__)
                maker = next((k for k in r.stage.segments if value in self.segment[k].writes), None)
                if kind == "act":
                    keeper = self.keeper(r.stage, value)
                    if keeper is not None:
                        self.b.dies_after(buffer, steps["B", keeper, mb])
                    elif readers:
                        self.b.dies_after(buffer, steps["F", readers[-1], mb])
                    elif maker is not None:
                        self.b.dies_after(buffer, steps["F", maker, mb])
                elif maker is not None:
                    self.b.dies_after(buffer, steps["B", maker, mb])


def _count(shape: Sequence[int]) -> int:
    return prod(shape)
