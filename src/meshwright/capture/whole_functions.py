"""Functions of torch's that cannot be traced, kept whole: each call of one is an operator `meshwright.region`, as a call of a module kept whole is.

This is finer than keeping the module whose forward calls it: a loss of CTC is one operator, and the net before it is traced. Only functions that give
tensors, change none, and whose results have the same shapes whatever the values are (tried on two samples).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .regions import one_region

__all__ = ["FunctionsWhole", "LastFunction"]


class LastFunction(TorchFunctionMode):  # type: ignore[misc]
    """Notes which function of torch's was running when something failed."""

    failed: Callable[..., Any] | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return function(*args, **(kwargs or {}))
        except Exception:
            self.failed = function
            raise


class FunctionsWhole(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered, calls of `functions` are single operators. `name`: of the model, for keys; `batch`: its samples; `unfit`: those that
    cannot be so."""

    def __init__(self, functions: Container[Any], name: str, batch: int) -> None:
        super().__init__()
        self.functions, self.name, self.batch, self.count, self.unfit = functions, name, batch, 0, set[Any]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in self.functions or function in self.unfit:
            return function(*args, **kwargs)
        key = f"{self.name}|{function.__name__}()|{self.count}"
        self.count += 1
        try:
            return one_region(key, lambda _, args, kwargs: _unchanged(function, args, kwargs), args, kwargs, batch=self.batch, fixed=True)
        except Exception:  # it is not known beforehand what a function of torch's says of samples
            self.unfit.add(function)
            return function(*args, **kwargs)


def _unchanged(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    before = [x._version for x in tensors]
    result = function(*args, **kwargs)
    if before != [x._version for x in tensors] or any(x is y for x in tensors for y in (result if isinstance(result, tuple) else (result,))):
        raise RuntimeError("it changes what it is given")
    return result
