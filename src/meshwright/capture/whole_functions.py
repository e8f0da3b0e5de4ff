"""Functions of torch's that cannot be traced, kept whole: each call of one is an operator `meshwright.region`, as a call of a module kept whole is.

This is finer than keeping the module whose forward calls it: a loss of CTC is one operator, and the net before it is traced. Only functions that give
tensors, change none, and whose results have the same shapes whatever the values are (tried on two samples).

Where such a function is given a tensor whose shape follows values (`labels.masked_select(mask)`), the calls that this tensor comes of are made in the
operator too, and so are those of whole numbers and truth values that it is given beside: what was counted of a mask must go with what was selected by
it, on samples as well.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .regions import one_region
from .torch_private import flat_tree, held_weakly

__all__ = ["JOINED", "FunctionsWhole", "LastFunction"]


def JOINED() -> None:
    """Stands for whichever functions they are."""


JOINED.__name__ = "functions that are given tensors whose shapes follow values"
_DRAWING = ("rand", "normal", "bernoulli", "multinomial", "poisson", "dropout")


class LastFunction(TorchFunctionMode):  # type: ignore[misc]
    """Notes which function of torch's was running when something failed."""

    failed: Callable[..., Any] | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return function(*args, **(kwargs or {}))
        except Exception:
            self.failed = function
            raise


@dataclass(eq=False)
class _Call:
    """A call whose result a tensor is. `leaves`, `form`: its arguments, flat; `versions`: of its tensors when it was made; `made`: of its result."""

    function: Callable[..., Any]
    leaves: list[Any]
    form: Any
    versions: list[int]
    made: int = 0

    @staticmethod
    def of(function: Callable[..., Any], args: Any, kwargs: Any) -> _Call:
        leaves, form = flat_tree((args, kwargs))
        return _Call(function, leaves, form, _versions(leaves))

    @property
    def holds(self) -> bool:
        """Whether the tensors that it was given still are what they were."""
        return self.versions == _versions(self.leaves)

    def run(self, values: dict[int, Any], made: dict[int, Any], known: Any) -> Any:
        """Its result. `values`: of tensors that are given, by identity; `made`: of calls that have run; `known`: the call that a tensor comes of."""
        if id(self) not in made:
            found = [_value(x, values, made, known) if isinstance(x, torch.Tensor) else x for x in self.leaves]
            args, kwargs = self.form.unflatten(found)
            made[id(self)] = self.function(*args, **kwargs)
        return made[id(self)]


def _value(x: torch.Tensor, values: dict[int, Any], made: dict[int, Any], known: Any) -> Any:
    return values[id(x)] if id(x) in values else known[x].run(values, made, known)


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [x._version for x in leaves if isinstance(x, torch.Tensor)]


class FunctionsWhole(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered, calls of `functions` are single operators. `name`: of the model, for keys; `batch`: its samples; `unfit`: those that
    cannot be so."""

    def __init__(self, functions: Container[Any], name: str, batch: int) -> None:
        super().__init__()
        self.functions, self.name, self.batch, self.count, self.unfit = functions, name, batch, 0, set[Any]()
        self.known = held_weakly()  # tensors of whole numbers and truth values, or whose shape follows values -> call

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") == "__get__":
            return function(*args, **kwargs)
        call = _Call.of(function, args, kwargs)
        joined = JOINED in self.functions and any(map(_follows_values, call.leaves))
        if function in self.unfit or not (joined or function in self.functions):
            return self.noted(call, function(*args, **kwargs))
        try:
            return self.whole(call, kwargs)
        except Exception:  # it is not known beforehand what a function of torch's says of samples
            if not joined:
                self.unfit.add(function)
            return self.noted(call, function(*args, **kwargs))

    def noted(self, call: _Call, result: Any) -> Any:
        """`result`, of which it is known then what it comes of, if that may be computed again."""
        if isinstance(result, torch.Tensor) and not any(x is result for x in call.leaves) and call.holds:
            again = _follows_values(result) or not (result.is_floating_point() or result.is_complex())
            if again and not call.function.__name__.startswith(_DRAWING) and any(isinstance(x, torch.Tensor) for x in call.leaves):
                self.known[result], call.made = call, result._version
        return result

    def whole(self, call: _Call, kwargs: Any) -> Any:
        if kwargs.get("reduction") == "sum":  # how a loss is reduced is for the graph to say
            args, _ = call.form.unflatten(call.leaves)
            alone = {**kwargs, "reduction": "none"}
            return self.whole(_Call.of(call.function, args, alone), alone).sum()
        given = self.given(call) if any(map(_follows_values, call.leaves)) else [x for x in call.leaves if isinstance(x, torch.Tensor)]
        key = f"{self.name}|{call.function.__name__}()|{self.count}"
        self.count += 1

        def run(_: Any, args: Any, kwargs: Any) -> Any:
            return _unchanged(lambda: call.run(dict(zip(map(id, given), args, strict=True)), {}, self.known), args)

        return one_region(key, run, tuple(given), {}, batch=self.batch, fixed=True)

    def given(self, call: _Call) -> list[torch.Tensor]:
        """The tensors that a call and those before it are computed of."""
        found: dict[int, torch.Tensor] = {}

        def look(x: _Call) -> None:
            for t in x.leaves:
                if isinstance(t, torch.Tensor) and id(t) not in found:
                    before = self.known.get(t)
                    if before is not None and before.holds and before.made == t._version:
                        look(before)
                    else:
                        found[id(t)] = t

        look(call)
        return list(found.values())


def _follows_values(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and any(not isinstance(d, int) for d in x.shape)


def _unchanged(run: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
    before = _versions(given)
    result = run()
    if before != _versions(given) or any(x is y for x in given for y in (result if isinstance(result, tuple) else (result,))):
        raise RuntimeError("it changes what it is given")
    return result
