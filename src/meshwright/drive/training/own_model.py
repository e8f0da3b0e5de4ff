"""Plans the training of a model that is an object in the caller's program.

    plan = meshwright.plan(model, batch, fabric="dgx-h100:2", optimizer=optimizer)

`capture.live` names a live model, copies it for tracing, and describes its batches. The plan keeps the form of the batch, so that
`meshwright.torch.parallelize` can trace the model again without an example.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from ...cost import Cost
from ...errors import MissingExtra, UsageError, in_python
from ...fabric.fabric import Fabric
from ...job import Recipe, Training
from ...plan.plan import Plan
from ...plan.shapes import with_shapes
from ..plans import read_fabric
from .collective_choice import CollectivesWanted
from .context import SearchBudget
from .pipeline import PipelineWanted
from .recompute import RecomputeWanted
from .shapes import require_one_state, require_sums, wishes_beside
from .sharding import ShardingWanted
from .training import plan_training, require_job
from .wishes import LayoutWanted, Wishes

if TYPE_CHECKING:
    import torch

    from ...capture.live_job import LiveJob
    from .context import Made

__all__ = ["plan_model", "plan_shapes"]

# torch's optimizers that update every element by itself, so that ranks may be given pieces of parameters; by the state that they keep.
TWO_STATES = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD", "Rprop"})
DEFAULT_LEARNING_RATE = 1e-3


@in_python
def plan_model(
    model: torch.nn.Module | Callable[[], Any] | str, batch: Any = None, *, fabric: Fabric | str, optimizer: Any = "adamw",
    loss: str | Callable[..., Any] | None = None, global_batch: int | None = None, data: int | None = None, tensor: int | None = None,
    pipeline: int | None = None, expert: int | None = 1, microbatch: int | None = None, zero: int | None = None, schedule: str = "",
    recompute: str = "auto", shapes: Sequence[Any] = (), collective: str = "auto", seed: int = 0, cost: Cost | None = None,
    wishes: Iterable[object] = (), budget: SearchBudget | None = None, without: Collection[str] = (), recipe: Recipe | None = None,
) -> Plan:  # fmt: skip
    """Plans the training of `model` on all devices of `fabric`. `meshwright.plan(...)` is the same. The model is neither run nor changed.

    Args:
        model: an nn.Module (with values, or on the meta device), a function that makes one, or a name as `meshwright train plan --model` takes it.
        batch: one batch, samples first: a tensor, a tuple of tensors with the target last, or a dictionary of tensors that forward takes by name.
            Not needed if the model is a name: its function gives example inputs. Tensors on the meta device are enough.
        fabric: a fabric, a file, or a preset such as `dgx-h100:2`.
        optimizer: a torch optimizer, its class, or a name: `adamw`, `sgd`, `module:function`.
        loss: `cross-entropy`, `mse` or `module:function` of (output, target); `output` (the model returns its loss: a tensor, `.loss`, `["loss"]` or
            the first of a tuple); or a function: of (output, target) for a tuple, of (output, batch) for a dictionary. Default: `cross-entropy` for
            a tuple of two or more, else `output`. A dictionary's target is `labels` or the like, else its last tensor (`capture.calling`).
        global_batch: samples of one step over all replicas; default: the batch's.
        data, tensor, pipeline, microbatch: fixed degrees, and samples of a micro-batch. None lets the search choose.
        expert: neighbouring data replicas that divide the experts of every layer (see `meshwright.nn.convert_experts`); None lets the search choose.
        zero: what data replicas divide: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights. None lets the search choose.
        schedule, recompute, collective: as `--pipeline`, `--recompute`, `--collective` of `meshwright train plan`.
        recipe: precision, clipping, schedule, moving average and parameters without weight decay (`meshwright.Recipe`); default: nothing of it.
        shapes: further batches like `batch`, with as many samples, of other shapes (sequence lengths, sizes of pictures). Each has a step of its own,
            over the same layout of weights and optimizer state; the plan's own is that of the largest. See `parallelize`. Of a model by name: texts
            or numbers as of `train plan --shapes`, which are all shapes that the plan has.
        wishes: records for what has no argument here (`plan_training` lists them). A record replaces the arguments above that it covers.

    Raises: UsageError (arguments; a module that cannot be copied), CaptureError (the model fails), and what `plan_training` raises.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("torch", extra="torch", needed_for="planning a live model") from error
    from ...capture.live_job import by_size, live_job

    label, learning_rate = optimizer_name(optimizer)
    recipe = None if recipe == Recipe() else recipe
    where = read_fabric(fabric) if isinstance(fabric, str) else fabric
    asked: tuple[object, ...] = (
        LayoutWanted(data=data, tensor=tensor, pipeline=pipeline, microbatch=microbatch, expert=expert), ShardingWanted(level=zero),
        PipelineWanted(name=schedule), RecomputeWanted(recompute), CollectivesWanted(collective),
    )  # fmt: skip
    given = tuple(x for x in wishes if x is not None)
    asked = (*(x for x in asked if not any(type(x) is type(g) for g in given)), *given)
    if isinstance(model, str):
        if batch is not None or (loss is not None and not isinstance(loss, str)) or global_batch is None:
            raise UsageError(
                "a model by name brings its example inputs", where=model, hint="give global_batch=, a loss by name and no batch; or the module itself"
            )
        job = Training(
            model=model, global_batch=global_batch, loss=loss or "cross-entropy", optimizer=label, learning_rate=learning_rate, seed=seed,
            recipe=recipe or msgspec.UNSET,
        )  # fmt: skip
        if shapes:
            return plan_shapes(job, [str(s) for s in shapes], where, cost, wishes=asked, budget=budget, without=without)
        return plan_training(job, where, cost, wishes=asked, budget=budget, without=without)
    if not isinstance(model, torch.nn.Module) and not callable(model):
        raise UsageError(f"the model is a {type(model).__name__}", where="model", hint="an nn.Module, a function that makes one, or a name")

    def job_of(one: Any) -> LiveJob:
        return live_job(model, one, loss, optimizer=label, learning_rate=learning_rate, global_batch=global_batch, seed=seed, recipe=recipe)

    if shapes:
        require_sums(Wishes.these(asked))
    return _of_jobs(by_size([job_of(one) for one in (batch, *shapes)]), where, cost, asked, budget, without)


