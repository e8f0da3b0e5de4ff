"""Which plans with autocast run on a GPU: those made by its list of operators, and those that count on no type that autocast gives.

A GPU casts other operators than a processor does: layer norms and softmax are float32 there. Plans for GPUs are made with the GPU's list
(`Recipe.casts`). One that was made with the processor's has the same calls, which give on a GPU what eager autocast gives there. But a size that the
plan fixes must not depend on the list: messages between stages, tensor-parallel ranks, parts of the positions, experts; sums of statistics; steps
that were planned operator by operator. On processors every plan runs with the list that it was made with.
"""

from __future__ import annotations

from ...errors import Unsupported
from ...job import Recipe
from ...plan.context import layout_exchanges
from ...plan.plan import TrainingLayout

__all__ = ["require_casts"]


def require_casts(layout: TrainingLayout, asked: Recipe, device: str, where: str) -> None:
    """Raises: Unsupported where `device` ("cpu", "cuda") casts other operators than the plan's sizes count on; says which part of the plan it is."""
    if asked.precision == "fp32" or device in ("cpu", asked.casts):
        return
    counted = {
        f"pipeline {layout.pipeline}": layout.pipeline > 1, f"tensor {layout.tensor}": layout.tensor > 1,
        f"context {layout.context}": layout.context > 1, f"expert {layout.expert}": layout.expert > 1,
        "exchanges of values": bool(layout_exchanges(layout)),
        "statistics of the whole batch": bool(layout.batch_sums or ()), "steps planned by operator": any(s.step is not None for s in layout.segments),
    }  # fmt: skip
    for part, holds in counted.items():
        if holds:
            raise Unsupported(
                f"the plan ({part}) counts what {asked.precision} casts on processors; {device} casts other operators", where=where,
                hint="plan for a fabric of GPUs, or data parallelism alone (--dp N --pp 1 --tp 1), or run on processors", data={"part": part},
            )  # fmt: skip
