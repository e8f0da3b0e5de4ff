"""Ok-Topk: sums by balanced regions, a threshold for the sums, and a balanced gathering: at most 6k(P-1)/P words whatever the number of ranks.

Cite: S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022), sections 3 and 4.
Left open by the paper: how thresholds are kept from drifting between re-evaluations (its authors' code multiplies them by 1.03 or 1.012). Our
answer: the next step's is the last step's k-th magnitude, moved on by 3/4 of what it grew by and lowered by 2 %, so that a little more than k are
above it. Of its own entries a rank then sends the k largest. For the sums, sizes are exchanged for 128 thresholds at once, and the one that leaves
closest to k is taken: no further round. Where it leaves more than 4/3 k or less than k/3, the exact one is found in the same step.
Left open: what to do when regions have become uneven before their turn. Our answer: the header of every step carries quantiles of each rank's
selection; the next step's regions are cut at quantiles of all of them merged, without a round of their own. They are made anew in the same step when
somebody would receive more than half of the promised volume, or 5 % more than the mean and enough to pay for the round. (The mean of the ranks' own
cuts is no cut of all where supports differ.)
Deviations: the exact global threshold comes from three all-reduced histograms of float bit patterns (11 + 11 + 9 bits) instead of gathering all sums;
blocks are also balanced where the bound would be missed, not only beyond four times the mean; equal values are kept rank by rank until there are k.
Invariant: every rank's every region is in the result once; between re-evaluations at most 6k(P-1)/P words each way, whatever ranks select.
Cost: (2P + 2 log P) messages; O(n) to select, O(k) to add. Programs of P^2 chunks, so at most MAX_RANKS ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....cite import Cite
from ....errors import Unsupported, UsageError
from .phases import EDGE_THRESHOLDS, Phases, planned
from .problem import SparsePlan, SparseProblem, SparseSizes, SparseStrategy

__all__ = ["CITE", "DEVIATIONS", "OkTopk"]

CITE = Cite(
    key="li2022oktopk", title="Near-Optimal Sparse Allreduce for Distributed Deep Learning", authors="Shigang Li, Torsten Hoefler", year=2022,
    venue="PPoPP 2022",
)  # fmt: skip
DEVIATIONS = (
    "thresholds follow the k-th magnitude", "sizes for 128 thresholds at once", "exact thresholds from histograms",
    "regions follow every step's proposals", "ties rank by rank",
)  # fmt: skip
MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class OkTopk(SparseStrategy):
    """Options. period: steps between exact thresholds; region_period: between new regions; balance: times the mean that a block may have."""

    name: ClassVar[str] = "oktopk"
    cite: ClassVar[Cite] = CITE

    kinds: ClassVar[tuple[str, ...]] = ("steady", "thresholds", "regions", "thresholds+regions")

    period: int = 32
    region_period: int = 64
    balance: float = 4.0

    def plan(self, problem: SparseProblem) -> SparsePlan:
        """Raises: Unsupported beyond MAX_RANKS ranks, UsageError."""
        if self.period < 1 or self.region_period < 1 or self.balance < 1:
            raise UsageError("periods and balance must be >= 1", where="oktopk")
        if len(problem.ranks) > MAX_RANKS:
            raise Unsupported(
                f"Ok-Topk works up to {MAX_RANKS} ranks, got {len(problem.ranks)}",
                hint="sum inside each server first, and use one rank per server",
            )  # fmt: skip
        n = len(problem.ranks)
        words = 4 * problem.k * (n - 1) / n * problem.entry_bytes / 8
        return planned(self, problem, words, {"limit_words": problem.limit_words})

    def phases(self, sizes: SparseSizes, kind: str) -> Phases:
        """Counts are gathered again where regions are new, which a step may also decide by what its headers say; exact thresholds likewise."""
        n, exact = sizes.ranks, "thresholds" in kind
        p = Phases(sizes, f"oktopk {kind}", regions=n, parts=n)
        picked = p.select(exact=exact)
        p.headers()
        p.gather_counts("counts", 8 * n, always="regions" in kind)
        kept = p.sum_regions(picked)
        if not exact:
            kept = p.choose(kept, sizes.most)
            p.gather_counts("edges", 8 * EDGE_THRESHOLDS)
        p.histograms(kept, always=exact)
        kept = p.choose(kept, sizes.most, again=not exact)
        p.gather_counts("sizes", 16, always=exact)
        blocks = p.balance(kept)
        rooms = p.gather(blocks, n, sizes.k / n, sizes.most)
        # chunk (region j, part q) of the result lies in the block of rank q, at j
        p.finish(rooms, [(c % n) * n + c // n for c in range(n * n)], sizes.k)
        return p
