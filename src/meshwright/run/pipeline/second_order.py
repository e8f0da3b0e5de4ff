"""K-FAC's real work in the idle time of a pipeline: what a filled plan's items do to the Linear layers of the stages of one rank.

Items are those of `decide.pipeline.fill_work.kfac_work`: `curvature A|B <stage>:m<microbatch>`, cut into pieces by layers; `sync A|B <stage>`, sums
over the ranks that hold the stage; and `inverse A|B <stage>.<part>`, a part of the stage's layers each, on one of these ranks. Curvature is that of
the cycle's first step; a layer's factors are averaged when its first inverse is due, which the plan places after all of their curvature, and at the
end of the cycle every rank gets the inverses that others made. Convention: the loss is a mean over the rows of a micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...errors import Unsupported, UsageError
from ...second_order import KFAC
from ...second_order.capture import Conventions
from ...second_order.layer import Factor
from ..executor.tags import ReservedTag
from ..executor.transport import Messages, Transport
from .stages import Given

__all__ = ["Exchange", "StageKFAC", "serial_kfac", "worst_kfac_difference"]

Key = tuple[int, int]  # (copy, stage)
_ITEM = re.compile(r"fill:(curvature|inverse|sync) ([AB]) (\d+)(?::m(\d+)(?::r\d+)?|\.(\d+)|)(?::(\d+)/(\d+))?$")
_KINDS: Mapping[str, Factor] = {"A": "input", "B": "gradient"}


def kfac_of(module: nn.Module, share: float, *, deferred: bool) -> KFAC | None:
    """K-FAC of a stage whose loss is multiplied by `share`; None where it has no layer that K-FAC treats. Takes no step of its own."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained:
        return None
    try:
        return KFAC(module, torch.optim.SGD(trained, lr=0.0), deferred=deferred, conventions=Conventions(scale=share))
    except UsageError:
        return None


