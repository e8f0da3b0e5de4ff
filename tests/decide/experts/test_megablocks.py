"""Ways of multiplying rows: the one whose fitted line is lowest."""

from __future__ import annotations

import random

import pytest

from meshwright.decide.experts.megablocks import FIRST_STEPS, FittedWays, multiplied_rows
from meshwright.errors import UsageError


def test_rows_by_counting() -> None:
    counts = [5, 0, 17]
    assert [multiplied_rows(w, counts, 4) for w in ("loop", "grouped", "padded", "sparse")] == [22, 22, 51, 8 + 20]
    assert multiplied_rows("padded", [], 4) == 0


def test_the_lowest_line_wins() -> None:
    """Padding is fast where experts are even, and pays no more where one has most rows."""
    true = {"loop": (4.0, 1.0), "padded": (0.0, 0.9), "grouped": (1.0, 1.0)}  # seconds per step and per row
    ways, draw = FittedWays(tuple(true), 16), random.Random(0)
    even, skewed = [10, 10, 10, 10], [37, 1, 1, 1]

    def time_s(way: str, counts: list[int]) -> float:
        return true[way][0] + true[way][1] * multiplied_rows(way, counts, 16)

    seen = []
    for step in range(12):
        counts = [draw.randint(1, 20) for _ in range(4)] if step else even
        seen.append(ways.choose(counts))
        ways.record(seen[-1], counts, time_s(seen[-1], counts))
    assert all(seen[: 3 * FIRST_STEPS].count(w) == FIRST_STEPS for w in true)
    for counts in (even, skewed):
        assert ways.choose(counts) == min(true, key=lambda w: time_s(w, counts))
    assert {ways.choose(even), ways.choose(skewed)} == {"padded", "grouped"}


def test_rows_that_never_differ() -> None:
    ways = FittedWays(("loop", "grouped"), 16)
    for way, time in (("loop", 2.0), ("grouped", 1.0)):
        for _ in range(FIRST_STEPS):
            ways.record(way, [4, 4], time)
    assert ways.choose([8, 8]) == "grouped" and ways.predicted_s("loop", [8, 8]) == 4.0
    with pytest.raises(UsageError, match="needs a way"):
        FittedWays((), 16)
