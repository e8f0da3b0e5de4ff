"""MegaBlocks' question: by which products rows of any number each go through their experts; chosen from rates fitted to what was measured.

Cite: T. Gale, D. Narayanan, C. Young, M. Zaharia, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts" (MLSys 2023, arXiv 2211.15841).
Left open by the paper: when its products pay. Our answer: each way's time is a line over the rows that it multiplies, fitted to its own steps.
Deviations: loops, padded and grouped products are ways too. Invariant: the way changes no output. Cost: two steps by each way, then a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...cite import Cite
from ...errors import UsageError

__all__ = ["CITE", "FittedWays", "multiplied_rows"]

CITE = Cite(
    key="gale2023megablocks",
    title="MegaBlocks: Efficient Sparse Training with Mixture-of-Experts",
    authors="T. Gale, D. Narayanan, C. Young, M. Zaharia",
    year=2023,
    venue="MLSys",
    url="https://arxiv.org/abs/2211.15841",
)
FIRST_STEPS = 2  # by each way, before rates are believed
MAX_SAMPLES = 64  # of a way's newest steps that its line is fitted to


def multiplied_rows(way: str, counts: Sequence[int], block: int) -> int:
    """Rows that a way multiplies: those there are, all experts as long as the longest (padded), or each rounded up to blocks (sparse)."""
    if way == "padded":
        return len(counts) * max(counts, default=0)
    return sum(-(-n // block) * block for n in counts) if way == "sparse" else sum(counts)


@dataclass
class FittedWays:
    """`choose(counts)`, run the step, `record(way, counts, time_s)`. Each rank decides for itself. Raises: UsageError without ways."""

    ways: tuple[str, ...]
    block: int
    samples: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ways or self.block < 1:
            raise UsageError(f"needs a way and blocks of at least 1, got {list(self.ways)} and {self.block}", where="ways")

    def choose(self, counts: Sequence[int]) -> str:
        """The way predicted to be fastest; before that, one that has had too few steps."""
        few = [w for w in self.ways if len(self.samples.get(w, ())) < FIRST_STEPS]
        return few[0] if few else min(self.ways, key=lambda w: (self.predicted_s(w, counts), self.ways.index(w)))

    def record(self, way: str, counts: Sequence[int], time_s: float) -> None:
        kept = self.samples.setdefault(way, [])
        kept.append((multiplied_rows(way, counts, self.block), time_s))
        del kept[:-MAX_SAMPLES]

    def predicted_s(self, way: str, counts: Sequence[int]) -> float:
        """By the line of least squares through the way's steps; where its rows never differed, in proportion to them."""
        known = self.samples[way]
        rows = multiplied_rows(way, counts, self.block)
        mean_n, mean_s = (sum(x[i] for x in known) / len(known) for i in (0, 1))
        spread = sum((n - mean_n) ** 2 for n, _ in known)
        if not spread:
            return mean_s * rows / mean_n if mean_n else mean_s
        slope = max(0.0, sum((n - mean_n) * (s - mean_s) for n, s in known) / spread)
        return max(0.0, mean_s + slope * (rows - mean_n))
