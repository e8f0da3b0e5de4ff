"""The owner's code in double precision: while `Widened` is entered, what his code calls float32 is float64.

`module.double()` widens what a module holds, not what its code says: a normalisation that computes `x.float()` would round in the middle of a double
step, and a plan's double twin (`wide`), whose calls were widened, would seem to differ. This does to calls what `wide` does to a graph.
Code that widening breaks, or that rounds where torch's functions are not asked (a compiled extension), is compared in its own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Widened"]

NARROW, WIDE = torch.float32, torch.float64
FILLS = (torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.arange, torch.linspace, torch.logspace)


class Widened(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args)
        if func is torch.Tensor.type and len(args) > 1 and args[1] == "torch.FloatTensor":
            return torch.Tensor.double(args[0])
        args, named = tuple(map(_wide, args)), {k: _wide(v) for k, v in (kwargs or {}).items()}
        if func in FILLS and named.get("dtype") is None and "out" not in named:
            like = func(*args, **{**named, "device": "meta"})  # of which type torch would make it
            return func(*args, **{**named, "dtype": WIDE if like.dtype is NARROW else like.dtype})
        found = func(*args, **named)
        made = isinstance(found, torch.Tensor) and found.dtype is NARROW and not any(isinstance(x, torch.Tensor) for x in args)
        return found.double() if made else found


def _wide(value: Any) -> Any:
    return WIDE if value is NARROW else value
