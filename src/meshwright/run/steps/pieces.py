"""Operators in pieces, for real: convolutions by images or output channels, normalisation's gradient by channels, pooling with four-bit places.

A processor's convolution writes its operands into another order first, in a workspace as large as they are; of a few images at a time that is
small and stays in the cache. By images, results and input gradients are sums over the same numbers in the same order, and so are weight gradients by
output channels; whether they have the same bits depends on the kernels that the library picks for pieces, so it is measured (`probe.steps.variants`).
Weight gradients by images are other sums: exact up to rounding. An input's gradient that is as large as the output's can take its place, image by
image: "images 8 over".
Names: "images 8", "channels 8": in eight pieces. "offsets": max pooling that gives the places of its maxima in four bits, and its gradient.
Source: the card of MONeT, sections 3.1 and 3.6 (choice of convolution algorithm and workspace). Deviation: on a processor, pieces take the place of
a library's algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import fx

from ...capture.losses import CHANNELS_LAST
from ...kernels.packed import scatter_offsets
from ...kernels.pooling import pool_offsets

__all__ = [
    "BATCH_NORM_BACKWARD", "CONVOLUTION", "CONVOLUTION_BACKWARD", "GROUPS", "MASK", "PIECES", "POOL", "POOL_BACKWARD", "TRANSPOSED",
    "arguments", "in_pieces", "pool", "pool_geometry", "pool_gradient",
]  # fmt: skip

CONVOLUTION = "aten.convolution.default"
CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
BATCH_NORM_BACKWARD = "aten.native_batch_norm_backward.default"
POOL = "aten.max_pool2d_with_indices.default"
POOL_BACKWARD = "aten.max_pool2d_with_indices_backward.default"
TRANSPOSED, GROUPS, MASK = 7, 9, 10  # of convolution_backward's arguments

Run = Callable[..., Any]


def arguments(call: fx.Node, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call's own arguments, with these operands."""
    given = dict(zip(call.all_input_nodes, inputs, strict=True))
    found: tuple[Any, ...] = fx.node.map_arg(call.args, given.__getitem__)
    return found


