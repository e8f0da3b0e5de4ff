"""TopkDSA: sums by equal regions; a region is gathered as entries, or as it is where that is shorter.

Cite: C. Renggli et al., "SparCML" (SC 2019), dynamic sparse all-reduce by split and all-gather (DSAR_Split_allgather).
Left open by the paper: when to switch. Our answer: region by region, where its entries weigh more than its elements (two words against one).
Invariant: between 4k(P-1)/P words (selections alike) and (2k + n)(P-1)/P (dense) each way, plus what equal regions are uneven.
Cost: P + log P messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....cite import Cite
from .phases import Phases, planned
from .problem import SparsePlan, SparseProblem, SparseSizes, SparseStrategy
from .topka import CITE

__all__ = ["CITE", "DEVIATIONS", "TopkDsa"]

DEVIATIONS = ("every region switches for itself",)


@dataclass(frozen=True, kw_only=True)
class TopkDsa(SparseStrategy):
    """Options. period: steps between exact thresholds."""

    name: ClassVar[str] = "topkdsa"
    cite: ClassVar[Cite] = CITE

    kinds: ClassVar[tuple[str, ...]] = ("steady", "thresholds")

    period: int = 32

    def plan(self, problem: SparseProblem) -> SparsePlan:
        n = len(problem.ranks)
        return planned(self, problem, (2 * problem.k + 2 * _expected(problem.sizes)) * (n - 1) / n * problem.entry_bytes / 8)

    def phases(self, sizes: SparseSizes, kind: str) -> Phases:
        n, expected, most = sizes.ranks, _expected(sizes), min(sizes.ranks * sizes.most, _dense(sizes))
        p = Phases(sizes, "topkdsa", regions=n)
        picked = p.select(exact="thresholds" in kind)
        p.headers()
        chosen = p.choose(p.sum_regions(picked), most)
        p.gather_counts("sizes", 8)
        rooms = p.gather(chosen, 1, expected / n, most)
        p.finish(rooms, list(range(n)), expected)
        return p


def _dense(sizes: SparseSizes) -> int:
    """The whole vector's bytes, counted in entries."""
    return -(-4 * sizes.elements // sizes.entry_bytes)


def _expected(sizes: SparseSizes) -> int:
    """Entries of the result."""
    return min(sizes.union(sizes.ranks), _dense(sizes))
