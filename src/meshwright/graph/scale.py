"""A captured graph at another batch size, without capturing again.

Capture is done at two batch sizes. Where the two graphs have the same calls, every integer in them (dimensions, storage sizes, flops,
bytes, constants of views) is an affine function of the batch, and two points give it exactly. Numbers that do not depend on the
inputs (parameters, their gradients) have slope 0. What is not affine is refused: a value with two dimensions that depend on the batch (rows compared
with rows), a size whose change is not a whole number per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ..errors import Unsupported, UsageError
from .graph import GraphValue, OpGraph, Scaling

__all__ = ["at_batch", "scaling_between"]


def scaling_between(graph: OpGraph, other: OpGraph) -> Scaling | str:
    """The scaling of `graph` learned from a capture of the same model at another batch size, or the reason why there is none."""
    rows = other.batch_size - graph.batch_size
    if rows == 0:
        return "both captures have the same batch size"
    for a, b in zip(_values(graph), _values(other), strict=False):
        if len(a.shape) == len(b.shape) and sum(x != y for x, y in zip(a.shape, b.shape, strict=True)) > 1:
            return f"a value of shape {list(a.shape)} at batch {graph.batch_size} has {list(b.shape)} at {other.batch_size}: not affine in the batch"
    mine, others = list(_leaves(_document(graph))), list(_leaves(_document(other)))
    if len(mine) != len(others):
        return f"the calls differ between batch {graph.batch_size} and {other.batch_size}"
    index, slope, position = [], [], 0
    for a, b in zip(mine, others, strict=True):
        if type(a) is not type(b) or (a != b and type(a) is not int):
            return f"batch {graph.batch_size} and {other.batch_size} differ in {a!r} and {b!r}"
        if type(a) is not int:
            continue
        if a != b:
            per_row, rest = divmod(b - a, rows)
            if rest:
                return f"a size is {a} at batch {graph.batch_size} and {b} at {other.batch_size}: not affine in the batch"
            index.append(position)
            slope.append(per_row)
        position += 1
    return Scaling(integers=position, index=tuple(index), slope=tuple(slope))


def at_batch(graph: OpGraph, batch_size: int) -> OpGraph:
    """`graph` as a capture at `batch_size` would be.

    Exact if the module makes the same calls at both sizes and its sizes are affine in the batch. Raises UsageError for a batch below
    one, Unsupported if the graph carries no scaling or would get negative sizes.
    """
    if batch_size < 1:
        raise UsageError(f"batch size must be >= 1, got {batch_size}", where=graph.model)
    if batch_size == graph.batch_size:
        return graph
    hint = f"capture it at that size: meshwright train capture --model {graph.model} --batch {batch_size}"
    if graph.scaling is None:
        raise Unsupported(f"the graph was captured at batch {graph.batch_size} only", where=graph.model, hint=hint)
    document = _document(graph)
    slopes = dict(zip(graph.scaling.index, graph.scaling.slope, strict=True))
    found = sum(1 for leaf in _leaves(document) if type(leaf) is int)
    if found != graph.scaling.integers:
        message = f"the scaling is for {graph.scaling.integers} integers, the graph has {found}: it was changed"
        raise Unsupported(message, where=graph.model, hint=hint)
    rows = batch_size - graph.batch_size
    counter = [0]

    def scaled(tree: Any) -> Any:
        if type(tree) is dict:
            return {key: scaled(value) for key, value in tree.items()}
        if type(tree) is list:
            return [scaled(value) for value in tree]
        if type(tree) is not int:
            return tree
        position = counter[0]
        counter[0] += 1
        slope = slopes.get(position)
        if slope is None:
            return tree
        if tree >= 0 and tree + slope * rows < 0:
            raise Unsupported(f"a size would be {tree + slope * rows} at batch {batch_size}", where=graph.model, hint=hint)
        return tree + slope * rows

    result = msgspec.convert(scaled(document), OpGraph)
    return msgspec.structs.replace(result, scaling=graph.scaling, notes=graph.notes)


def _values(graph: OpGraph) -> Iterator[GraphValue]:
    for n in graph.nodes:
        yield from n.outputs
    for j in graph.joint:
        yield from j.outputs


def _document(graph: OpGraph) -> Any:
    # Notes are text about one capture and may differ; tuples become lists, so that both forms traverse alike.
    return msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(graph, scaling=None, notes=()), order="deterministic"))


def _leaves(tree: Any) -> Iterator[Any]:
    if type(tree) is dict:
        for value in tree.values():
            yield from _leaves(value)
    elif type(tree) in (list, tuple):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree
