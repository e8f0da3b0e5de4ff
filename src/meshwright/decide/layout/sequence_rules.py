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
from .sharding import POINTWISE_BINARY, POINTWISE_UNARY, RESHAPES, Needs, Refused, Split, propagate, short_name

__all__ = ["CUTS", "VIEWS", "Along", "carried"]

Shapes = Mapping[str, tuple[int, ...]]


class Along(NamedTuple):
    """`extent`: positions of the sequence that this is a split of; values of one extent are shared out alike."""

    split: Split
    extent: int


CUTS = POINTWISE_BINARY | frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "bitwise_and", "bitwise_or", "pow", "remainder", "fmod", "addcmul", "addcdiv",
    "lerp", "atan2", "rsub",
})  # fmt: skip
_UNARY = POINTWISE_UNARY | frozenset({
    "cos", "sin", "log", "log1p", "expm1", "erf", "clamp", "clamp_min", "clamp_max", "reciprocal", "logical_not", "bitwise_not", "round", "floor",
    "ceil", "sign", "logsigmoid", "zeros_like", "ones_like", "log_sigmoid", "hardsigmoid", "selu", "celu",
})  # fmt: skip
VIEWS = RESHAPES | frozenset({"squeeze", "unsqueeze", "transpose", "permute", "t", "mT", "contiguous", "clone", "alias", "detach", "expand", "slice"})
_REDUCED = frozenset({"mean", "sum", "amax", "amin", "var", "std", "var_mean", "logsumexp", "linalg_vector_norm"})
_KEPT = frozenset({
    "transpose", "permute", "chunk", "split", "split_with_sizes", "unbind", "slice", "cat", "unsqueeze", "softmax", "_softmax", "expand", "t", "mT",
})  # fmt: skip


def carried(n: OpNode, known: Mapping[str, Along | None], shapes: Shapes) -> Along | None:
    """What the result of `n` is; None where no operand is split. Raises: Refused where positions meet, or nothing is known."""
    found = {v: a for v in n.inputs if (a := known.get(v)) is not None}
    if not found:
        return None
    extents = {a.extent for a in found.values()}
    if len(extents) > 1:
        raise Refused(f"{n.name}: sequences of {' and '.join(map(str, sorted(extents)))} positions meet")
    name, splits = short_name(n.target), {v: a.split for v, a in found.items()}
    if name == "getitem":
        return next(iter(found.values()))
    try:
        split = _split(n, name, splits, shapes)
    except Needs as need:
        raise Refused(f"{n.name}: {n.target} of {need.value}, which is whole") from None
    return Along(split, extents.pop())


def _split(n: OpNode, name: str, splits: Mapping[str, Split], shapes: Shapes) -> Split:
    first = splits.get(n.inputs[0])
    rank = len(shapes[n.inputs[0]])
    if name in CUTS or name in _UNARY:
        return _pointwise(n, splits, shapes)
    if first is None:
        raise Refused(f"{n.name}: {n.target} takes positions apart")
    if name in ("layer_norm", "rms_norm"):
        normalised = n.args[1] if len(n.args) > 1 else n.kwargs.get("normalized_shape", [])
        if first.dim >= rank - len(normalised) or len(splits) > 1:
            raise Refused(f"{n.name}: {n.target} normalises over positions")
        return first
    if name == "linear":
        if first.dim == rank - 1 or len(splits) > 1:
            raise Refused(f"{n.name}: {n.target} contracts positions")
        return first
    if name == "matmul" and len(splits) == 1 and len(shapes[n.inputs[1]]) == 2 and first.dim < rank - 1:
        return first
    if name in ("log_softmax", "_log_softmax"):
        if int(n.args[1]) % rank == first.dim:
            raise Refused(f"{n.name}: {n.target} over positions")
        return first
    if name == "select":
        dim = int(n.args[1]) % rank
        if dim == first.dim:
            raise Refused(f"{n.name}: {n.target} picks one position")
        return first.at(first.dim - (dim < first.dim))
    if name in _REDUCED:
        return _reduced(n, first, shapes)
    if name in RESHAPES or name == "squeeze":
        return _same_split(propagate(_as_reshape(n), splits, shapes), n)
    if name in _KEPT:
        return _same_split(propagate(n, splits, shapes), n)
    raise Refused(f"{n.name}: no rule for {n.target} on positions")


def _as_reshape(n: OpNode) -> OpNode:
    import msgspec

    return msgspec.structs.replace(n, target="aten.view.default")


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


def _reduced(n: OpNode, split: Split, shapes: Shapes) -> Split:
    old, new = shapes[n.inputs[0]], shapes[n.name]
    at = 2 if short_name(n.target) == "linalg_vector_norm" else 1
    over = n.args[at] if len(n.args) > at else n.kwargs.get("dim")
    dims = {int(d) % len(old) for d in (over if isinstance(over, list) else [over])} if over is not None else set()
    if not dims or split.dim in dims:
        raise Refused(f"{n.name}: {n.target} over positions")
    return split if len(new) == len(old) else split.at(split.dim - sum(d < split.dim for d in dims))
