"""K-FAC's real work in the idle time of a pipeline: what a filled plan's items do to the Linear layers of the stages of one rank.

Items are those of `decide.pipeline.fill_work.kfac_work`: `curvature A|B <stage>:m<microbatch>`, cut into pieces by layers, and `inverse A|B
<stage>.<part>`, a part of the stage's layers each. Curvature is that of the cycle's first step; a layer's factors are averaged when its first
inverse is due, which the plan places after all of their curvature. Convention: the loss is a mean over the rows of a micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Literal

import torch
from torch import nn

from ...errors import Unsupported, UsageError
from ...second_order import KFAC
from ...second_order.capture import Conventions
from .stages import Given

__all__ = ["StageKFAC", "serial_kfac", "worst_kfac_difference"]

Key = tuple[int, int]  # (copy, stage)
_ITEM = re.compile(r"fill:(curvature|inverse) ([AB]) (\d+)(?::m(\d+)|\.(\d+))(?::(\d+)/(\d+))?$")
_KINDS: Mapping[str, Literal["input", "gradient"]] = {"A": "input", "B": "gradient"}


def kfac_of(module: nn.Module, share: float, *, deferred: bool) -> KFAC | None:
    """K-FAC of a stage whose loss is multiplied by `share`; None where it has no layer that K-FAC treats. Takes no step of its own."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        return None
    try:
        return KFAC(module, torch.optim.SGD(trained, lr=0.0), deferred=deferred, conventions=Conventions(scale=share))
    except UsageError:
        return None


class StageKFAC:
    """`parts`: inverses per stage and factor that the plan has. Counts what it has done in `done`, by kind."""

    def __init__(self, modules: Mapping[Key, nn.Module], share: float, parts: Mapping[int, int]) -> None:
        found = {stage: kfac_of(module, share, deferred=True) for (_, stage), module in modules.items()}
        self.stages = {stage: k for stage, k in found.items() if k is not None}
        self.parts = parts
        self.done = {"curvature": 0, "inverse": 0}
        self.averaged: set[tuple[int, str]] = set()

    def begin(self, *, first: bool) -> None:
        """A step of the cycle begins; its first one brings new curvature."""
        for kfac in self.stages.values():
            kfac.capture.on = first
        if first:
            self.averaged.clear()
            for kfac in self.stages.values():
                kfac.capture.clear()

    def tell(self, stage: int, microbatch: int) -> None:
        """The next forward of the stage is that of this micro-batch."""
        if stage in self.stages:
            self.stages[stage].microbatch = microbatch

    def action(self, item: str) -> Callable[[], None]:
        """What an item (`fill:...`, as the program names it) does. Raises: Unsupported for work other than K-FAC's."""
        found = _ITEM.match(item)
        if found is None:
            raise Unsupported(f"{item!r} has no real counterpart", where="fill", hint="K-FAC's runs on given stages; leave --stages out to pace it")
        kind, factor, stage_text, microbatch, part, piece, pieces = found.groups()
        stage = int(stage_text)
        if stage not in self.stages:
            return lambda: None
        kfac = self.stages[stage]
        if kind == "curvature":
            layers = _share(list(kfac.layers), int(piece or 1) - 1, int(pieces or 1))
            return partial(self._curvature, kfac, layers, _KINDS[factor], int(microbatch))
        return partial(self._invert, kfac, stage, _share(list(kfac.layers), int(part), self.parts[stage]), _KINDS[factor])

    def _curvature(self, kfac: KFAC, layers: Sequence[str], what: Literal["input", "gradient"], microbatch: int) -> None:
        for name in layers:
            self.done["curvature"] += kfac.curvature(name, what, microbatch)

    def _invert(self, kfac: KFAC, stage: int, layers: Sequence[str], what: Literal["input", "gradient"]) -> None:
        for name in layers:
            if (stage, name) not in self.averaged:
                kfac.average(name)
                self.averaged.add((stage, name))
            kfac.invert(name, what)
            self.done["inverse"] += 1

    def precondition(self) -> None:
        """Every stage's gradients in place, by the latest inverses."""
        for kfac in self.stages.values():
            kfac.precondition()


def _share(layers: Sequence[str], part: int, parts: int) -> list[str]:
    """The layers of one of `parts` parts, in order and as even as can be."""
    return [name for i, name in enumerate(layers) if i * parts // len(layers) == part] if parts <= len(layers) else list(layers[part : part + 1])


def serial_kfac(given: Given) -> list[nn.Module]:
    """Copies of all stages after one serial step: gradients of the mean loss, preconditioned by factors of this very step."""
    modules = [deepcopy(m).cpu() for m in given.modules]
    share = 1.0 / len(given.inputs)
    optimizers = [kfac_of(m, share, deferred=False) for m in modules]
    for module in modules:
        module.zero_grad()
    for m, (x, target) in enumerate(zip(given.inputs, given.targets, strict=True)):
        for module, kfac in zip(modules, optimizers, strict=True):
            if kfac is not None:
                kfac.microbatch = m
            x = module(x)
        (given.loss(x, target) * share).backward()
    for kfac in optimizers:
        if kfac is not None:
            kfac.step()
            kfac.close()
    return modules


def worst_kfac_difference(given: Given, modules: Mapping[Key, nn.Module]) -> float:
    """Largest difference of preconditioned gradients from a serial K-FAC step's, relative to the largest element of each."""
    serial = serial_kfac(given)
    worst = 0.0
    for (_, stage), module in modules.items():
        for p, q in zip(module.parameters(), serial[stage].parameters(), strict=True):
            if p.grad is not None and q.grad is not None:
                worst = max(worst, float((p.grad.cpu() - q.grad).abs().max()) / max(float(q.grad.abs().max()), 1e-30))
    return worst
