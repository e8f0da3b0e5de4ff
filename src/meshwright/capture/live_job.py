"""The job of a live model: from its owner's objects when it is planned, and from the plan when it runs; jobs of a named model's several shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import torch
from torch import nn

from meshwright.errors import FormatError, PlanMismatch, UsageError
from meshwright.job import Recipe, Training

from .live import LIVE, BatchForm, as_function, form_of, live_name, maker_of
from .resolve import build_model
from .user_gradients import refuse_loss_parameters

__all__ = ["LiveJob", "PlannedBatch", "by_size", "live_again", "live_job", "named_jobs", "sizes_of"]

Loss = str | Callable[..., Any] | None
# Losses that were planned with in this process, by name; None where one name was used for two.
_PLANNED_LOSSES: dict[str, Callable[..., Any] | None] = {}


class PlannedBatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A plan's `job["batch"]`: how batches of its live model are given. `inputs`: (shape, dtype without `torch.`) of each tensor, samples first;
    `loss`: name of a function of (output, batch by names)."""

    names: list[str] = []
    single: bool = False
    inputs: list[tuple[list[int], str]]
    loss: str = ""

    @property
    def form(self) -> BatchForm:
        return BatchForm(tuple(self.names), self.single)

    @property
    def shape(self) -> str:
        """In words: `(8, 128) int64, (8, 128) int64`."""
        return ", ".join(f"({', '.join(map(str, size))}) {dtype}" for size, dtype in self.inputs)


@dataclass(frozen=True)
class LiveJob:
    """`stands_for`: what the job's names mean while it is planned or traced (`live.standing`); `batch`: what the plan keeps; `loss`: a function."""

    job: Training
    batch: PlannedBatch
    stands_for: Mapping[str, Callable[..., Any]]
    loss: Callable[..., Any] | None = None


def live_job(
    model: nn.Module | Callable[[], Any], batch: Any, loss: Loss, *, optimizer: str, learning_rate: float, global_batch: int | None, seed: int,
    recipe: Recipe | None = None,
) -> LiveJob:  # fmt: skip
    """The job of training `model` on batches like `batch`. Raises: UsageError for a batch of another form, or a loss that does not go with it."""
    form = form_of(batch)
    inputs = form.tensors(batch)
    for i, x in enumerate(inputs):
        if x.dim() == 0 or x.shape[0] != (inputs[0].shape[0] if inputs[0].dim() else -1) or not x.shape[0]:
            raise UsageError(
                f"{form.names[i] if form.names else f'tensor {i}'} of the batch has shape {tuple(x.shape)}", where="batch",
                hint="the first dimension of every tensor is the sample, the same number of them in all",
            )  # fmt: skip
    label, function = _loss("output" if loss is None and getattr(model, "returns_loss", False) else loss, form)
    by_names = function if form.names else None
    names: dict[str, Callable[..., Any]] = {live_name(model): maker_of(model, form, inputs, by_names)}
    if function is not None and not form.names:
        names[label] = function
    job = Training(
        model=live_name(model), global_batch=global_batch or int(inputs[0].shape[0]), loss=label, optimizer=optimizer, learning_rate=learning_rate,
        seed=seed, recipe=recipe or msgspec.UNSET,
    )  # fmt: skip
    told = PlannedBatch(
        names=list(form.names), single=form.single, inputs=[(list(x.shape), str(x.dtype).removeprefix("torch.")) for x in inputs],
        loss=live_name(loss, what="loss") if by_names is not None else "",
    )  # fmt: skip
    return LiveJob(job, told, names, function)


def named_jobs(job: Training, shapes: Sequence[str]) -> list[LiveJob]:
    """Jobs of a model by name, one for each shape; `shapes`: of the first input, as of `sizes_of`.

    Raises: UsageError for fewer than two, or one that does not fit the inputs; as `build_model`.
    """
    if len(shapes) < 2:
        raise UsageError(f"{len(shapes)} shapes are given", where="shapes", hint="two or more, e.g. --shapes 64,128,256")
    source = build_model(job.model, device="meta", seed=job.seed, lazy=True)
    names, made = source.calling.names if source.calling is not None else (), []
    own = tuple(tuple(x.shape[1:]) for x in source.examples)
    for text in shapes:
        sizes = sizes_of(text, own)
        told = PlannedBatch(
            names=list(names), single=not names and len(sizes) == 1,
            inputs=[([job.global_batch, *s], str(x.dtype).removeprefix("torch.")) for s, x in zip(sizes, source.examples, strict=True)],
        )  # fmt: skip
        of_it = job if sizes == own else msgspec.structs.replace(job, sizes=sizes)
        made.append(LiveJob(of_it, told, {}))
    return made


