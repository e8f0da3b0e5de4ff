"""How finely a joint packing's rates are rounded, and into how many pieces its trees' messages are cut."""

from __future__ import annotations

from fractions import Fraction

from ....cost import Transport
from ..problem import CollectiveProblem

__all__ = ["choose_pieces", "rate_units", "FINEST", "MAX_UNITS", "SIMPLE", "MIN_PIECE_BYTES"]

MIN_PIECE_BYTES = 4096
SIMPLE, FINEST = 12, 24  # most units per narrowest link that rates are rounded down to
MAX_UNITS = 24  # units tried


def rate_units(rates: list[int]) -> list[Fraction]:
    """Units to round rates down to, coarsest first: simple parts of the narrowest link, and units each of which loses less than all coarser."""
    narrowest = rates[0]
    chosen = {Fraction(narrowest, j) for j in range(1, SIMPLE + 1)}
    least = Fraction(1)
    fine = {Fraction(rate, j) for rate in rates for j in range(rate // narrowest, FINEST * rate // narrowest + 1) if j}
    for unit in sorted((u for u in fine if u <= narrowest), reverse=True):
        loss = max(1 - unit * (rate // unit) / rate for rate in rates)
        if 0 < loss < least:
            chosen.add(unit)
            least = loss
    lossy = [u for u in chosen if any(rate % u for rate in rates)]
    return sorted(lossy, reverse=True)[:MAX_UNITS]


def choose_pieces(problem: CollectiveProblem, hops: int, time_s: float, *, most: int, units: int) -> int:
    """Square-root rule: filling a pipeline of h hops costs h - 1 pieces' time, every further piece costs one message overhead."""
    if hops <= 1:
        return 1
    transport = problem.transport or Transport()
    overhead_s = 2 * transport.per_message_s + 2 * transport.per_step_s
    wanted = min(most, problem.size_bytes // units // MIN_PIECE_BYTES)
    if overhead_s > 0:
        wanted = min(wanted, int(((hops - 1) * time_s / overhead_s) ** 0.5))
    latency_s = max(x.latency_s + x.library_latency_s for x in problem.fabric.links)
    if latency_s > 0:
        wanted = min(wanted, int(time_s / latency_s))
    return 1 << max(wanted, 1).bit_length() - 1
