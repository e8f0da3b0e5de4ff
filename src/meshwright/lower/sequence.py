"""Buffers and messages of values that are split along the sequence, for `lowering`.

A rank's part of such a value is `act:<value>:<mb>`. Around a split segment it is one slot of a buffer of all parts: partial sums are
reduce-scattered there and this rank's slot copied out, or the rank's part is copied in and the others all-gathered. Slots are of the largest part;
so sequences that do not divide are sent with padding, and the plan counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from math import lcm
from typing import Any

from ..plan.plan import Segment, TrainingLayout, ValueInfo
from ..plan.shards import local_value
from ..program.builder import LaneBuilder, ProgramBuilder, StepRef

__all__ = ["ELEMENT_BYTES", "SequenceParts", "element_of", "per_chunk"]

# Bytes that sizes are padded to where a buffer's own elements are not larger: those of float32.
ELEMENT_BYTES = 4
SCATTER, GATHER = "reduce-scatter", "all-gather"

# (rank, lane, buffer, bytes, operation) -> the step that calls it among the rank's tensor group
TensorCall = Callable[..., StepRef]


def element_of(value: ValueInfo) -> int:
    """Bytes of an element, as far as padding is concerned."""
    return 8 if value.dtype in ("float64", "int64") else ELEMENT_BYTES


def per_chunk(size_bytes: int, chunks: int, element_bytes: int = ELEMENT_BYTES) -> int:
    """Bytes per chunk when `size_bytes` of whole elements are padded to whole chunks."""
    elements = -(-size_bytes // element_bytes)
    return -(-elements // chunks) * element_bytes if chunks > 1 else size_bytes


class SequenceParts:
    """`plan` plans a collective (purpose, ranks, bytes, operation); `call` calls it on a rank's lane."""

    def __init__(self, b: ProgramBuilder, layout: TrainingLayout, plan: Callable[..., Any], call: TensorCall) -> None:
        self.b, self.layout, self.plan, self.call = b, layout, plan, call
        self.value: dict[str, ValueInfo] = {v.name: v for v in layout.values}
        self.slots: dict[tuple[str, int], tuple[int, int]] = {}

    def slot(self, rank: int, value: str) -> tuple[int, int]:
        """(chunks, bytes per chunk) of one rank's part: of the largest, alike on all ranks that hold the value or hand it on."""
        lay = self.layout
        d = lay.coordinates(rank)[1]
        if (value, d) not in self.slots:
            size = max(local_value(self.value[value], t, lay.tensor).size_bytes for t in range(lay.tensor))
            groups = [tuple(lay.rank(p, d, t) for t in range(lay.tensor)) for p in range(lay.pipeline)]
            planned = [self.plan("tensor", g, lay.tensor * size, op).chunks for g in groups for op in (SCATTER, GATHER)]
            chunks = lcm(lay.tensor, *planned) // lay.tensor
            self.slots[value, d] = (chunks, per_chunk(size, chunks, element_of(self.value[value])))
        return self.slots[value, d]

    def buffer(self, rank: int, buffers: dict[str, int], kind: str, value: str, mb: int, *, segment: str = "") -> int:
        """A buffer with a slot for every rank's part of a value, in the order of their tensor indices; entered in `buffers` by name."""
        return self._buffer(rank, buffers, f"{kind}:{value}:{segment}:{mb}" if segment else f"{kind}:{value}:{mb}", value, self.layout.tensor)

    def _buffer(self, rank: int, buffers: dict[str, int], name: str, value: str, slots: int) -> int:
        if name not in buffers:
            chunks, each = self.slot(rank, value)
            buffers[name] = self.b.buffer(rank, chunks=chunks * slots, chunk_bytes=each, role="activation", name=name)
        return buffers[name]

    def gather(self, rank: int, lane: LaneBuilder, part: int, parts: int, value: str, after: Sequence[StepRef]) -> None:
        """All-gather `parts` from this rank's `part`."""
        chunks, each = self.slot(rank, value)
        lane.copy((part, 0), (parts, self.layout.coordinates(rank)[2] * chunks), chunks, after=after)
        self.call(rank, lane, parts, self.layout.tensor * chunks * each, GATHER)

    def before_backward(
        self, rank: int, lane: LaneBuilder, buffers: dict[str, int], s: Segment, mb: int, kept: Container[str], waits: Sequence[StepRef],
        kind: Callable[[str, str], str],
    ) -> list[int]:
        """Gathers before B of a segment: the gradients of its reduce-scattered results, and the gathered reads that autograd `kept`. The
        buffers of all parts that these are in; B ends them. `kind`: of a segment's buffer of a value."""
        found: list[int] = []
        for v in s.writes:
            if v in s.sum_writes and self.value[v].split is not None and self.value[v].differentiable:
                part = self._buffer(rank, buffers, f"grad:{v}:{mb}", v, 1)
                found.append(self.buffer(rank, buffers, "gradall", v, mb))
                self.gather(rank, lane, part, found[-1], v, waits if len(found) == 1 else ())
        for v in s.gathers:
            if v in kept:
                found.append(self.buffer(rank, buffers, "actagain", v, mb, segment=s.key))
                self.gather(rank, lane, buffers[f"{kind(s.key, v)}:{v}:{mb}"], found[-1], v, waits if len(found) == 1 else ())
        return found

    def scatter(self, rank: int, lane: LaneBuilder, parts: int, part: int, value: str, *, add: bool, summed: bool = True) -> StepRef:
        """Reduce-scatter `parts` (unless each rank has all of it, then not `summed`) and put this rank's slot into `part`, which ends `parts`."""
        chunks, each = self.slot(rank, value)
        if summed:
            self.call(rank, lane, parts, self.layout.tensor * chunks * each, SCATTER)
        ref = lane.copy((parts, self.layout.coordinates(rank)[2] * chunks), (part, 0), chunks, add=add)
        self.b.dies_after(parts, ref)
        return ref
