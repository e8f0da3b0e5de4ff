"""How example inputs become a module's arguments, and how its output becomes what a loss takes.

Everything else deals in a flat row of tensors, batch first, target last. A model function may give its inputs as a tuple, as keyword arguments
(`{"input_ids": ..., "labels": ...}`), or as both (`((args...), {...})`), with tensors inside tuples, lists and dictionaries; what is no tensor
(None, a flag, a number) is passed as it is at every call. The target is the input of one of the names in `TARGET_NAMES`, else the last tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TARGET_NAMES", "Calling", "described", "flat_inputs", "loss_of", "parts_of", "prediction_of", "scalars_in"]

TARGET_NAMES = ("labels", "label", "targets", "target")
_PREDICTIONS = ("logits", "prediction", "sample", "last_hidden_state")  # fields of an output that a named loss is given, the first that is there


@dataclass(frozen=True)
class _Slot:
    """Where tensor number `index` of the row stands."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Calling:
    """`args` and `kwargs` with slots where the tensors of the row stand; `names`: one per tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module's arguments. With the target missing from `tensors`, the argument that it stands in is left out."""
        args = [_filled(a, tensors) for a in self.args if not _missing(a, len(tensors))]
        return tuple(args), {k: _filled(v, tensors) for k, v in self.kwargs.items() if not _missing(v, len(tensors))}


def flat_inputs(given: Any) -> tuple[tuple[Any, ...], Calling | None]:
    """The row of tensors (target last), and how the module is called with it; None for a plain tuple or list of tensors.

    What is no row of tensors comes back as it is, for the caller to refuse.
    """
    if isinstance(given, Mapping):
        args: tuple[Any, ...] = ()
        kwargs = dict(given)
    elif isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], (tuple, list)) and isinstance(given[1], Mapping):
        args, kwargs = tuple(given[0]), dict(given[1])
    elif isinstance(given, (tuple, list)) and any(isinstance(x, (tuple, list, Mapping)) or x is None for x in given):
        args, kwargs = tuple(given), {}
    else:
        return tuple(given), None
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    slotted_args = tuple(_slotted(a, str(i), tensors, names) for i, a in enumerate(args))
    slotted = {str(k): _slotted(v, str(k), tensors, names) for k, v in kwargs.items()}
    last = next((names.index(n) for n in TARGET_NAMES if n in names), len(names) - 1)
    order = [i for i in range(len(names)) if i != last] + ([last] if names else [])
    place = {old: new for new, old in enumerate(order)}
    calling = Calling(
        args=tuple(_moved(a, place) for a in slotted_args), kwargs={k: _moved(v, place) for k, v in slotted.items()},
        names=tuple(names[i] for i in order),
    )  # fmt: skip
    return tuple(tensors[i] for i in order), calling


def prediction_of(output: Any) -> Any:
    """The tensor that a named loss compares with the target: `logits` or the like of an output with fields, else its first tensor."""
    if isinstance(output, torch.Tensor):
        return output
    fields = _fields(output)
    for name in _PREDICTIONS:
        if isinstance(fields.get(name), torch.Tensor):
            return fields[name]
    values = list(fields.values()) if fields else list(output) if isinstance(output, (tuple, list)) else []
    for value in values:
        found = prediction_of(value)
        if isinstance(found, torch.Tensor):
            return found
    return output


def loss_of(output: Any) -> Any:
    """The loss that a module returned: itself, the field `loss`, the only floating-point scalar of a row or of fields (`(logits, loss)`), or the one
    that stands first in a row. What holds no such thing comes back as it is, for the caller to refuse."""
    fields = _fields(output)
    if isinstance(fields.get("loss"), torch.Tensor):
        return fields["loss"]
    found = scalars_in(output)
    return next(iter(found.values())) if len(found) == 1 or "0" in found else output


def scalars_in(output: Any) -> dict[str, torch.Tensor]:
    """Floating-point scalars of a row or of fields, by place or name."""
    return {k: v for k, v in parts_of(output).items() if isinstance(v, torch.Tensor) and not v.dim() and v.is_floating_point()}


def described(output: Any) -> str:
    """What a module returned, with names, shapes and types."""
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}, {output.dtype}"
    parts = ", ".join(f"{k}: {tuple(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__}" for k, v in parts_of(output).items())
    return f"a {type(output).__name__}" + (f" ({parts})" if parts else "")


def parts_of(output: Any) -> dict[str, Any]:
    """What a row or fields hold, by place or name; nothing of anything else."""
    row = {str(i): v for i, v in enumerate(output)} if isinstance(output, (tuple, list)) else {}
    return _fields(output) or row


def _fields(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return {str(k): v for k, v in output.items()}
    if hasattr(output, "_asdict"):  # a named tuple
        return dict(output._asdict())
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
    return {}


def _slotted(value: Any, name: str, tensors: list[torch.Tensor], names: list[str]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        names.append(name)
        return _Slot(len(tensors) - 1)
    if isinstance(value, (tuple, list)):
        made = [_slotted(v, f"{name}.{i}", tensors, names) for i, v in enumerate(value)]
        return type(value)(made) if type(value) in (tuple, list) else tuple(made)
    if isinstance(value, Mapping):
        return {k: _slotted(v, f"{name}.{k}", tensors, names) for k, v in value.items()}
    return value


def _moved(value: Any, place: Mapping[int, int]) -> Any:
    if isinstance(value, _Slot):
        return _Slot(place[value.index])
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, place) for v in value)
    if isinstance(value, dict):
        return {k: _moved(v, place) for k, v in value.items()}
    return value


def _missing(value: Any, count: int) -> bool:
    return isinstance(value, _Slot) and value.index >= count


def _filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(v, tensors) for v in value)
    if isinstance(value, dict):
        return {k: _filled(v, tensors) for k, v in value.items()}
    return value
