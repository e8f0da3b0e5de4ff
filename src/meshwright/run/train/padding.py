"""Samples of changing shape, padded to the shape that a plan is for: `DATA?pad=VALUE,...`, a value for each of the model's inputs.

A plan of several shapes takes each batch in its smallest that holds it: samples are filled up to the longest of their batch (`Together`), and the
batch to its shape (`shaped_batches`).

A tensor that is shorter than the model's example input is filled up at the end of every dimension; a longer one is left as it is, and refused where
batches are checked, with both shapes. What padding means is the owner's: targets of it are a value that the loss ignores, and nothing before it
may look at it (a causal mask, or one of the inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import Unsupported, UsageError
from ...plan.batch_statistics import normalises
from ..steps.forward_graph import ForwardGraph

__all__ = ["Padding", "Together", "filled", "fits", "padding_of", "refuse_counted"]

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
            return tensors  # refused where batches are checked
        return tuple(filled(x, wanted, value) for x, wanted, value in zip(tensors, self.shapes, self.values, strict=True))


@dataclass(frozen=True)
class Together:
    """Samples of one batch, filled up to the longest of them in every dimension."""

    values: tuple[float, ...]
    name: str

    def __call__(self, items: Sequence[Any]) -> list[tuple[torch.Tensor, ...]]:
        """Raises: as `Padding`."""
        rows = [Padding(self.values, (), self.name)(item) for item in items]  # as tensors
        if any(len(row) != len(self.values) for row in rows):
            return rows
        found = []
        for column, value in zip(zip(*rows, strict=True), self.values, strict=True):
            longest = tuple(map(max, zip(*(x.shape for x in column), strict=True))) if len({x.dim() for x in column}) == 1 else ()
            found.append([filled(x, longest, value) for x in column])
        return list(zip(*found, strict=True))


def fits(tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]], padded: bool) -> bool:
    """Whether a batch is of these sizes of a sample, or can be `padded` to them. Rows and dtypes are not looked at."""
    if len(tensors) != len(sizes) or any(x.dim() != len(size) + 1 for x, size in zip(tensors, sizes, strict=True)):
        return False
    pairs = [(a, b) for x, size in zip(tensors, sizes, strict=True) for a, b in zip(x.shape[1:], size, strict=True)]
    return all(a <= b if padded else a == b for a, b in pairs)


def refuse_counted(graphs: Sequence[ForwardGraph], where: str) -> None:
    """Raises: Unsupported where statistics of the batch would count padding."""
    for graph in graphs:
        found = next((n for n in graph.nodes if normalises(n.target, n.args)), None)
        if found is not None:
            raise Unsupported(
                f"statistics of the batch would count what is padded: {found.target}", where=graph.modules.get(found.name, "") or found.name,
                hint=f"give batches of the plan's shapes exactly, without {where}",
            )  # fmt: skip


def filled(x: torch.Tensor, wanted: tuple[int, ...], value: float) -> torch.Tensor:
    """`x` with `value` at the end of every dimension that is shorter than wanted."""
    if x.dim() != len(wanted) or tuple(x.shape) == wanted:
        return x
    made = x.new_full([max(a, b) for a, b in zip(x.shape, wanted, strict=True)], value)
    made[tuple(slice(0, n) for n in x.shape)] = x
    return made


def padding_of(name: str, examples: Sequence[torch.Tensor], *, together: bool) -> tuple[str, Padding | Together | None]:
    """(the data's own name, how it is padded: every sample to the examples' shape, or those of a batch `together`).

    Raises: UsageError for values that are no numbers, or not one for each input.
    """
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
    return name, Together(values, name) if together else Padding(values, tuple(tuple(x.shape[1:]) for x in examples), name)
