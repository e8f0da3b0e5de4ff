"""Work of a module that cannot be traced: it is run once, forward and backward, and every ATen call is added up."""

from __future__ import annotations

import contextlib
import linecache
import re
from collections.abc import Iterator
from typing import Any

import torch

from meshwright.errors import Unsupported
from meshwright.graph.graph import Work

from .as_before import Places
from .diagnose import quiet
from .flops import lacks_formula
from .forward import TracedForward
from .left_tensors import RUNS, Given, refuse_left_tensors
from .losses import Objective, kept_tensors
from .nodes import target_name
from .resolve import place_of
from .torch_private import DispatchRecorder
from .user_gradients import gradients_returned, parameter_changes
from .work import work_of

__all__ = ["made_for_another_batch", "measured_work", "refuse_changes", "refuse_left"]


def made_for_another_batch(traced: TracedForward, place: str) -> str:
    """What the line at `place` (`file:line`) takes from the run before the trace, on another number of samples: ` attribute kept, ...`; "" if
    nothing."""
    file, _, line = place.rpartition(":")
    words = set(re.findall(r"\w+", linecache.getline(file, int(line)))) if line.isdecimal() else set()
    assert isinstance(traced.objective, Objective)
    for x, said in Places(traced.objective.model, traced.objective.code).tensors():
        if x.dim() and x.shape[0] not in (1, traced.batch_size) and said.startswith("attribute") and said.split()[1].rpartition(".")[2] in words:
            return f"{said} holds a tensor of shape {tuple(x.shape)}, made for another batch than these {traced.batch_size} samples"
    return ""


def refuse_changes(traced: TracedForward) -> None:
    """Raises: Unsupported where a forward pass on fakes, as far as it comes, changes a parameter, or backward puts gradients into some."""
    wanted = [p for p in traced.parameters.values() if p.requires_grad]
    mode, returned = traced.mode or contextlib.nullcontext(), gradients_returned(traced.objective.model)
    with quiet(), mode, torch.enable_grad(), returned, _parameters_kept(traced), contextlib.suppress(Exception):
        loss = traced.objective(*traced.inputs)
        torch.autograd.grad(loss, wanted, allow_unused=True)


def refuse_left(traced: TracedForward) -> None:
    """Raises: Unsupported where a run on real tensors depends on what one on other samples left."""
    objective = traced.objective
    assert isinstance(objective, Objective)
    kept = kept_tensors(objective)
    others = [Given([x[i % len(x) :][:1].expand_as(x).clone() for x in traced.inputs], kept) for i in range(RUNS - 1)]
    given = [*others, Given(traced.inputs, kept)]
    with quiet():
        found = refuse_left_tensors(objective.model, objective.code, lambda one: objective(*one.inputs), given, by_values=True)
    if isinstance(found, Unsupported):
        raise found


@contextlib.contextmanager
def _parameters_kept(traced: TracedForward) -> Iterator[None]:
    before = {n: p._version for n, p in traced.parameters.items()}
    yield
    for name, p in traced.parameters.items():
        if p._version != before[name]:
            raise parameter_changes(name, place_of(type(traced.objective.model).forward))


def measured_work(traced: TracedForward) -> tuple[Work, Work, tuple[str, ...]]:
    """(forward, backward, operators without a flop formula) of one step on the tensors of `traced`. Gradients are not kept."""
    phase = [Work(), Work()]
    backward = [0]
    missing: set[str] = set()

    def seen(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        phase[backward[0]] += work_of(operator, args, kwargs, result)
        if lacks_formula(operator):
            missing.add(target_name(operator))

    wanted = [p for p in traced.parameters.values() if p.requires_grad]
    with quiet(), torch.enable_grad(), DispatchRecorder(seen), _parameters_kept(traced):
        loss = traced.graph_module(*(traced.value(v) for v in traced.placeholders))[0]
        backward[0] = 1
        if wanted and loss.requires_grad:
            torch.autograd.grad(loss, wanted, allow_unused=True)
    return phase[0], phase[1], tuple(sorted(missing))
