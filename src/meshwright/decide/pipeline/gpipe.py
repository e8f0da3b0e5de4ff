"""GPipe: all forwards, then all backwards.

Cite: see CITE.
Left open by the paper: the order of the backwards. Our answer: as the forwards by default, which is PyTorch's; `reverse` runs the last
    micro-batch first.
Invariant: with equal stages and free messages (microbatches + devices - 1)·(F + B); every device keeps all micro-batches.
Cost: O(devices · microbatches).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from ...cite import Cite
from .orders import actions, looped
from .problem import PipelineProblem, PipelineStrategy, Schedule

__all__ = ["CITE", "GPipe"]

CITE = Cite(
    key="huang2019gpipe", title="GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", year=2019, venue="NeurIPS",
    authors="Huang et al.", url="https://arxiv.org/abs/1811.06965",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GPipe(PipelineStrategy):
    """`reverse`: backwards run the last micro-batch first."""

    name: ClassVar[str] = "gpipe"
    cite: ClassVar[Cite] = CITE

    reverse: bool = False

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        n = problem.microbatches
        back = range(n - 1, -1, -1) if self.reverse else range(n)
        orders = tuple(tuple(actions("F", [(d, m) for m in range(n)]) + actions("B", [(d, m) for m in back])) for d in range(problem.devices))
        return Schedule(
            name=self.name, devices=problem.devices, stages=problem.devices, placement=(looped(problem.devices, 1),), copy_of=(0,) * n,
            orders=orders, options=asdict(self),
        )  # fmt: skip
