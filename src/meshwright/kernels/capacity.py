"""How many rows an expert's buffer has. Cite: Tutel (arXiv 2206.03382), section 3.2; its code rounds as here."""

from __future__ import annotations

import math

from ..errors import UsageError

__all__ = ["MAX_ALIGNMENT", "aligned", "capacity_of"]

MAX_ALIGNMENT = 256  # Tutel: a larger multiple of the capacity is itself rounded up, to WIDE_ALIGNMENT
WIDE_ALIGNMENT = 128


def aligned(capacity: int, alignment: int) -> int:
    """The capacity rounded up to a multiple of `alignment` (one above MAX_ALIGNMENT is first rounded up to a multiple of WIDE_ALIGNMENT)."""
    if alignment > MAX_ALIGNMENT:
        alignment = -(-alignment // WIDE_ALIGNMENT) * WIDE_ALIGNMENT
    return -(-capacity // alignment) * alignment


def capacity_of(factor: float, *, tokens: int, experts: int, k: int, demand: int, alignment: int = 1) -> int:
    """Rows of an expert's buffer. `tokens`: of the rank with the most; `demand`: tokens that want the most wanted expert, of all ranks.

    factor f > 0: k · int(f · ceil(tokens / experts)); 0: the demand, so nothing is dropped; < 0: the demand, but at most as for -f.
    Raises: UsageError where f leaves no room for any token, with the smallest f that does.
    """
    if not math.isfinite(factor):
        raise UsageError(f"must be a number, got {factor}", where="capacity_factor")
    each = -(-tokens // experts)
    most = k * int(abs(factor) * each)
    if tokens and factor and not most:
        sign = "-" if factor < 0 else ""
        raise UsageError(
            f"{factor:g} of {each} tokens per expert rounds to a capacity of zero: every token would be dropped", where="capacity_factor",
            hint=f"{sign}{1 / each:.6g} or more; 0 drops nothing", data={"tokens": tokens, "experts": experts, "smallest": 1 / each},
        )  # fmt: skip
    if factor > 0:
        return aligned(most, alignment)
    return aligned(min(demand, most) if factor < 0 else demand, alignment)
