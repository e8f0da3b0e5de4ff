"""Floating-point sums as sums of integers: equal bits in any order, over any tree, by any backend.

Cite: A. Sapio and others, "Scaling Distributed Machine Learning with In-Network Aggregation" (NSDI'21), section 3.7: numbers as integers that share
an exponent, the largest of all workers' blocks.
Deviations: the exponent is agreed before the integers are made, not a round ahead; two limbs of 32 bits, kept as one of 64.
Invariant: a block's exponent e is the least with 2^e above every magnitude in it at any of the n ranks. Integers are multiples of the quantum
2^(e - 62 + ceil(log2 n)), at most 2^62 / n in magnitude, so no sum of n overflows; making one rounds by half a quantum at most.
Error of a sum: at most n / 2 quanta, below n^2 2^-60 of the block's largest magnitude, and one rounding to double and to the element's type. Elements
above 2^-(38 - ceil(log2 n)) of it (float32) are exact.
Cost: 8 B an element and one byte a block (four where elements are doubles) on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BLOCK_ELEMENTS", "Encoded", "exponents", "from_integers", "is_finite", "to_integers"]

BLOCK_ELEMENTS = 256  # that share an exponent: a quarter of a KiB of float32 pays one byte
INTEGER_BITS = 62  # of a sum's magnitude: one bit is the sign, one is spare
# Per type: smallest exponent told apart (smaller blocks count as it), what says "not finite", how it is sent. Float32's denormals are multiples of
# the quantum at -125; doubles below 2^-900 are not (2^-960 is the quantum there).
_RANGES = {torch.float64: (-900, 1 << 20, torch.int32)}
_SMALL = (-125, 255, torch.uint8)


@dataclass(frozen=True)
class Encoded:
    """`exponent`: one per block, as sent; rows of whole blocks."""

    exponent: torch.Tensor
    elements: int  # per row
    dtype: torch.dtype


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """(rows, elements) -> (rows, blocks, BLOCK_ELEMENTS), zeros at the end."""
    count, elements = rows.shape
    blocks = -(-elements // BLOCK_ELEMENTS)
    if blocks * BLOCK_ELEMENTS == elements:
        return rows.view(count, blocks, BLOCK_ELEMENTS)
    padded = rows.new_zeros(count, blocks * BLOCK_ELEMENTS)
    padded[:, :elements] = rows
    return padded.view(count, blocks, BLOCK_ELEMENTS)


def exponents(rows: torch.Tensor) -> Encoded:
    """Of this rank's own blocks: what ranks take the maximum of."""
    least, none, sent = _RANGES.get(rows.dtype, _SMALL)
    top = _blocks(rows).abs().amax(dim=2).double()
    exponent = torch.frexp(top).exponent.clamp(min=least) + (1 - least)  # 1 and up; 0: nothing but zeros
    exponent = torch.where(top == 0, 0, exponent)
    exponent = torch.where(torch.isfinite(top), exponent, none)
    return Encoded(exponent.to(sent).reshape(-1), rows.shape[1], rows.dtype)


def is_finite(agreed: Encoded) -> bool:
    """Whether all ranks' blocks hold numbers only."""
    return not bool((agreed.exponent == _RANGES.get(agreed.dtype, _SMALL)[1]).any())


def _shift(agreed: Encoded, exponent: torch.Tensor, ranks: int) -> torch.Tensor:
    """Binary digits by which a block moves up to become integers."""
    least = _RANGES.get(agreed.dtype, _SMALL)[0]
    return INTEGER_BITS - (ranks - 1).bit_length() - (exponent.to(torch.int32) + (least - 1))


def to_integers(rows: torch.Tensor, agreed: Encoded, ranks: int) -> torch.Tensor:
    """int64 in whole blocks, flat."""
    shift = _shift(agreed, agreed.exponent, ranks).view(rows.shape[0], -1, 1)
    return torch.ldexp(_blocks(rows).double(), shift).round_().to(torch.int64).reshape(-1)


def from_integers(sums: torch.Tensor, agreed: Encoded, ranks: int, *, row: int | None = None, average: bool = False) -> torch.Tensor:
    """(rows, elements) of the element's type; `row`: the sums are this row's alone."""
    exponent = agreed.exponent
    if row is not None:
        each = -(-agreed.elements // BLOCK_ELEMENTS)
        exponent = exponent[row * each : (row + 1) * each]
    shift = _shift(agreed, exponent, ranks)
    found = sums.double()
    if average:
        found /= ranks
    found = torch.ldexp(found.view(len(shift), BLOCK_ELEMENTS), -shift.view(-1, 1))
    blocks = -(-agreed.elements // BLOCK_ELEMENTS)
    return found.to(agreed.dtype).view(-1, blocks * BLOCK_ELEMENTS)[:, : agreed.elements]
