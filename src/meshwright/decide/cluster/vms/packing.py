"""Packing without forecasts: first fit and best fit, and the two scores of Kubernetes' scheduler.

Cite: first and best fit are folklore; MostAllocated and LeastAllocated are scoring strategies of the plugin NodeResourcesFit of kube-scheduler.
Left open by the paper: ties. Our answer: the host with the lowest number; Kubernetes draws among the best.
Deviations: of Kubernetes only this score, with resources weighted alike; no spreading by owner, no preemption.
Invariant: first fit never opens an empty host while one in use has room.
Cost: O(hosts · resources) per machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....cite import FOLKLORE, Cite
from ....kernels.vm_fleet import BEST, FIRST, LEAST, MOST, Rule
from .problem import Placing, VmProblem, VmStrategy

__all__ = ["BestFit", "FirstFit", "LeastAllocated", "MostAllocated"]

KUBERNETES = Cite(key="kubernetes-noderesourcesfit", title="Resource Bin Packing", year=2024, venue="Kubernetes documentation")


class _Packing(VmStrategy):
    """One rule of the compiled ones."""

    forecasts: ClassVar[bool] = False
    kind: ClassVar[int]

    def plan(self, problem: VmProblem, *, rng: np.random.Generator) -> Placing:
        return Placing(rule=Rule(self.kind))


@dataclass(frozen=True, kw_only=True)
class FirstFit(_Packing):
    """The first host with room. No options."""

    name: ClassVar[str] = "first-fit"
    cite: ClassVar[Cite] = FOLKLORE
    kind: ClassVar[int] = FIRST


@dataclass(frozen=True, kw_only=True)
class BestFit(_Packing):
    """The host with the least free afterwards, summed over resources. No options."""

    name: ClassVar[str] = "best-fit"
    cite: ClassVar[Cite] = FOLKLORE
    kind: ClassVar[int] = BEST


@dataclass(frozen=True, kw_only=True)
class MostAllocated(_Packing):
    """The host with the highest score of 0 to 100 for what is taken, in whole numbers. No options."""

    name: ClassVar[str] = "most-allocated"
    cite: ClassVar[Cite] = KUBERNETES
    kind: ClassVar[int] = MOST


@dataclass(frozen=True, kw_only=True)
class LeastAllocated(_Packing):
    """The host with the highest score of 0 to 100 for what is free: Kubernetes' default. No options."""

    name: ClassVar[str] = "least-allocated"
    cite: ClassVar[Cite] = KUBERNETES
    kind: ClassVar[int] = LEAST
