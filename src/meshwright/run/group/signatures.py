"""What a call of torch's is, as the flight recorder keeps it and ranks compare it: operation, root, operator, type, and bytes where ranks must agree.

The bytes are those of the whole: of the gathered result, of one rank's whole input where it is scattered. Splits of an all-to-all are a rank's own,
so such a call has none unless all ranks have agreed on equal ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .chunks import BLOCKED
from .record_file import pack_call
from .reductions import operator_name

__all__ = ["REDUCING", "ROOTED", "Signature", "signature_of", "signing"]

Signature = tuple[int, int]  # (packed call, bytes)
REDUCING = ("all-reduce", "reduce", "reduce-scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
_packed: dict[Any, int] = {}


def _signature(op: str, root: int, operator: Any, dtype: torch.dtype, size_bytes: int) -> Signature:
    """`operator`: torch's reduce operator; nothing for operations that do not reduce."""
    kind = getattr(operator, "op", operator)
    key = op, root, kind, dtype
    call = _packed.get(key)
    if call is None:
        call = _packed[key] = pack_call(op, root, operator_name(operator), str(dtype).removeprefix("torch."))
    return call, size_bytes


def signature_of(op: str, root: int, elements: int, given: torch.Tensor, options: Any, ranks: int) -> Signature:
    """Of a call with `elements` per rank, or in all where ranks hold the same."""
    size_bytes = elements * (ranks if op in BLOCKED else 1) * given.element_size()
    return _signature(op, root, options.reduceOp if op in REDUCING else None, given.dtype, size_bytes)


def signing(op: str, ranks: int) -> Callable[[tuple[Any, ...]], Signature]:
    """From the arguments of the built-in backend's call, options last."""

    def sign(args: tuple[Any, ...]) -> Signature:
        tensor, size_bytes = _measured(op, ranks, args)
        options = args[-1]
        root = options.rootRank if op in ROOTED else -1
        return _signature(op, root, options.reduceOp if op in REDUCING else None, tensor.dtype, size_bytes)

    return sign


def _measured(op: str, ranks: int, args: tuple[Any, ...]) -> tuple[torch.Tensor, int]:
    """A tensor of the call, and its bytes."""
    target, source = args[0], args[1]
    if op in ("all-reduce", "broadcast", "reduce"):
        return target[0], _bytes(target[0])
    if op == "all-to-all":
        return (target if isinstance(target, torch.Tensor) else target[0]), 0
    if isinstance(target, torch.Tensor):
        return target, _bytes(target if op == "all-gather" else source)
    if op == "reduce-scatter":
        return target[0], sum(map(_bytes, source[0]))
    if op == "all-gather":  # a list of unlike lengths is the same at all ranks, and gloo's to refuse
        return source[0], sum(map(_bytes, target[0]))
    own = target[0] if op == "scatter" else source[0]
    return own, ranks * _bytes(own)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * int(tensor.element_size())
