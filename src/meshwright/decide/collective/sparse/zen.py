"""Zen: sums by hashed regions, which are balanced without agreeing on boundaries, then all of them gathered.

Cite: Z. Wang, Z. Xu, J. Xi, Y. Wang, A. Shrivastava, T. S. E. Ng, "Zen: Empowering Distributed Training with Sparsity-driven Data Synchronization"
(OSDI 2025), hierarchical hashing, balanced parallelism.
Left open by the paper: a hash without collisions whose inverse is cheap. Our answer: i -> factor * i mod n with a factor prime to n, near n over the
golden ratio; a rank's region is a dense array over the places, and indices come back by the factor's inverse.
Deviations: results are gathered as entries, not as bitmaps over the hashed regions.
Invariant: as TopkDSA without its switch, but regions weigh alike for any pattern that is no arithmetic progression. Cost: P + log P messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....cite import Cite
from ....errors import Unsupported
from .phases import Phases, planned
from .problem import SparsePlan, SparseProblem, SparseSizes, SparseStrategy

__all__ = ["CITE", "DEVIATIONS", "Zen"]

CITE = Cite(
    key="wang2025zen", title="Zen: Empowering Distributed Training with Sparsity-driven Data Synchronization",
    authors="Zhuang Wang, Zhaozhuo Xu, Jingyi Xi, Yuke Wang, Anshumali Shrivastava, T. S. Eugene Ng", year=2025, venue="OSDI 2025",
)  # fmt: skip
DEVIATIONS = ("entries instead of hashed bitmaps", "an affine hash")


@dataclass(frozen=True, kw_only=True)
class Zen(SparseStrategy):
    """Options. period: steps between exact thresholds."""

    name: ClassVar[str] = "zen"
    cite: ClassVar[Cite] = CITE

    kinds: ClassVar[tuple[str, ...]] = ("steady", "thresholds")

    period: int = 32

    def plan(self, problem: SparseProblem) -> SparsePlan:
        """Raises: Unsupported from 2^31 elements on."""
        if problem.elements >= 1 << 31:
            raise Unsupported(f"hashed regions of {problem.elements} elements", where="zen", hint="use oktopk beyond 2^31 elements")
        n = len(problem.ranks)
        return planned(self, problem, (2 * problem.k + 2 * problem.sizes.union(n)) * (n - 1) / n)

    def phases(self, sizes: SparseSizes, kind: str) -> Phases:
        n, expected = sizes.ranks, sizes.union(sizes.ranks)
        p = Phases(sizes, "zen", regions=n)
        picked = p.select(exact="thresholds" in kind)
        p.headers()
        chosen = p.choose(p.sum_regions(picked), n * sizes.most)
        p.gather_counts("sizes", 8)
        rooms = p.gather(chosen, 1, expected / n, n * sizes.most)
        p.finish(rooms, list(range(n)), expected)
        return p
