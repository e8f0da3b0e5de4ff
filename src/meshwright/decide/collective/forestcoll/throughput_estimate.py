"""What a forest is worth for large messages before it is cut and simulated: bytes, filling of the pipeline, latency."""

from __future__ import annotations

from .arrival import HopTimes, arrival_s
from .forest import MAX_FEW_RANKS, Forest

__all__ = ["LARGE_MESSAGE_BYTES", "MAX_TRIED_RANKS", "filled", "most_steps", "worth_of"]

# Executed steps up to which more pieces are chosen (`most_steps`): as many as keep steps times squared ranks, what a simulation costs, below
# the first; but within the other two, and among ranks that simulate in seconds (144 do) no fewer than the last.
MAX_STEPS_TIMES_SQUARED_RANKS = 12_300_000_000
MIN_STEP_LIMIT = 500_000
MAX_STEP_LIMIT = 8 * MIN_STEP_LIMIT
MIN_STEP_LIMIT_OF_TRIED_RANKS = 2_600_000
MIN_STEP_LIMIT_OF_ONE_ROOT = 8_000_000  # few messages share a link: some seconds of a core
# Ranks up to which such large programs are simulated, and fewer trees tried where the exact number leaves few pieces.
MAX_TRIED_RANKS = 160
LARGE_MESSAGE_BYTES = 1 << 30  # message for which forests are compared before they are cut and simulated
MAX_COUNTED_PIECES = 16384.0  # pieces are counted up to here: more fill a pipeline hardly better
STEPS_PER_TREE_EDGE = 1.5  # of a program, about: a rank with several children sends once more per child


def filled(ranks: int, roots: int, channels: float, height: int) -> float:
    """Share of the time that is left when the pipeline of so many trees, each a channel of its own, has been filled."""
    pieces = min(MAX_COUNTED_PIECES, most_steps(ranks, roots) / (STEPS_PER_TREE_EDGE * channels * ranks))
    return pieces / (pieces + height - 1)


def worth_of(forest: Forest, seconds: HopTimes) -> float:
    """Share of the optimum after the time to fill the pipeline and the latency of its latest arrival, for LARGE_MESSAGE_BYTES."""
    total = sum(forest.weight)
    channels = (forest.distinct * forest.k * total) ** 0.5  # between equal trees counted once and all trees
    time_s = float(LARGE_MESSAGE_BYTES * forest.stretch / forest.k / forest.graph.unit_Bps / total)
    share = float(forest.ratio) * filled(forest.graph.ranks, sum(map(bool, forest.weight)), channels, forest.height)
    return share * time_s / (time_s + arrival_s(forest, seconds))


def most_steps(ranks: int, roots: int) -> int:
    """Executed steps up to which more pieces are chosen: the more ranks, the longer takes a simulator for a step; few roots have few messages."""
    if roots == 1 and ranks <= MAX_FEW_RANKS:
        return MAX_STEP_LIMIT
    least = MIN_STEP_LIMIT_OF_ONE_ROOT if roots == 1 else MIN_STEP_LIMIT_OF_TRIED_RANKS if ranks <= MAX_TRIED_RANKS else MIN_STEP_LIMIT
    return int(max(min(MAX_STEPS_TIMES_SQUARED_RANKS // ranks**2, MAX_STEP_LIMIT), least))
