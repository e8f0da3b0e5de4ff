"""What people would write by hand, each as a strategy: AutoDDL's search within one template (`templates`).

Invariant: none is slower than the hand-written strategy of its name, and AutoDDL is never slower than any of them in the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....cite import FOLKLORE, Cite
from ....plan.sharding import ShardingPlan
from ..grid import CITE as GRID_CITE
from ..megatron import CITE as MEGATRON_CITE
from .problem import ShardingProblem, ShardingStrategy
from .strategy import AutoDDL

__all__ = ["BY_HAND", "ConvolutionsThenLinear", "DataAndMegatron", "DataParallel", "Megatron"]

KRIZHEVSKY = Cite(
    key="krizhevsky2014weird", title="One weird trick for parallelizing convolutional neural networks", year=2014, venue="arXiv:1404.5997",
    authors="Alex Krizhevsky",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _ByHand(ShardingStrategy):
    """Options. mesh: only this one; time_limit_s: of the search within the template."""

    mesh: tuple[int, ...] | None = None
    time_limit_s: float = 120.0

    def plan(self, problem: ShardingProblem, *, rng: np.random.Generator | None = None, seed: int = 0) -> ShardingPlan:
        return AutoDDL(search=self.name, mesh=self.mesh, time_limit_s=self.time_limit_s).plan(problem, rng=rng, seed=seed)


class DataParallel(_ByHand):
    name: ClassVar[str] = "data"
    cite: ClassVar[Cite] = FOLKLORE


class Megatron(_ByHand):
    name: ClassVar[str] = "megatron"
    cite: ClassVar[Cite] = MEGATRON_CITE


class ConvolutionsThenLinear(_ByHand):
    name: ClassVar[str] = "conv-dp+fc-tp"
    cite: ClassVar[Cite] = KRIZHEVSKY


class DataAndMegatron(_ByHand):
    name: ClassVar[str] = "data+megatron"
    cite: ClassVar[Cite] = GRID_CITE


BY_HAND = (DataParallel, Megatron, ConvolutionsThenLinear, DataAndMegatron)