def parts(whole: int, pieces: int) -> Iterator[slice]:
    """`whole` in `pieces` ranges of nearly the same length; none is empty."""
    ends = [whole * k // pieces for k in range(pieces + 1)]
    return (slice(a, b) for a, b in pairwise(ends) if b > a)


def room_for(part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """For all of which `part` is a piece, in its order of dimensions."""
    last = CHANNELS_LAST.get(part.dim())
    other = last is not None and not part.is_contiguous() and part.is_contiguous(memory_format=last)
    return part.new_empty(shape) if not other else torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=last)


def convolution(pieces: int) -> Run:
    def run(call: fx.Node, *inputs: Any) -> torch.Tensor:
        x, *others = arguments(call, inputs)
        function: Any = call.target
        out = None
        for s in parts(x.shape[0], pieces):
            y = function(x[s], *others)
            out = room_for(y, (x.shape[0], *y.shape[1:])) if out is None else out
            out[s] = y
            del y
        assert out is not None
        return out

    return run


def convolution_gradients(pieces: int, over: bool = False) -> Run:
    """By images: the half that makes the input's gradient, or (up to rounding) the other. `over`: into the output's gradient, which is as large."""

    def run(call: fx.Node, *inputs: Any) -> tuple[torch.Tensor | None, ...]:
        gradient, x, *others = arguments(call, inputs)
        function: Any = call.target
        given, sums = gradient if over else None, [None, None]
        for s in parts(x.shape[0], pieces):
            part, *found = function(gradient[s], x[s], *others)
            if part is not None:
                given = room_for(part, (x.shape[0], *part.shape[1:])) if given is None else given
                given[s] = part
            del part
            sums = [a if b is None else b.add_(a) for a, b in zip(found, sums, strict=True)]
        return given, *sums

    return run


def weight_gradient(pieces: int) -> Run:
    """By output channels."""

    def run(call: fx.Node, *inputs: Any) -> tuple[torch.Tensor | None, ...]:
        gradient, x, weight, sizes, *others = arguments(call, inputs)
        function: Any = call.target
        out = None
        bias = gradient.new_empty(weight.shape[0]) if others[MASK - 4][2] else None
        for s in parts(weight.shape[0], pieces):
            rows = s.stop - s.start
            _, part, of_bias = function(gradient[:, s], x, weight[s], None if sizes is None else [rows], *others)
            out = room_for(part, tuple(weight.shape)) if out is None else out
            out[s] = part
            if bias is not None:
                bias[s] = of_bias
            del part
        return None, out, bias

    return run


def batch_norm_gradient(pieces: int) -> Run:
    """By channels, each of which is a normalisation of its own."""

    def run(call: fx.Node, *inputs: Any) -> tuple[torch.Tensor | None, ...]:
        gradient, x, *others = arguments(call, inputs)
        function: Any = call.target
        of_channel = [isinstance(o, torch.Tensor) for o in others]
        found: list[torch.Tensor | None] = [None, None, None]
        for s in parts(x.shape[1], pieces):
            some = (o[s] if per else o for o, per in zip(others, of_channel, strict=True))
            result = function(gradient[:, s].contiguous(), x[:, s].contiguous(), *some)
            for k, y in enumerate(result):
                if y is not None:
                    whole = found[k] if found[k] is not None else y.new_empty(x.shape if k == 0 else x.shape[1])
                    assert whole is not None
                    (whole[:, s] if k == 0 else whole[s]).copy_(y)
                    found[k] = whole
            del result
        return tuple(found)

    return run


def pool(call: fx.Node, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.new_empty(call.meta["val"][0].shape)
    packed = torch.empty(-(-y.numel() // 2), dtype=torch.uint8)
    geometry = np.array(pool_geometry(call), np.int64)
    pool_offsets(x.contiguous().view(-1).numpy(), y.view(-1).numpy(), packed.numpy(), geometry, *_planes(y.shape, x.shape))
    return y, packed


def pool_gradient(call: fx.Node, gradient: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    out = gradient.new_empty(call.meta["val"].shape)
    geometry = np.array(pool_geometry(call), np.int64)
    scatter_offsets(packed.numpy(), gradient.contiguous().view(-1).numpy(), out.view(-1).numpy(), geometry, *_planes(gradient.shape, out.shape))
    return out


def _planes(outside: torch.Size, inside: torch.Size) -> tuple[np.ndarray, np.ndarray]:
    return np.array(outside[-2:], np.int64), np.array(inside[-2:], np.int64)


def pool_geometry(call: fx.Node) -> list[int]:
    """kernel, stride, padding, dilation, two numbers each, of a pooling call or its gradient's."""
    first = 1 if str(call.target) == POOL else 2
    pairs = [_pair(call.args[first + k] if len(call.args) > first + k else default) for k, default in enumerate(((), (), 0, 1))]
    pairs[1] = pairs[1] or pairs[0]
    return [int(x) for p in pairs for x in p]


def _pair(x: Any) -> tuple[int, ...]:
    found = tuple(x) if isinstance(x, (list, tuple)) else (x, x)
    return (found * 2)[:2] if found else ()


PIECES: dict[tuple[str, str], Callable[[int], Run]] = {
    (CONVOLUTION, "images"): convolution, (CONVOLUTION_BACKWARD, "images"): convolution_gradients,
    (CONVOLUTION_BACKWARD, "channels"): weight_gradient, (BATCH_NORM_BACKWARD, "channels"): batch_norm_gradient,
}  # fmt: skip
WHOLE: dict[tuple[str, str], Run] = {(POOL, "offsets"): pool, (POOL_BACKWARD, "offsets"): pool_gradient}


def in_pieces(target: str, name: str) -> Run | None:
    """The implementation called `name` of the operator `target`; None where there is none."""
    if (target, name) in WHOLE:
        return WHOLE[target, name]
    kind, _, rest = name.partition(" ")
    count, _, over = rest.partition(" ")
    if (target, kind) not in PIECES or not count.isdecimal() or len(count) > 9 or int(count) < 1 or over not in ("", "over"):
        return None
    if over:
        return convolution_gradients(int(count), over=True) if (target, kind) == (CONVOLUTION_BACKWARD, "images") else None
    return PIECES[target, kind](int(count))
