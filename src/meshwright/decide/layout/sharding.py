"""How a split dimension travels through the operators of a forward graph.

A value is either whole on every tensor-parallel rank (`None`) or `Split(dim, blocks)`: its dimension `dim` consists of `blocks`
equal blocks, each cut evenly over the ranks (packed q, k, v is one dimension of 3 blocks; a fused gate-and-up projection of 2).
`propagate` gives an operator's result from its operands, `Refused` if the operator cannot run on shards without
communication, and `Needs` if it could, were another operand split as well.

Left out on purpose: operators that would need communication inside (softmax over the split dimension, normalisation over it);
they end the search, they are never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...graph import OpNode

__all__ = ["Needs", "Refused", "Split", "propagate", "short_name"]


class Split(NamedTuple):
    dim: int
    blocks: int


class Refused(Exception):
    """The operator cannot run on shards."""


class Needs(Exception):
    """The operator could run on shards if `value` were split too."""

    def __init__(self, value: str) -> None:
        super().__init__(value)
        self.value = value


Shapes = Mapping[str, tuple[int, ...]]
Splits = Mapping[str, Split | None]
Rule = Callable[[OpNode, Splits, Shapes], "Split | None"]

POINTWISE_UNARY = frozenset({
    "gelu", "relu", "silu", "tanh", "sigmoid", "neg", "exp", "sqrt", "rsqrt", "pow", "dropout", "native_dropout", "contiguous", "clone", "to",
    "_to_copy", "type_as", "alias", "detach", "hardtanh", "leaky_relu", "elu", "softplus", "square", "abs", "relu6", "hardswish", "mish",
})  # fmt: skip
POINTWISE_BINARY = frozenset({"add", "sub", "mul", "div", "maximum", "minimum", "where", "masked_fill"})
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})


def short_name(target: str) -> str:
    """`aten.linear.default` -> `linear`; `operator.getitem` -> `getitem`."""
    parts = target.split(".")
    if parts[0] == "aten" and len(parts) > 1:
        return parts[1].rstrip("_")
    return parts[-1].rstrip("_")


def propagate(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """The split of `node`'s result. `splits` has every operand, `shapes` every operand and the node itself (first output)."""
    if all(splits.get(v) is None for v in node.inputs):
        return None
    name = short_name(node.target)
    if name in POINTWISE_UNARY:
        return splits[node.inputs[0]]
    if name in POINTWISE_BINARY:
        return _binary(node, splits, shapes)
    if name in RESHAPES:
        return _reshape(node, splits, shapes)
    rule = _RULES.get(name)
    if rule is None:
        raise Refused(f"{node.name}: no rule for {node.target} on shards")
    return rule(node, splits, shapes)


def _one(node: OpNode, splits: Splits) -> tuple[str, Split]:
    for value in node.inputs:
        found = splits.get(value)
        if found is not None:
            return value, found
    raise Refused(node.name)


def _dim(value: Any, rank: int) -> int:
    return value % rank if isinstance(value, int) else 0


