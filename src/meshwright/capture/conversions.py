"""Conversions to the type that something has: `self.router.to(torch.float32)` in a forward pass, `x.to(x.dtype)`.

Eager PyTorch does nothing there. Tracing fails at the first (it swaps parameters that it holds), and keeps a call for the second, which would be
planned, priced and could be cut at. Nor does it with `torch.tensor([])` among what is joined, which an empty cache of keys and values is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from .torch_private import storage_key

__all__ = ["idle_conversions_removed", "modules_left_as_they_are"]

aten = torch.ops.aten
_CONVERSIONS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default)
_ASSERTED = aten._assert_tensor_metadata.default


@contextlib.contextmanager
def modules_left_as_they_are() -> Iterator[None]:
    """While it lasts, a conversion of a module that changes none of its tensors does not touch them."""
    convert = nn.Module._apply

    def converted(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        with torch.no_grad():
            idle = all(function(x) is x for x in chain(self.parameters(recurse), self.buffers(recurse)))
        return self if idle else convert(self, function, recurse)

    nn.Module._apply = converted
    try:
        yield
    finally:
        nn.Module._apply = convert


def idle_conversions_removed(graph: fx.Graph) -> bool:
    """Takes out calls that give the tensor that they are given, and what is asserted of types before conversions; whether there were any."""
    idle = [n for n in graph.nodes if n.target is _ASSERTED or (n.target in _CONVERSIONS and _same(n.args[0].meta.get("val"), n.meta.get("val")))]
    for n in idle:
        if n.target is not _ASSERTED:
            n.replace_all_uses_with(n.args[0])
        graph.erase_node(n)
    joins = [n for n in graph.nodes if n.target is aten.cat.default and any(map(_empty, n.args[0])) and not all(map(_empty, n.args[0]))]
    for n in joins:
        n.args = ([x for x in n.args[0] if not _empty(x)], *n.args[1:])
    return bool(idle) or bool(joins)


def _empty(n: fx.Node) -> bool:
    shape = n.meta["val"].shape
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0  # not a size that follows values


def _same(given: Any, made: Any) -> bool:
    if not (isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor)) or given.layout != torch.strided or made.layout != torch.strided:
        return False
    forms = [(x.dtype, x.device, x.shape, x.stride(), x.storage_offset(), storage_key(x)) for x in (given, made)]
    return forms[0] == forms[1]
