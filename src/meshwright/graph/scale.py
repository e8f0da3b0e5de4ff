"""A captured graph at another batch size, without capturing again.

Capture is done at two batch sizes. Where the two graphs have the same calls, every integer in them (dimensions, storage sizes, flops,
bytes, constants of views) is an affine function of the batch, and two points give it exactly. Numbers that do not depend on the
inputs (parameters, their gradients) have slope 0. Where rows are compared with rows, a value has two dimensions that depend on the batch: its bytes
and flops are quadratic, and a third capture gives them. Refused are values with more such dimensions, and sizes whose change is no whole number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from ..errors import Unsupported, UsageError
from .graph import GraphValue, OpGraph, Scaling

__all__ = ["NOT_SCALED", "at_batch", "first_other_call", "rows_compared", "scaling_between"]

NOT_SCALED = "cannot be scaled to other batch sizes: "  # begins a note of a captured graph


def rows_compared(graph: OpGraph, other: OpGraph, limit: int = 1) -> str:
    """A value with more than `limit` dimensions that depend on the batch; "" where there is none."""
    for a, b in zip(_values(graph), _values(other), strict=False):
        if len(a.shape) == len(b.shape) and sum(x != y for x, y in zip(a.shape, b.shape, strict=True)) > limit:
            return f"a value of shape {list(a.shape)} at batch {graph.batch_size} has {list(b.shape)} at {other.batch_size}: not affine in the batch"
    return ""


def first_other_call(graph: OpGraph, other: OpGraph) -> tuple[str, str]:
    """(operator, module) of the first call that one makes more often than the other."""
    counts = [Counter((n.target, n.module) for n in g.nodes) for g in (graph, other)]
    return next(((n.target, n.module) for n in graph.nodes if counts[0][n.target, n.module] != counts[1][n.target, n.module]), ("", ""))


def scaling_between(graph: OpGraph, other: OpGraph, third: OpGraph | None = None) -> Scaling | str:
    """The scaling of `graph` learned from a capture of the same model at another batch size, or the reason why there is none. `third`: at one more,
    for sizes that are quadratic in the batch."""
    rows = other.batch_size - graph.batch_size
    more = third.batch_size - graph.batch_size if third is not None else 2 * rows
    if not rows or not more or rows == more:
        return "captures have the same batch size"
    if why := rows_compared(graph, other, 1 if third is None else 2):
        return why
    trees = [list(_leaves(_document(g))) for g in (graph, other, *(() if third is None else (third,)))]
    if len({*map(len, trees)}) > 1:
        name, module = first_other_call(graph, other)
        said = f": {name} in module {module!r}" if name else ""
        return f"the calls differ between batch {graph.batch_size} and {other.batch_size}{said}"
    index, slope, square, position = [], [], [], 0
    for a, b, *c in zip(*trees, strict=True):
        if any(type(a) is not type(x) or (a != x and type(a) is not int) for x in (b, *c)):
            return f"batch {graph.batch_size} and {other.batch_size} differ in {a!r} and {b!r}"
        if type(a) is not int:
            continue
        if a != b or any(a != x for x in c):
            # c - a = slope * more + curve * more^2 and b - a = slope * rows + curve * rows^2
            curve, odd = divmod((c[0] - a) * rows - (b - a) * more, rows * more * (more - rows)) if c else (0, 0)
            per_row, rest = divmod(b - a - curve * rows * rows, rows)
            if rest or odd:
                return f"a size is {a} at batch {graph.batch_size} and {b} at {other.batch_size}: not affine in the batch"
            index.append(position)
            slope.append(per_row)
            square.append(curve)
        position += 1
    return Scaling(integers=position, index=tuple(index), slope=tuple(slope), square=tuple(square) if any(square) else UNSET)


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
        why = next((n.removeprefix(NOT_SCALED) for n in graph.notes if n.startswith(NOT_SCALED)), "")
        if "the calls differ" in why:
            hint += "; or let forward and loss make the same calls for every batch: no Python loop over its samples"
        raise Unsupported(f"the graph was captured at batch {graph.batch_size} only{why and f': {why}'}", where=graph.model, hint=hint)
    document = _document(graph)
    square = graph.scaling.square or (0,) * len(graph.scaling.index)
    slopes = dict(zip(graph.scaling.index, zip(graph.scaling.slope, square, strict=True), strict=True))
    rows = batch_size - graph.batch_size
    found, below = 0, list[int]()

    def scaled(tree: Any) -> Any:
        nonlocal found
        kind = type(tree)
        if kind is int:
            position, found = found, found + 1
            if position not in slopes:
                return tree
            slope, curve = slopes[position]
            size = tree + slope * rows + curve * rows * rows
            if size < 0 <= tree:
                below.append(size)
            return size
        if kind is list:
            return [scaled(value) for value in tree]
        return {key: scaled(value) for key, value in tree.items()} if kind is dict else tree

    document = scaled(document)
    if found != graph.scaling.integers:
        message = f"the scaling is for {graph.scaling.integers} integers, the graph has {found}: it was changed"
        raise Unsupported(message, where=graph.model, hint=hint)
    if below:
        raise Unsupported(f"a size would be {below[0]} at batch {batch_size}", where=graph.model, hint=hint)
    result = msgspec.convert(document, OpGraph)
    return msgspec.structs.replace(result, scaling=_from(graph.scaling, rows), notes=graph.notes)


def _from(scaling: Scaling, rows: int) -> Scaling:
    """The same sizes, counted from so many rows more."""
    if not scaling.square:
        return scaling
    return msgspec.structs.replace(scaling, slope=tuple(s + 2 * q * rows for s, q in zip(scaling.slope, scaling.square, strict=True)))


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
