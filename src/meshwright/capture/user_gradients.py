"""Gradients that the owner's code makes itself: what torch.export records is forward alone, and autograd of that would train something else.

`functions_watched` tells of `autograd.Function`s of the owner's while a module is traced. A module with one, or with hooks, is kept whole
(`exporting`), and they run in it; hooks on parameters are refused, since a rank has parameters of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright.errors import Unsupported

from .resolve import place_of

__all__ = ["functions_watched", "gradients_returned", "parameter_changes", "refuse_loss_parameters", "refuse_parameter_hooks"]

OF_TORCH = ("torch.", "meshwright.")  # whose functions compute the gradient of what they compute


def refuse_parameter_hooks(module: nn.Module, model: str) -> None:
    """Raises: Unsupported for a hook on a parameter: a rank's parameters are copies or parts, on which it would not run."""
    for name, p in module.named_parameters():
        hooks = [*(p._backward_hooks or {}).values(), *(getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()]
        if hooks:
            raise Unsupported(
                f"{model}: parameter {name!r} has a hook on its gradient, which ranks with parameters of their own would not run",
                where=place_of(hooks[0]),
                hint="change gradients in the module's backward (a hook on a tensor or module), or in the optimizer function",
                data={"cause": "user-gradients", "parameter": name, "where": place_of(hooks[0])},
            )  # fmt: skip


def refuse_loss_parameters(loss: Any) -> None:
    """Raises: Unsupported for a loss that is a module with parameters to train: a plan's are the model's."""
    name = next((n for n, p in loss.named_parameters() if p.requires_grad), "") if isinstance(loss, nn.Module) else ""
    if name:
        raise Unsupported(
            f"the loss has a parameter {name!r} to train, and a plan trains those of the model", where=place_of(loss),
            hint="make it part of the model: a module that returns its loss (loss output); or freeze it (requires_grad_(False))",
            data={"parameter": name},
        )  # fmt: skip


def parameter_changes(name: str, where: str) -> Unsupported:
    """The refusal of a parameter that forward changes: ranks run forward once per micro-batch, and each would change it once more."""
    return Unsupported(
        f"forward changes parameter {name!r} in place; ranks run it once per micro-batch, and it would change as many times", where=where,
        hint="make it a buffer (register_buffer), which changes once per step, or change it after the optimizer's step",
        data={"cause": "parameter-changed", "parameter": name},
    )  # fmt: skip


@contextlib.contextmanager
def gradients_returned(module: nn.Module) -> Iterator[None]:
    """Around a forward and a backward pass. Raises: Unsupported where backward puts gradients into the module's own parameters, which are not those
    that the pass was given, nor a rank's: an `autograd.Function` that calls `torch.autograd.backward` does (reversible layers, for one)."""
    used: list[type] = []
    before = [(name, p, p.grad) for name, p in module.named_parameters()]
    with functions_watched(used.append):
        yield
    names = [name for name, p, gradient in before if p.grad is not gradient]
    for _, p, gradient in before:
        p.grad = gradient
    if names:
        function = used[0] if used else None
        raise Unsupported(
            f"backward of {function.__qualname__ if function else 'forward'} puts the gradient of parameter {names[0]!r} into the parameter itself "
            "(torch.autograd.backward within backward), and ranks have parameters of their own",
            where=place_of(getattr(function, "backward", type(module).forward)), data={"cause": "user-gradients", "parameters": names},
            hint="give the parameters to the function's apply and return their gradients (torch.autograd.grad); or checkpoint the layers instead",
        )  # fmt: skip


@contextlib.contextmanager
def functions_watched(tell: Callable[[type], None]) -> Iterator[None]:
    """While it is entered, `tell(cls)` for every use of an `autograd.Function` outside torch: a model may hold `F.apply` since before, so it is the
    functions' own `forward` that is watched."""
    put_back: list[tuple[Any, Any]] = []
    for cls in _functions(torch.autograd.Function):
        if isinstance(forward := cls.__dict__.get("forward"), staticmethod):
            put_back.append((cls, forward))
            cls.forward = staticmethod(_before(functools.partial(tell, cls), forward.__func__))
    try:
        yield
    finally:
        for owner, own in put_back:
            owner.forward = own


def _functions(base: type) -> Iterator[Any]:
    cls: type
    for cls in base.__subclasses__():
        if not cls.__module__.startswith(OF_TORCH):
            yield cls
        yield from _functions(cls)


def _before(tell: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        tell()
        return function(*args, **kwargs)

    return told
