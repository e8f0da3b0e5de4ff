"""The gate of a plan of several shapes: the step of each, and whether padding changes the loss.

The largest shape's step is compared on the data, as of any plan; those of the others on drawn samples of their sizes. Where data is padded, the loss
of some samples in evaluation mode, at their own lengths, must be that of the same samples filled up to the largest shape: else what is trained would
depend on which samples share a batch.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch

from ...capture.losses import Objective
from ...capture.precision import casting
from ...errors import DifferentTraining
from ...job import Training
from ...plan.plan import Plan
from ...plan.shapes import plans_of_shapes
from ..train.data import open_data, rows_of
from ..train.padding import MARK, Together, filled, fits, padding_of
from .gate import GateReport, Stated, gate, too_large
from .step import Owner

__all__ = ["gate_shapes", "unlike"]

TRIED_SAMPLES = 32  # among which shorter ones are looked for
PADDED_SAMPLES = 4  # whose loss is compared
TOLERANCE = 1e-4  # of their losses, relative; in the model's own precision, and 100 times that in a narrow one


def gate_shapes(plan: Plan, *, data: str, stated: Stated | None = None, limited: bool = True) -> GateReport:
    """As `gate`, for all shapes of a plan; of one shape it is `gate`. Raises: as `gate`; DifferentTraining where padding changes the loss."""
    stated = stated or Stated()
    first, *others = plans_of_shapes(plan)
    report = gate(first, data=data, stated=stated, limited=limited)
    if not others:
        return report
    more = [gate(p, data="synthetic", stated=stated, limited=limited) for p in others]
    why = next((x.why_not for x in more if x.why_not), "")
    sizes = ", ".join("x".join(map(str, s.inputs[0][0][1:])) for s in plan.shapes)
    said = f"steps of shapes {sizes} were compared on drawn samples" if not why else f"not compared for every shape: {why}"
    note = _padding(plan, data, limited)
    return replace(
        report, numbers=report.numbers + sum(x.numbers for x in more), largest_error=max(x.largest_error for x in (report, *more)),
        notes=(*report.notes, said, *([note] if note else [])),
    )  # fmt: skip


def _padding(plan: Plan, data: str, limited: bool) -> str:
    """What was tried of padding, in words; nothing where nothing is padded. Raises: DifferentTraining."""
    layout = plan.layout
    assert layout is not None
    if MARK not in data:
        return ""
    if limited and (why := too_large(plan, layout)):
        return f"whether padding changes the loss was not tried: {why}"
    job = msgspec.convert(plan.job["training"], Training)
    owner = Owner(job, wide=False)
    examples = owner.initial.examples
    sizes = [tuple(x.shape[1:]) for x in examples]
    padding = padding_of(data, examples, together=True)[1]
    assert isinstance(padding, Together)
    dataset = open_data(data, examples, job.seed, job.global_batch, together=True)
    rows = [rows_of(dataset, i, 1) for i in range(TRIED_SAMPLES)]
    shorter = [r for r in rows if fits(r, sizes, True) and not fits(r, sizes, False)]
    module = owner.initial.module.eval()
    objective = Objective(module, job.loss, calling=owner.initial.calling)
    narrow = job.asked.precision != "fp32" or any(p.dtype.itemsize < 4 for p in module.parameters())
    for given in shorter[:PADDED_SAMPLES]:
        larger = [filled(x, (1, *size), value) for x, size, value in zip(given, sizes, padding.values, strict=True)]
        losses = []
        for inputs in (given, larger):
            with owner.own_code(), torch.no_grad(), casting(job.asked.autocast):
                losses.append(float(objective(*(x.clone() for x in inputs))))
        if unlike(*losses, narrow=narrow):
            raise DifferentTraining(
                f"padding changes the loss: a sample of {tuple(given[0].shape[1:])} has {losses[0]:.6g} by itself and {losses[1]:.6g} padded to "
                f"{sizes[0]}, so what is trained would depend on the lengths of others in its batch", where=job.model,
                hint="targets of padding must be a value that the loss ignores, and the model must not look at padding (a causal mask, or an input)",
                data={"cause": "padding", "losses": losses},
            )  # fmt: skip
    if not shorter:
        return f"none of the first {TRIED_SAMPLES} samples is padded"
    return f"padding changes no loss of {min(len(shorter), PADDED_SAMPLES)} shorter samples"


def unlike(one: float, other: float, *, narrow: bool) -> bool:
    """Whether two losses differ by more than rounding in the model's own precision, or in a narrow one, makes of one number."""
    return abs(one - other) > TOLERANCE * (100 if narrow else 1) * max(abs(one), abs(other))
