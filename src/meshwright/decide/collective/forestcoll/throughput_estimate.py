"""What a forest is worth for large messages before it is cut and simulated: bytes, filling of the pipeline, latency."""

from __future__ import annotations

from .arrival import HopTimes, arrival_s
from .forest import Forest

__all__ = ["SMALL_RANKS", "filled", "most_steps", "worth_of"]

MAX_STEPS = 500_000  # executed steps up to which more pieces are chosen ...
FEW_RANKS, FEW_STEPS = 160, 2_600_000  # ... and for many roots among up to so many ranks at least so many
MAX_WORK = 12_300_000_000  # steps times ranks squared up to which more pieces are chosen, within 1 and 8 times MAX_STEPS
LARGE_BYTES = 1 << 30  # for which forests are compared
MAX_COUNTED = 16384.0  # pieces
STEPS_PER_EDGE = 1.5  # of a program, about: a rank with several children sends once more per child
SMALL_RANKS = 72  # up to so many, more forests are tried for their height


def filled(ranks: int, roots: int, channels: float, height: int) -> float:
    """Share of the time that is left when the pipeline of so many trees, each a channel of its own, has been filled."""
    pieces = min(MAX_COUNTED, most_steps(ranks, roots) / (STEPS_PER_EDGE * channels * ranks))
    return pieces / (pieces + height - 1)


def worth_of(forest: Forest, seconds: HopTimes) -> float:
    """Share of the optimum after the time to fill the pipeline and the latency of its latest arrival, for LARGE_BYTES."""
    total = sum(forest.weight)
    channels = (forest.distinct * forest.k * total) ** 0.5  # between equal trees counted once and all trees
    time_s = float(LARGE_BYTES * forest.stretch / forest.k / forest.graph.unit_Bps / total)
    share = float(forest.ratio) * filled(forest.graph.ranks, sum(map(bool, forest.weight)), channels, forest.height)
    return share * time_s / (time_s + arrival_s(forest, seconds))


def most_steps(ranks: int, roots: int) -> int:
    """Executed steps up to which more pieces are chosen: the more ranks, the longer takes a simulator for a step; few roots have few messages."""
    if roots == 1 and ranks <= SMALL_RANKS:
        return 8 * MAX_STEPS
    least = FEW_STEPS if roots > 1 and ranks <= FEW_RANKS else MAX_STEPS
    return int(min(max(MAX_WORK // ranks**2, least), 8 * MAX_STEPS))
