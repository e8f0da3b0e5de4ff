"""Batch normalisation's statistics and its result as two operators, for real (`probe.steps.norms_apart` makes step graphs of them).

The result from given statistics is the plain operator in evaluation: with a variance of 1 and nothing added to it, a weight that has been multiplied
by the inverse deviation gives the factor and the term that training computes, by the same kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .pieces import arguments

__all__ = ["APART", "BATCH_NORMS", "FROM_STATISTICS", "both", "from_statistics", "normalised", "statistics"]

APART, FROM_STATISTICS = "apart", "from statistics"
BATCH_NORMS = ("aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.no_stats")


def normalised(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor, deviation: torch.Tensor
) -> torch.Tensor:
    """`deviation`: the inverse of each channel's."""
    factor = deviation if weight is None else deviation * weight
    found: torch.Tensor = torch.native_batch_norm(x, factor, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    return found


def from_statistics(call: fx.Node, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """`call`: of the view that shows the result. `others`: the weight and the bias, where there are such, then the statistics."""
    source: Any = call.args[0]
    weight, bias = (isinstance(a, fx.Node) for a in source.args[1:3])
    *given, mean, deviation = others
    return normalised(x, given[0] if weight else None, given[-1] if bias else None, mean, deviation)


def both(call: fx.Node, *inputs: torch.Tensor) -> tuple[tuple[Any, ...], torch.Tensor]:
    """(the statistics, in the places that they have in the plain operator's results; the normalised values)."""
    function: Any = call.target
    result, *rest = function(*arguments(call, inputs))
    return (None, *rest), result


def statistics(call: fx.Node, *inputs: torch.Tensor) -> tuple[Any, ...]:
    return both(call, *inputs)[0]
