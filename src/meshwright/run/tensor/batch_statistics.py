"""Normalisation by the statistics of a batch of which each data replica has some samples; its parts and what travels: `plan.batch_statistics`.

Samples are (N, C) or (N, C, ...); sums are in float64 for float64 samples, else in float32. All replicas have as many samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec
import torch

from ...plan.batch_statistics import MOMENTS, NORMALISE, SUM, moments_of, sum_of
from ..steps.forward_graph import ForwardGraph, ForwardNode, TensorInfo

__all__ = ["FUNCTIONS", "batch_norm_moments", "batch_norm_sum", "expand_norms", "normalise"]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _others(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _along(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A number per channel, to be combined with samples."""
    return value.view([-1 if d == 1 else 1 for d in range(x.dim())])


def _count(x: torch.Tensor, replicas: int) -> int:
    """Numbers of a channel in the whole batch."""
    return int(x.numel() // x.shape[1] * replicas)


def batch_norm_sum(x: torch.Tensor) -> torch.Tensor:
    return _wide(x.detach()).sum(_others(x))


class _Moments(torch.autograd.Function):  # type: ignore[misc]
    """The distances' own share in the gradient of the mean is left out: over the whole batch it is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: torch.Tensor, replicas: int) -> torch.Tensor:
        mean = total / _count(x, replicas)
        ctx.save_for_backward(x, mean)
        distance = _wide(x) - _along(mean, x)
        return torch.stack([total / replicas, (distance * distance).sum(_others(x))])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, mean = ctx.saved_tensors
        found = _along(gradient[0], x) + _along(2 * gradient[1], x) * (_wide(x) - _along(mean, x))
        return found.to(x.dtype), None, None


def batch_norm_moments(x: torch.Tensor, total: torch.Tensor, *, replicas: int) -> torch.Tensor:
    """`total`: of the whole batch. Row 0: a replica's share of it; row 1: its squared distances from the mean."""
    found: torch.Tensor = _Moments.apply(x, total, replicas)
    return found


class _Normalise(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, moments: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, count: int, eps: float
    ) -> torch.Tensor:
        mean, inverse = moments[0] / count, (moments[1] / count + eps).rsqrt()
        ctx.save_for_backward(x, mean, inverse, weight)
        ctx.count, ctx.bias = count, None if bias is None else bias.dtype
        found = (_wide(x) - _along(mean, x)) * _along(inverse if weight is None else inverse * weight, x)
        return (found if bias is None else found + _along(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean, inverse, weight = ctx.saved_tensors
        wide, distance, over = _wide(gradient), _wide(x) - _along(mean, x), _others(x)
        sums, products = wide.sum(over), (wide * distance).sum(over)
        scale = inverse if weight is None else inverse * weight
        moments = torch.stack([-sums * scale, -0.5 * products * scale * inverse * inverse]) / ctx.count
        of_weight = None if weight is None else (products * inverse).to(weight.dtype)
        return (wide * _along(scale, x)).to(x.dtype), moments, of_weight, None if ctx.bias is None else sums.to(ctx.bias), None, None


def normalise(
    x: torch.Tensor, moments: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool, *, replicas: int,
) -> torch.Tensor:  # fmt: skip
    """`torch.nn.functional.batch_norm` of this replica's samples by the moments of all; running statistics are moved in place."""
    if not training:  # in evaluation what travelled is not looked at
        return torch.batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled)
    count = _count(x, replicas)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.mul_(1 - momentum).add_((moments[0] / count).to(running_mean.dtype), alpha=momentum)
            running_var.mul_(1 - momentum).add_((moments[1] / max(1, count - 1)).to(running_var.dtype), alpha=momentum)
    found: torch.Tensor = _Normalise.apply(x, moments, weight, bias, count, eps)
    return found


FUNCTIONS: dict[str, Callable[..., Any]] = {SUM: batch_norm_sum, MOMENTS: batch_norm_moments, NORMALISE: normalise}


def expand_norms(graph: ForwardGraph, norms: Collection[str], replicas: int) -> ForwardGraph:
    """`graph` with each of the nodes `norms` as three calls, as `plan.batch_statistics.with_shared_statistics` does with an `OpGraph`."""
    if not norms:
        return graph
    nodes = [y for n in graph.nodes for y in (_three(n, replicas) if n.name in norms else [n])]
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _three(n: ForwardNode, replicas: int) -> list[ForwardNode]:
    x, out = n.args[0], n.outputs[0]
    assert out is not None
    wide, channels = "float64" if out.dtype == "float64" else "float32", out.shape[1]
    shared = {"replicas": replicas}
    first = ForwardNode(sum_of(n.name), SUM, [x], {}, (TensorInfo((channels,), wide),))
    second = ForwardNode(moments_of(n.name), MOMENTS, [x, {"value": first.name}], shared, (TensorInfo((2, channels), wide),))
    return [first, second, ForwardNode(n.name, NORMALISE, [x, {"value": second.name}, *n.args[1:]], {**n.kwargs, **shared}, n.outputs)]
