"""What a prediction from a layer profile needs beside the profile: a layout, the network's measured rates, and how the runtime behaves.

Everything that engines do differently is a field of `TrainingRuntime`, none is a hidden constant; `fit` (`meshwright.decide.layout.profiled.fit`)
determines the overheads and constants from measured runs. Units are in the names; GB is 10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import msgspec

from ..errors import UnknownName, UsageError
from .layer_profile import Entry

__all__ = [
    "MeasuredRun", "NetworkProfile", "PieceOrder", "ProfiledLayout", "ProfiledSchedule", "ProfiledStage", "RateCurve", "Replica", "TrainingRuntime",
]  # fmt: skip


MAX_PASSES = 1_000_000  # stages x micro-batches that a simulation is asked for
MAX_REPLICAS = 1 << 16  # stages x pipelines


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Replica(_Record, frozen=True, kw_only=True):
    """One data-parallel copy of a stage: `tensor` GPUs of one kind in one server. `server` names it; empty: servers are filled in order."""

    device: str
    tensor: int = 1
    zone: str = ""
    server: str = ""


class ProfiledStage(_Record, frozen=True, kw_only=True):
    """`layers` consecutive layers of the profile; replica i belongs to pipeline i."""

    layers: int
    replicas: tuple[Replica, ...]


# of every stage, in order: (phase, piece, micro-batch); F forward, B whole backward, I gradient of the input, W of the weights
PieceOrder = tuple[tuple[tuple[str, int, int], ...], ...]


class ProfiledSchedule(_Record, frozen=True, kw_only=True):
    """A pipeline schedule other than 1F1B. The model is cut into pieces, in its order: `layers` of each, and the stage that holds it (`stage_of`)."""

    name: str
    layers: tuple[int, ...]
    stage_of: tuple[int, ...]


class ProfiledLayout(_Record, frozen=True, kw_only=True):
    """A pipeline of stages, uneven if need be, in data-parallel copies; `microbatches` of `microbatch` samples each, a number for every pipeline.

    `schedule`: none is 1F1B, a stage's layers follow each other; with one, a stage holds the layers of its pieces. `context`: so many pipelines in a
    row share samples and divide their positions.
    """

    stages: tuple[ProfiledStage, ...]
    microbatch: int
    microbatches: tuple[int, ...]
    name: str = ""
    schedule: ProfiledSchedule | None = None
    context: int = 1

    def __post_init__(self) -> None:
        if self.context < 1 or len(self.microbatches) % self.context:
            message = f"{len(self.microbatches)} pipelines do not divide into groups of {self.context} that share samples"
            raise UsageError(message, where=self.name or "layout", hint="a context degree that divides the pipelines")
        if not self.stages or not self.microbatches:
            raise UsageError("a layout needs stages and micro-batches", where=self.name or "layout")
        if self.microbatch < 1 or min(self.microbatches) < 1:
            raise UsageError("micro-batches need at least one sample, and pipelines one micro-batch", where=self.name or "layout")
        if len(self.stages) * sum(self.microbatches) > MAX_PASSES:
            raise UsageError(f"more than {MAX_PASSES} passes of micro-batches through stages", where=self.name or "layout")
        if len(self.stages) * len(self.microbatches) > MAX_REPLICAS:
            raise UsageError(f"more than {MAX_REPLICAS} replicas of stages", where=self.name or "layout")
        for i, stage in enumerate(self.stages):
            if stage.layers < 1 or len(stage.replicas) != len(self.microbatches):
                message = f"{stage.layers} layers, {len(stage.replicas)} replicas; needs a layer or more, and {len(self.microbatches)} replicas"
                raise UsageError(message, where=f"{self.name or 'layout'}: stages[{i}]", hint="one replica per pipeline")
            if any(r.tensor < 1 for r in stage.replicas):
                raise UsageError("tensor degrees must be >= 1", where=f"{self.name or 'layout'}: stages[{i}].replicas")
        if self.schedule is not None:
            held = [0] * len(self.stages)
            for n, s in zip(self.schedule.layers, self.schedule.stage_of, strict=False):
                if 0 <= s < len(held):
                    held[s] += n
            whole = len(self.schedule.layers) == len(self.schedule.stage_of) and min(self.schedule.layers, default=0) > 0
            if not whole or held != [s.layers for s in self.stages]:
                message = f"its pieces give the stages {held} layers, these have {[s.layers for s in self.stages]}"
                raise UsageError(message, where=f"{self.name or 'layout'}: schedule", hint="every piece has a layer or more and a stage")

    @property
    def data(self) -> int:
        return len(self.microbatches)

    @property
    def gpus(self) -> int:
        return sum(r.tensor for s in self.stages for r in s.replicas)

    @property
    def global_batch(self) -> int:
        return self.microbatch * sum(self.microbatches) // self.context

    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(stage, first layer, layers) of every piece of the model, in its order; without a schedule a stage is a piece."""
        s = self.schedule
        layers, stage_of = (s.layers, s.stage_of) if s is not None else ([x.layers for x in self.stages], range(len(self.stages)))
        return tuple(zip(stage_of, (0, *accumulate(layers)), layers, strict=False))

    def layers_of(self, stage: int) -> list[int]:
        """The layers that a stage holds, in the model's order."""
        return [x for s, first, count in self.pieces if s == stage for x in range(first, first + count)]

    def entries(self) -> tuple[Entry, ...]:
        """Rows of a profile that this layout needs."""
        return tuple(dict.fromkeys(Entry(r.device, self.microbatch, r.tensor) for s in self.stages for r in s.replicas))

    @staticmethod
    def uniform(
        layers: tuple[int, ...], *, device: str, data: int = 1, tensor: int = 1, microbatch: int = 1, microbatches: int = 1, zone: str = "",
        name: str = "",
    ) -> ProfiledLayout:  # fmt: skip
        """The same kind of GPU and degrees everywhere; `layers` per stage."""
        replicas = (Replica(device=device, tensor=tensor, zone=zone),) * data
        stages = tuple(ProfiledStage(layers=n, replicas=replicas) for n in layers)
        return ProfiledLayout(stages=stages, microbatch=microbatch, microbatches=(microbatches,) * data, name=name)


