"""How a split dimension travels through each kind of operator: `OPERATORS` by short name, and pointwise operators and reshapes, which are many.

See `sharding` for what a rule answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ...graph.graph import OpNode
from .split import Grouped, Needs, Pieces, Refused, Split, reshape_split

__all__ = ["OPERATORS", "REDUCTIONS", "Result", "Shapes", "Splits", "broadcast", "reshape", "short_name"]

Shapes = Mapping[str, tuple[int, ...]]
Splits = Mapping[str, "Split | Pieces | None"]
Result = Split | Pieces | None
Rule = Callable[[OpNode, Splits, Shapes], Result]

REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "var", "std", "var_mean", "logsumexp", "linalg_vector_norm"})


def short_name(target: str) -> str:
    """`aten.linear.default` -> `linear`; `operator.getitem` -> `getitem`."""
    parts = target.split(".")
    if parts[0] in ("aten", "meshwright") and len(parts) > 1:
        return parts[1].rstrip("_")
    return parts[-1].rstrip("_")


def _one(node: OpNode, splits: Splits) -> tuple[str, Split]:
    for value in node.inputs:
        found = splits.get(value)
        if isinstance(found, Split):
            return value, found
    raise Refused(node.name)


def _dim(value: Any, rank: int) -> int:
    return value % rank if isinstance(value, int) else 0


def _arg(node: OpNode, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def broadcast(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
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
        require_split(node, value, split, splits, shapes, len(out))
    return split


def require_split(node: OpNode, value: str, split: Split, splits: Splits, shapes: Shapes, rank: int) -> None:
    """Raises Needs unless `value`, aligned at the last of `rank` dimensions, is split, or the same for every part of the split dimension."""
    at = split.dim - (rank - len(shapes[value]))
    if splits.get(value) is None and at >= 0 and shapes[value][at] != 1:
        if split.repeated:
            raise Refused(f"{node.name}: only a reshape may follow the repetition of key-value heads")
        raise Needs(value, split.at(at))


def reshape(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
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
    """Values one after another along a dimension, or (`slice_scatter`) one in a range of another."""
    return _alike(node, splits, _dim(_arg(node, 2 if short_name(node.target) == "slice_scatter" else 1, "dim", 0), len(shapes[node.name])))


def _without_dim(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """One entry of a dimension, or every entry as a result of its own: the dimension is gone."""
    value, split = _one(node, splits)
    dim = _dim(_arg(node, 1, "dim", 0), len(shapes[value]))
    if dim == split.dim:
        raise Refused(f"{node.name}: takes the split dimension apart")
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
    grouped = bool(node.kwargs.get("enable_gqa")) and shapes[k][split.dim] != shapes[q][split.dim]
    for value in (q, k, v):
        if splits.get(value) is None:
            raise Needs(value, Split(split.dim, 1, shapes[k][split.dim] if grouped and value != q else 0))
    for value in (k, v) if grouped else ():
        found = splits[value]
        if isinstance(found, Split) and found.dim == split.dim and not found.groups:
            raise Grouped(value, shapes[value][split.dim], Split(split.dim))
    wanted = {q: Split(split.dim), k: Split(split.dim, 1, shapes[k][split.dim] if grouped else 0)}
    if splits[q] != wanted[q] or splits[k] != wanted[k] or splits[v] != wanted[k]:
        raise Refused(f"{node.name}: q, k and v are split differently")
    for mask in node.inputs[3:]:
        require_split(node, mask, wanted[q], splits, shapes, len(shapes[q]))
        if (found := splits.get(mask)) is not None and found != wanted[q].at(split.dim - (len(shapes[q]) - len(shapes[mask]))):
            raise Refused(f"{node.name}: the mask is split differently")
    return wanted[q]


def _joined(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """Key and value as one block: split by heads, both alike."""
    return _alike(node, splits, len(shapes[node.name]) - 1)


def _round(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """A round of ring attention over heads; what it hands on is split as the queries are."""
    q, kv, *before = node.inputs
    heads, groups = shapes[q][1], shapes[kv][1]
    if len(before) > 1 or (before and shapes[before[0]][1] != heads):
        raise Refused(f"{node.name}: a mask beside positions that ranks divide")
    for value in (q, kv):
        if splits.get(value) is None:
            raise Needs(value, Split(1, 1, groups if value == kv and groups != heads else 0))
    found = splits[kv]
    if splits[q] != Split(1) or any(splits.get(v) != Split(1) for v in before):
        raise Refused(f"{node.name}: queries are not split by heads")
    if groups != heads and isinstance(found, Split) and found.dim == 1 and not found.groups:
        raise Grouped(kv, groups, Split(1))
    if found != Split(1, 1, groups if groups != heads else 0):
        raise Refused(f"{node.name}: queries and key-value heads are split differently")
    return Split(1)


def _same(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    return _not_repeated(node, _one(node, splits)[1])


def _matmul(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    a, b = node.inputs[:2]
    rank = len(shapes[node.name])
    for value, other in ((a, b), (b, a)):
        found = splits.get(value)
        if not isinstance(found, Split):
            continue
        split = found.at(found.dim + rank - len(shapes[value]))
        if split.repeated or split.dim >= rank - 2 or min(len(shapes[a]), len(shapes[b])) < 2:
            break
        require_split(node, other, split, splits, shapes, rank)
        beside = splits.get(other)
        if isinstance(beside, Split) and beside.at(beside.dim + rank - len(shapes[other])) != split:
            raise Refused(f"{node.name}: operands are split differently")
        return split
    raise Refused(f"{node.name}: a product is split over batch dimensions only")


def _added_product(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """`baddbmm`: a product of batches that is added to the first operand."""
    first, a, b = node.inputs[:3]
    if all(splits.get(v) is None for v in (a, b)):
        raise Refused(f"{node.name}: only what it adds to is split")
    product = _matmul(msgspec.structs.replace(node, inputs=(a, b)), splits, shapes)
    assert product is not None
    require_split(node, first, product, splits, shapes, len(shapes[node.name]))
    beside = splits.get(first)
    if isinstance(beside, Split) and beside.at(beside.dim + len(shapes[node.name]) - len(shapes[first])) != product:
        raise Refused(f"{node.name}: operands are split differently")
    return product


def _einsum(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """Split along one letter that the result keeps: every operand that has it is split along it."""
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    terms, _, result = equation.partition("->")
    letters = terms.split(",")
    names = [str(x["value"]) for x in operands]
    if not result or "." in equation or len(letters) != len(names) or any(len(set(t)) < len(t) for t in letters):
        raise Refused(f"{node.name}: an einsum is split where its equation names every dimension once, and its result")
    found = {(t[s.dim], s.at(0)) for t, v in zip(letters, names, strict=True) if isinstance(s := splits.get(v), Split)}
    if len(found) != 1:
        raise Refused(f"{node.name}: operands are split differently")
    ((letter, split),) = found
    if letter not in result or split.repeated:
        raise Refused(f"{node.name}: it sums over the split dimension")
    for term, value in zip(letters, names, strict=True):
        if letter in term and splits.get(value) is None:
            raise Needs(value, split.at(term.index(letter)))
        if letter not in term and splits.get(value) is not None:
            raise Refused(f"{node.name}: operands are split differently")
    return split.at(result.index(letter))


def _reduction(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    value, split = _one(node, splits)
    old, new = shapes[value], shapes[node.name]
    over = _arg(node, 2 if short_name(node.target) == "linalg_vector_norm" else 1, "dim")
    dims = {int(d) % len(old) for d in (over if isinstance(over, list) else [over])} if over is not None else set()
    if not dims or split.dim in dims or split.repeated:
        raise Refused(f"{node.name}: {node.target} over the split dimension")
    return split if len(new) == len(old) else split.at(split.dim - sum(d < split.dim for d in dims))


def _extreme(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """Largest or smallest along one dimension, with its place, or of two values."""
    return broadcast(node, splits, shapes) if len(node.inputs) > 1 else _reduction(node, splits, shapes)


def _new(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """A new value, alike everywhere or yet to be written, as long as the operand along the split dimension."""
    value, split = _one(node, splits)
    old, new = shapes[value], shapes[node.name]
    if len(old) != len(new) or old[split.dim] != new[split.dim]:
        raise Refused(f"{node.name}: another size along the split dimension")
    return _not_repeated(node, split)


def _normalise(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """Of the last dimensions, of which the split one is none; weight and bias are the same for every part."""
    value, split = _one(node, splits)
    if value != node.inputs[0] or split.repeated or split.dim >= len(shapes[value]) - len(_arg(node, 1, "normalized_shape", [])):
        raise Refused(f"{node.name}: {node.target} normalises over the split dimension")
    return split


def _stack(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    split = _alike(node, splits, -1)
    dim = _dim(_arg(node, 1, "dim", 0), len(shapes[node.name]))
    return split.at(split.dim + (dim <= split.dim))


def _alike(node: OpNode, splits: Splits, joined: int) -> Split:
    """The common split of values that are joined along dimension `joined`."""
    _, split = _one(node, splits)
    if split.dim == joined or any(splits.get(v) not in (None, split) for v in node.inputs):
        raise Refused(f"{node.name}: joins values along the split dimension, or values that are split differently")
    for value in node.inputs:
        if splits.get(value) is None:
            raise Needs(value, _not_repeated(node, split))
    return _not_repeated(node, split)


def _as_complex(node: OpNode, splits: Splits, shapes: Shapes) -> Split | None:
    """Pairs of numbers in the last dimension, which is not the split one, as complex numbers; or back."""
    value, split = _one(node, splits)
    if short_name(node.target) == "view_as_complex" and split.dim == len(shapes[value]) - 1:
        raise Refused(f"{node.name}: pairs the split dimension")
    return _not_repeated(node, split)


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


OPERATORS: dict[str, Rule] = {
    "transpose": _transpose, "permute": _permute, "chunk": _pieces, "split": _pieces, "split_with_sizes": _pieces, "unbind": _without_dim,
    "slice": _slice, "select": _without_dim, "cat": _cat, "stack": _stack, "repeat_interleave": _repeat_interleave, "unsqueeze": _unsqueeze,
    "scaled_dot_product_attention": _attention, "matmul": _matmul, "bmm": _matmul, "baddbmm": _added_product,
    "einsum": _einsum, "softmax": _softmax, "_softmax": _softmax,
    "log_softmax": _softmax, "expand": _expand, "t": _swap_last, "mT": _swap_last, "layer_norm": _normalise, "rms_norm": _normalise,
    "context_join": _joined, "context_shift": _same, "ring_block": _round, "ring_end": _round,
    "view_as_complex": _as_complex, "view_as_real": _as_complex, **dict.fromkeys(REDUCTIONS, _reduction),
    "max": _extreme, "min": _extreme, "slice_scatter": _cat, **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _new),
}  # fmt: skip
