"""Gradient groups that data replicas exchange through a codec, as steps of a training program.

Of a bucket with a codec, every rank encodes its own gradients (`encode`) into its slot of `sent<group>`; an all-gather brings all slots to all
replicas; `decode` writes the mean of what all payloads stand for over the gradients. Between the two the gradients are nobody's: encoding spends
them. What error feedback keeps from step to step is `residual<group>`. Encodes stand in the compute lane behind the backward that completes the
group, decodes behind the last backward, as in the timeline of `traffic`.

Payloads have one size, which the codec states exactly; slots are padded to whole chunks of the all-gather. Source: Wang et al., "Cupcake"
(MLSys 2023), for where encodes and decodes stand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING

from .codec import CodecSpec, parse_codec
from .errors import Unsupported
from .lowering_sequence import per_chunk
from .plan import TrainingLayout
from .program_builder import StepRef

if TYPE_CHECKING:
    from .lowering import _Lowering, _Rank

__all__ = ["CompressedSums", "require_codecs_run", "unsupported_codec", "unsupported_layout"]


def unsupported_codec(spec: CodecSpec) -> str:
    """Why no training plan can use this codec; empty where one can."""
    if spec.aggregation != "all-gather":
        return f"{spec.name} is summed in its encoded form, and only codecs whose payloads are gathered are planned in training steps"
    if spec.kind.own_memory:
        return f"{spec.name} keeps a momentum or memory of its own, which takes the optimizer's place"
    if not all(size.exact for size in spec.rounds([(1024,)])):
        return f"the size of what {spec.name} sends depends on the data, and programs of training steps have fixed sizes"
    return ""


def unsupported_layout(layout: TrainingLayout) -> str:
    """Why the gradients of this layout cannot go through codecs; empty where they can."""
    if layout.data < 2:
        return "there is one data replica, so no gradients are exchanged"
    if layout.zero_level:
        return f"sharding level {layout.zero_level} divides gradients, and codecs are planned for whole ones (--zero 0)"
    if layout.tensor > 1 or layout.pipeline > 1:
        return f"codecs are planned for data parallelism alone, not with {layout.tensor} tensor x {layout.pipeline} pipeline ranks (--tp 1 --pp 1)"
    return ""


def require_codecs_run(layout: TrainingLayout, *, local_shards: str, device: str) -> None:
    """Raises: Unsupported where a plan with codecs cannot be run as asked."""
    if any(b.codec for b in layout.buckets) and (local_shards or device != "cpu"):
        raise Unsupported(
            "the plan sends gradients through codecs: they run on processors, and keep what they have not sent in shared checkpoints",
            where="--local-shards" if local_shards else "--device", hint="leave it out, or plan with --compress none",
        )  # fmt: skip


@dataclass
class _Compressed:
    spec: CodecSpec
    elements: int
    payload_bytes: int
    chunks: int = 1
    sent: int = -1
    residual: int = -1
    gathered: StepRef | None = None

    @property
    def workspace_bytes(self) -> int:
        return 2 * 4 * self.elements + self.payload_bytes


@dataclass
class CompressedSums:
    """Of one rank: its groups with a codec, by name (`@0`). Raises (`of`): Unsupported for codecs and layouts that do not go together."""

    low: _Lowering
    r: _Rank
    replicas: tuple[int, ...]
    label: str
    groups: dict[str, _Compressed] = field(default_factory=dict)

    @classmethod
    def of(cls, low: _Lowering, r: _Rank, replicas: tuple[int, ...], label: str) -> CompressedSums:
        made = cls(low, r, replicas, label)
        shapes = {p.name: tuple(p.shape) for p in low.graph.parameters}
        for number, bucket in enumerate(low.layout.buckets_of(r.stage.index)):
            if not bucket.codec:
                continue
            spec = parse_codec(bucket.codec)
            if reason := unsupported_codec(spec) or unsupported_layout(low.layout):
                raise Unsupported(reason, where=f"bucket {number}", hint="plan with --compress none, or another codec or layout")
            if low.folded:
                raise Unsupported("the program of so many ranks is folded, and codecs are not", where=f"bucket {number}", hint="fewer devices")
            params = r.gradients[f"gradients@{number}"]
            (size,) = spec.rounds([shapes[p] for p in params])
            elements = sum(r.sizes[p] for p in params) // low.element_bytes
            made.groups[f"@{number}"] = _Compressed(spec, elements, size.upper)
        return made

    def buffers(self) -> None:
        b, n = self.low.b, len(self.replicas)
        for name, g in self.groups.items():
            size = n * -(-g.payload_bytes // 4) * 4
            g.chunks = lcm(n, self.low.plan_all_reduce("gradient", self.replicas, size, "all-gather").chunks)
            each = per_chunk(size, g.chunks)
            g.sent = b.buffer(self.r.number, chunks=g.chunks, chunk_bytes=each, role="scratch", persistent=True, name=f"sent{name}")
            if g.spec.feedback:
                g.residual = b.buffer(
                    self.r.number, chunks=1, chunk_bytes=4 * g.elements, role="state", persistent=True, name=f"residual{name}"
                )  # fmt: skip

    def _op(self, kind: str, name: str, reads: list[tuple[int, int, int]], writes: list[tuple[int, int, int]]) -> int:
        index = self.r.stage.index
        return self.low.b.op(
            kind, graph=f"codec{index}{name}", stage=index, workspace_bytes=self.groups[name].workspace_bytes, reads=reads, writes=writes
        )

    def send(self, name: str, after: StepRef) -> None:
        """Encode the group and gather the payloads, after step `after`."""
        g, r = self.groups[name], self.r
        own = g.chunks // len(self.replicas)
        gradients = self.low.whole(r, f"gradients{name}")
        memory = [(g.residual, 0, 1)] if g.residual >= 0 else []
        slot = (g.sent, self.replicas.index(r.number) * own, own)
        encoded = r.compute.compute(self._op("encode", name, [gradients, *memory], [slot, gradients, *memory]), after=[after])
        size = len(self.replicas) * -(-g.payload_bytes // 4) * 4
        g.gathered = r.sync.call(self.low.call("gradient", self.label, self.replicas, r.number, g.sent, size, "all-gather"), after=[encoded])

    def receive(self) -> None:
        """Decode what has been gathered, in the order in which it was sent."""
        for name, g in self.groups.items():
            if g.gathered is not None:
                whole = self.low.whole(self.r, f"gradients{name}")
                self.r.compute.compute(self._op("decode", name, [(g.sent, 0, g.chunks)], [whole]), after=[g.gathered])
