"""What autograd keeps in a real run, by module: `saved_tensors_hooks` over a module's forward pass.

Every storage counts once, at the first module that saves a tensor of it; parameters do not count. The module is the innermost one whose
forward was running. Tensors inside a region that `torch.utils.checkpoint` or `meshwright.run.steps.recompute` handles have hooks of their own and
are not
seen here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["SavedBytes", "saved_bytes"]


@dataclass
class SavedBytes:
    """`by_module`: path -> bytes; modules that keep nothing are left out. `result` is what the run returned."""

    by_module: dict[str, int] = field(default_factory=dict)
    result: Any = None

    @property
    def total(self) -> int:
        return sum(self.by_module.values())


def saved_bytes(module: nn.Module, run: Callable[[], Any], *, prefix: str = "") -> SavedBytes:
    """Runs `run()` (which calls `module`) and counts what autograd keeps. `prefix` is taken off the front of module paths."""
    found = SavedBytes()
    # Held until the end: an address then names one storage only. A parameter's views have its storage.
    seen: dict[int, torch.Tensor] = {p.untyped_storage()._cdata: p for p in module.parameters()}
    path: list[str] = [""]

    def pack(x: torch.Tensor) -> torch.Tensor:
        key = x.untyped_storage()._cdata
        if key not in seen:
            seen[key] = x
            found.by_module[path[-1]] = found.by_module.get(path[-1], 0) + x.untyped_storage().nbytes()
        return x

    with _paths(module, path, prefix), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found.result = run()
    return found


@contextlib.contextmanager
def _paths(module: nn.Module, path: list[str], prefix: str) -> Iterator[None]:
    """Keeps `path[-1]` at the module that runs."""
    handles = []
    for name, sub in module.named_modules():
        short = name.removeprefix(prefix).removeprefix(".") if name.startswith(prefix) else name

        def enter(_: nn.Module, __: Any, short: str = short) -> None:
            path.append(short)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            path.pop()

        handles.append(sub.register_forward_pre_hook(enter))
        handles.append(sub.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
