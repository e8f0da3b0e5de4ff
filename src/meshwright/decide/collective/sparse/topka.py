"""TopkA: every rank gathers every rank's selection and adds them up.

Cite: C. Renggli, S. Ashkboos, M. Aghagolzadeh, D. Alistarh, T. Hoefler, "SparCML: High-Performance Sparse Communication for Machine Learning"
(SC 2019), sparse all-reduce by all-gather, as it is compared in Li and Hoefler (PPoPP 2022).
Left open by the paper: which all-gather. Our answer: Bruck's, ceil(log2 P) rounds for any number of ranks.
Invariant: 2k(P-1) words each way. Cost: log P messages, O(Pk log P) to add.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....cite import Cite
from .phases import Phases, planned
from .problem import SparsePlan, SparseProblem, SparseSizes, SparseStrategy

__all__ = ["CITE", "DEVIATIONS", "TopkA"]

CITE = Cite(
    key="renggli2019sparcml", title="SparCML: High-Performance Sparse Communication for Machine Learning",
    authors="Cèdric Renggli, Saleh Ashkboos, Mehdi Aghagolzadeh, Dan Alistarh, Torsten Hoefler", year=2019, venue="SC 2019",
)  # fmt: skip
DEVIATIONS: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TopkA(SparseStrategy):
    """Options. period: steps between exact thresholds."""

    name: ClassVar[str] = "topka"
    cite: ClassVar[Cite] = CITE

    kinds: ClassVar[tuple[str, ...]] = ("steady", "thresholds")

    period: int = 32

    def plan(self, problem: SparseProblem) -> SparsePlan:
        return planned(self, problem, 2 * problem.k * (len(problem.ranks) - 1) * problem.entry_bytes / 8)

    def phases(self, sizes: SparseSizes, kind: str) -> Phases:
        n = sizes.ranks
        p = Phases(sizes, "topka", regions=1)
        picked = p.select(exact="thresholds" in kind)
        p.headers()
        rooms = p.gather(picked, 1, sizes.k, n * sizes.most)
        p.finish(rooms, list(range(n)), n * sizes.k)
        return p