def plan_shapes(
    job: Training, shapes: Sequence[str], fabric: Fabric, cost: Cost | None = None, *, wishes: Iterable[object] = (),
    budget: SearchBudget | None = None, without: Collection[str] = (), watch: Callable[[Made], None] | None = None,
) -> Plan:  # fmt: skip
    """Plans the training of a model by name on batches of several shapes (`capture.live_job.named_jobs`), a step for each. As `plan_training`.

    Raises: Unsupported with gradient codecs, and for a shape whose step would keep another state; UsageError for shapes that do not fit the model.
    """
    from ...capture.live_job import by_size, named_jobs

    asked = tuple(x for x in wishes if x is not None)
    require_sums(require_job(job, fabric, asked, without))
    return _of_jobs(by_size(named_jobs(job, shapes)), fabric, cost, asked, budget, without, watch)


def _of_jobs(
    jobs: Sequence[LiveJob], fabric: Fabric, cost: Cost | None, asked: Iterable[object], budget: SearchBudget | None, without: Collection[str],
    watch: Callable[[Made], None] | None = None,
) -> Plan:  # fmt: skip
    """The plan of the first job, with the steps of the others beside it."""
    from ...capture.live import standing

    live, *others = jobs
    if others:
        from ...capture.kept_by_shape import refuse_kept_by_shape

        refuse_kept_by_shape(jobs)
    with standing(live.stands_for):
        plan = plan_training(live.job, fabric, cost, wishes=asked, budget=budget, without=without, watch=watch)
    made = []
    for other in others:
        with standing(other.stands_for):
            beside = wishes_beside(plan, Wishes.these(asked)).given
            step = plan_training(other.job, fabric, cost, wishes=beside, budget=budget, without=without, watch=watch)
        require_one_state(plan, step, other.batch.shape)
        made.append((other.batch.inputs, step))
    plan = replace(plan, job={**plan.job, "batch": msgspec.to_builtins(live.batch)})
    return with_shapes(plan, tuple(made)) if made else plan


def optimizer_name(optimizer: Any) -> tuple[str, float]:
    """(the job's name for an optimizer, its class or its name; its learning rate).

    From the name, planning knows what the optimizer keeps, and whether it updates every element by itself. Then parameters may be divided.
    Raises: UsageError for what is none.
    """
    if isinstance(optimizer, str):
        return optimizer, DEFAULT_LEARNING_RATE
    import torch

    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        raise UsageError(f"the optimizer is a {kind.__name__}", where="optimizer", hint="a torch.optim optimizer, its class, or a name")
    groups: list[Mapping[str, Any]] = [] if isinstance(optimizer, type) else optimizer.param_groups
    learning_rate = next((float(g["lr"]) for g in groups if "lr" in g), DEFAULT_LEARNING_RATE)
    if kind is torch.optim.SGD and not any(g.get("momentum") for g in groups):
        return "sgd", learning_rate
    if kind is torch.optim.SGD or (kind.__module__.startswith("torch.optim.") and kind.__name__ in TWO_STATES):
        return "adamw", learning_rate
    return f"live:{kind.__qualname__}", learning_rate
