"""How a split dimension travels through the operators of a forward graph.

A value is either whole on every tensor-parallel rank (`None`) or `Split(dim, blocks)`: its dimension `dim` consists of `blocks`
equal blocks, each cut over the ranks in the region's shares (packed q, k, v is one dimension of 3 blocks; a fused gate-and-up projection
of 2), or of the unequal blocks of `mixed` (packed q, k, v of grouped-query attention). A block of `groups` key-value heads is cut between
heads only: each rank holds those that its query heads use.
`propagate` gives an operator's result from its operands, `Refused` if the operator cannot run on shards without communication, `Needs` if
it could, were another operand split as well, and `Grouped` if it could, were an operand split by key-value heads.

Left out on purpose: operators that would need communication inside (softmax over the split dimension, normalisation over it);
they end the search, they are never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...graph.graph import OpNode

__all__ = ["Grouped", "Needs", "Pieces", "Refused", "Split", "propagate", "short_name"]


class Split(NamedTuple):
    """`repeated`: the dimension behind holds the copies of each group that its query heads read; it is as long as they are many."""

    dim: int
    blocks: int = 1
    groups: int = 0
    mixed: tuple[tuple[int, int], ...] = ()
    repeated: bool = False

    def at(self, dim: int) -> Split:
        return self._replace(dim=dim)


class Pieces(list["Split"]):
    """What the results of an operator with several results are, where they differ."""


class Refused(Exception):
    """The operator cannot run on shards."""


class Needs(Exception):
    """The operator could run on shards if `value` were split too."""

    def __init__(self, value: str) -> None:
        super().__init__(value)
        self.value = value


class Grouped(Exception):
    """The operator could run on shards if `value` were split by its `groups` key-value heads instead of by its elements.

    `otherwise`: the result where the ranks' shares divide the key-value heads anyway.
    """

    def __init__(self, value: str, groups: int, otherwise: Split | None = None) -> None:
        super().__init__(value)
        self.value, self.groups, self.otherwise = value, groups, otherwise


Shapes = Mapping[str, tuple[int, ...]]
Splits = Mapping[str, "Split | Pieces | None"]
Result = Split | Pieces | None
Rule = Callable[[OpNode, Splits, Shapes], Result]

POINTWISE_UNARY = frozenset({
    "gelu", "relu", "silu", "tanh", "sigmoid", "neg", "exp", "sqrt", "rsqrt", "pow", "dropout", "native_dropout",
    "contiguous", "clone", "to",
    "_to_copy", "type_as",
    "float", "double", "half", "bfloat16", "alias", "detach", "hardtanh", "leaky_relu", "elu", "softplus", "square", "abs", "relu6", "hardswish",
    "mish",
})  # fmt: skip
POINTWISE_BINARY = frozenset({"add", "sub", "mul", "div", "maximum", "minimum", "where", "masked_fill"})
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})


def short_name(target: str) -> str:
    """`aten.linear.default` -> `linear`; `operator.getitem` -> `getitem`."""
    parts = target.split(".")
    if parts[0] == "aten" and len(parts) > 1:
        return parts[1].rstrip("_")
    return parts[-1].rstrip("_")


def propagate(node: OpNode, splits: Splits, shapes: Shapes) -> Result:
    """The split of `node`'s result. `splits` has every operand, `shapes` every operand and the node itself (first output)."""
    if all(splits.get(v) is None for v in node.inputs):
        return None
    name = short_name(node.target)
    if name == "_assert_tensor_metadata":
        return None
    if name == "getitem":
        return _picked(node, splits)
    if any(isinstance(splits.get(v), Pieces) for v in node.inputs):
        raise Refused(f"{node.name}: takes several results at once")
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
        if isinstance(found, Split):
            return value, found
    raise Refused(node.name)


