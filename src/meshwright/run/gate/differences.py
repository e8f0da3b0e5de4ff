"""What two runs of one step disagree on: the loss, gradients, buffers, parameters after the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...plan.plan import TrainingLayout
from ...plan.shards import divided_parameters
from ..tensor.sharding import take_part
from .planned import Held, RankStep
from .step import Step

__all__ = ["KINDS", "Compared", "Difference", "Tolerance", "differences", "settled_elements", "tolerance_of"]

KINDS = ("loss", "gradient", "buffer", "parameter")  # in the order in which a step makes them


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """`relative`: of the largest entry of a tensor; `updated`: the same, of parameters after the optimizer.

    `floor`: a gradient is measured against this share of the model's largest at least, since what is zero but for rounding has no size of its own.
    `settled`: an element's update is compared where its gradient is at least this share of the tensor's largest: optimizers that normalise make an
    update of full size of what is rounding alone.
    """

    relative: float
    updated: float
    floor: float
    settled: float


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    if dtype == torch.float64:
        return Tolerance(relative=1e-9, updated=1e-7, floor=1e-4, settled=1e-6)
    if dtype == torch.float32:
        return Tolerance(relative=1e-4, updated=1e-3, floor=1e-2, settled=1e-3)
    return Tolerance(relative=3e-2, updated=1e-1, floor=1e-1, settled=1e-1)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """`kind`: loss, gradient, buffer or parameter; `planned`, `own`: the numbers that are furthest apart; `error`: relative to the largest entry."""

    kind: str
    name: str
    rank: int
    planned: float
    own: float
    error: float


@dataclass
class Compared:
    """How much was compared, and the largest error seen, differences or not."""

    found: list[Difference]
    numbers: int
    largest: float


def differences(
    layout: TrainingLayout, planned: Sequence[RankStep], own: Step | Sequence[Step], tolerance: Tolerance, kinds: Sequence[str] = KINDS
) -> Compared:
    """Everything of `kinds` that differs by more than the tolerance: the loss first, then gradients, buffers, parameters, each by size of error.

    `own`: the owner's step; a list where every data replica has buffers of its own, equal in all else.
    """
    steps = [own] if isinstance(own, Step) else list(own)
    whole = steps[0]
    compared = Compared([], 0, 0.0)
    heard = {layout.coordinates(r)[:2]: x.loss for r, x in enumerate(planned) if x.loss is not None}
    loss = sum(heard.values()) / max(1, len(heard))
    planned_loss, own_loss = (torch.tensor([x], dtype=torch.float64) for x in (loss, whole.loss))
    _note(compared, "loss", "loss", -1, planned_loss, own_loss, 0.0, tolerance.relative)
    largest = max((float(g.abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0)
    for rank, name, have, want in _pairs(layout, planned, "gradients", whole.gradients) if "gradient" in kinds else ():
        _note(compared, "gradient", name, rank, have, want, tolerance.floor * largest, tolerance.relative)
    for rank, step in enumerate(planned) if "buffer" in kinds else ():
        replica = layout.coordinates(rank)[1]
        buffers = steps[replica if len(steps) > 1 else 0].buffers
        for name, have in step.buffers.items():
            if name in buffers:
                _note(compared, "buffer", name, rank, have, buffers[name], 0.0, tolerance.relative)
    settled = settled_elements(whole, tolerance)
    parameters, masks = (_pairs(layout, planned, "parameters", x) if "parameter" in kinds else () for x in (whole.parameters, settled))
    for (rank, name, have, want), (_, _, _, mask) in zip(parameters, masks, strict=True):
        if name in settled:
            have, want = have[mask], want[mask]
        _note(compared, "parameter", name, rank, have, want, 0.0, tolerance.updated)
    compared.found.sort(key=lambda d: (KINDS.index(d.kind), -d.error))
    return compared


def settled_elements(step: Step, tolerance: Tolerance) -> dict[str, torch.Tensor]:
    """By parameter that has a gradient: of which elements the gradient is more than rounding, so that their updates can be compared."""
    found = {n: g for n, g in step.gradients.items() if g.numel()}
    largest = max((float(g.abs().max()) for g in found.values()), default=0.0)
    return {n: g.abs() >= tolerance.settled * max(float(g.abs().max()), tolerance.floor * largest) for n, g in found.items()}


def _pairs(
    layout: TrainingLayout, planned: Sequence[RankStep], what: str, whole: dict[str, torch.Tensor]
) -> Iterator[tuple[int, str, torch.Tensor, torch.Tensor]]:
    """(rank, name, what the rank has, the same elements of the whole). A gradient that the owner has none of is zero."""
    for rank, step in enumerate(planned):
        held: list[Held] = getattr(step, what)
        divided = divided_parameters(layout, rank)
        for x in held:
            if x.name not in whole:
                yield rank, x.name, x.values, torch.zeros_like(x.values)
                continue
            own = whole[x.name]
            if (of := divided.get(x.name)) is not None:
                own = take_part(own, of.shard.axis, of.shard, of.part, of.parts)
            yield rank, x.name, x.values, own.reshape(-1)[x.first : x.first + x.values.numel()]


def _note(
    compared: Compared, kind: str, name: str, rank: int, have: torch.Tensor, want: torch.Tensor, floor: float, allowed: float
) -> None:
    if have.shape != want.shape:
        compared.found.append(Difference(kind=kind, name=name, rank=rank, planned=have.numel(), own=want.numel(), error=float("inf")))
        return
    if not have.numel():
        return
    a, b = have.detach().double().reshape(-1), want.detach().double().reshape(-1)
    compared.numbers += a.numel()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    apart = torch.where(apart.isnan(), float("inf"), apart)
    at = int(apart.argmax())
    finite = b[b.isfinite()]
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, floor)
    error = float(apart[at]) / scale if scale else (float("inf") if float(apart[at]) else 0.0)
    compared.largest = max(compared.largest, error)
    if error > allowed:
        compared.found.append(Difference(kind=kind, name=name, rank=rank, planned=float(a[at]), own=float(b[at]), error=error))