class Exchange:
    """Messages between the ranks that hold a stage. `transport`: with an order of its own, if it has no tags."""

    def __init__(self, transport: Transport, rank: int) -> None:
        self.transport, self.rank = transport, rank

    def add_up(self, vector: torch.Tensor, ranks: Sequence[int], tag: int) -> None:
        """The sum over `ranks` takes the vector's place on all, with the same bits: every rank adds up a part of it, in the order of the ranks."""
        borders = [len(vector) * i // len(ranks) for i in range(len(ranks) + 1)]
        parts = [vector[a:b] for a, b in pairwise(borders)]
        mine = parts[ranks.index(self.rank)]
        found = {r: mine if r == self.rank else torch.empty_like(mine) for r in ranks}
        self._all(ranks, tag, parts, found)
        mine.copy_(torch.stack([found[r] for r in ranks]).sum(0))
        self._all(ranks, tag + 1, [mine] * len(ranks), dict(zip(ranks, parts, strict=True)))

    def spread(self, vector: torch.Tensor, owner: int, ranks: Sequence[int], tag: int) -> None:
        """The owner's vector takes the place of the others'."""
        others = [r for r in ranks if r != owner] if owner == self.rank else []
        self._exchange([(vector, r, tag) for r in others], [(vector, owner, tag)] if owner != self.rank else [])

    def _all(self, ranks: Sequence[int], tag: int, outgoing: Sequence[torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        sends = [(x, r, tag) for r, x in zip(ranks, outgoing, strict=True) if r != self.rank and x.numel()]
        self._exchange(sends, [(incoming[r], r, tag) for r in ranks if r != self.rank and incoming[r].numel()])

    def _exchange(self, sends: Messages, receives: Messages) -> None:
        if sends or receives:
            for work in self.transport.exchange(sends, receives):
                self.transport.wait(work)


class StageKFAC:
    """`items` and `placements` of a filled plan say who does what. Counts what it has done in `done`, by kind."""

    def __init__(
        self, modules: Mapping[Key, nn.Module], share: float, items: Sequence[Mapping[str, Any]], placements: Sequence[Mapping[str, Any]],
        exchange: Exchange,
    ) -> None:  # fmt: skip
        self.stages: dict[int, KFAC] = {}
        for (_, stage), module in modules.items():
            if stage in self.stages:
                raise Unsupported(f"a rank holds stage {stage} twice", where="fill", hint="K-FAC runs where a rank holds one copy of a stage")
            if (kfac := kfac_of(module, share, deferred=True)) is not None:
                self.stages[stage] = kfac
        self.exchange = exchange
        self.parts: dict[int, int] = {}  # inverses per stage and factor
        self.holders: dict[int, Sequence[int]] = {}  # of stages that several ranks hold
        for item in items:
            name = item["name"].split()
            if item["kind"] == "inverse" and name[1] == "A":
                stage = int(name[2].partition(".")[0])
                self.parts[stage] = self.parts.get(stage, 0) + 1
            elif item["kind"] == "sync":
                self.holders[int(name[2])] = sorted(item["ranks"])
        self.owner = {p["item"]: p["rank"] for p in placements}
        self.done = {"curvature": 0, "inverse": 0, **({"sync": 0} if self.holders else {})}
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
        if kind == "sync":
            return partial(self._add_up, kfac, stage, _KINDS[factor])
        if kind == "curvature":
            layers = _share(list(kfac.layers), int(piece or 1) - 1, int(pieces or 1))
            return partial(self._curvature, kfac, layers, _KINDS[factor], int(microbatch))
        return partial(self._invert, kfac, stage, _share(list(kfac.layers), int(part), self.parts[stage]), _KINDS[factor])

    def _curvature(self, kfac: KFAC, layers: Sequence[str], what: Factor, microbatch: int) -> None:
        for name in layers:
            self.done["curvature"] += kfac.curvature(name, what, microbatch)

    def _add_up(self, kfac: KFAC, stage: int, what: Factor) -> None:
        vectors = [layer.packed_sum(what) for layer in kfac.layers.values()]
        for dtype in dict.fromkeys(v.dtype for v in vectors):
            own = [(layer, v) for layer, v in zip(kfac.layers.values(), vectors, strict=True) if v.dtype == dtype]
            whole = torch.cat([v for _, v in own])
            self.exchange.add_up(whole, self.holders[stage], self._tag(stage, what))
            for (layer, _), summed in zip(own, whole.split([len(v) for _, v in own]), strict=True):
                layer.take_sum(what, summed)
        self.done["sync"] += 1

    def _tag(self, stage: int, what: Factor) -> int:
        return ReservedTag.BESIDE_PROGRAM + 4 * stage + 2 * (what == "gradient")

    def _invert(self, kfac: KFAC, stage: int, layers: Sequence[str], what: Factor) -> None:
        for name in layers:
            self._average(kfac, stage, name)
            kfac.invert(name, what)
            self.done["inverse"] += 1

    def _average(self, kfac: KFAC, stage: int, name: str) -> None:
        if (stage, name) not in self.averaged:
            kfac.average(name)
            self.averaged.add((stage, name))

    def share_inverses(self) -> None:
        """At the end of a cycle: every rank that holds a stage gets the inverses that another made."""
        for stage, ranks in self.holders.items():
            kfac = self.stages.get(stage)
            if kfac is None or self.exchange.rank not in ranks:
                continue
            for name in kfac.layers:
                self._average(kfac, stage, name)
            for letter, what in _KINDS.items():
                for owner, names in self._makers(kfac, stage, letter):
                    for layer in (kfac.layers[name] for name in names):
                        if not layer.usable:  # the factors are the same everywhere
                            continue
                        packed = layer.packed_inverse(what, room=owner != self.exchange.rank)
                        self.exchange.spread(packed, owner, ranks, self._tag(stage, what))
                        layer.take_inverse(what, packed)

    def _makers(self, kfac: KFAC, stage: int, letter: str) -> Iterator[tuple[int, list[str]]]:
        """(rank, layers that it inverts)."""
        for part in range(self.parts[stage]):
            yield self.owner[f"inverse {letter} {stage}.{part}"], _share(list(kfac.layers), part, self.parts[stage])

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
