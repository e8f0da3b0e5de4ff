"""Which calls bring samples of a batch together, read from their operators and arguments. Names and arithmetic, without torch.

An operator that is not named here is taken for one of each sample by itself, as data parallelism takes all of them; the gate finds what is not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

__all__ = ["contracted", "linear", "mixes", "over_samples", "sums_samples"]

# Operators that look along one dimension: (position of the argument that says which, its default).
ALONG = {
    "softmax": (1, -1), "_softmax": (1, -1), "log_softmax": (1, -1), "_log_softmax": (1, -1), "cumsum": (1, -1), "cumprod": (1, -1),
    "logcumsumexp": (1, -1), "cummax": (1, -1), "cummin": (1, -1), "sort": (1, -1), "argsort": (1, -1), "topk": (2, -1), "flip": (1, -1),
    "roll": (2, None), "cat": (1, 0), "select": (1, 0), "index_select": (1, 0), "gather": (1, 0), "scatter": (1, 0), "scatter_add": (1, 0),
    "scatter_reduce": (1, 0), "index_add": (1, 0), "index_copy": (1, 0), "index_fill": (1, 0), "split": (2, 0), "split_with_sizes": (2, 0),
    "chunk": (2, 0), "unbind": (1, 0), "unfold": (1, 0), "narrow": (1, 0), "kthvalue": (2, -1), "renorm": (2, 0), "glu": (1, -1),
}  # fmt: skip
SUMS = ("sum", "mean")
LINEAR = ("add", "sub", "rsub", "neg", "clone", "alias", "to", "_to_copy", "view", "reshape", "squeeze", "contiguous", "float", "double")


def _first(n: Any, at: int = 0) -> str:
    x = n.args[at] if len(n.args) > at else None
    return str(x["value"]) if isinstance(x, dict) and isinstance(x.get("value"), str) else ""


def mixes(n: Any, name: str, dims: Mapping[str, int], shape: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a call whose result has rows of samples looks at other rows. `dims`: dimension of the samples in each of its operands that has one."""
    source = next((v for v in n.inputs if v in dims), "")
    rank, dim = len(shape.get(source, ())), dims.get(source, -1)
    if name == "slice":
        given: list[Any] = [*n.args[1:]]
        rest: list[Any] = [0, None, None, 1][len(given) :]
        along, start, end, step = given + rest
        whole = not start and (end is None or end >= shape[source][dim]) and step in (1, None)
        return bool(along % rank == dim) and not whole
    if name in ("index", "index_put", "_unsafe_index"):
        places = n.args[1] if len(n.args) > 1 else []
        return source == _first(n) and dim < len(places) and places[dim] is not None
    if name in ("tril", "triu", "diagonal", "diag", "trace"):
        return dim >= rank - 2
    if name not in ALONG:
        return False
    at, default = ALONG[name]
    along = n.args[at] if len(n.args) > at else n.kwargs.get("dim", n.kwargs.get("dims", default))
    return along is None or any(x % max(1, rank) == dim for x in (along if isinstance(along, list) else [along]))


def contracted(n: Any, name: str, value: str, shape: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Dimensions of an operand that a product sums over."""
    rank, found = len(shape.get(value, ())), list[int]()
    first = 1 if name in ("addmm", "baddbmm", "addmv", "addbmm") else 0
    if name in ("linear",) and value in (_first(n), _first(n, 1)):
        found.append(rank - 1)
    elif name in ("mm", "bmm", "matmul", "addmm", "baddbmm", "mv", "dot", "addmv", "addbmm"):
        if value == _first(n, first):
            found.append(rank - 1)
        if value == _first(n, first + 1):
            found.append(max(0, rank - 2))
    return tuple(found)


def sums_samples(n: Any, name: str, dims: Mapping[str, int], shape: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a call is a sum or a mean over all samples, so that sums over replicas are those of the batch."""
    source = _first(n)
    if name in SUMS:
        over = n.args[1] if len(n.args) > 1 and isinstance(n.args[1], list) else n.kwargs.get("dim")
        rank = len(shape[source])
        return source in dims and (not over or dims[source] in {x % rank for x in over})
    if name != "mm":
        return False
    a, b = source, _first(n, 1)
    return a in dims and b in dims and dims[a] == 1 and dims[b] == 0


def linear(n: Any, name: str, samples: Collection[str], shape: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a number is a sum of others, each with a constant factor."""
    if any(prod(shape.get(v, ())) != 1 for v in n.inputs) or not n.inputs:
        return False
    if name in ("mul", "div", "true_divide"):
        varying = [v for v in n.inputs if v in samples]
        return len(varying) == 1 and (name == "mul" or _first(n) == varying[0])
    return name in LINEAR or name in SUMS


def over_samples(n: Any, name: str) -> bool:
    """Whether a term of a loss is a sum or a mean, as far as its operator says."""
    return name in SUMS or name.endswith("_loss") or name in ("kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits", "nll_loss2d")
