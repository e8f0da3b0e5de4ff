"""Steps that are not those of the whole batch, told of where no batch was given to compare one: the loop is the owner's, as it is under DDP.

What brings samples together is read from calls and shapes: normalisation by the batch, and what compares samples or divides sums over them. A mean
over samples, or over what is counted among them, adds up over micro-batches, and is not told of.
"""

from __future__ import annotations

import warnings
from typing import Any

from ...capture.live import standing
from ...capture.live_job import LiveJob
from ...capture.regions import REGION
from ...errors import MeshwrightError
from ...plan.batch_statistics import batch_sums
from ...plan.plan import TrainingLayout
from ..gate.causes import batch_statistics
from ..launch.outcome import at_whole_batch
from ..steps.forward_graph import OPAQUE
from ..tensor.whole_batch import calls_of
from ..train.changed_buffers import changed_buffers
from ..train.loss_terms import loss_understood

__all__ = ["tell_of_whole_batch"]

GLOBAL = 'plan with recipe=Recipe(batch_statistics="global") for those of the whole batch'
WHOLE = "one micro-batch in all"
COMPARE = "give parallelize a batch, so that a step is compared with the model's own"


def tell_of_whole_batch(graph: Any, live: LiveJob, layout: TrainingLayout) -> None:
    """Warns where the step is not that of the whole batch. Costs a trace at twice the micro-batch."""
    if layout.all_microbatches == 1 or batch_sums(layout):
        return
    advice = f"{GLOBAL}, or {WHOLE}"
    if norms := batch_statistics(graph):
        what = f"module {graph.modules.get(norms[0].name, '')!r} normalises by each micro-batch of {layout.microbatch_size} samples by itself"
    elif moved := next((name for name, (_, of_samples) in changed_buffers(graph).items() if of_samples), ""):
        what = f"buffer {moved!r} follows the samples that forward sees, and each micro-batch changes it by its own {layout.microbatch_size}"
        advice = f"plan with {WHOLE}"
    elif kept := _kept_loss(graph):
        what = f"{kept} is kept whole, so that its loss is not known to be a mean over samples: each micro-batch has its own"
        advice = COMPARE
    elif found := _together(graph, live, layout):
        what = f"{found} brings samples together, and each micro-batch of {layout.microbatch_size} samples is by itself"
    else:
        return
    warnings.warn(f"{what}; {advice}", stacklevel=5)  # the owner's call of `parallelize`, past `errors.in_python`


def _kept_loss(graph: Any) -> str:
    """What computes the loss where that was not traced."""
    if any(n.target == OPAQUE for n in graph.nodes):
        return "the model"
    return "the loss" if any(n.target == REGION and graph.modules.get(n.name, "") == "loss" for n in graph.nodes) else ""


def _together(graph: Any, live: LiveJob, layout: TrainingLayout) -> str:
    """The first call that brings samples together, and its module; "" where calls and shapes show none."""
    with standing(live.stands_for):
        try:
            both = at_whole_batch(graph, live.job, 2 * layout.microbatch_size, {})
            calls = calls_of(both)
        except MeshwrightError:  # other calls at another batch: nothing is known
            return ""
    summed = {c.name.partition("/")[0] for c in calls if c.role == "share"}
    if loss_understood(graph):  # sums over samples lead to it as they should; what is left are those that samples are compared with
        rows = {n.name for n, m in zip(graph.nodes, both.whole, strict=True) if n.outputs != m.outputs}
        summed &= {v for n in graph.nodes if n.name in rows for v in n.inputs}
    names = summed | {c.name.partition("/")[0] for c in calls if c.role == "place"}
    first = next((n for n in graph.nodes if n.name in names), None)
    if first is None:
        return ""
    module = graph.modules.get(first.name, "")
    return f"{first.target} of {'the loss' if module == 'loss' else f'module {module!r}' if module else 'the model'}"