def _arg(node: OpNode, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _binary(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    out = shapes[node.name]
    found: set[Split] = set()
    for value in node.inputs:
        split = splits.get(value)
        if split is not None:
            found.add(Split(split.dim + len(out) - len(shapes[value]), split.blocks))
    if len(found) != 1:
        raise Refused(f"{node.name}: operands are split differently")
    (split,) = found
    for value in node.inputs:
        shape = shapes[value]
        at = split.dim - (len(out) - len(shape))
        if splits.get(value) is None and at >= 0 and shape[at] != 1:
            raise Needs(value)
    return split


def _reshape(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    return reshape_split(shapes[value], shapes[node.name], split)


def reshape_split(old: Sequence[int], new: Sequence[int], split: Split) -> Split:
    """Where the split dimension lies after a reshape from `old` to `new`; Refused if it is torn apart."""
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0, a, b = i, j, 1, 1
        while True:  # grow the smaller side until both groups hold equally many elements
            if a == b and i > i0 and j > j0:
                break
            if (a <= b and i < len(old)) or j >= len(new):
                if i >= len(old):
                    break
                a *= old[i]
                i += 1
            else:
                b *= new[j]
                j += 1
        while i < len(old) and old[i] == 1 and i not in (split.dim,):
            i += 1
        if i0 <= split.dim < i:
            group_new = list(range(j0, j))
            before = 1
            for d in range(i0, split.dim):
                before *= old[d]
            return _place(old[split.dim], before, [(d, new[d]) for d in group_new], split)
    raise Refused("the split dimension vanished")


def _place(size: int, before: int, group: list[tuple[int, int]], split: Split) -> Split:
    """`before` elements of the old group lie in front of the split dimension; find the new dimension that carries it."""
    blocks = before * split.blocks  # as seen from the front of the group, this many equal blocks are each cut
    unit = size // split.blocks
    front = 1
    for dim, extent in group:
        # this dimension starts after `front` whole blocks-worth of outer index
        if extent == 1:
            continue
        if blocks % front == 0 and extent % max(blocks // front, 1) == 0:
            own = blocks // front
            if extent > own:  # the cut falls inside this dimension
                if unit % (extent // own) and (extent // own) % unit:
                    break
                return Split(dim, own)
        front *= extent
    raise Refused("a reshape tears the split dimension apart")


def _linear(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    raise Refused("linear is handled by the region search")


def _transpose(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    rank = len(shapes[value])
    a, b = _dim(_arg(node, 1, "dim0"), rank), _dim(_arg(node, 2, "dim1"), rank)
    return Split({a: b, b: a}.get(split.dim, split.dim), split.blocks)


def _swap_last(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    rank = len(shapes[value])
    return Split({rank - 1: rank - 2, rank - 2: rank - 1}.get(split.dim, split.dim), split.blocks)


def _permute(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    order = [_dim(d, len(shapes[value])) for d in _arg(node, 1, "dims")]
    return Split(order.index(split.dim), split.blocks)


def _pieces(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    shape = shapes[value]
    dim = _dim(_arg(node, 2, "dim", 0), len(shape))
    if dim != split.dim:
        return split
    what = _arg(node, 1, "chunks" if short_name(node.target) == "chunk" else "split_size")
    if short_name(node.target) == "chunk":
        count = int(what)
    elif isinstance(what, int):
        count = -(-shape[dim] // what)
    else:
        if len(set(what)) != 1:
            raise Refused(f"{node.name}: uneven pieces of the split dimension")
        count = len(what)
    if shape[dim] % count or split.blocks % count:
        raise Refused(f"{node.name}: {count} pieces of a dimension of {split.blocks} blocks")
    return Split(split.dim, split.blocks // count)


def _unbind(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    dim = _dim(_arg(node, 1, "dim", 0), len(shapes[value]))
    if dim == split.dim:
        raise Refused(f"{node.name}: unbinds the split dimension")
    return Split(split.dim - (dim < split.dim), split.blocks)


def _unsqueeze(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    dim = _dim(_arg(node, 1, "dim"), len(shapes[value]) + 1)
    return Split(split.dim + (dim <= split.dim), split.blocks)


def _attention(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    q, k, v = node.inputs[:3]
    split = next(s for s in (splits.get(x) for x in (q, k, v)) if s is not None)
    if split.blocks != 1 or split.dim >= len(shapes[q]) - 2:
        raise Refused(f"{node.name}: attention is split over heads only")
    for value in (q, k, v):
        if splits.get(value) is None:
            raise Needs(value)
        if splits[value] != split:
            raise Refused(f"{node.name}: q, k and v are split differently")
    for mask in node.inputs[3:]:
        at = split.dim - (len(shapes[q]) - len(shapes[mask]))
        if at >= 0 and shapes[mask][at] != 1:
            raise Refused(f"{node.name}: the mask differs between heads")
    return split


def _matmul(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    a, b = node.inputs[:2]
    split = splits.get(a) or splits.get(b)
    if split is None or split.dim >= len(shapes[node.name]) - 2 or len(shapes[a]) != len(shapes[b]):
        raise Refused(f"{node.name}: a product is split over batch dimensions only")
    for value in (a, b):
        if splits.get(value) is None:
            raise Needs(value)
        if splits[value] != split:
            raise Refused(f"{node.name}: operands are split differently")
    return split


def _softmax(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    if _dim(_arg(node, 1, "dim"), len(shapes[value])) == split.dim:
        raise Refused(f"{node.name}: softmax over the split dimension")
    return split


def _expand(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    return Split(split.dim + len(shapes[node.name]) - len(shapes[value]), split.blocks)


_RULES: dict[str, Rule] = {
    "transpose": _transpose, "permute": _permute, "chunk": _pieces, "split": _pieces, "split_with_sizes": _pieces, "unbind": _unbind,
    "getitem": lambda node, splits, shapes: _one(node, splits)[1], "unsqueeze": _unsqueeze, "scaled_dot_product_attention": _attention,
    "matmul": _matmul, "bmm": _matmul, "softmax": _softmax, "_softmax": _softmax, "expand": _expand, "t": _swap_last, "mT": _swap_last,
    "linear": _linear,
}  # fmt: skip
