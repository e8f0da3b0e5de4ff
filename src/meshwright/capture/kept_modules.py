"""Modules that are kept whole: what stands for their calls while a model is traced, and what is called in a rank.

A trace runs such a module for real, on samples. Each time it begins in the state that it had before the trace, and has that again afterwards: what it
counts, caches or remembers beside parameters and buffers. Where a run depends on what one before it left, it is refused, as for the whole model
(`left_tensors`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .as_before import as_before
from .assigned_buffers import Held, held_buffers, put_back
from .left_tensors import Given, refuse_left_tensors
from .regions import Samples, one_region
from .resolve import place_of
from .torch_private import FakeTensorMode

__all__ = ["kept_whole"]

_FAKE: Any = type(FakeTensorMode().from_tensor(torch.empty(0)))


@contextlib.contextmanager
def kept_whole(modules: Mapping[str, nn.Module], paths: Sequence[str], name: str, batch: int) -> Iterator[None]:
    """While it lasts, calls of the modules at `paths` in this thread are single operators. `name`: of the model, for keys; `batch`: its samples."""
    try:
        for path in paths:
            modules[path]._call_impl = _Called(modules[path], name, path, batch)
        yield
    finally:
        for path in paths:
            modules[path].__dict__.pop("_call_impl", None)


class _Called:
    """Stands for a module's call while its model is traced."""

    def __init__(self, module: nn.Module, name: str, path: str, batch: int) -> None:
        self.module, self.key, self.path, self.batch, self.count = module, f"{name}|{path}", path, batch, 0
        self.original = module._call_impl
        self.thread = threading.get_ident()
        self.real = {n: t for n, t in _state(module) if not isinstance(t, _FAKE)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return self.original(*args, **kwargs)
        key = f"{self.key}|{self.count}"
        self.count += 1
        state, where = list(_state(self.module)), place_of(type(self.module).forward)
        around = partial(as_before, self.module, values=True)
        return one_region(
            key, _call_of(self.module), args, kwargs, state, self.real, batch=self.batch, where=where, around=around, tried=self.refuse_left,
            owner=self.module,
        )  # fmt: skip

    def refuse_left(self, call: Callable[[Sequence[torch.Tensor]], Any], samples: Samples) -> None:
        """Raises: Unsupported where what the module does with the last of these (inputs, state) depends on what it did with the others."""
        given = [Given(inputs, {f"state {i}": x for i, x in enumerate(state)}) for inputs, state in samples]
        found = refuse_left_tensors(
            self.module, None, lambda one: call([*one.inputs, *one.kept.values()]), given, by_values=True, path=self.path.removeprefix("model.")
        )  # fmt: skip
        if not isinstance(found, bool):
            raise found


def _call_of(module: nn.Module) -> Callable[[dict[str, torch.Tensor], Any, Any], Any]:
    def call(state: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        held: Held = []
        hooks = (
            module.register_forward_pre_hook(lambda m, _: held.extend(held_buffers(m))), module.register_forward_hook(lambda *_: put_back(held))
        )  # fmt: skip
        try:
            return torch.func.functional_call(module, state, args, kwargs, tie_weights=False)
        finally:
            for hook in hooks:
                hook.remove()

    return call


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
