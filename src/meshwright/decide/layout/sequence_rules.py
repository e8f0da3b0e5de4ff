"""How positions of the sequence travel through the operators between tensor-parallel regions.

A value is whole, or `Along(split, extent)`: its dimension `split.dim` holds positions of a sequence of `extent` positions, in `split.blocks` equal
blocks (a batch of sequences in one dimension is a block per sample). An operator keeps them apart if position i of its result depends on
position i of its operands alone; every other operator is refused here, and its operands are gathered.
Operands that are whole where others are split (a table of positions, a mask) are cut to a rank's part by pointwise operators.

Left out on purpose: operators that a rank could run on its positions with messages of their own (softmax or a scan over the sequence).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...graph.graph import OpNode
from .sharding import POINTWISE, POINTWISE_UNARY, REDUCTIONS, RESHAPES, propagate, short_name
from .split import Needs, Refused, Split

__all__ = ["VIEWS", "Along", "carried"]

Shapes = Mapping[str, tuple[int, ...]]


class Along(NamedTuple):
    """`extent`: positions of the sequence that this is a split of; values of one extent are shared out alike."""

    split: Split
    extent: int


VIEWS = RESHAPES | frozenset({"unsqueeze", "transpose", "permute", "t", "mT", "contiguous", "clone", "alias", "detach", "expand", "slice"})
_KEPT = REDUCTIONS | frozenset({
    "transpose", "permute", "chunk", "split", "split_with_sizes", "unbind", "slice", "select", "cat", "stack", "unsqueeze", "softmax", "_softmax",
    "log_softmax", "expand", "t", "mT", "layer_norm", "rms_norm",
})  # fmt: skip


def carried(n: OpNode, known: Mapping[str, Along | None], shapes: Shapes) -> Along | None:
    """What the result of `n` is; None where no operand that it is made of is split. Raises: Refused where positions meet, or nothing is known."""
    found = {v: a for v in n.inputs if (a := known.get(v)) is not None}
    if not found:
        return None
    extents = {a.extent for a in found.values()}
    if len(extents) > 1:
        raise Refused(f"{n.name}: sequences of {' and '.join(map(str, sorted(extents)))} positions meet")
    name, splits = short_name(n.target), {v: a.split for v, a in found.items()}
    if name == "getitem":
        return next(iter(found.values()))
    if name in POINTWISE_UNARY and n.inputs[0] not in found:
        return None  # `type_as` and `to` take the type of another operand, not its positions
    try:
        split = _split(n, name, splits, shapes)
    except Needs as need:
        raise Refused(f"{n.name}: {n.target} of {need.value}, which is whole") from None
    return Along(split, extents.pop())


def _split(n: OpNode, name: str, splits: Mapping[str, Split], shapes: Shapes) -> Split:
    if name in POINTWISE or name in POINTWISE_UNARY:
        return _pointwise(n, splits, shapes)
    x = n.inputs[1 if name == "addmm" and len(n.inputs) == 3 else 0]
    first = splits.get(x)
    if first is None:
        raise Refused(f"{n.name}: {n.target} takes positions apart")
    weighted = name == "linear" or (name in ("addmm", "mm", "matmul") and len(splits) == 1 and len(shapes[n.inputs[-1]]) == 2)
    if weighted:
        if first.dim == len(shapes[x]) - 1 or len(splits) > 1:
            raise Refused(f"{n.name}: {n.target} contracts positions")
        return first
    if name in RESHAPES or name in _KEPT:
        return _same_split(propagate(n, splits, shapes), n)
    raise Refused(f"{n.name}: no rule for {n.target} on positions")


def _same_split(found: object, n: OpNode) -> Split:
    if not isinstance(found, Split):
        raise Refused(f"{n.name}: {n.target} divides the positions")
    return found


def _pointwise(n: OpNode, splits: Mapping[str, Split], shapes: Shapes) -> Split:
    out = shapes[n.name]
    moved = {s.at(s.dim + len(out) - len(shapes[v])) for v, s in splits.items()}
    if len(moved) != 1:
        raise Refused(f"{n.name}: operands are split along different dimensions")
    (split,) = moved
    if any(shapes[v][s.dim] != out[split.dim] for v, s in splits.items()):
        raise Refused(f"{n.name}: {n.target} repeats positions")
    return split
