"""One-forward-one-backward (1F1B): the synchronous pipeline order with the smallest activation memory at GPipe's bubble.

Cite: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), ICML 2021; Narayanan et al.,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2.1.
Left open by the paper: what happens when there are fewer micro-batches than stages. Our answer: the warm-up is cut to the
    number of micro-batches, and the order becomes all-forward-all-backward on the stages that this concerns.
Invariant: every stage runs F and B of each micro-batch once, both in increasing micro-batch order, F before B; stage s holds
    at most min(microbatches, stages - s) micro-batches at once. With equal stages (f, b seconds) and free communication the
    step takes (microbatches + stages - 1)·(f + b).
Cost: O(microbatches) per stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cite import Cite
from ...plan.orders import one_f_one_b_order
from .orders import looped
from .problem import Action, PipelineProblem, PipelineStrategy, Schedule

__all__ = ["CITE", "OneFOneB"]

CITE = Cite(
    key="narayanan2021pipedream2bw", title="Memory-Efficient Pipeline-Parallel DNN Training", year=2021, venue="ICML", authors="Narayanan et al.",
    url="https://arxiv.org/abs/2006.09503",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OneFOneB(PipelineStrategy):
    """No options."""

    name: ClassVar[str] = "1f1b"
    cite: ClassVar[Cite] = CITE
    aliases: ClassVar[tuple[str, ...]] = ("onefoneb",)

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        p, n = problem.devices, problem.microbatches
        orders = tuple(tuple(Action(kind, d, m) for kind, m in one_f_one_b_order(p, n, d)) for d in range(p))
        return Schedule(name=self.name, devices=p, stages=p, placement=(looped(p, 1),), copy_of=(0,) * n, orders=orders)
