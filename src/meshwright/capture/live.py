"""Models that are objects of this process: the names they are planned under, the form of their batches, and copies of them to trace.

A live model is planned as `live:<class>`. That name means something only while `standing` says what it stands for: then `resolve_function` gives a
function that makes copies, on the meta device (shapes without memory) or on a real one. The owner's module itself is never changed or run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.errors import UsageError

from .calling import flat_inputs

__all__ = ["LIVE", "BatchForm", "LossModule", "as_function", "form_of", "live_name", "maker_of", "reduces_to", "standing", "stands_for"]

LIVE = "live:"  # begins the name of what lives in a process
MakeExample = Callable[[], tuple[nn.Module, Any]]

_STANDING: dict[str, Callable[..., Any]] = {}


@contextlib.contextmanager
def standing(named: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While it lasts, these names of models and losses mean these functions, whatever they mean otherwise."""
    before = {name: _STANDING.get(name) for name in named}
    _STANDING.update(named)
    try:
        yield
    finally:
        for name, function in before.items():
            if function is None:
                _STANDING.pop(name, None)
            else:
                _STANDING[name] = function


def stands_for(name: str) -> Callable[..., Any] | None:
    """What `name` stands for now; None for a name like any other. Raises: UsageError for a live name that nothing stands for."""
    found = _STANDING.get(name)
    if found is None and name.startswith(LIVE):
        raise UsageError(
            f"{name} is an object of the program that planned it", where=name,
            hint="run the plan in that program: step = meshwright.torch.parallelize(model, optimizer, plan)",
        )  # fmt: skip
    return found


def live_name(thing: object, *, what: str = "") -> str:
    """`live:<qualified name>` of a module's class, a class or a function; `live:<what>:<qualified name>` for another thing than a model."""
    named = thing if isinstance(thing, type) or hasattr(thing, "__qualname__") else type(thing)
    return f"{LIVE}{what}{':' if what else ''}{getattr(named, '__qualname__', type(thing).__qualname__)}"


@dataclass(frozen=True)
class BatchForm:
    """How a batch is given. `names`: of a dictionary's tensors, in the order of `calling.flat_inputs`; empty: a tensor (`single`), or a tuple with
    the target last."""

    names: tuple[str, ...] = ()
    single: bool = False

    def tensors(self, batch: object) -> tuple[torch.Tensor, ...]:
        """The batch's tensors in the model's order. Raises: UsageError for another form, another name, or what is no tensor."""
        if self.names:
            if not isinstance(batch, Mapping):
                raise _other_form(f"a {type(batch).__name__}", f"a dictionary of {', '.join(self.names)}")
            given = {k: v for k, v in batch.items() if v is not None}
            if set(given) != set(self.names):
                odd = sorted(set(given) ^ set(self.names))
                raise _other_form(f"a dictionary of {', '.join(map(str, given))}", f"one of {', '.join(self.names)}", odd=odd)
            found: Sequence[Any] = [given[name] for name in self.names]
        elif self.single:
            found = list(batch) if isinstance(batch, (tuple, list)) and len(batch) == 1 else [batch]
        elif isinstance(batch, (tuple, list)):
            found = batch
        else:
            raise _other_form(f"a {type(batch).__name__}", "a tuple of tensors, target last")
        for i, x in enumerate(found):
            if not isinstance(x, torch.Tensor):
                what = self.names[i] if self.names else f"tensor {i}"
                raise UsageError(f"{what} of the batch is a {type(x).__name__}, not a tensor", where="batch", hint="give tensors, batch first")
        return tuple(found)


