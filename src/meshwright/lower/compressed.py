"""Gradient groups that data replicas exchange through a codec, as steps of a training program.

Gathered: of a bucket with such a codec, every rank encodes its own gradients (`encode`) into its slot of `sent<group>`; an all-gather brings all
slots to all replicas; `decode` writes the mean of what all payloads stand for over the gradients. Slots are padded to whole chunks of the all-gather.
Summed: `encode` fills `sum0<group>`, which an all-reduce completes; of a codec with a second round, `advance` makes `sum1<group>` of it, which
another completes; `decode` writes the mean that the sums stand for.
Between the first and the last the gradients are nobody's: encoding spends them. What a codec remembers from step to step is `residual<group>`.
Encodes stand in the compute lane behind the backward that completes the group, decodes behind the last backward, as in the timeline of `traffic`;
second rounds stand there too, so that no backward waits for a sum.

Replicas are all ranks that hold the same stages and tensor part, copies of stages among them. With tensor-parallel ranks only parameters that these
divide go through codecs: what every rank has whole must stay equal on them to the last bit, and what a codec selects or rounds would not.
With the optimizer's state divided (level 1) every replica decodes whole gradients, and updates its part.

Payloads have one size, which the codec states exactly. Source: Wang et al., "Cupcake" (MLSys 2023), for where encodes and decodes stand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm, prod

from ..codec.codec import CodecSpec, parse_codec
from ..errors import Unsupported
from ..graph.graph import OpGraph
from ..plan.plan import TrainingLayout
from ..plan.shards import local_shape
from ..program.builder import StepRef
from .sequence import per_chunk
from .step import RankLanes, StepLowering

__all__ = ["CompressedSums", "divided_parameters", "local_shapes", "require_codecs_run", "unsupported_codec", "unsupported_layout"]

SUMMAND_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def unsupported_codec(spec: CodecSpec) -> str:
    """Why no training plan can use this codec; empty where one can."""
    if spec.kind.own_memory:
        return f"{spec.name} keeps a momentum or memory of its own, which takes the optimizer's place"
    if not all(size.exact for size in spec.rounds([(1024,)])):
        return f"the size of what {spec.name} sends depends on the data, and programs of training steps have fixed sizes"
    return ""


def unsupported_layout(layout: TrainingLayout) -> str:
    """Why no gradients of this layout can go through codecs; empty where some can."""
    if layout.data * len(layout.mates(0)) < 2:
        return "there is one data replica, so no gradients are exchanged"
    if layout.zero_level > 1:
        return (
            f"sharding level {layout.zero_level} keeps no whole gradients, and what a codec has not sent is as large as they are"
            " (level 1 divides the optimizer's state, and goes with codecs)"
        )
    if layout.whole_parameters:
        return "replicas divide whole parameters, whose gradients do not lie one after the other (--zero 0)"
    if layout.zero_level and len(layout.mates(0)) > 1:
        return "copies of a stage add up parts of decoded gradients when state is divided, and each would decode others (--zero 0)"
    if layout.tensor > 1 and not divided_parameters(layout):
        return f"each of {layout.tensor} tensor-parallel ranks holds every parameter whole, and codecs would not keep these equal"
    return ""


def divided_parameters(layout: TrainingLayout) -> frozenset[str]:
    """Parameters that no two tensor-parallel ranks hold elements of alike; without tensor parallelism, all of them."""
    if layout.tensor == 1:
        return frozenset(p for s in layout.stages for p in s.params)
    return frozenset(s.param for s in layout.shards) - {x.param for x in layout.partial_gradients}


def local_shapes(graph: OpGraph, layout: TrainingLayout, tensor_index: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters as ranks with this tensor index hold them."""
    split = {s.param: s for s in layout.shards} if layout.tensor > 1 else {}
    return {
        p.name: local_shape(p.shape, s.axis, s, tensor_index, layout.tensor) if (s := split.get(p.name)) else tuple(p.shape)
        for p in graph.parameters
    }


def require_codecs_run(layout: TrainingLayout, *, local_shards: str, device: str) -> None:
    """Raises: Unsupported where a plan with codecs cannot be run as asked."""
    if any(b.codec for b in layout.buckets) and (local_shards or device != "cpu"):
        raise Unsupported(
            "the plan sends gradients through codecs: they run on processors, and keep what they have not sent in shared checkpoints",
            where="--local-shards" if local_shards else "--device", hint="leave it out, or plan with --compress none",
        )  # fmt: skip


@dataclass
class _Compressed:
    """`rounds`: bytes of one rank's payloads; `sums`: buffers of those that are summed. `arrived`: the last exchange so far."""

    spec: CodecSpec
    elements: int
    rounds: tuple[int, ...]
    chunks: int = 1
    sent: int = -1
    sums: list[int] = field(default_factory=list)
    residual: int = -1
    arrived: StepRef | None = None

    @property
    def gathered(self) -> bool:
        return self.spec.aggregation == "all-gather"

    @property
    def workspace_bytes(self) -> int:
        return 2 * 4 * self.elements + max(self.rounds, default=0)

    @property
    def remembered_bytes(self) -> int:
        """The residual, and the factor that a second round leaves for the next step to start from."""
        return (4 * self.elements if self.spec.feedback else 0) + sum(self.rounds[1:])


