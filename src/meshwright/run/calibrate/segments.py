"""Measured costs of the executor's real units of work: a stage's segments, forward and backward, and the optimizer.

The segments run in the order of the step with as many micro-batches in flight as the schedule keeps, on values that the segments before them
made, so that caches, allocator and autograd are in the state of a real step. Time is the thread's CPU time, one intra-op thread;
a unit's price is the median over its executions (repeats x micro-batches, the first pass left out).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import torch

from ...cost import Priced
from ...errors import UsageError
from .operators import quiet_single_thread

__all__ = ["SegmentLike", "StageTimes", "at_share", "measure_segments", "one_forward_one_backward"]

_clock = time.thread_time
GRADIENT_SCALE = 1e-3  # received gradients are small random numbers: zeros or denormals would be faster or slower than real ones


class SegmentLike(Protocol):
    """What is used of `meshwright.run.train.segments.SegmentModule`."""

    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def writes(self) -> tuple[str, ...]: ...
    @property
    def inputs(self) -> tuple[int, ...]: ...
    def forward(self, microbatch: int, reads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
    def backward(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]: ...


class StageTimes(msgspec.Struct, frozen=True):
    """`prices`: by the key under which `Cost` looks them up; `sends`: one micro-batch's values that later stages read."""

    prices: dict[str, Priced]
    sends: dict[str, torch.Tensor]


def one_forward_one_backward(in_flight: int, microbatches: int) -> list[tuple[str, int]]:
    """Order of forward and backward passes of a stage that keeps `in_flight` micro-batches: 1F1B."""
    warm = min(in_flight, microbatches)
    order = [("F", mb) for mb in range(warm)]
    for mb in range(microbatches):
        order.append(("B", mb))
        if warm + mb < microbatches:
            order.append(("F", warm + mb))
    return order


def measure_segments(
    segments: Mapping[str, SegmentLike], received: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], *, loss: str, in_flight: int = 1,
    microbatches: int = 4, repeats: int = 3, optimizer: tuple[str, Callable[[], object]] | None = None,
) -> StageTimes:  # fmt: skip
    """Time one stage: `segments` in their order of execution.

    `received`: one micro-batch's values from earlier stages, by value name; `inputs`: example inputs of one micro-batch; `loss`: its value name.
    `optimizer`: (graph key, step), e.g. `("opt0", optimizer.step)`; run once per repeat and priced under `"opt0|optimizer"`.
    Parameters and gradient buffers are changed as a real step changes them; pass copies.
    Raises: UsageError when a value that is read is neither received nor made, or repeats, micro-batches or in-flight are below 1.
    """
    if min(in_flight, microbatches, repeats) < 1:
        raise UsageError("in_flight, microbatches and repeats must be at least 1")
    stage = _Stage(segments, received, inputs, loss)
    order = one_forward_one_backward(in_flight, max(microbatches, in_flight))
    with quiet_single_thread():
        for repeat in range(repeats + 1):
            if repeat == 1:
                stage.samples.clear()  # the first pass fills caches and the allocator
            for phase, mb in order:
                if phase == "F":
                    stage.forward(mb)
                else:
                    stage.backward(mb)
            if optimizer is not None:
                key, step = optimizer
                begin = _clock()
                step()
                stage.samples[f"{key}|optimizer"].append(_clock() - begin)
    return StageTimes({key: _measured(statistics.median(times)) for key, times in stage.samples.items()}, stage.sends)


def at_share(prices: Mapping[str, Priced], share: float, slowdown: float = 1.0) -> dict[str, Priced]:
    """The same prices when a rank has `share` of a core and its CPU time is stretched by `slowdown` (shared caches): wall = CPU / share."""
    if not 0 < share <= 1 or slowdown < 1:
        raise UsageError(f"share must be in (0, 1] and slowdown at least 1, got {share} and {slowdown}")
    return {key: Priced(p.cpu_s * slowdown / share, p.evidence, p.cpu_s * slowdown) for key, p in prices.items()}


def _measured(cpu_s: float) -> Priced:
    return Priced(cpu_s, "measured", cpu_s)


class _Stage:
    """Runs a stage's segments on several micro-batches and collects CPU seconds per unit of work."""

    def __init__(
        self, segments: Mapping[str, SegmentLike], received: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], loss: str
    ) -> None:
        self.segments, self.received, self.inputs, self.loss = segments, received, inputs, loss
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.sends: dict[str, torch.Tensor] = {}
        self.values: dict[int, dict[str, torch.Tensor]] = {}
        known = {*received}
        for key, segment in segments.items():
            missing = [v for v in segment.reads if v not in known]
            if missing:
                raise UsageError(f"segment {key!r} reads {missing[0]!r}, which is neither received nor made before it", hint="pass it in `received`")
            known.update(segment.writes)
        self.inner = {v for s in segments.values() for v in s.reads}  # gradients of other written values come from later stages

    def forward(self, mb: int) -> None:
        values = {name: x.clone() for name, x in self.received.items()}  # a buffer of its own per micro-batch, as a receive has
        for key, segment in self.segments.items():
            reads, inputs = [values[v] for v in segment.reads], [self.inputs[i] for i in segment.inputs]
            begin = _clock()
            written = segment.forward(mb, reads, inputs)
            self.samples[f"{key}|F"].append(_clock() - begin)
            values.update(zip(segment.writes, written, strict=True))
        if not self.sends:
            self.sends = {v: x.detach().clone() for v, x in values.items() if v not in self.received}
        self.values[mb] = values

    def backward(self, mb: int) -> None:
        values = self.values.pop(mb)
        gradients: dict[str, torch.Tensor] = {}
        for key in reversed([*self.segments]):
            segment = self.segments[key]
            given = [self.gradient(v, values, gradients) for v in segment.writes]
            begin = _clock()
            found = segment.backward(mb, given)
            self.samples[f"{key}|B"].append(_clock() - begin)
            for position, gradient in found.items():
                name = segment.reads[position]
                gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient.clone()

    def gradient(self, name: str, values: Mapping[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> torch.Tensor | None:
        value = values[name]
        if name == self.loss:
            return torch.ones_like(value)
        if not value.is_floating_point():
            return None
        if name not in gradients and name not in self.inner:
            gradients[name] = torch.randn_like(value) * GRADIENT_SCALE
        return gradients.get(name)
