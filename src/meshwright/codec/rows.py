"""Rows sent at few bits: bytes on the wire and the variance of what comes back. `kernels.rows` does it, `run.halo` sends it.

A row of D numbers at b bits: zero point Z = min, scale S = (max - min) / (2^b - 1), both rounded to bfloat16; each number is rounded at random to one
of its two neighbours among Z + k S, so the expectation is exact. Rows of equal width of one message are packed together, then zero points and scales
follow. (AdaQP, MLSys 2023, section 3.3 of its card. Packed along the row, not across 8/b rows: no row waits for another.)
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UsageError

__all__ = ["FULL", "PARAMETER_BYTES", "WIDTHS", "levels_of", "message_bytes", "noise_factor", "require_width"]

WIDTHS = (2, 4, 8)
FULL = 32  # bits of a row that is sent as it is, float32
PARAMETER_BYTES = 4  # zero point and scale of a row, two bfloat16


def require_width(bits: int, *, where: str = "bits") -> int:
    """Raises: UsageError for a width that rows are not sent at."""
    if bits not in (*WIDTHS, FULL):
        raise UsageError(f"rows are not sent at {bits} bits", where=where, hint=f"one of {', '.join(map(str, (*WIDTHS, FULL)))}")
    return bits


def levels_of(bits: int) -> int:
    return (1 << bits) - 1


def noise_factor(bits: int) -> float:
    """By what a row's weight, D (max - min)^2 / 6, is multiplied: 1 / (2^b - 1)^2; 0 at full precision."""
    return 0.0 if bits == FULL else 1 / levels_of(bits) ** 2


def message_bytes(rows: Mapping[int, int], dim: int) -> int:
    """Bytes of one message with so many rows of each width."""
    whole = sum(-(-count * dim * bits // 8) for bits, count in rows.items())
    return whole + PARAMETER_BYTES * sum(count for bits, count in rows.items() if bits != FULL)
