"""What a job's recipe asks of the program of every step, as part of its layouts; recipes that no run could follow are refused."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...cost import Cost
from ...decide.layout.problem import Degrees
from ...errors import Unsupported, UsageError
from ...fabric.fabric import Fabric
from ...graph.graph import OpGraph
from ...graph.scale import at_batch
from ...job import Training
from ...plan.batch_statistics import normalises, sums_in, with_shared_statistics
from ...plan.optimizers import optimizer_kind, state_copies, undecayed
from ...plan.plan import StepEnd
from ...plan.precision import Precision

__all__ = ["at_peak_of", "refusing_cuts", "require_recipe", "statistics_of", "step_end"]


def require_recipe(job: Training, graph: OpGraph) -> None:
    """Raises: UnknownName, Unsupported, UsageError for an optimizer that does not exist or cannot be used, for values that do not fit, and where no
    parameter gets a gradient."""
    asked = job.asked
    if graph.method == "export" and graph.joint and not graph.gradients:
        trainable = any(p.trainable for p in graph.parameters)
        text = "the loss has no gradient for any parameter" if trainable else "no parameter of the model is trainable"
        hint = "what is detached, or computed under no_grad, has none" if trainable else "requires_grad_(True) on what is to be trained"
        raise UsageError(f"{text}: there is nothing to train", where=graph.model, hint=hint)
    kind = optimizer_kind(job.optimizer)
    if asked.no_decay and kind is None:
        raise UsageError("a function makes its own groups", where="--no-decay", hint="leave --no-decay out, or name an optimizer of torch.optim")
    undecayed({p.name: p.shape for p in graph.parameters if p.trainable}, asked.no_decay)
    if not 0 <= asked.ema < 1:
        raise UsageError(f"the decay of the average must be at least 0 and below 1, got {asked.ema:g}", where="--ema", hint="e.g. --ema 0.999")
    if asked.batch_statistics not in ("", "global"):
        raise UsageError(f"there is no {asked.batch_statistics!r} of it", where="--batch-statistics", hint="global, or leave it out")
    if asked.batch_statistics:
        _require_shared(graph)
    cast = {"bf16-autocast": "bfloat16", "fp16-autocast": "float16"}.get(asked.precision)
    if cast is not None and not any(x.dtype == cast for n in graph.nodes for x in n.outputs):
        raise UsageError(f"the graph holds no {cast}: it was captured in another precision", where="--precision", hint="give --model")
    for value, flag in ((asked.clip_norm, "--clip-norm"), (asked.clip_value, "--clip-value")):
        if not 0 <= value < float("inf"):
            raise UsageError(f"gradients are clipped to a positive number, got {value:g}", where=flag, hint=f"e.g. {flag} 1.0")
    if asked.clip_norm and asked.clip_value:
        raise UsageError("gradients are clipped by norm or by value", where="--clip-value", hint="leave one of the two out")


def _require_shared(graph: OpGraph) -> None:
    if any(normalises(n.target, n.args) for n in graph.nodes):
        return
    where, found = "--batch-statistics global", "the model could not be traced" if graph.method == "opaque" else ""
    if not found and not sums_in(with_shared_statistics(graph, at_batch(graph, 2 * graph.batch_size))):
        found = "no call of the model or its loss looks at other samples of the batch"
    if found:
        hint = "leave it out, or plan one micro-batch in all (--dp 1) for a loss that looks at the whole batch"
        raise Unsupported(f"{found}: there is nothing of the batch that replicas could share", where=where, hint=hint)


def step_end(job: Training, graph: OpGraph, precision: Precision | None = None) -> StepEnd | None:
    """None where the job asks for nothing that the program shows. `precision`: of the layout, which says what masters take."""
    copies = state_copies(job.optimizer, job.asked.ema)
    if precision is None and any(p.trainable and p.dtype == "bfloat16" for p in graph.parameters):
        copies = 2 * (1 + copies)  # a master and its state, twice as wide as the weight
    # float16 may overflow: the norm tells all ranks alike that some gradient is not finite
    made = StepEnd(
        state_copies=copies, norm=job.asked.clip_norm > 0 or job.asked.precision == "fp16-autocast",
        folded=True if job.asked.reproducible == "tree" else msgspec.UNSET,
    )  # fmt: skip
    return None if made == StepEnd() else made


def statistics_of(job: Training) -> int:
    """Samples of the batch whose statistics the data replicas share; 0 where they do not."""
    return job.global_batch if job.asked.batch_statistics == "global" else 0


def at_peak_of(cost: Cost, job: Training, fabric: Fabric) -> Cost:
    """The cost at the peak of the job's precision, where the devices state one and it is the higher one: products are cast, and they are the work."""
    kind = {"bf16-autocast": "bf16", "fp16-autocast": "fp16"}.get(job.asked.precision, "bf16" if job.dtype == "bfloat16" else "")
    if cost.dtype == "fp32" and all(d.flops.get(kind, -1) >= d.flops.get("fp32", 0) for d in fabric.devices):
        return msgspec.structs.replace(cost, dtype=kind)
    return cost


def refusing_cuts(job: Training, refuse: Callable[[Degrees], str] | None) -> Callable[[Degrees], str] | None:
    """`refuse`, tensor parallelism for an optimizer that needs parameters whole, and several micro-batches of a replica where replicas share
    statistics of the batch (`plan.batch_statistics`)."""
    kind, shared = optimizer_kind(job.optimizer), statistics_of(job)
    if (kind is None or kind.cut) and not shared:
        return refuse

    def why(degrees: Degrees) -> str:
        if shared and (degrees.context > 1 or degrees.data * degrees.microbatch_size < shared):
            count = shared // (degrees.data * degrees.microbatch_size)
            each = f"{degrees.context} ranks share samples" if degrees.context > 1 else f"{count} a replica"
            return f"statistics of the whole batch need one micro-batch in each replica (--microbatch {shared} / --dp): {each}"
        if kind is not None and not kind.cut and degrees.tensor > 1:
            where = "plan with --tp 1, where --zero lets replicas divide whole parameters, or --pp"
            return f"optimizer {job.optimizer} needs parameters whole, tensor parallelism splits them: {where}"
        return refuse(degrees) if refuse is not None else ""

    return why
