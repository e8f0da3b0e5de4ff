"""Calls of the whole batch, of which each data replica has some samples; which they are and what travels: `plan.whole_batch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from ...plan.whole_batch import BACK, PLACE, SHARE, Call, renamed, shared_calls, wide_type
from ..steps.forward_graph import ForwardGraph, ForwardNode, TensorInfo

__all__ = ["FUNCTIONS", "calls_of", "expand_batch", "of_whole_batch"]


def place(x: torch.Tensor, *, dim: int, outer: int, replica: int, replicas: int, dtype: torch.dtype) -> torch.Tensor:
    """A replica's rows (dimension `dim`, `outer` times all of them) in their places among zeros."""
    x = x.to(dtype).unflatten(dim, (outer, -1))
    size, after = x.shape[dim + 1], [0, 0] * (x.dim() - 2 - dim)
    return torch.nn.functional.pad(x, (*after, replica * size, (replicas - 1 - replica) * size)).flatten(dim, dim + 1)


def share(x: torch.Tensor, *, replicas: int, dtype: torch.dtype) -> torch.Tensor:
    """What a replica adds: all of a sum, or its part of a mean over `replicas` equal ones."""
    return x.to(dtype, copy=True) if replicas == 1 else x.to(dtype) / replicas


def back(x: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {PLACE: place, SHARE: share, BACK: back}


def calls_of(graph: ForwardGraph) -> list[Call]:
    """The calls of a graph that has its own at the whole batch; none where replicas share nothing."""
    return shared_calls(graph.nodes, graph.whole, graph.inputs, graph.whole_inputs, graph.outputs[0]) if graph.whole else []


def of_whole_batch(graph: ForwardGraph) -> frozenset[str]:
    """The captured calls whose results are of the whole batch."""
    return frozenset(c.name for c in calls_of(graph) if c.role in ("whole", "back"))


def expand_batch(graph: ForwardGraph, replica: int, replicas: int) -> ForwardGraph:
    """`graph` as a replica runs it, as `plan.whole_batch.with_shared_batch` does with an `OpGraph`."""
    if not graph.whole:
        return graph
    own, whole = graph.by_name, {n.name: n for n in graph.whole}
    known: dict[str, TensorInfo] = {f"input:{i}": x for i, x in enumerate(graph.inputs)}
    types: dict[str, str] = {}
    nodes: list[ForwardNode] = []
    for c in calls_of(graph):
        if c.role in ("own", "whole"):
            n = (own if c.role == "own" else whole)[c.of]
            made = msgspec.structs.replace(n, name=c.name, args=renamed(n.args, c.names), kwargs=renamed(n.kwargs, c.names))
        else:
            made = _moved(c, known[c.of], types, replica, replicas)
        if made.outputs and made.outputs[0] is not None:
            known[c.name] = made.outputs[0]
        nodes.append(made)
    return msgspec.structs.replace(graph, nodes=tuple(nodes), whole=(), whole_inputs=())


def _moved(c: Call, value: TensorInfo, types: dict[str, str], replica: int, replicas: int) -> ForwardNode:
    if c.role == "back":
        return ForwardNode(c.name, BACK, [{"value": c.of}], {"dtype": {"dtype": types[c.of]}}, (TensorInfo(value.shape, types[c.of]),))
    types[c.name], dtype = value.dtype, wide_type(value.dtype)
    how: Mapping[str, Any] = {"dtype": {"dtype": dtype}}
    if c.role == "share":
        return ForwardNode(c.name, SHARE, [{"value": c.of}], {**how, "replicas": replicas if c.mean else 1}, (TensorInfo(value.shape, dtype),))
    shape = tuple(d * replicas if i == c.dim else d for i, d in enumerate(value.shape))
    how = {**how, "dim": c.dim, "outer": c.outer, "replica": replica, "replicas": replicas}
    return ForwardNode(c.name, PLACE, [{"value": c.of}], dict(how), (TensorInfo(shape, dtype),))