def _picked(node: OpNode, splits: Splits) -> Split | None:
    found = splits.get(node.inputs[0])
    return found[int(node.args[1])] if isinstance(found, Pieces) else found


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
        if isinstance(split, Split):
            found.add(split.at(split.dim + len(out) - len(shapes[value])))
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
    old, new = shapes[value], shapes[node.name]
    if split.repeated:  # groups x copies become query heads
        d = split.dim
        if tuple(new) != (*old[:d], old[d] * old[d + 1], *old[d + 2 :]):
            raise Refused(f"{node.name}: a reshape tears the repeated heads apart")
        return Split(d)
    if split.mixed:
        if new[-1] != old[-1] or split.dim != len(old) - 1:
            raise Refused(f"{node.name}: a reshape tears unequal blocks apart")
        return split.at(len(new) - 1)
    found = reshape_split(old, new, Split(split.dim, split.blocks))
    if split.groups and (new[found.dim] // found.blocks) % split.groups:
        raise Refused(f"{node.name}: a reshape tears key-value heads apart")
    return found._replace(groups=split.groups)


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


def _not_repeated(node: OpNode, split: Split) -> Split:
    if split.repeated:
        raise Refused(f"{node.name}: only a reshape may follow the repetition of key-value heads")
    return split


def _transpose(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    rank = len(shapes[value])
    a, b = _dim(_arg(node, 1, "dim0"), rank), _dim(_arg(node, 2, "dim1"), rank)
    return _not_repeated(node, split).at({a: b, b: a}.get(split.dim, split.dim))


def _swap_last(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    rank = len(shapes[value])
    return _not_repeated(node, split).at({rank - 1: rank - 2, rank - 2: rank - 1}.get(split.dim, split.dim))


def _permute(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    order = [_dim(d, len(shapes[value])) for d in _arg(node, 1, "dims")]
    return _not_repeated(node, split).at(order.index(split.dim))


def _pieces(node: OpNode, splits: Splits, shapes: Shapes) -> Result:
    value, split = _one(node, splits)
    shape = shapes[value]
    dim = _dim(_arg(node, 2, "dim", 0), len(shape))
    if dim != split.dim:
        return _not_repeated(node, split)
    what = _arg(node, 1, "chunks" if short_name(node.target) == "chunk" else "split_size")
    if short_name(node.target) == "chunk":
        step = -(-shape[dim] // int(what))
        sizes = [min(step, shape[dim] - at) for at in range(0, shape[dim], step)]
    elif isinstance(what, int):
        sizes = [min(what, shape[dim] - at) for at in range(0, shape[dim], what)]
    else:
        sizes = [int(x) for x in what]
    at, found = 0, Pieces()
    for size in sizes:
        found.append(_whole_blocks(node, split, shape[dim], at, at + size))
        at += size
    return found[0] if all(x == found[0] for x in found) else found


def _whole_blocks(node: OpNode, split: Split, extent: int, low: int, high: int) -> Split:
    """The split of the range [low, high) of the split dimension, which must consist of whole blocks."""
    sizes = split.mixed or ((extent // split.blocks, split.groups),) * split.blocks
    at, kept = 0, []
    for size, groups in sizes:
        if low <= at and at + size <= high:
            kept.append((size, groups))
        elif at < high and at + size > low:
            raise Refused(f"{node.name}: [{low}:{high}] of the split dimension does not consist of whole blocks")
        at += size
    if not kept:
        raise Refused(f"{node.name}: an empty piece of the split dimension")
    if len(set(kept)) == 1:
        return Split(split.dim, len(kept), kept[0][1])
    return Split(split.dim, mixed=tuple(kept))


def _slice(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    shape = shapes[value]
    dim = _dim(_arg(node, 1, "dim", 0), len(shape))
    if dim != split.dim:
        return _not_repeated(node, split)
    low, high, step = slice(_arg(node, 2, "start"), _arg(node, 3, "end"), _arg(node, 4, "step", 1)).indices(shape[dim])
    if (low, high, step) == (0, shape[dim], 1):
        return split
    if step != 1:
        raise Refused(f"{node.name}: takes every {step}th element of the split dimension")
    return _whole_blocks(node, split, shape[dim], low, high)


def _cat(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    found = {splits.get(v) for v in node.inputs}
    (_, split) = _one(node, splits)
    if len(found) != 1 or _dim(_arg(node, 1, "dim", 0), len(shapes[node.name])) == split.dim:
        raise Refused(f"{node.name}: joins values along the split dimension, or values that are split differently")
    return _not_repeated(node, split)


def _unbind(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    dim = _dim(_arg(node, 1, "dim", 0), len(shapes[value]))
    if dim == split.dim:
        raise Refused(f"{node.name}: unbinds the split dimension")
    return _not_repeated(node, split).at(split.dim - (dim < split.dim))


def _unsqueeze(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    dim = _dim(_arg(node, 1, "dim"), len(shapes[value]) + 1)
    return _not_repeated(node, split).at(split.dim + (dim <= split.dim))


def _attention(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    q, k, v = node.inputs[:3]
    split = next(s for s in (splits.get(x) for x in (q, k, v)) if isinstance(s, Split))
    if split.blocks != 1 or split.mixed or split.repeated or split.dim >= len(shapes[q]) - 2:
        raise Refused(f"{node.name}: attention is split over heads only")
    for value in (q, k, v):
        if splits.get(value) is None:
            raise Needs(value)
    grouped = bool(node.kwargs.get("enable_gqa")) and shapes[k][split.dim] != shapes[q][split.dim]
    for value in (k, v) if grouped else ():
        found = splits[value]
        if isinstance(found, Split) and found.dim == split.dim and not found.groups:
            raise Grouped(value, shapes[value][split.dim], Split(split.dim))
    wanted = {q: Split(split.dim), k: Split(split.dim, 1, shapes[k][split.dim] if grouped else 0)}
    if splits[q] != wanted[q] or splits[k] != wanted[k] or splits[v] != wanted[k]:
        raise Refused(f"{node.name}: q, k and v are split differently")
    for mask in node.inputs[3:]:
        at = split.dim - (len(shapes[q]) - len(shapes[mask]))
        if at >= 0 and shapes[mask][at] != 1:
            raise Refused(f"{node.name}: the mask differs between heads")
    return wanted[q]


def _matmul(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    a, b = node.inputs[:2]
    split = splits.get(a) or splits.get(b)
    if not isinstance(split, Split) or split.repeated or split.dim >= len(shapes[node.name]) - 2 or len(shapes[a]) != len(shapes[b]):
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
    old, new = shapes[value], shapes[node.name]
    added = len(new) - len(old)
    behind = split.dim + 1
    if new[split.dim + added] != old[split.dim]:
        raise Refused(f"{node.name}: repeats the split dimension")
    if added == 0 and behind < len(old) and old[behind] == 1 and new[behind] > 1:
        # the key-value heads of grouped-query attention, once for each of their query heads
        if split.blocks != 1 or split.mixed or split.repeated:
            raise Refused(f"{node.name}: repeats blocks of the split dimension")
        if not split.groups:
            raise Grouped(value, old[split.dim], split)
        return split._replace(repeated=True) if split.groups == old[split.dim] else split
    return _not_repeated(node, split).at(split.dim + added)


def _repeat_interleave(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    dim = _dim(_arg(node, 2, "dim"), len(shapes[value]))
    if dim != split.dim:
        return _not_repeated(node, split)
    if split.blocks != 1 or split.mixed or split.repeated or not isinstance(_arg(node, 1, "repeats"), int):
        raise Refused(f"{node.name}: repeats blocks of the split dimension")
    if not split.groups:
        raise Grouped(value, shapes[value][dim], Split(dim))
    if split.groups != shapes[value][dim]:
        raise Refused(f"{node.name}: repeats elements of key-value heads")
    return Split(dim)


_RULES: dict[str, Rule] = {
    "transpose": _transpose, "permute": _permute, "chunk": _pieces, "split": _pieces, "split_with_sizes": _pieces, "unbind": _unbind,
    "slice": _slice, "cat": _cat, "repeat_interleave": _repeat_interleave, "unsqueeze": _unsqueeze, "scaled_dot_product_attention": _attention,
    "matmul": _matmul, "bmm": _matmul, "softmax": _softmax, "_softmax": _softmax, "expand": _expand, "t": _swap_last, "mT": _swap_last,
    "linear": _linear,
}  # fmt: skip