def sizes_of(text: str, own: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Sizes of a sample's tensors, from `own` and a text such as `64` (tokens) or `3x64x48`: the first input's leading dimensions. Of the others
    every dimension follows that is as long as one of those was.

    Raises: UsageError for what is no such text, and where it is open which dimension another input follows.
    """
    words = text.strip().split("x")
    if not all(w.isdecimal() and int(w) > 0 for w in words) or not len(words) <= len(own[0]):
        shown = "x".join(map(str, own[0])) or "no dimension"
        raise UsageError(f"{text!r} is no shape of the first input, whose samples have {shown}", where="shapes", hint="e.g. 64, or 3x64x48")
    new: dict[int, int] = {}
    for old, word in zip(own[0], words, strict=False):
        if new.setdefault(old, int(word)) != int(word) and any(old in size for size in own[1:]):
            raise UsageError(
                f"two dimensions of the first input are {old} long, and {text!r} makes them unlike: another input's could follow either",
                where="shapes", hint="plan the module itself (meshwright.plan), with a batch of each shape",
            )  # fmt: skip
    first = (*map(int, words), *own[0][len(words) :])
    return (first, *(tuple(new.get(d, d) for d in size) for size in own[1:]))


def by_size(jobs: Sequence[LiveJob]) -> list[LiveJob]:
    """Jobs of one model for batches of several shapes, the largest first.

    Raises: UsageError for batches that differ in form, samples or dtypes, for a shape twice, and where none holds all others.
    """
    first = jobs[0].batch
    for number, job in enumerate(jobs[1:]):
        told, where = job.batch, f"shapes[{number}]"
        kinds = [[(size[:1], len(size), dtype) for size, dtype in x.inputs] for x in (first, told)]
        if told.form != first.form or kinds[0] != kinds[1]:
            raise UsageError(
                f"the batch has {told.shape}, the first one {first.shape}", where=where,
                hint="batches of one plan have the same form, samples and dtypes; only further dimensions differ",
            )  # fmt: skip
        if any(told.inputs == other.batch.inputs for other in jobs[: number + 1]):
            raise UsageError(f"the shape {told.shape} is given twice", where=where, hint="once for each step")
    ordered = sorted(jobs, key=lambda job: -sum(prod(size) for size, _ in job.batch.inputs))
    largest = ordered[0].batch
    for job in ordered[1:]:
        if any(a > b for (one, _), (most, _) in zip(job.batch.inputs, largest.inputs, strict=True) for a, b in zip(one, most, strict=True)):
            raise UsageError(
                f"no shape holds all others: {largest.shape} is smaller than {job.batch.shape} somewhere", where="shapes",
                hint="give one that is at least as large in every dimension: what no other takes is padded to it",
            )  # fmt: skip
    return ordered


def live_again(model: nn.Module, planned: Mapping[str, Any], loss: Loss, batch: Any = None) -> LiveJob:
    """The job of a plan (`planned` is its `job`) with the owner's `model` in the place of the one that was planned.

    `loss`: needed where the plan's is a function of another process. `batch`: an example, where the plan was made from a model's name.
    Raises: PlanMismatch where the plan has no form of a batch or knows no loss, FormatError for a plan that says something else.
    """
    try:
        job = msgspec.convert(planned["training"], Training)
        told = msgspec.convert(planned["batch"], PlannedBatch) if "batch" in planned else None
    except (KeyError, msgspec.ValidationError) as error:
        raise FormatError(f"not a training plan's job: {error}", where="plan.job") from None
    if told is None:
        if batch is None:
            raise PlanMismatch(
                "the plan was made from a model's name and does not say how batches are given", where=job.model,
                hint="plan the module itself with meshwright.plan, or give batch=, one example",
            )  # fmt: skip
        form = form_of(batch)
        told = PlannedBatch(
            names=list(form.names), single=form.single,
            inputs=[(list(x.shape), str(x.dtype).removeprefix("torch.")) for x in form.tensors(batch)],
        )  # fmt: skip
    inputs = [torch.empty(shape, dtype=_dtype(name), device="meta") for shape, name in told.inputs]
    wanted = told.loss or (job.loss if job.loss.startswith(LIVE) else "")
    function = _planned_loss(wanted, loss) if wanted else None
    names: dict[str, Callable[..., Any]] = {job.model: maker_of(model, told.form, inputs, function if told.names else None)}
    if function is not None and not told.names:
        names[job.loss] = function
    return LiveJob(job, told, names, function)


def _loss(loss: Loss, form: BatchForm) -> tuple[str, Callable[..., Any] | None]:
    """(the job's loss, the function it is if it has no name of its own)."""
    if loss is None:
        return ("output" if form.names or form.single else "cross-entropy"), None
    if isinstance(loss, str):
        if loss != "output" and (form.single or len(form.names) == 1):
            raise UsageError(
                f"the loss {loss!r} takes (output, target), and the batch has no target", where="loss",
                hint="give a tuple with the target last, or loss='output' (the model returns its loss)",
            )  # fmt: skip
        return loss, None
    if form.single:
        raise UsageError("a loss function needs a target", where="loss", hint="give the batch as a tuple with the target last, or as a dictionary")
    refuse_loss_parameters(loss)
    name = live_name(loss, what="loss")
    known = _PLANNED_LOSSES.get(name, loss)
    function = as_function(loss)
    _PLANNED_LOSSES[name] = loss if known is loss else None
    return ("output" if form.names else name), function


def _planned_loss(name: str, given: Loss) -> Callable[..., Any]:
    found = given if given is not None and not isinstance(given, str) else _PLANNED_LOSSES.get(name)
    if found is None:
        raise PlanMismatch(
            f"the plan's loss, {name}, is a function of the program that planned", where="loss", hint="give it: parallelize(..., loss=function)"
        )
    return as_function(found)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"{name!r} is not a dtype", where="plan.job.batch")
    return found
