"""Inputs whose results are exactly predictable, so that wrong elements are counted instead of judged by a tolerance.

An element depends on (seed, rank, its index) through an integer hash, so any slice can be made and verified anywhere (the idea of nccl-tests'
verifiable buffers). Values are so small that results are exact in every type: sums and averages take 0..3 (averages times the number of ranks),
products 1 or 2 with at most MAX_TWOS twos, the rest 0..100 or, for bitwise operators, any 7 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["DTYPES", "REDUCTIONS", "contribution", "element_hashes", "expected", "wrong_elements"]

DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "float": torch.float32, "double": torch.float64,
}  # fmt: skip
REDUCTIONS = ("sum", "prod", "min", "max", "avg")
MAX_TWOS = 4  # factors of 2 in a product over all ranks, so that it stays exact in int8 and half precision
BLOCK_ELEMENTS = 1 << 15  # hashed at a time, as int64
_MIX = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


def element_hashes(seed: int, rank: int, first: int, count: int) -> torch.Tensor:
    """int64 in 0..2^31 per element."""
    x = torch.arange(first, first + count, dtype=torch.int64)
    x = (x * _MIX[0] + rank * _MIX[1] + seed * _MIX[2]) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    x = ((x ^ (x >> 12)) * 0x297A2D39) & 0xFFFFFFFF
    return (x ^ (x >> 15)) >> 1


def contribution(seed: int, rank: int, ranks: int, first: int, count: int, dtype: torch.dtype, reduction: str = "sum") -> torch.Tensor:
    """What `rank` puts in at elements first .. first+count."""
    return _in_blocks(lambda at, size: _contribution(seed, rank, ranks, at, size, reduction), first, count, dtype)


def expected(seed: int, ranks: int, first: int, count: int, dtype: torch.dtype, reduction: str) -> torch.Tensor:
    """All ranks' contributions combined, in exact integers."""
    return _in_blocks(lambda at, size: _expected(seed, ranks, at, size, reduction), first, count, dtype)


def _in_blocks(make: Callable[[int, int], torch.Tensor], first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """int64 elements from `make(first, count)`, BLOCK_ELEMENTS at a time: whole tensors of them would cost fresh memory at every operation."""
    out = torch.empty(count, dtype=dtype)
    for at in range(0, count, BLOCK_ELEMENTS):
        size = min(BLOCK_ELEMENTS, count - at)
        out[at : at + size] = make(first + at, size)
    return out


def _contribution(seed: int, rank: int, ranks: int, first: int, count: int, reduction: str) -> torch.Tensor:
    mixed = element_hashes(seed, rank, first, count)
    if reduction == "prod":
        spread = element_hashes(seed, 1 << 20, first, count) % max(ranks, 1)
        mixed = 1 + ((rank - spread) % max(ranks, 1) < MAX_TWOS).long() * (mixed % 2)
    elif reduction == "sum":
        mixed = mixed % 4
    elif reduction == "avg":
        mixed = mixed % 4 * ranks
    else:
        mixed = mixed % 101
    return mixed


def _expected(seed: int, ranks: int, first: int, count: int, reduction: str) -> torch.Tensor:
    rows = [_contribution(seed, r, ranks, first, count, reduction) for r in range(ranks)]
    total = rows[0].clone()
    for row in rows[1:]:
        if reduction in ("sum", "avg"):
            total += row
        elif reduction == "prod":
            total *= row
        else:
            total = torch.minimum(total, row) if reduction == "min" else torch.maximum(total, row)
    return total // ranks if reduction == "avg" else total


def wrong_elements(found: torch.Tensor, wanted: torch.Tensor) -> int:
    return int((found.reshape(-1) != wanted.reshape(-1)).sum())
