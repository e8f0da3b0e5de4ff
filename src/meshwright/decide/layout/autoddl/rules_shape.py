"""Rules of the operators that move dimensions: views, transposes, splits, concatenations."""

from __future__ import annotations

from math import gcd, prod

from .rules import Call, Shape, Signature, Spec, dims_without, letters

__all__ = ["MAX_BLOCKS", "SHAPE", "dimension_groups"]

MAX_BLOCKS = 16  # blocks of a dimension that are followed through views


def _one(result: str, operand: str, **more: object) -> Spec:
    return Spec(operands=(operand,), result=result, linear=(frozenset({0}),), **more)  # type: ignore[arg-type]


def same(call: Call) -> Spec:
    """Copies, aliases, casts between floating types, single results of calls with several."""
    names = letters(call.rank)
    return _one(names, names)


def dimension_groups(a: Shape, b: Shape) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of consecutive dimensions of `a` and `b` with equal products, dimensions of size 1 left out."""
    left = [i for i, n in enumerate(a) if n != 1]
    right = [i for i, n in enumerate(b) if n != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left and right:
        mine, other = [left.pop(0)], [right.pop(0)]
        while (have := prod(a[i] for i in mine)) != (want := prod(b[i] for i in other)):
            if have < want and left:
                mine.append(left.pop(0))
            elif right:
                other.append(right.pop(0))
            else:
                return groups
        groups.append((mine, other))
    return groups


def view(call: Call) -> Spec | None:
    """Reshapes: the outermost dimension of a group that is merged or divided keeps a split; inner ones become splits in blocks."""
    a, b = call.shapes[0], call.outputs[0]
    if 0 in a or 0 in b:
        return None
    operand, result = ["."] * len(a), ["."] * len(b)
    even: dict[str, int] = {}
    extra: list[Signature] = []
    for mine, other in dimension_groups(a, b):
        letter = chr(ord("a") + mine[0])
        operand[mine[0]], result[other[0]] = letter, letter
        if len(mine) > 1 or len(other) > 1:
            even[letter] = gcd(a[mine[0]], b[other[0]])
        if len(mine) == 1:
            extra += [_inner(f"S{mine[0]}/{n}", f"S{other[i]}", b[other[i]]) for i, n in _inner_blocks(b, other)]
        elif len(other) == 1:
            extra += [_inner(f"S{mine[i]}", f"S{other[0]}/{n}", a[mine[i]]) for i, n in _inner_blocks(a, mine)]
    return _one("".join(result), "".join(operand), even=even, extra=tuple(extra))


def _inner_blocks(shape: Shape, dims: list[int]) -> list[tuple[int, int]]:
    """(index into dims, blocks before it) of the dimensions after the first."""
    found = [(i, prod(shape[d] for d in dims[:i])) for i in range(1, len(dims))]
    return [(i, n) for i, n in found if n <= MAX_BLOCKS]


def _inner(source: str, target: str, size: int) -> Signature:
    return Signature(f"split {target}", (source,), target, True, (), f"{source}>{target}", size)


def permute(call: Call) -> Spec:
    count = len(call.shapes[0])
    order = [int(d) % count for d in call.argument(1, "dims", [])]
    names = letters(count)
    return _one("".join(names[d] for d in order), names)


def transpose(call: Call) -> Spec:
    count = len(call.shapes[0])
    names = list(letters(count))
    if count > 1:
        i, j = (0, 1) if call.node.target.startswith("aten.t.") else (int(call.argument(1, "dim0")), int(call.argument(2, "dim1")))
        names[i], names[j] = names[j], names[i]
    return _one("".join(names), letters(count))


def expand(call: Call) -> Spec:
    a, b = call.shapes[0], call.outputs[0]
    names, offset = letters(len(b)), len(b) - len(a)
    operand = "".join(names[offset + i] if n == b[offset + i] else "." for i, n in enumerate(a))
    result = "".join(c if c in operand else "." for c in names)
    return _one(result, operand)


def squeeze(call: Call) -> Spec:
    """squeeze and unsqueeze: dimensions of size 1 come or go."""
    a, b = call.shapes[0], call.outputs[0]
    operand, result = ["."] * len(a), ["."] * len(b)
    for k, (i, j) in enumerate(zip([i for i, n in enumerate(a) if n != 1], [j for j, n in enumerate(b) if n != 1], strict=True)):
        operand[i] = result[j] = chr(ord("a") + k)
    return _one("".join(result), "".join(operand))


def select(call: Call) -> Spec:
    dim = int(call.argument(1, "dim", 0)) % len(call.shapes[0])
    operand = dims_without(len(call.shapes[0]), [dim])
    return _one(operand[:dim] + operand[dim + 1 :], operand)


def narrowed(call: Call) -> Spec:
    """slice, narrow: the dimension that is cut stays whole, unless nothing is cut off."""
    dim = int(call.argument(1, "dim", 0)) % len(call.shapes[0])
    whole = call.shapes[0] == call.outputs[0] and "slice" in call.node.target
    word = dims_without(len(call.shapes[0]), [] if whole else [dim])
    return _one(word, word)


def pieces(call: Call) -> Spec:
    """split, chunk: equal pieces are blocks of the dimension."""
    shape = call.shapes[0]
    dim = int(call.argument(2, "dim", 0)) % len(shape)
    word = dims_without(len(shape), [dim])
    count = len(call.outputs)
    extra: tuple[Signature, ...] = ()
    if len({o[dim] for o in call.outputs}) == 1 and 1 < count <= MAX_BLOCKS:
        extra = (_inner(f"S{dim}/{count}", f"S{dim}", call.outputs[0][dim]),)
    return _one(word, word, extra=extra)


def unbind(call: Call) -> Spec:
    dim = int(call.argument(1, "dim", 0)) % len(call.shapes[0])
    operand = dims_without(len(call.shapes[0]), [dim])
    return _one(operand[:dim] + operand[dim + 1 :], operand)


def cat(call: Call) -> Spec | None:
    if any(len(s) != call.rank for s in call.shapes):
        return None
    dim = int(call.argument(1, "dim", 0)) % call.rank
    word = dims_without(call.rank, [dim])
    count = len(call.shapes)
    extra: tuple[Signature, ...] = ()
    if len({s[dim] for s in call.shapes}) == 1 and 1 < count <= MAX_BLOCKS:
        joined = _inner(f"S{dim}", f"S{dim}/{count}", call.shapes[0][dim])
        extra = (Signature(joined.name, (f"S{dim}",) * count, joined.output, True, (), joined.letter, joined.even),)
    return Spec(operands=(word,) * count, result=word, linear=(frozenset(range(count)),), extra=extra)


def stack(call: Call) -> Spec:
    dim = int(call.argument(1, "dim", 0)) % call.rank
    word = dims_without(call.rank, [dim])
    operand = word[:dim] + word[dim + 1 :]
    count = len(call.shapes)
    return Spec(operands=(operand,) * count, result=word, linear=(frozenset(range(count)),))


def flip(call: Call) -> Spec:
    """flip, roll, cumulative sums: along whole dimensions."""
    dims = call.argument(2 if "roll" in call.node.target else 1, "dims", call.node.kwargs.get("dim", []))
    word = dims_without(call.rank, [int(d) for d in (dims if isinstance(dims, list) else [dims])] or range(call.rank))
    return _one(word, word)


SHAPE = {
    **dict.fromkeys(("clone", "contiguous", "alias", "detach", "getitem", "to", "_to_copy", "lift_fresh_copy"), same),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "_unsafe_view"), view),
    **dict.fromkeys(("transpose", "t", "swapaxes"), transpose), "permute": permute, "expand": expand,
    **dict.fromkeys(("squeeze", "unsqueeze", "squeeze_", "unsqueeze_"), squeeze), "select": select,
    **dict.fromkeys(("slice", "narrow"), narrowed), **dict.fromkeys(("split", "chunk", "split_with_sizes"), pieces),
    "unbind": unbind, "cat": cat, "concat": cat, "stack": stack, "flip": flip, "roll": flip, "cumsum": flip,
}  # fmt: skip
