"""Types of the pipeline decision: the problem, the common form of a schedule, and what a strategy is.

A model is cut into `devices` stages; with `chunks` v > 1 each stage is cut into v equal pieces, and the v·devices pieces, in model
order, are the *stages* that a schedule speaks of (0 = first). A schedule gives every device its compute actions in order; times are
never part of it. Action kinds: F forward; B whole backward; I gradient of the input, W gradient of the weights (split backward).
F and a backward may run at once, as a pair with a time of its own (`Action.beside`).
Micro-batches are numbered over the whole step. A stage may have several copies (Chimera's pipes); a micro-batch uses one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...plan.orders import RECEIVES_AHEAD
from ..strategies import Listed

__all__ = [
    "FREE_RATE_BPS", "KIND_CODES", "Action", "Collective", "CollectiveKind", "Columns", "Kind", "Offload", "PipelineProblem", "PipelineStrategy",
    "Schedule", "Traits", "per_stage",
]  # fmt: skip

Kind = Literal["F", "B", "I", "W"]
CollectiveKind = Literal["gather", "reduce", "all-reduce"]
# Of a border without a stated rate: a terabyte takes a quarter of a microsecond, which is not seen beside any computation.
FREE_RATE_BPS = 1 << 62


class Action(NamedTuple):
    """Compute work on micro-batches `microbatch` .. `microbatch + count - 1` at once (count > 1: Chimera's doubled forward)."""

    kind: Kind
    stage: int
    microbatch: int
    copy: int = 0
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    # Of an overlapped pair, F and the backward that stands right behind it (B, or I and its W): the stage of the other half; -1 outside of pairs.
    # Both begin when both can, and end together after the pair's time.
    beside: int = -1

    def __str__(self) -> str:
        many = f"-{self.microbatch + self.count - 1}" if self.count > 1 else ""
        return f"{self.stage}{self.kind}{self.microbatch}{many}" + (f"&{self.beside}" if self.beside >= 0 else "")


class Collective(NamedTuple):
    """Weights gathered, gradients reduced or all-reduced, of one stage, in the device's communication lane.

    `after`, `before`: places in the device's compute order. It starts when action `after` is complete (-1: at once), and action `before`
    waits for it (-1: only the end of the step does).
    """

    kind: CollectiveKind
    stage: int
    copy: int = 0
    after: int = -1
    before: int = -1


class Offload(NamedTuple):
    """What a stage saves of one micro-batch waits in the host's memory between its F and its backward.

    `free`, `fetch`: places in the device's compute order. The action at `free` waits until the copy to the host is complete, so the bytes are free
    from there on; the copy back begins when the action at `fetch` is complete, and the backward waits for it.
    """

    stage: int
    microbatch: int
    free: int
    fetch: int


def per_stage(values: float | Sequence[float], devices: int, name: str) -> tuple[float, ...]:
    """One number for every stage, or one per stage. Raises: UsageError naming `name`."""
    given = (values,) if isinstance(values, int | float) else tuple(values)
    if len(given) == 1:
        given *= devices
    if len(given) != devices:
        raise UsageError(f"{len(given)} numbers for {devices} stages", where=name, hint="give one number, or one per stage")
    for x in given:
        if not isfinite(x) or x < 0:
            raise UsageError(f"must be finite and >= 0, got {x}", where=name)
    return given


@dataclass(frozen=True, kw_only=True)
class PipelineProblem:
    """Everything per stage of the model, on a device of speed 1; a device of speed v takes 1/v of the time.

    backward_s: whole backward (B); input_grad_s, weight_grad_s: its two parts when split (I, W), which need not add up to it.
    activation_bytes: what a stage keeps of one micro-batch from its forward to the end of its backward (of W when split), input included.
    message_bytes: what crosses the border after a stage, either way. p2p_*[i]: of the connection between devices i and i+1 (the last:
    with device 0); other pairs get the smallest rate and largest latency. memory_cap_bytes: per device, () = no limit.
    weight_bytes: parameters, gradients and optimiser state of one copy of a stage. gradient_bytes: what a reduction of it moves.
    pair_s: of a forward of the stage beside a backward, () = by `pair_overlap`, the share of the shorter one that the longer one hides (0: the sum of
    both, 1: the longer one). data: replicas of the whole pipeline. first_input_grad: whether the first stage of the model computes a gradient of its
    input. host_out_Bps, host_in_Bps: of copies between a device and its host's memory and back, 0 = none are made.
    """

    devices: int
    microbatches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    p2p_latency_s: tuple[float, ...]
    p2p_rate_Bps: tuple[int, ...]
    speeds: tuple[float, ...]
    memory_cap_bytes: tuple[int, ...] = ()
    data: int = 1
    first_input_grad: bool = True
    pair_s: tuple[float, ...] = ()
    pair_overlap: float = 0.0
    host_out_Bps: float = 0.0
    host_in_Bps: float = 0.0

    @staticmethod
    def of(
        devices: int, microbatches: int, *, forward_s: float | Sequence[float] = 1.0, backward_s: float | Sequence[float] | None = None,
        input_grad_s: float | Sequence[float] | None = None, weight_grad_s: float | Sequence[float] | None = None,
        activation_bytes: float | Sequence[float] = 1, message_bytes: float | Sequence[float] | None = None,
        weight_bytes: float | Sequence[float] = 0, gradient_bytes: float | Sequence[float] = 0, p2p_latency_s: float | Sequence[float] = 0.0,
        p2p_rate_Bps: float | Sequence[float] | None = None, speeds: float | Sequence[float] = 1.0,
        memory_cap_bytes: float | Sequence[float] | None = None, data: int = 1, first_input_grad: bool = True,
        pair_s: float | Sequence[float] | None = None, pair_overlap: float = 0.0, host_out_Bps: float = 0.0, host_in_Bps: float = 0.0,
        exchange_s: float | Sequence[float] | None = None,
    ) -> PipelineProblem:  # fmt: skip
        """Fill in and check. Without `backward_s` it is I + W; without I or W they are the rest of the backward, or half of it each.

        `message_bytes` is `activation_bytes` unless given. `exchange_s`: of a forward's time, and again of its backward's, what goes to all-to-all
        exchanges of experts. In a pair they pass beside the other half's computation (`overlapped_s`). Raises: UsageError naming the field.
        """
        for name, value in (("devices", devices), ("microbatches", microbatches), ("data", data)):
            if value < 1:
                raise UsageError(f"must be >= 1, got {value}", where=name, hint="a pipeline has stages and micro-batches")
        table = {"forward_s": forward_s, "activation_bytes": activation_bytes, "weight_bytes": weight_bytes, "gradient_bytes": gradient_bytes}
        filled = {k: per_stage(v, devices, k) for k, v in table.items()}
        whole, inputs, weights = _backward(devices, filled["forward_s"], backward_s, input_grad_s, weight_grad_s)
        border = filled["activation_bytes"] if message_bytes is None else per_stage(message_bytes, devices, "message_bytes")
        rate = per_stage(FREE_RATE_BPS if p2p_rate_Bps is None else p2p_rate_Bps, devices, "p2p_rate_Bps")
        quick = per_stage(speeds, devices, "speeds")
        for where, values in (("p2p_rate_Bps", rate), ("speeds", quick)):
            if min(values) <= 0:
                raise UsageError("must be > 0", where=where)
        if not 0 <= pair_overlap <= 1:
            raise UsageError(f"must be between 0 and 1, got {pair_overlap}", where="pair_overlap", hint="it is a share of the shorter half")
        if min(host_out_Bps, host_in_Bps) < 0 or (host_out_Bps > 0) != (host_in_Bps > 0):
            raise UsageError("needs two rates above 0, or none", where="host copies", hint="bytes per second to the host's memory, and back")
        if exchange_s is not None:
            if pair_s is not None or pair_overlap:
                raise UsageError("says what a pair takes, and so do the time or the overlap of pairs", where="exchange_s", hint="give one of them")
            pair_s = overlapped_s(filled["forward_s"], whole, per_stage(exchange_s, devices, "exchange_s"))
        cap = () if memory_cap_bytes is None else tuple(int(x) for x in per_stage(memory_cap_bytes, devices, "memory_cap_bytes"))
        return PipelineProblem(
            devices=devices, microbatches=microbatches, forward_s=filled["forward_s"], backward_s=whole, input_grad_s=inputs,
            weight_grad_s=weights, activation_bytes=_whole(filled["activation_bytes"]), message_bytes=_whole(border),
            weight_bytes=_whole(filled["weight_bytes"]), gradient_bytes=_whole(filled["gradient_bytes"]),
            p2p_latency_s=per_stage(p2p_latency_s, devices, "p2p_latency_s"), p2p_rate_Bps=_whole(rate), speeds=quick,
            memory_cap_bytes=cap, data=data, first_input_grad=first_input_grad,
            pair_s=() if pair_s is None else per_stage(pair_s, devices, "pair_s"), pair_overlap=float(pair_overlap),
            host_out_Bps=float(host_out_Bps), host_in_Bps=float(host_in_Bps),
        )  # fmt: skip


def overlapped_s(forward_s: Sequence[float], backward_s: Sequence[float], exchange_s: Sequence[float]) -> tuple[float, ...]:
    """Of each stage: a forward beside a backward, each with so many seconds of exchanges. Both computations share the device, both exchanges its
    network, and neither half gets shorter (DeepSeek-V3, arXiv 2412.19437, section 3.2.1). Raises: UsageError for exchanges longer than a half."""
    found = []
    for f, b, x in zip(forward_s, backward_s, exchange_s, strict=True):
        if x > min(f, b):
            raise UsageError(f"exchanges of {x:g} s are longer than a forward of {f:g} or a backward of {b:g} s, whose part they are",
                             where="exchange_s", hint="forward and backward times include exchanges")  # fmt: skip
        found.append(max(f + b - 2 * x, 2 * x, f, b))
    return tuple(found)


def _whole(values: Sequence[float]) -> tuple[int, ...]:
    return tuple(int(x) for x in values)


def _backward(
    devices: int, forward: Sequence[float], whole: Any, inputs: Any, weights: Any
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Whole backward and its two parts, from whichever were given; with none, I = W = F."""
    b = None if whole is None else per_stage(whole, devices, "backward_s")
    i = None if inputs is None else per_stage(inputs, devices, "input_grad_s")
    w = None if weights is None else per_stage(weights, devices, "weight_grad_s")
    if b is None:
        i = i or (tuple(forward) if w is None else w)
        w = w or i
        return tuple(x + y for x, y in zip(i, w, strict=True)), i, w
    if i is None and w is None:
        i = w = tuple(x / 2 for x in b)
    elif i is None and w is not None:
        i = _rest(b, w, "weight_grad_s")
    elif w is None and i is not None:
        w = _rest(b, i, "input_grad_s")
    assert i is not None and w is not None
    return b, i, w


def _rest(whole: tuple[float, ...], part: tuple[float, ...], where: str) -> tuple[float, ...]:
    if any(p > b for p, b in zip(part, whole, strict=True)):
        raise UsageError("takes longer than the whole backward", where=where, hint="give both parts of the split backward")
    return tuple(b - p for b, p in zip(whole, part, strict=True))


KIND_CODES = {"F": 0, "B": 1, "I": 2, "W": 3}  # as `Columns.kind` has them


@dataclass(frozen=True)
class Columns:
    """All actions of a schedule as columns, device after device: those of device d are first[d] to first[d + 1]. `kind`: see KIND_CODES."""

    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    copy: NDArray[np.int64]
    count: NDArray[np.int64]
    beside: NDArray[np.int64]
    first: NDArray[np.int64]

    @staticmethod
    def of(orders: Sequence[Sequence[Action]]) -> Columns:
        rows = [a for order in orders for a in order]
        codes = np.fromiter((KIND_CODES[a[0]] for a in rows), np.int64, len(rows))
        stage, microbatch, copy, count, beside = (np.fromiter(map(itemgetter(i), rows), np.int64, len(rows)) for i in range(1, 6))
        return Columns(codes, stage, microbatch, copy, count, beside, np.cumsum([0, *map(len, orders)], dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Who computes what in which order.

    placement[copy][stage]: the device. orders[device]: its compute actions. copy_of[m]: the copy that micro-batch m runs through.
    parts: micro-batches here per micro-batch of the problem (2: Chimera's halved backward). collectives[device]: weights and gradients, in the
    order of the device's communication lane. offloads[device]: what waits in the host's memory for a while, () = nothing anywhere. receives_ahead:
    messages a receiver may hold unused per connection and direction, at least (more where the producer's order demands it).
    """

    name: str
    devices: int
    stages: int
    placement: tuple[tuple[int, ...], ...]
    copy_of: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    split: bool = False
    parts: int = 1
    collectives: tuple[tuple[Collective, ...], ...] = ()
    offloads: tuple[tuple[Offload, ...], ...] = ()
    receives_ahead: int = RECEIVES_AHEAD
    options: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def microbatches(self) -> int:
        return len(self.copy_of)

    @cached_property
    def columns(self) -> Columns:
        return Columns.of(self.orders)

    @property
    def chunks(self) -> int:
        """Stages per device and copy."""
        return self.stages // self.devices

    @property
    def copies(self) -> int:
        return len(self.placement)

    def device(self, action: Action) -> int:
        return self.placement[action.copy][action.stage]

    def hosted(self, device: int) -> list[tuple[int, int]]:
        """(copy, stage) of everything the device holds, by stage."""
        found = [(c, s) for c, where in enumerate(self.placement) for s, d in enumerate(where) if d == device]
        return sorted(found, key=lambda x: (x[1], x[0]))


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a schedule demands of a model, known before anything is planned.

    stages_per_device: of one copy. split_backward: I and W instead of B. copies: of every stage, 1 = none besides the stage itself (of a
    strategy that chooses, the least). parts: micro-batches that run per micro-batch of the problem. pairs: forwards run beside backwards, where
    that hides something.
    """

    stages_per_device: int = 1
    split_backward: bool = False
    copies: int = 1
    parts: int = 1
    pairs: bool = False


class PipelineStrategy(Listed, Protocol):
    """A frozen dataclass of options with one method; what drivers need to know of it is here, with defaults. See docs/extending.md.

    told: options by which a variant is named even where they are the defaults.
    """

    told: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def applies(cls, problem: PipelineProblem) -> bool:
        """Cheap. False only where `plan` raises Unsupported with every option; the reason is in that error."""
        return True

    @classmethod
    def variants(cls, problem: PipelineProblem, *, chunks: Sequence[int] = (2,), effort: int = 0) -> tuple[Self, ...]:
        """What is worth comparing, without variants that would equal another one here; () for what is only run when it is named.

        chunks: stages per device to try, for those who have the choice. effort: of exact search, where it is wanted.
        """
        return (cls(),)

    @property
    def traits(self) -> Traits:
        return Traits()

    def settled(self) -> Self:
        """The same, with the choices made that `traits` follow from."""
        return self

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        """Raises: Unsupported (with a hint) when the schedule does not exist for the problem, Infeasible when it cannot fit in memory."""
        ...
