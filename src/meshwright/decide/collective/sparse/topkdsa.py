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
from ..problem import options_of
from .phases import Phases, two_programs
from .problem import SparsePlan, SparseProblem, SparseStrategy
from .topka import CITE

__all__ = ["CITE", "DEVIATIONS", "TopkDsa"]

DEVIATIONS = ("every region switches for itself",)


@dataclass(frozen=True, kw_only=True)
class TopkDsa(SparseStrategy):
    """Options. period: steps between exact thresholds."""

    name: ClassVar[str] = "topkdsa"
    cite: ClassVar[Cite] = CITE

    period: int = 32

    def plan(self, problem: SparseProblem) -> SparsePlan:
        n, entry = len(problem.ranks), problem.entry_bytes
        dense = -(-4 * problem.elements // entry)  # the whole vector's bytes, counted in entries
        expected = min(problem.union(n), dense)

        def build(exact: bool) -> Phases:
            p = Phases(problem, "topkdsa", regions=n)
            picked = p.select(exact=exact)
            p.headers()
            chosen = p.choose(p.sum_regions(picked), min(n * problem.most, dense))
            p.gather_counts("sizes", 8)
            rooms = p.gather(chosen, 1, expected / n, min(n * problem.most, dense))
            p.finish(rooms, list(range(n)), expected)
            return p

        words = (2 * problem.k + 2 * expected) * (n - 1) / n * entry / 8
        programs, works = two_programs(build)
        return SparsePlan(strategy=self.name, programs=programs, usual="steady", words=words, works=works, options=options_of(self))
