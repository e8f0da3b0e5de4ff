"""Says which operator a capture failed on, and where: file and line in the user's code, and the module that was running."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .resolve import ModelSource, user_location
from .torch_private import DispatchRecorder

__all__ = ["Refusal", "diagnose", "module_in", "quiet"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a module could not be traced. `operator` is "" when torch's error does not say."""

    operator: str
    where: str
    module: str
    message: str
    function: Any = None  # of torch's, that was running
    in_python: bool = False  # the owner's Python failed, not torch: eager PyTorch may go another way there

    def __str__(self) -> str:
        operator = f"operator {self.operator}" if self.operator else "an operator"
        return f"{operator} in module {self.module!r} at {self.where or 'unknown place'}: {self.message}"


def diagnose(objective: nn.Module, source: ModelSource, mode: Any, error: Exception) -> Refusal:
    """Runs the module once on fake tensors to find the operator that fails; without such a failure `error` itself is described."""
    if mode is not None:
        last: list[str] = []
        try:
            with quiet(), mode, torch.no_grad(), DispatchRecorder(lambda f, a, k, r: None, lambda f: last.append(str(f))):
                objective(*source.inputs)
        except Exception as failure:
            return _describe(objective, source, failure, str(getattr(failure, "func", last[-1] if last else "")))
    return _describe(objective, source, error, str(getattr(error, "func", "")))


def _describe(objective: nn.Module, source: ModelSource, error: Exception, operator: str) -> Refusal:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    message = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    where = user_location(error, source.name.rpartition(":")[0])
    return Refusal(operator=operator, where=where, module=module_in(objective, error), message=message)


def module_in(objective: nn.Module, error: BaseException) -> str:
    """Path of the innermost module of `objective` that was running when `error` was raised; "" is the root."""
    paths = {id(m): name for name, m in objective.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        called = trace.tb_frame.f_code.co_name in ("forward", "_call_impl")  # not `to` and the like
        if called and isinstance(owner, nn.Module) and id(owner) in paths:
            found = paths[id(owner)]
        trace = trace.tb_next
    return found.removeprefix("model.") if found != "model" else ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Tracing warns about what is normal here, logs and prints whole graphs before it raises, and runs the user's prints many times."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
