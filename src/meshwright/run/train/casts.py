"""Which plans with autocast run on a GPU: those that count on no type that autocast gives.

A plan is made with the processor's list of operators that autocast casts; a GPU's list is another (layer norms and softmax are float32 there). The
calls are the same, so on a GPU they give what eager autocast gives there. But a size that the plan fixes must not depend on the list: messages
between stages, tensor-parallel ranks, parts of the positions, experts; sums of statistics; steps that were planned operator by operator.
"""

from __future__ import annotations

from ...errors import Unsupported
from ...plan.context import layout_exchanges
from ...plan.plan import TrainingLayout

__all__ = ["require_casts"]


def require_casts(layout: TrainingLayout, precision: str, device: str, where: str) -> None:
    """Raises: Unsupported where `device` ("cpu", "cuda") casts other operators than the plan's sizes count on; says which part of the plan it is."""
    if precision == "fp32" or device == "cpu":
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
                f"the plan ({part}) counts what {precision} casts on processors; {device} casts other operators", where=where,
                hint="plan data parallelism alone (--data N --pipeline 1 --tensor 1), or in fp32, or run on processors", data={"part": part},
            )  # fmt: skip
