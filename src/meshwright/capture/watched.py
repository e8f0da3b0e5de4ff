"""What an export would silently lose: gradients of the owner's own (`torch.autograd.Function`), hooks on tensors, files that forward reads."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from .side_effects import Seen, calls_watched
from .torch_private import checkpoints_run_plainly
from .user_gradients import functions_watched

__all__ = ["NOT_THE_OWNERS", "Watched", "as_if_not_traced", "watching"]

NOT_THE_OWNERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # folders of code that runs on the owner's behalf


@dataclass(frozen=True)
class Watched:
    """Something in forward that an export would lose: what, in which module, at which line."""

    what: str
    module: str
    where: str


@contextlib.contextmanager
def watching(model: nn.Module, found: list[Watched], seen: Seen) -> Iterator[None]:
    """While a model is exported in this thread: checkpoints run plainly; what export would lose is added to `found` (gradients of the owner's, hooks,
    files that are read); `seen`: of what else it does."""
    paths = {id(m): name for name, m in model.named_modules()}
    thread = threading.get_ident()

    def note(what: str) -> None:
        module, where, frame = "", "", sys._getframe(2)
        while frame is not None:  # the innermost module that is running, and the line of whoever called
            if not frame.f_code.co_filename.startswith(NOT_THE_OWNERS):
                where = where or f"{frame.f_code.co_filename}:{frame.f_lineno}"
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in paths:
                module = paths[id(owner)]
                break
            frame = frame.f_back  # type: ignore[assignment]
        found.append(Watched(what, module, where))

    def reads(where: str) -> None:
        if threading.get_ident() == thread:
            note(f"the file that is read at {where}")

    def prints(where: str) -> None:
        if threading.get_ident() == thread and where not in seen.printed:
            seen.printed.append(where)

    def sets(module: nn.Module, name: str, value: Any, where: str) -> None:
        if threading.get_ident() == thread and id(module) in paths:
            seen.assigned[paths[id(module)].removeprefix("model").removeprefix("."), name] = (module, value, where)

    tensor, register = torch.Tensor, torch.Tensor.register_hook
    saving = torch.autograd.graph.saved_tensors_hooks
    enter = saving.__enter__

    def applied(cls: type) -> None:
        if threading.get_ident() == thread:
            note(f"the gradient of {cls.__qualname__} (torch.autograd.Function)")

    def registered(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if threading.get_ident() == thread:
            note("a hook on a tensor")
        return register(self, hook)

    def saved(self: Any) -> Any:
        if threading.get_ident() == thread and not _of_torch(self.pack_hook):
            note("hooks on saved tensors")
        return enter(self)

    def node_of(self: torch.Tensor) -> Any:
        node = tensor.__base__.grad_fn.__get__(self)
        owners = threading.get_ident() == thread and not sys._getframe(1).f_code.co_filename.startswith(NOT_THE_OWNERS)
        return _WatchedNode(node, note) if owners and node is not None else node

    tensor.register_hook, tensor.grad_fn, saving.__enter__ = registered, property(node_of), saved
    try:
        with checkpoints_run_plainly(), functions_watched(applied), calls_watched(reads, prints, sets):
            yield
    finally:
        tensor.register_hook, saving.__enter__ = register, enter
        del tensor.grad_fn


@contextlib.contextmanager
def as_if_not_traced() -> Iterator[None]:
    """While it lasts, the owner's code that asks whether it is compiled or exported is told that it is not, and goes the way that it goes in eager
    PyTorch. torch's own code is told the truth."""

    def denied(function: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: function() and sys._getframe(1).f_code.co_filename.startswith(NOT_THE_OWNERS)

    with contextlib.ExitStack() as stack:
        for name in ("is_compiling", "is_exporting"):
            stack.enter_context(patch.object(torch.compiler, name, denied(getattr(torch.compiler, name))))
        yield


class _WatchedNode:
    """A node of the backward graph in the owner's hands: hooks that he puts on it are told of."""

    def __init__(self, node: Any, note: Callable[[str], None]) -> None:
        self._node, self._note = node, note

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            self._note("a hook on a backward node")
        return getattr(self._node, name)


def _of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.")
