"""Accelerate's own loop on a plan: `step = accelerated(accelerator, model, optimizer, plan)`, in the place of `accelerator.prepare`.

    step = meshwright.torch.accelerated(accelerator, model, optimizer, plan)
    for batch in loader:                      # the plan's global batches, the same at every rank: the loader is not prepared
        loss = step(batch)                    # instead of backward(loss), clip_grad_norm_ and optimizer.step(): the plan's recipe clips
        scheduler.step()

`accelerator.save_state` and `load_state` save and load the step (model, optimizer and count), whole, so that another plan of the model can go on.
The accelerator's mixed precision is the plan's (`Recipe(precision=...)`), or off. Not supported, and refused: another mixed precision, gradient
accumulation of the accelerator's, FSDP, DeepSpeed and Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...drive.plans import read_plan
from ...errors import MissingExtra, UsageError
from ...plan.plan import Plan
from .parallelize import parallelize
from .recipe import recipe_of
from .shapes import Pad
from .step import ParallelStep

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise MissingExtra("accelerate", extra="accelerate", needed_for="accelerated") from error

__all__ = ["accelerated"]

PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class _Saved:
    """What `accelerator.save_state` asks of every rank, and writes at the first."""

    def __init__(self, step: ParallelStep) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.step.state_dict(full=True), "optimizer": self.step.optimizer_state_dict(full=True), "steps": self.step.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step.load_state_dict(state["model"])
        self.step.load_optimizer_state_dict(state["optimizer"])
        self.step.steps = int(state["steps"])


def accelerated(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan | str | Path, *,
    loss: Callable[..., Any] | None = None, batch: Any = None, pad: Pad = None, compare: bool = True,
) -> ParallelStep:  # fmt: skip
    """`parallelize` on the accelerator's device and world; the step is part of the accelerator's checkpoints.

    model, optimizer: as they are, not prepared. loss, batch, pad, compare: as of `parallelize`.
    Raises: UsageError for settings of the accelerator that would train something else, and what
    `parallelize` raises.
    """
    plan = plan if isinstance(plan, Plan) else read_plan(plan)
    planned = recipe_of(plan).precision
    wrong = [
        (accelerator.mixed_precision not in ("no", planned.removesuffix("-autocast")), f"mixed_precision={accelerator.mixed_precision!r}",
         f"the plan's precision counts, and is {planned}"),
        (accelerator.gradient_accumulation_steps != 1, "gradient_accumulation_steps", "the plan has its own micro-batches"),
        (accelerator.distributed_type not in PLAIN, str(accelerator.distributed_type), "the plan divides the model"),
    ]  # fmt: skip
    for is_wrong, name, why in wrong:
        if is_wrong:
            raise UsageError(f"the accelerator has {name}", where="Accelerator", hint=f"leave it off: {why}")
    step = parallelize(model.to(accelerator.device), optimizer, plan, loss=loss, batch=batch, pad=pad, compare=compare)
    accelerator.register_for_checkpointing(_Saved(step))
    return step
