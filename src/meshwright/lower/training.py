"""Lowers a training layout to a `Program`: one step of training on every rank.

Per rank: a compute lane (segments forward `F` and backward `B` in the schedule's order, tensor-parallel all-reduces as calls, the
optimizer last), pipeline lanes (receive and send activations, receive and send gradients: `lower.pipeline`), and a lane for the sums of
gradients. Weights, gradients and optimizer state, whole or sharded: `lower.data`.
Where backward is split, `I` gives the gradients of what a segment reads, and `W` later adds those of its parameters, from what forward kept
(`saved:`, `act:`) and the gradients that `I` left (`left:`). Gradients of values accumulate in `grad:` buffers that start at zero.

Values that are split along the sequence have a buffer of the rank's part (`act:`, `grad:`). Around a split segment, buffers with a slot for every
rank's part, padded to the largest, go through a reduce-scatter (`actsum:` in forward, `gradpart:` in backward) or an all-gather (`actall:`,
`gradall:`, and `actagain:` where backward needs again what forward gathered); local copies join slot and part.

Segments that run forward again before their backward (`plan.forward_again`) do so as `R`, with every message of `F`, and have buffers of their own:
`remade:`, `remadeall:` and `remadesum:`. Then `F` saves nothing.

Parameters used by several stages (a tied head) have a gradient buffer of their own, `gradients:<parameter>`, reduced over the data
replicas and then over the stages that hold it. Parameters whose gradients are partial sums on a group of tensor-parallel ranks (shared
key-value heads) have one, `gradients+<tensor indices>`, reduced over that group first. Names of buffers and communicators are part of
the plan format (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.graph import OpGraph
from ..plan.forward_again import AGAIN
from ..plan.plan import Segment, TrainingLayout
from ..plan.shards import local_values
from ..plan.sizes import gradient_buffers, shard_bytes, training_works
from ..program.builder import StepRef
from ..program.program import Program, Role, Unit
from .connections import RankOrder
from .context import ContextMessages
from .data import DataParallel
from .folded import largest_shards, largest_values, with_fold
from .pipeline import PipelineMessages
from .step import Order, PlanCollective, RankLanes, StepLowering

__all__ = ["PlanCollective", "gradient_buffers", "lower_training", "shard_bytes", "training_works"]


def lower_training(
    graph: OpGraph, layout: TrainingLayout, order: Order, all_reduce: PlanCollective, *, folded: bool = False, orders: Sequence[RankOrder] = ()
) -> tuple[Program, dict[str, Program]]:
    """The program of one training step, and the programs it calls by content hash. `folded`: one rank of every stage stands for all its others.

    `orders[p]`: (phase, stage, micro-batch) of what pipeline index p computes, in order, phases being F and B, or F, I and W; without it stage i is
    on pipeline index i and runs `order`. An action that stands there n times runs in n parts, which others come between: its next segment each time,
    at the last all that are left. Raises: Unsupported where ranks are not alike (`folded`), orders do not fit, or the layout cannot be lowered.
    """
    return _Lowering(graph, layout, order, all_reduce, folded=folded, orders=orders).run()


class _Lowering(StepLowering):
    data: dict[int, DataParallel]  # by rank
    messages: dict[int, PipelineMessages]  # by number of micro-batches
    context: ContextMessages

    def run(self) -> tuple[Program, dict[str, Program]]:
        lay = self.layout
        ranks, self.data = [], {}
        padded = (largest_shards(self.graph, lay), largest_values(lay)) if self.folded else None
        for number in self.stored:
            pipeline, _, tensor = lay.coordinates(number)
            stage = lay.held(pipeline)
            sizes, values = padded or (shard_bytes(self.graph, lay, tensor), local_values(lay, number))
            facts = (sizes, values, gradient_buffers(self.graph, lay, stage, tensor))
            compute = self.b.lane(number, unit=Unit.COMPUTE, role=Role.COMPUTE)
            recv_act, send_act, recv_grad, send_grad, sync = (self.b.lane(number) for _ in range(5))
            ranks.append(RankLanes(number, stage, *facts, compute, recv_act, send_act, recv_grad, send_grad, sync))
        alike: dict[int, list[RankLanes]] = {}  # replicas with as many micro-batches
        for r in ranks:
            alike.setdefault(lay.microbatches_of(lay.coordinates(r.number)[1]), []).append(r)
        self.messages = {n: PipelineMessages(self, some, [self.order(p, n) for p in range(lay.pipeline)]) for n, some in alike.items()}
        self.context = ContextMessages(self, ranks)
        for r in ranks:
            p, d, _ = lay.coordinates(r.number)
            self.data[r.number] = DataParallel(self, r, self.positions(p, d))
            self.data[r.number].buffers()
            run = {"F": self.forward, "R": self.forward_again, "B": self.backward, "I": self.backward, "W": self.weights}
            # compute first: messages and sums hang on its steps, and buffers die after the last of all
            for at in self.positions(p, d):
                run[at.phase](r, self.segment[at.segment], at.microbatch)
            self.messages_of(r).emit(r)
            self.data[r.number].finish()
            self.lifetimes(r)
        program = self.b.build()
        return with_fold(program, lay) if self.folded else program, self.callees

    def messages_of(self, r: RankLanes) -> PipelineMessages:
        return self.messages[self.layout.microbatches_of(self.layout.coordinates(r.number)[1])]

    # ---- buffers -----------------------------------------------------------------------------------------------
    def batch(self, r: RankLanes, mb: int) -> tuple[int, int, int]:
        """What the rank reads of a micro-batch's example inputs: fetched before the step begins, held until the next."""
        name = f"inputs:{mb}"
        if name not in r.buffers:
            lay = self.layout
            stages = [k for k, copy in lay.hosted(lay.coordinates(r.number)[0]) if copy == lay.copy(mb)]
            read = {s: size for k in stages for key in lay.stages[k].segments for s, size in self.inputs[key].items()}
            r.buffers[name] = self.b.buffer(r.number, chunks=1, chunk_bytes=sum(read.values()), role="input", persistent=True, name=name)
        return self.whole(r, name)

    def sums_directly(self, r: RankLanes, value: str) -> bool:
        """The gradient of `value` can be all-reduced in place: one split segment is all that reads it here, and nothing arrives for it."""
        keys = self.readers.get((self.layout.coordinates(r.number)[0], value), [])
        return len(keys) == 1 and value in self.segment[keys[0]].sum_grads and value not in r.stage.sends

    # ---- compute -----------------------------------------------------------------------------------------------
    def forward(self, r: RankLanes, s: Segment, mb: int) -> None:
        first = s.key == self.layout.stages[s.stage].segments[0]
        waits = self.messages_of(r).arrivals(r, "F", s.stage, mb) if first else []
        r.forward_done[s.stage, mb] = self.one_forward(r, s, mb, waits)  # of the last, in the end

    def forward_again(self, r: RankLanes, s: Segment, mb: int) -> None:
        self.one_forward(r, s, mb, (), again=True)

    def one_forward(self, r: RankLanes, s: Segment, mb: int, waits: Sequence[StepRef], *, again: bool = False) -> StepRef:
        """`F` of a segment with what completes its results, or `R`."""
        key, keeps = s.key, again or s.key not in self.run_again
        part, whole, summed = AGAIN.values() if again else AGAIN
        reads, writes, held = self.data[r.number].enter()
        reads += [self.batch(r, mb)] if self.inputs[key] else []
        gathered = []
        for v in s.reads:
            kind = self.kind(key, v) if again else part
            own = self.activation(r, kind, v, mb)
            if v in s.gathers:
                gathered.append(self.parts.buffer(r.number, r.buffers, whole, v, mb, segment=key))
                self.parts.gather(r.number, r.compute, own, gathered[-1], v, waits)
                waits = []
            reads.append(self.whole(r, f"{whole}:{v}:{key}:{mb}" if v in s.gathers else f"{kind}:{v}:{mb}"))
        made = [v for v in s.writes if not again or v in self.remade[key]]
        for v in made:
            self.activation(r, part, v, mb)
            if scattered := v in s.sum_writes and v in self.apart:
                self.parts.buffer(r.number, r.buffers, summed, v, mb)
            writes.append(self.whole(r, f"{summed if scattered else part}:{v}:{mb}"))
        if keeps:
            saved = f"saved:{key}:{mb}"
            r.buffers[saved] = self.b.buffer(r.number, chunks=1, chunk_bytes=s.saved_bytes, role="activation", name=saved)
            writes.append(self.whole(r, saved))
        temporary = s.forward_workspace_bytes + (0 if keeps else s.saved_bytes)  # what is not kept is there for a while at most
        op = self.op(r, s, "R" if again else "F", mb, reads, writes, temporary)
        ref = r.compute.compute(op, after=[*waits, *held, *self.context.waits(r, s, mb, again=again)])
        self.data[r.number].leave(ref)
        for buffer in gathered:
            self.b.dies_after(buffer, ref)
        for v in s.sum_writes:
            if v not in made:
                continue
            if v in self.apart:
                ref = self.parts.scatter(r.number, r.compute, r.buffers[f"{summed}:{v}:{mb}"], r.buffers[f"{part}:{v}:{mb}"], v, add=False)
            else:
                ref = self.tensor_call(r, f"{part}:{v}:{mb}", v)
        for v in made:
            r.produced[f"remade:{v}" if again else v, mb] = ref
        self.context.forward(r, s, mb, again=again)
        return ref

    def op(
        self, r: RankLanes, s: Segment, name: str, mb: int, reads: list[tuple[int, int, int]], writes: list[tuple[int, int, int]], temp: int
    ) -> int:
        t = self.layout.coordinates(r.number)[2]
        return self.b.op(
            name, graph=s.key, stage=s.stage, microbatch=mb, part=t if s.split else 0, parts=self.layout.tensor if s.split else 1,
            accumulate=name not in ("F", "R"), copy=self.layout.copy(mb), workspace_bytes=temp, reads=reads, writes=writes,
        )  # fmt: skip

    def tensor_call(self, r: RankLanes, buffer: str, value: str) -> StepRef:
        purpose, ranks, name = self.summing(r.number, value)
        return r.compute.call(self.call(purpose, name, ranks, r.number, r.buffers[buffer], self.value[value].size_bytes))

    def backward(self, r: RankLanes, s: Segment, mb: int) -> None:
        """`B`, or `I` where backward is split."""
        name, key = "I" if self.layout.split_backward else "B", s.key
        first = key == self.layout.stages[s.stage].segments[-1]
        waits = self.messages_of(r).arrivals(r, "B", s.stage, mb) if first else []
        read_again = [v for x in s.recompute for v in x.reads] + [*(s.step.kept if s.step is not None else ())]
        own = (f"{self.kind(key, v)}:{v}:{mb}" for v in read_again if v not in s.reads)  # written here, read by what runs again
        reads, gradients, held = self.data[r.number].enter()
        reads += [self.whole(r, name) for name in dict.fromkeys((f"saved:{key}:{mb}", *own))]
        gathered = self.parts.before_backward(r.number, r.compute, r.buffers, s, mb, self.keeps[key], waits, self.kind)
        waits = [] if gathered else waits
        arriving, came = self.context.receive_again(r, s, mb)
        gathered += came
        for v in s.writes:
            if self.value[v].differentiable and v not in self.graph.outputs:
                self.activation(r, "grad", v, mb)
                reads.append(self.whole(r, f"gradall:{v}:{mb}" if v in s.sum_writes and v in self.apart else f"grad:{v}:{mb}"))
        writes, partial = [], []
        for v in s.reads:
            if v in self.keeps[key]:
                reads.append(self.whole(r, self.context.name(s, v, mb)))
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
        if name == "I":  # what W needs of this pass is kept until then
            left = f"left:{key}:{mb}"
            r.buffers[left] = self.b.buffer(r.number, chunks=1, chunk_bytes=s.left_bytes, role="activation", name=left)
            writes.append(self.whole(r, left))
        op = self.op(r, s, name, mb, reads, writes + gradients, s.backward_workspace_bytes)
        ref = r.compute.compute(op, after=[*waits, *arriving, *held, *self.context.returned(r, s, mb)])
        self.data[r.number].leave(ref)
        for buffer in gathered:
            self.b.dies_after(buffer, ref)
        for v in partial:
            ref = self.sum_gradient(r, s, v, mb)
        self.context.gradients(r, s, mb, ref)
        r.backward_done[s.stage, mb] = ref  # of the last, in the end

    def weights(self, r: RankLanes, s: Segment, mb: int) -> None:
        """`W`: gradients of parameters, from what forward kept and `I` left."""
        reads, gradients, held = self.data[r.number].enter()
        reads += [self.whole(r, f"saved:{s.key}:{mb}"), self.whole(r, f"left:{s.key}:{mb}")]
        kept = [(v, self.context.name(s, v, mb)) for v in s.reads if v in self.keeps[s.key]]
        gathered = {v: r.buffers[name] for v, name in kept if name.startswith("actagain:")}
        reads += [self.whole(r, name) for _, name in kept]
        op = self.op(r, s, "W", mb, reads, gradients, s.backward_workspace_bytes)
        ref = r.compute.compute(op, after=held)
        for buffer in gathered.values():
            self.b.dies_after(buffer, ref)
        self.data[r.number].leave(ref)

    def sum_gradient(self, r: RankLanes, s: Segment, value: str, mb: int) -> StepRef:
        if value in s.gathers:
            parts, part = r.buffers[f"gradpart:{value}:{s.key}:{mb}"], r.buffers[f"grad:{value}:{mb}"]
            return self.parts.scatter(r.number, r.compute, parts, part, value, add=True, summed=value in s.sum_grads)
        if self.sums_directly(r, value):
            return self.tensor_call(r, f"grad:{value}:{mb}", value)
        # others add to the gradient too, and it may be summed only once: the part is summed by itself and then added
        self.tensor_call(r, f"gradpart:{value}:{s.key}:{mb}", value)
        part = r.buffers[f"gradpart:{value}:{s.key}:{mb}"]
        whole = self.activation(r, "grad", value, mb)
        ref = r.compute.copy((part, 0), (whole, 0), self.b.chunks_of(part), add=True)
        self.b.dies_after(part, ref)
        return ref

    # ---- lifetimes ---------------------------------------------------------------------------------------------
    def lifetimes(self, r: RankLanes) -> None:
        """Deaths of saved values, activations and gradients; sends and local sums have been added where they were made."""
        steps: dict[tuple[str, str, int], StepRef] = {}
        for i, op in r.compute.ops():
            steps[self.b.op_key(op)] = StepRef(r.compute.number, i)
        end, back = ("W", "I") if self.layout.split_backward else ("B", "B")
        pipeline = self.layout.coordinates(r.number)[0]
        makers = {v: k for k in reversed(r.stage.segments) for v in self.segment[k].writes}
        keepers: dict[str, list[str]] = {}
        for k in r.stage.segments:
            for v in self.keeps[k] - self.context.again:
                keepers.setdefault(v, []).append(k)
        for name, buffer in r.buffers.items():
            kind, _, rest = name.partition(":")
            value, _, number = rest.rpartition(":")
            if kind in ("saved", "left"):
                self.b.dies_after(buffer, steps[end, value, int(number)])
            elif kind in ("act", "remade", "grad"):
                mb = int(number)
                maker = makers.get(value)
                if kind == "grad":
                    last = [steps[back, maker, mb]] if maker is not None and (back, maker, mb) in steps else []
                else:
                    using = [k for k in (*self.readers.get((pipeline, value), []), maker) if k is not None]
                    passes = [(end, k) for k in keepers.get(value, ()) if self.kind(k, value) == kind]
                    passes += [("R", k) for k in using if k in self.run_again and self.kind(k, value) == kind]
                    last = [steps[phase, k, mb] for phase, k in passes if (phase, k, mb) in steps]
                    last = last or [steps["F", k, mb] for k in using if ("F", k, mb) in steps]
                if last:
                    self.b.dies_after(buffer, max(last))
