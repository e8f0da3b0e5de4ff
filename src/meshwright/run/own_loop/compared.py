"""The gate of a live model: one step of a plan beside the owner's module and his optimizer, on his batch, before `parallelize` takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from ...capture.live import LIVE, standing
from ...capture.live_job import live_again
from ...drive.plans import check_plan
from ...errors import UsageError, in_python
from ...plan.plan import Plan
from ...plan.shapes import plans_of_shapes
from ..gate.gate import GateReport, Stated, gate
from ..train.optimizer_trial import copy_for

__all__ = ["compare_step"]

OPTIMIZER = f"{LIVE}optimizer"  # what the owner's optimizer is called while its copies are made


@dataclass(frozen=True)
class _OwnSamples:
    """The samples of the owner's batches in turn, beginning one later in every round, so that no two rounds have equal micro-batches."""

    tensors: Sequence[torch.Tensor]

    def sample(self, index: int) -> tuple[torch.Tensor, ...]:
        rows = len(self.tensors[0])
        return tuple(x[(index + index // rows) % rows].detach().cpu() for x in self.tensors)


@in_python
def compare_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, batch: Any, *, loss: Callable[..., Any] | None = None,
    stated: Stated, limited: bool = True,
) -> GateReport:  # fmt: skip
    """See `meshwright.torch.compare_step`, which this is."""
    if plan.kind != "training" or plan.layout is None:
        raise UsageError(f"the plan is of a {plan.kind}", where="plan", hint="a plan of meshwright.plan or `meshwright train plan`")
    empty = next((n for n, p in model.named_parameters() if p.is_meta or not p.numel()), None)
    if empty is not None:
        raise UsageError(f"parameter {empty} holds no values", where="model", hint="compare before parallelize takes the model")
    check_plan(plan)
    whole = dict(model.named_parameters())
    given = live_again(model, plan.job, loss, batch).batch.form.tensors(batch)
    planned = [(p, live_again(model, p.job, loss, batch)) for p in plans_of_shapes(plan)]
    fits = [x for x in planned if all(tuple(g.shape[1:]) == tuple(size[1:]) for g, (size, _) in zip(given, x[1].batch.inputs, strict=False))]
    if not fits or len(given) != len(fits[0][1].batch.inputs):
        raise UsageError(
            f"a batch of {', '.join(str(tuple(x.shape)) for x in given)} was given, the plan was made for "
            f"{' or '.join(live.batch.shape for _, live in planned)}", where="batch", hint="give a batch as planned",
        )  # fmt: skip
    one, live = fits[0]
    job = msgspec.structs.replace(live.job, optimizer=OPTIMIZER)
    own = replace(one, job={**one.job, "training": msgspec.to_builtins(job)})
    with standing({**live.stands_for, OPTIMIZER: lambda held, _: copy_for(optimizer, whole, dict(held))}):
        return gate(own, data=_OwnSamples(given), stated=stated, limited=limited)
