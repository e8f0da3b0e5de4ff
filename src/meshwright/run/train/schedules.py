"""Schedules of the learning rate by name, stepped once after each training step.

    cosine:steps=1000,warmup=100,end=0.1     up to the optimizer's rate in `warmup` steps, down to `end` times it in step `steps`, and on so
    linear:steps=1000,warmup=100             the same in a straight line
    constant:warmup=100
    inverse-sqrt:warmup=100                  as 1 / sqrt(step) after the warm-up
    CosineAnnealingLR:T_max=1000             any of torch.optim.lr_scheduler, with its options
    module:function                          called as function(optimizer, **options), returns a scheduler

A schedule is a function of the number of steps, so a resumed run makes a new one and steps it as often as the first run did: the same bits, whatever
the scheduler keeps, and in any layout. What needs more than the number of steps (a loss to plateau) is refused.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from ...capture.resolve import resolve_function, user_code
from ...errors import UnknownName, Unsupported, UsageError
from ...plan.optimizers import named

__all__ = ["SHAPES", "fast_forward", "make_schedule"]

Factor = Callable[[int], float]


def _warm(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _share(step: int, steps: int, warmup: int) -> float:
    """Of the way from the end of the warm-up to the last step, at most 1."""
    return min(1.0, (step - warmup) / max(1, steps - warmup))


def cosine(*, steps: int, warmup: int = 0, end: float = 0.0) -> Factor:
    def factor(step: int) -> float:
        if step < warmup:
            return _warm(step, warmup)
        return end + (1 - end) * 0.5 * (1.0 + math.cos(math.pi * _share(step, steps, warmup)))

    return factor


def linear(*, steps: int, warmup: int = 0, end: float = 0.0) -> Factor:
    return lambda step: _warm(step, warmup) if step < warmup else end + (1 - end) * (1.0 - _share(step, steps, warmup))


def constant(*, warmup: int = 0) -> Factor:
    return lambda step: min(1.0, _warm(step, warmup)) if warmup else 1.0


def inverse_sqrt(*, warmup: int = 0) -> Factor:
    first = max(1, warmup)
    return lambda step: _warm(step, warmup) if step < warmup else math.sqrt(first / max(first, step))


SHAPES: Mapping[str, Callable[..., Factor]] = {"cosine": cosine, "linear": linear, "constant": constant, "inverse-sqrt": inverse_sqrt}


def make_schedule(text: str, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that `text` names, on this optimizer; None for an empty text.

    Raises: UnknownName for a name, or an option, that does not exist; UsageError for a value that does not fit; Unsupported for a schedule that needs
    more than the number of steps; CaptureError for a function that fails.
    """
    if not text:
        return None
    asked = named(text, where="--schedule")
    if asked.is_function:
        with user_code(asked.name, asked.name.rpartition(":")[0]):
            made = resolve_function(asked.name, what="schedule")(optimizer, **asked.options)
        if not isinstance(made, lr_scheduler.LRScheduler):
            raise UsageError(f"{asked.name} returned a {type(made).__name__}, not a torch.optim.lr_scheduler.LRScheduler", where="--schedule")
        if made.optimizer is not optimizer:
            raise UsageError(f"{asked.name} returned the schedule of another optimizer", where="--schedule", hint="make it of the one it is given")
    elif asked.name in SHAPES:
        made = lr_scheduler.LambdaLR(optimizer, _called(SHAPES[asked.name], asked.options, text))
    else:
        made = _called(_of_torch(asked.name, text), asked.options, text, optimizer)
    if isinstance(made, lr_scheduler.ReduceLROnPlateau):
        raise Unsupported(
            "ReduceLROnPlateau needs the loss of every step, and a schedule is only given the number of the step",
            where="--schedule", hint="e.g. cosine:steps=1000",
        )  # fmt: skip
    return made


def _of_torch(name: str, text: str) -> Any:
    kinds = {k.lower(): v for k, v in vars(lr_scheduler).items() if isinstance(v, type) and issubclass(v, lr_scheduler.LRScheduler)}
    kinds = {k: v for k, v in kinds.items() if v is not lr_scheduler.LRScheduler}
    if name.lower() not in kinds:
        known = ", ".join([*SHAPES, *sorted(v.__name__ for v in kinds.values() if not v.__name__.startswith("_"))])
        raise UnknownName(f"there is no schedule {name!r}", where=text, hint=f"{known}, or module:function")
    return kinds[name.lower()]


def _called(kind: Callable[..., Any], options: Mapping[str, Any], text: str, *given: Any) -> Any:
    known = [n for n, p in inspect.signature(kind).parameters.items() if n not in ("optimizer", "last_epoch", "verbose")]
    if odd := [o for o in options if o not in known]:
        raise UnknownName(f"schedule {text.partition(':')[0]} has no option {odd[0]!r}", where=text, hint=f"it has {', '.join(known) or 'none'}")
    try:
        return kind(*given, **options)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"these options do not fit: {error}", where=text, hint=f"its options: {', '.join(known)}") from None


def fast_forward(schedule: Any, steps: int) -> None:
    """Steps a new schedule as often as training has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where the optimizer has not stepped: here it has, in another process
        for _ in range(steps):
            schedule.step()
