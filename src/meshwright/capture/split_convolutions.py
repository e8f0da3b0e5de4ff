"""Backward convolutions in two: the gradients of weight and bias first, then that of the input, which does not read the input's values.

One ATen call makes all three and holds input, gradient and result at once. Its two halves give the same bits (each gradient is a kernel of its own),
take as long together, and between them the input can be let go; each has its own inner workspace. The input's gradient takes one element spread over
the input's shape instead of the input: its values are not read.
Source: the card of MONeT, section 3.1 (two backward nodes per convolution).
"""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

import torch
from torch import fx

__all__ = ["split_convolutions"]

BACKWARD = torch.ops.aten.convolution_backward.default
MASK_ARGUMENT = 10  # position of the output mask among the backward operator's arguments


def split_convolutions(graph: fx.Graph) -> int:
    """Rewrites `graph`, whose nodes carry fakes; returns how many calls it has split.

    Left whole: what makes no gradient of the input, and tensors that are not in torch's default order of dimensions, for which kernels choose
    the order of their result by the input's.
    """
    found = [n for n in graph.find_nodes(op="call_function", target=BACKWARD) if n.args[MASK_ARGUMENT][0] and _in_default_order(n)]
    for n in found:
        _split(graph, n)
    return len(found)


def _in_default_order(n: fx.Node) -> bool:
    return all(isinstance(x, fx.Node) and _falling(x.meta["val"]) for x in n.args[:3])


def _falling(x: torch.Tensor) -> bool:
    """Strides fall from dimension to dimension, as in a contiguous tensor or a slice of one."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    return all(a >= b for a, b in pairwise(strides))


def _split(graph: fx.Graph, whole: fx.Node) -> None:
    gradient, given, *others = whole.args
    assert isinstance(gradient, fx.Node) and isinstance(given, fx.Node)
    value, mask = whole.meta["val"], list(whole.args[MASK_ARGUMENT])
    of_input, *of_weight = value
    parts = [x for x in whole.users if x.target is operator.getitem]

    def call(name: str, target: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
        made = graph.create_node("call_function", target, args, name=f"{whole.name}_{name}")
        made.meta = {**whole.meta, "val": val}
        return made

    with graph.inserting_before(whole):
        if any(mask[1:]):
            weight = call("weight", BACKWARD, (*whole.args[:MASK_ARGUMENT], [False, *mask[1:]]), (None, *of_weight))
            for x in parts:
                if x.args[1]:
                    x.replace_input_with(whole, weight)
        fake = gradient.meta["val"].new_empty([1])
        one = call("one", torch.ops.aten.new_empty.default, (gradient, [1]), fake)
        shape = list(given.meta["val"].shape)
        spread = call("shape", torch.ops.aten.expand.default, (one, shape), fake.expand(shape))
        half = call("input", BACKWARD, (gradient, spread, *others[: MASK_ARGUMENT - 2], [True, False, False]), (of_input, None, None))
    for x in parts:
        if x.args[1] == 0:
            x.replace_input_with(whole, half)
    graph.erase_node(whole)