class TrainingRuntime(_Record, frozen=True, kw_only=True):
    """How the engine that trains behaves. Defaults are assumptions, stated; `source` says where the numbers are from.

    p2p: whether a stage computes while its messages are under way. activation_copies: whether every tensor-parallel rank sends the whole
    activation to its peer, or its part (scatter-gather). update: whether the profile's update time is per layer or was repeated for the
    whole stage. nics_per_server: 0 = one per GPU. bucket_bytes: of a gradient all-reduce, 0 = the stage in one. overlap_gradients: layers'
    gradients go as soon as the last micro-batch's backward has passed them. Errors are relative and give the prediction's error bar.
    """

    p2p: Literal["blocking", "overlapped"] = "overlapped"
    activation_copies: Literal["whole", "part"] = "whole"
    update: Literal["layer", "stage"] = "layer"
    activation_bytes_per_value: float = 4.0  # on the wire; 4 as in the published memory tables
    gradient_bytes_per_value: float = 4.0  # on the wire
    saved_bytes_per_value: float = 4.0
    state_bytes_per_parameter: float = 16.0  # weight, gradient and optimizer together
    gpus_per_server: dict[str, int] = {}
    nics_per_server: int = 0
    nics_by_device: dict[str, int] = {}  # where kinds of server differ; goes before nics_per_server
    bucket_bytes: float = 0.0
    overlap_gradients: bool = False
    per_action_s: float = 0.0
    per_message_s: float = 0.0
    per_iteration_s: float = 0.0
    constant_memory_bytes: dict[str, int] = {}  # by device: context, libraries, fragmentation
    compute_error: float = 0.05
    network_error: float = 0.2
    memory_error: float = 0.1
    source: str = "assumed"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"must be finite and >= 0, got {value}", where=f"runtime.{name}")
        for name in ("compute_error", "network_error", "memory_error"):
            if getattr(self, name) >= 1:
                raise UsageError(f"must be below 1, got {getattr(self, name)}", where=f"runtime.{name}")
        if any(v < 1 for v in self.gpus_per_server.values()) or any(v < 0 for v in self.constant_memory_bytes.values()):
            raise UsageError("servers have GPUs, and memory is not negative", where="runtime")


_NUMBERS = (
    "activation_bytes_per_value", "gradient_bytes_per_value", "saved_bytes_per_value", "state_bytes_per_parameter", "nics_per_server", "bucket_bytes",
    "per_action_s", "per_message_s", "per_iteration_s", "compute_error", "network_error", "memory_error",
)  # fmt: skip


class MeasuredRun(_Record, frozen=True, kw_only=True):
    """A layout that was run: seconds per iteration and, where known, the peak of each stage's fullest device."""

    layout: ProfiledLayout
    time_s: float
    memory_peak_bytes: tuple[int, ...] = ()  # per stage


class RateCurve(_Record, frozen=True, kw_only=True):
    """Rate of one message by its size: c2 x^2 + c1 x + c0 GB/s with x = log2(bytes / 10^6), no less than 0, and at most `peak_Bps`.

    Below 10^6 bytes the polynomial means nothing, so x is 0 there; beyond the top of a falling parabola the rate stays at the top.
    """

    c2: float
    c1: float
    c0: float
    peak_Bps: float

    def rate_Bps(self, size_bytes: float) -> float:
        """Bytes per second, > 0. Raises: UsageError when the curve gives no positive rate."""
        x = max(0.0, math.log2(max(size_bytes, 1.0) / 1e6))
        if self.c2 < 0:
            x = min(x, max(0.0, -self.c1 / (2 * self.c2)))
        rate = min((self.c2 * x * x + self.c1 * x + self.c0) * 1e9, self.peak_Bps)
        if not rate > 0:
            raise UsageError(f"the network's curve gives {rate:.4g} B/s at {size_bytes:.4g} bytes", hint="measure the curve again")
        return rate


@dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """Measured rates: `inside[device, GPUs per server]`, `between[zone, device, GPUs, zone, device, GPUs]` of one NIC, one direction."""

    inside: Mapping[tuple[str, int], RateCurve] = field(default_factory=dict)
    between: Mapping[tuple[str, str, int, str, str, int], RateCurve] = field(default_factory=dict)

    def inside_curve(self, device: str, gpus: int) -> RateCurve:
        """Raises: UnknownName, listing what there is."""
        return _found(self.inside, (device, gpus), "inside a server")

    def between_curve(self, a: tuple[str, str, int], b: tuple[str, str, int]) -> RateCurve:
        """Between servers (zone, device, GPUs per server); the other direction where only that was measured. Raises: UnknownName."""
        if (*a, *b) not in self.between and (*b, *a) in self.between:
            a, b = b, a
        return _found(self.between, (*a, *b), "between servers")


def _found(table: Mapping[Any, RateCurve], key: tuple[object, ...], what: str) -> RateCurve:
    curve = table.get(key)
    if curve is None:
        some = "; ".join(", ".join(map(str, k)) for k in sorted(table, key=str)[:6])
        raise UnknownName(f"no measured rate {what} for {', '.join(map(str, key))}", hint=f"there are: {some or 'none; read a network file'}")
    return curve
