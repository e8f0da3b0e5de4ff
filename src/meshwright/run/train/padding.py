"""Samples of changing shape, padded to the shape that a plan is for: `DATA?pad=VALUE,...`, a value for each of the model's inputs.

A tensor that is shorter than the model's example input is filled up at the end of every dimension; a longer one is left as it is, and refused where
batches are checked, with both shapes. What padding means is the owner's: targets of it are a value that the loss ignores, and nothing before it
may look at it (a causal mask, or one of the inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import UsageError

__all__ = ["Padding", "filled", "padding_of"]

MARK = "?pad="


@dataclass(frozen=True)
class Padding:
    """`shapes`: of one sample's tensors in the plan."""

    values: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]
    name: str

    def __call__(self, item: Any) -> tuple[torch.Tensor, ...]:
        """Raises: UsageError for an item that is not tensors in the model's order."""
        given = item if isinstance(item, (tuple, list)) else (item,)
        try:
            tensors = tuple(torch.as_tensor(x) for x in given)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"an item is a {type(item).__name__}; what is padded are tensors in the order of the model's inputs", where=self.name,
                hint="return a tuple of tensors from __getitem__, target last, or pad in the loader's collate_fn",
            ) from None  # fmt: skip
        if len(tensors) != len(self.shapes):
            return tensors
        return tuple(filled(x, wanted, value) for x, wanted, value in zip(tensors, self.shapes, self.values, strict=True))


def filled(x: torch.Tensor, wanted: tuple[int, ...], value: float) -> torch.Tensor:
    """`x` with `value` at the end of every dimension that is shorter than wanted."""
    if x.dim() != len(wanted) or tuple(x.shape) == wanted:
        return x
    made = x.new_full([max(a, b) for a, b in zip(x.shape, wanted, strict=True)], value)
    made[tuple(slice(0, n) for n in x.shape)] = x
    return made


def padding_of(name: str, examples: Sequence[torch.Tensor]) -> tuple[str, Padding | None]:
    """(the data's own name, how it is padded). Raises: UsageError for values that are no numbers, or not one for each input."""
    name, mark, text = name.partition(MARK)
    if not mark:
        return name, None
    words = text.split(",")
    try:
        values = tuple(float(w) for w in words)
    except ValueError:
        raise UsageError(f"{text!r} is no list of numbers", where="--data", hint=f"e.g. {name}{MARK}0,-100") from None
    if len(values) != len(examples):
        what = f"{len(values)} values to pad with, the model takes {len(examples)} tensors"
        raise UsageError(what, where="--data", hint="one for each, target last")
    for value, x in zip(values, examples, strict=True):
        if not x.is_floating_point() and value != int(value):
            raise UsageError(f"{value:g} does not fit a tensor of {x.dtype}", where="--data", hint="a whole number")
    return name, Padding(values, tuple(tuple(x.shape[1:]) for x in examples), name)
