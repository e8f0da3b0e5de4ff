"""What a reduce operator does to two tensors, for the operators and element types that torch's built-in CPU backend has.

Whatever is not here (bitwise operators on floats, averages of integers, complex maxima) goes to the built-in backend, which refuses it in its own
words: a program of ours never changes what is allowed. Sums are formed in the tensor's own type, in the order of the program's steps, so equal
plans give equal bits; another plan may round differently, as another rank order does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Reduction", "operator_name", "reduction"]

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})


@dataclass(frozen=True)
class Reduction:
    """`combine(a, b)` puts a (+) b into a; `divide`: the result is divided by the number of ranks."""

    name: str
    combine: Callable[[torch.Tensor, torch.Tensor], Any]
    divide: bool = False


def _sum(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(b)


def _product(a: torch.Tensor, b: torch.Tensor) -> None:
    a.mul_(b)


def _least(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.minimum(a, b, out=a)


def _most(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.maximum(a, b, out=a)


def _and(a: torch.Tensor, b: torch.Tensor) -> None:
    a.bitwise_and_(b)


def _or(a: torch.Tensor, b: torch.Tensor) -> None:
    a.bitwise_or_(b)


def _xor(a: torch.Tensor, b: torch.Tensor) -> None:
    a.bitwise_xor_(b)


# operator -> (its function, element types, divide)
_TABLE: dict[Any, tuple[Reduction, frozenset[torch.dtype]]] = {
    dist.ReduceOp.SUM: (Reduction("sum", _sum), FLOATS | INTEGERS),
    dist.ReduceOp.AVG: (Reduction("avg", _sum, divide=True), FLOATS),
    dist.ReduceOp.PRODUCT: (Reduction("product", _product), FLOATS | INTEGERS),
    dist.ReduceOp.MIN: (Reduction("min", _least), FLOATS | INTEGERS),
    dist.ReduceOp.MAX: (Reduction("max", _most), FLOATS | INTEGERS),
    dist.ReduceOp.BAND: (Reduction("band", _and), INTEGERS),
    dist.ReduceOp.BOR: (Reduction("bor", _or), INTEGERS),
    dist.ReduceOp.BXOR: (Reduction("bxor", _xor), INTEGERS),
}


def reduction(op: Any, dtype: torch.dtype) -> Reduction | None:
    """None where the built-in backend has to decide."""
    found, dtypes = _known(op) or (None, ())
    return found if dtype in dtypes else None


def operator_name(op: Any) -> str:
    """`sum`; empty for operators without a name here, and for none."""
    found = _known(op) if op is not None else None
    return found[0].name if found is not None else ""


def _known(op: Any) -> tuple[Reduction, frozenset[torch.dtype]] | None:
    kind = op.op if hasattr(op, "op") and not isinstance(op, dist.ReduceOp.RedOpType) else op
    return next((row for known, row in _TABLE.items() if known == kind), None)