@dataclass
class CompressedSums:
    """Of one rank: its groups with a codec, by name (`@0`). Raises (`of`): Unsupported for codecs and layouts that do not go together."""

    low: StepLowering
    r: RankLanes
    replicas: tuple[int, ...]
    label: str
    groups: dict[str, _Compressed] = field(default_factory=dict)
    under_way: list[str] = field(default_factory=list)  # in the order in which they were sent

    @classmethod
    def of(cls, low: StepLowering, r: RankLanes, replicas: tuple[int, ...], label: str) -> CompressedSums:
        made = cls(low, r, replicas, label)
        tensor = low.layout.coordinates(r.number)[2]
        for number, bucket in enumerate(low.layout.buckets_of(r.stage.index)):
            if not bucket.codec:
                continue
            spec, where = parse_codec(bucket.codec), f"bucket {number}"
            if reason := unsupported_codec(spec) or unsupported_layout(low.layout):
                raise Unsupported(reason, where=where, hint="plan with --compress none, or another codec or layout")
            if low.folded:
                raise Unsupported("the program of so many ranks is folded, and codecs are not", where=where, hint="fewer devices")
            if odd := sorted(set(bucket.params) - divided_parameters(low.layout)):
                raise Unsupported(f"tensor-parallel ranks must hold {odd[0]} alike, which codecs do not warrant", where=where)
            params = r.gradients.get(f"gradients@{number}", ())
            if set(params) != set(bucket.params):
                odd = sorted(set(bucket.params) - set(params))
                raise Unsupported(f"gradients of {odd[:4]} are not summed over data replicas alone", where=where)
            shapes = local_shapes(low.graph, low.layout, tensor)
            if narrow := [p for p in params if r.sizes[p] < 4 * prod(shapes[p])]:
                raise Unsupported(f"gradients of {narrow[0]} are narrower than codecs know", where=where, hint="plan with --compress none")
            rounds = tuple(size.upper for size in spec.rounds([shapes[p] for p in params]))
            made.groups[f"@{number}"] = _Compressed(spec, sum(prod(shapes[p]) for p in params), tuple(x for x in rounds if x))
        return made

    def buffers(self) -> None:
        for name, g in self.groups.items():
            if g.gathered:
                size = self._gathered_bytes(g)
                g.chunks = lcm(len(self.replicas), self.low.plan_all_reduce("gradient", self.replicas, size, "all-gather").chunks)
                g.sent = self._buffer(f"sent{name}", g.chunks, per_chunk(size, g.chunks))
            else:
                for number, size in enumerate(g.rounds):
                    chunks = self.low.plan_all_reduce("gradient", self.replicas, size).chunks
                    g.sums.append(self._buffer(f"sum{number}{name}", chunks, per_chunk(size, chunks, SUMMAND_BYTES[g.spec.kind.summand])))
            if g.remembered_bytes:
                g.residual = self._buffer(f"residual{name}", 1, g.remembered_bytes, role="state")

    def _buffer(self, name: str, chunks: int, chunk_bytes: int, role: str = "scratch") -> int:
        return self.low.b.buffer(self.r.number, chunks=chunks, chunk_bytes=chunk_bytes, role=role, persistent=True, name=name)

    def _gathered_bytes(self, g: _Compressed) -> int:
        return len(self.replicas) * -(-g.rounds[0] // 4) * 4

    def _compute(self, kind: str, name: str, reads: list[int], writes: list[tuple[int, int, int]], after: StepRef) -> StepRef:
        """A step of the compute lane that reads the whole of `reads`, and what the codec remembers, which all but `decode` change."""
        g, r, b = self.groups[name], self.r, self.low.b
        memory = [(g.residual, 0, 1)] if g.residual >= 0 else []
        op = b.op(
            kind, graph=f"codec{r.stage.index}{name}", stage=r.stage.index, workspace_bytes=g.workspace_bytes,
            reads=[*((x, 0, b.chunks_of(x)) for x in reads), *memory], writes=[*writes, *(memory if kind != "decode" or g.sums else [])],
        )  # fmt: skip
        return r.compute.compute(op, after=[after])

    def _exchange(self, buffer: int, size_bytes: int, after: StepRef, *operation: str) -> StepRef:
        return self.r.sync.call(self.low.call("gradient", self.label, self.replicas, self.r.number, buffer, size_bytes, *operation), after=[after])

    def send(self, name: str, after: StepRef) -> None:
        """Encode the group and exchange the payloads, after step `after`."""
        g, gradients = self.groups[name], self.low.whole(self.r, f"gradients{name}")
        if g.gathered:
            own = g.chunks // len(self.replicas)
            slot = (g.sent, self.replicas.index(self.r.number) * own, own)
            encoded = self._compute("encode", name, [gradients[0]], [slot, gradients], after)
            g.arrived = self._exchange(g.sent, self._gathered_bytes(g), encoded, "all-gather")
        elif g.sums:
            encoded = self._compute("encode", name, [gradients[0]], [self._whole(g.sums[0]), gradients], after)
            g.arrived = self._exchange(g.sums[0], g.rounds[0], encoded)
        if g.arrived is not None:
            self.under_way.append(name)

    def receive(self) -> None:
        """Second rounds, and decodes, in the order in which groups were sent."""
        for name in self.under_way:
            g = self.groups[name]
            for number in range(1, len(g.sums)):
                assert g.arrived is not None
                before, fresh = g.sums[number - 1], g.sums[number]
                made = self._compute("advance", name, [before], [self._whole(before), self._whole(fresh)], g.arrived)
                g.arrived = self._exchange(fresh, g.rounds[number], made)
        for name in self.under_way:
            g = self.groups[name]
            assert g.arrived is not None
            self._compute("decode", name, g.sums or [g.sent], [self.low.whole(self.r, f"gradients{name}")], g.arrived)

    def _whole(self, buffer: int) -> tuple[int, int, int]:
        return buffer, 0, self.low.b.chunks_of(buffer)
