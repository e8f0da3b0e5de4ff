"""Optimizers by name. The update is elementwise on shards, so replicas and tensor-parallel shards stay equal to a serial run's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...capture.resolve import resolve_function
from ...errors import UnknownName, UsageError

__all__ = ["OPTIMIZERS", "make_optimizer"]

OPTIMIZERS = ("adamw", "sgd")


def make_optimizer(name: str, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], learning_rate: float) -> Any:
    """The optimizer called `name` for these parameters: `adamw`, `sgd`, or `module:function`, called as function(named_parameters, learning_rate).

    Raises: UnknownName; UsageError when the function does not return a torch optimizer.
    """
    named = list(named_parameters)
    parameters = [p for _, p in named]
    if name == "adamw":
        return torch.optim.AdamW(parameters or [torch.nn.Parameter(torch.empty(0))], lr=learning_rate)
    if name == "sgd":
        return torch.optim.SGD(parameters or [torch.nn.Parameter(torch.empty(0))], lr=learning_rate)
    if ":" not in name:
        raise UnknownName(f"there is no optimizer {name!r}", where=name, hint=f"{', '.join(OPTIMIZERS)} or module:function")
    made = resolve_function(name, what="optimizer")(named, learning_rate)
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"{name} returned a {type(made).__name__}, not a torch.optim.Optimizer", where=name)
    return made
