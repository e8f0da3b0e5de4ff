"""How finely a joint packing's rates are rounded, and into how many pieces its trees' messages are cut."""

from __future__ import annotations

from fractions import Fraction

from ....cost import Transport
from ..problem import MIN_PIECE_BYTES, CollectiveProblem

__all__ = [
    "MAX_DEPTH", "MAX_EXPLICIT_STEPS", "MAX_FINE_UNITS", "MAX_RUN_STEPS", "MAX_SIMPLE_UNITS", "MAX_TALL_RUN_STEPS", "MAX_TRIED_UNITS",
    "MIN_PIECES_LEFT", "MIN_TALL_HEIGHT", "choose_pieces", "rate_units",
]  # fmt: skip

MAX_SIMPLE_UNITS = 12  # rates are rounded down to the narrowest link's rate by 1 to 12 ...
MAX_FINE_UNITS = 24  # ... and to parts of any link's rate down to 1/24 of the narrowest, where they lose less than all coarser units
MAX_TRIED_UNITS = 24  # such roundings tried, the coarsest first; each is a linear program
# The size of programs of packed trees, in the network or not, of one collective or of several groups.
MAX_EXPLICIT_STEPS = 100_000  # executed steps: larger programs use `repeat` and batches of trees, unless told otherwise
MAX_RUN_STEPS = 1_000_000  # executed steps up to which more pieces and channels are chosen
MAX_TALL_RUN_STEPS = 3_000_000  # of trees so high that a piece's way is long: 0.934 of the bound for two MI250 boxes (28 hops), not 0.923
MIN_TALL_HEIGHT = 16  # hops
MIN_PIECES_LEFT = 64  # batches of trees become finer as long as the program's size leaves so many pieces
MAX_DEPTH = 4  # messages in flight on a channel of many pieces


def rate_units(rates: list[int]) -> list[Fraction]:
    """Units to round rates down to, coarsest first: simple parts of the narrowest link, and units each of which loses less than all coarser."""
    narrowest = rates[0]
    chosen = {Fraction(narrowest, j) for j in range(1, MAX_SIMPLE_UNITS + 1)}
    least = Fraction(1)
    fine = {Fraction(rate, j) for rate in rates for j in range(rate // narrowest, MAX_FINE_UNITS * rate // narrowest + 1) if j}
    for unit in sorted((u for u in fine if u <= narrowest), reverse=True):
        loss = max(1 - unit * (rate // unit) / rate for rate in rates)
        if 0 < loss < least:
            chosen.add(unit)
            least = loss
    # A unit that divides all rates changes nothing, so the exact optimum has been tried already.
    lossy = [u for u in chosen if any(rate % u for rate in rates)]
    return sorted(lossy, reverse=True)[:MAX_TRIED_UNITS]


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
