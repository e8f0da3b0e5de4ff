"""Stage modules: a user's, or paced ones.

A paced stage does little work and sleeps until its forward, the gradient of its input and the gradient of its weights have lasted what they should.
Each of the three sleeps in an autograd node of its own: on the input's path and on the weight's path, so a split backward runs
each once, and a first stage whose input needs no gradient never runs the former.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...capture.resolve import resolve_function
from ...errors import Unsupported, UsageError

__all__ = ["Given", "PacedStage", "given_stages", "precise_sleep"]

_PR_SET_TIMERSLACK = 29
SPIN_S = 1e-4  # of every paced time, spent awake: a sleep ends late by as much


def precise_sleep() -> None:
    """Sleeps of the calling thread end within microseconds of their time (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1)


def pace(until: float) -> None:
    """Returns at `until` by `perf_counter`, a few microseconds late: sleeps, and spends the last of the time awake."""
    now = time.perf_counter
    if (left := until - SPIN_S - now()) > 0:
        time.sleep(left)
    while now() < until:
        pass


class _Pace(torch.autograd.Function):  # type: ignore[misc]
    """Identity whose backward lasts `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.seconds > 0:
            pace(time.perf_counter() + ctx.seconds)
        return gradient, None


class PacedStage(nn.Module):  # type: ignore[misc]
    """(rows, n) -> (rows, elements): the input times a weight. forward_s, input_grad_s, weight_grad_s: how long the three take at least."""

    def __init__(self, elements: int, forward_s: float, input_grad_s: float, weight_grad_s: float, *, same: bool = True) -> None:
        super().__init__()
        self.forward_s, self.input_grad_s, self.weight_grad_s, self.elements = forward_s, input_grad_s, weight_grad_s, elements
        self.weight = nn.Parameter(torch.ones(1 if same else elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        until = time.perf_counter() + self.forward_s
        carried = _Pace.apply(x, self.input_grad_s) if x.requires_grad else x
        if carried.shape[-1] != self.elements:
            carried = carried.mean(-1, keepdim=True)
        y: torch.Tensor = carried * _Pace.apply(self.weight, self.weight_grad_s)
        pace(until)
        return y


@dataclass(frozen=True, kw_only=True)
class Given:
    """A user's model cut into stages: `modules[k]` maps one tensor to one tensor, the last one's output and the target go to `loss`.

    `inputs`, `targets`: one per micro-batch of the schedule and replica, replica after replica.
    """

    modules: tuple[nn.Module, ...]
    inputs: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def borders(self) -> list[torch.Tensor]:
        """Output of every stage for the first micro-batch, without a graph."""
        found, x = [], self.inputs[0]
        with torch.no_grad():
            for k, module in enumerate(self.modules):
                y = module(x)
                if not isinstance(y, torch.Tensor):
                    raise Unsupported(f"stage {k} returns {type(y).__name__}; messages between stages are one tensor", where=f"stage {k}")
                found.append(y)
                x = y
        return found


def given_stages(where: str, stages: int, microbatches: int) -> Given:
    """`FILE.py:function` or `module:function`, called as function(stages, microbatches) -> (modules, inputs, targets, loss).

    Raises: UsageError for a wrong number of stages or micro-batches, or micro-batches of different shapes.
    """
    made = resolve_function(where)(stages, microbatches)
    if not isinstance(made, tuple) or len(made) != 4:
        raise UsageError("must return (modules, inputs, targets, loss)", where=where, hint="see docs/pipelines.md")
    modules, inputs, targets, loss = made
    for name, found, wanted in (("stage modules", modules, stages), ("inputs", inputs, microbatches), ("targets", targets, microbatches)):
        if len(found) != wanted:
            raise UsageError(f"gives {len(found)} {name}, the schedule has {wanted}", where=where)
    _require_one_shape(inputs, "input", where)
    _require_one_shape(targets, "target", where)
    return Given(modules=tuple(modules), inputs=tuple(inputs), targets=tuple(targets), loss=loss)


def _require_one_shape(tensors: Sequence[torch.Tensor], what: str, where: str) -> None:
    for m, x in enumerate(tensors):
        if (x.shape, x.dtype) != (tensors[0].shape, tensors[0].dtype):
            raise UsageError(
                f"micro-batch {m} has an {what} of {list(x.shape)} {x.dtype}, micro-batch 0 of {list(tensors[0].shape)} {tensors[0].dtype}",
                where=where, hint="a schedule's buffers and times are those of one shape: pad micro-batches, or plan each shape for itself",
            )  # fmt: skip
