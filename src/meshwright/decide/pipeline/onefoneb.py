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
from typing import Literal

import numpy as np

from ...cite import Cite
from ...errors import UsageError
from .orders import looped
from .problem import Action, PipelineProblem, Schedule

__all__ = ["CITE", "OneFOneB", "Phase", "one_f_one_b_order", "peak_in_flight"]

CITE = Cite(
    key="narayanan2021pipedream2bw", title="Memory-Efficient Pipeline-Parallel DNN Training", year=2021, venue="ICML", authors="Narayanan et al.",
    url="https://arxiv.org/abs/2006.09503",
)  # fmt: skip

Phase = Literal["F", "B"]


@dataclass(frozen=True, kw_only=True)
class OneFOneB:
    """No options."""

    def plan(self, problem: PipelineProblem, *, rng: np.random.Generator | None = None) -> Schedule:
        p, n = problem.devices, problem.microbatches
        orders = tuple(tuple(Action(kind, d, m) for kind, m in one_f_one_b_order(p, n, d)) for d in range(p))
        return Schedule(name="1f1b", devices=p, stages=p, placement=(looped(p, 1),), copy_of=(0,) * n, orders=orders)


def one_f_one_b_order(stages: int, microbatches: int, stage: int) -> list[tuple[Phase, int]]:
    """Order of work on `stage` (0 = first): a list of ("F" | "B", micro-batch) of length 2 · microbatches.

    Raises: UsageError when a count is below 1 or the stage does not exist.
    """
    _require(stages, microbatches, stage)
    warmup = min(stages - stage - 1, microbatches)
    order: list[tuple[Phase, int]] = [("F", i) for i in range(warmup)]
    for i in range(microbatches - warmup):
        order += [("F", warmup + i), ("B", i)]
    order += [("B", i) for i in range(microbatches - warmup, microbatches)]
    return order


def peak_in_flight(stages: int, microbatches: int, stage: int) -> int:
    """Most micro-batches whose activations `stage` holds at once: min(microbatches, stages - stage)."""
    _require(stages, microbatches, stage)
    return min(microbatches, stages - stage)


def _require(stages: int, microbatches: int, stage: int) -> None:
    if stages < 1:
        raise UsageError(f"a pipeline needs at least 1 stage, got {stages}", where="stages")
    if microbatches < 1:
        raise UsageError(f"a pipeline needs at least 1 micro-batch, got {microbatches}", where="microbatches", hint="raise the global batch")
    if not 0 <= stage < stages:
        raise UsageError(f"there is no stage {stage} in a pipeline of {stages}", where="stage", hint=f"stages are 0-{stages - 1}")