def form_of(batch: object) -> BatchForm:
    """The form of a batch: a tensor, a tuple or list of tensors (target last), or a dictionary of tensors (None entries count as missing)."""
    if isinstance(batch, torch.Tensor):
        return BatchForm(single=True)
    if isinstance(batch, Mapping):
        given = {str(k): v for k, v in batch.items() if v is not None}
        calling = flat_inputs(given)[1]
        if calling is None or not calling.names:
            raise UsageError("the batch is empty", where="batch", hint="give a dictionary of tensors, batch first")
        odd = next((k for k, v in given.items() if not isinstance(v, torch.Tensor)), None)
        if odd is not None:
            raise UsageError(f"{odd} of the batch is a {type(given[odd]).__name__}, not a tensor", where="batch", hint="give tensors, batch first")
        return BatchForm(calling.names)
    if isinstance(batch, (tuple, list)):
        return BatchForm(single=len(batch) == 1)
    raise UsageError(f"the batch is a {type(batch).__name__}", where="batch", hint="a tensor, a tuple of tensors (target last), or a dictionary")


def _other_form(given: str, expected: str, **data: Any) -> UsageError:
    return UsageError(f"the batch is {given}, the plan was made for {expected}", where="batch", hint="give batches as planned", data=data)


def maker_of(
    model: nn.Module | Callable[[], Any], form: BatchForm, inputs: Sequence[torch.Tensor], loss: Callable[[Any, Any], Any] | None = None
) -> MakeExample:
    """A model function of copies of `model`, or of what `model()` makes, with these example inputs; inputs on meta have shapes only.

    `loss`: of (output, batch by names); forward of the copies returns it then.
    """

    def make() -> tuple[nn.Module, Any]:
        device = torch.get_default_device()
        if isinstance(model, nn.Module):
            made = copied(model, device)
        else:
            result = model()
            made = result[0] if isinstance(result, tuple) and len(result) == 2 else result
            if not isinstance(made, nn.Module):
                raise UsageError(f"made a {type(made).__name__}, not an nn.Module", where=live_name(model), hint="a function that returns the module")
        if loss is not None:
            _reduce_to_loss(made, loss)
        given = [_on(x, device) for x in inputs]
        return made, dict(zip(form.names, given, strict=True)) if form.names else tuple(given)

    return make


def copied(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy whose tensors are on `device`, ties kept; on meta without memory. Raises: UsageError for a module that cannot be copied so."""
    memo: dict[int, Any] = {}
    for sub in module.modules():
        for table in (sub._parameters, sub._buffers, sub.__dict__):
            for x in table.values():
                if isinstance(x, torch.Tensor) and id(x) not in memo:
                    memo[id(x)] = _as(x, device)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise UsageError(
            f"the module cannot be copied: {type(error).__name__}: {lines[0] if lines else 'no message'}", where=live_name(module),
            hint="give a function that makes the module instead of the module",
        ) from error  # fmt: skip


def _as(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if x.is_meta and device.type != "meta":
        raise UsageError("the model is on the meta device, and its values are needed", where="model", hint="it could not be traced: give its values")
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if device.type == "meta" else x.detach().to(device, copy=True)
    return nn.Parameter(made, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else made


def _on(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if x.is_meta and device.type != "meta":  # shapes only: a plan's, not an owner's batch
        return torch.zeros(x.shape, dtype=x.dtype, device=device)
    return x.detach().to(device)


def as_function(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that is a module, as a function: its tensors would count as the model's own."""
    return functools.wraps(loss.forward)(lambda *given: loss(*given)) if isinstance(loss, nn.Module) else loss


class LossModule(nn.Module):  # type: ignore[misc]
    """The loss as a module, so that its calls carry the module path `loss`, and it can be kept whole by itself."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Any, target: Any) -> Any:
        return self.function(output, target)


def _reduce_to_loss(module: nn.Module, loss: Callable[[Any, Any], Any]) -> None:
    forward, whole = module.forward, LossModule(loss)

    def reduced(**batch: torch.Tensor) -> Any:
        return whole(forward(**batch), batch)

    reduced.loss = whole  # type: ignore[attr-defined]
    module.forward = reduced


def reduces_to(module: nn.Module) -> LossModule | None:
    """The loss that a module's output was reduced to (`maker_of`)."""
    found: LossModule | None = getattr(module.forward, "loss", None)
    return found
