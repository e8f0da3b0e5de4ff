"""Ok-Topk: sums by balanced regions, a threshold for the sums, and a balanced gathering: at most 6k(P-1)/P words whatever the number of ranks.

Cite: S. Li, T. Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022), sections 3 and 4.
Left open by the paper: how thresholds are kept from drifting between re-evaluations (its authors' code multiplies them by 1.03 or 1.012). Our
answer: the next step's is the last step's k-th magnitude, moved on by 3/4 of what it grew by and lowered by 2 %, so that a little more than k are
above it. Of its own entries a rank then sends the k largest. For the sums, sizes are exchanged for 128 thresholds at once, and the one that leaves
closest to k is taken: no further round. Where it leaves more than 4/3 k or less than k/3, the exact one is found in the same step.
Left open: what to do when regions have become uneven before their turn. Our answer: the header of every step carries each rank's proposal; the next
step's regions are their mean, without a round of their own, and they are made anew in the same step when somebody would receive more than half of
the promised volume.
Deviations: the exact global threshold comes from three all-reduced histograms of float bit patterns (11 + 11 + 9 bits) instead of gathering all sums;
blocks are also balanced where the bound would be missed, not only beyond four times the mean; equal values are kept rank by rank until there are k.
Invariant: every rank's every region is in the result once; between re-evaluations at most 6k(P-1)/P words each way where ranks select alike.
Cost: (2P + 2 log P) messages; O(n) to select, O(k) to add. Programs of P^2 chunks, so at most MAX_RANKS ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....cite import Cite
from ....errors import Unsupported, UsageError
from ....program.program import Program
from ..problem import options_of
from .phases import EDGES, Phases
from .problem import SparsePlan, SparseProblem, SparseStrategy

__all__ = ["CITE", "DEVIATIONS", "KINDS", "OkTopk"]

CITE = Cite(
    key="li2022oktopk", title="Near-Optimal Sparse Allreduce for Distributed Deep Learning", authors="Shigang Li, Torsten Hoefler", year=2022,
    venue="PPoPP 2022",
)  # fmt: skip
DEVIATIONS = (
    "thresholds follow the k-th magnitude", "sizes for 128 thresholds at once", "exact thresholds from histograms",
    "regions follow every step's proposals", "ties rank by rank",
)  # fmt: skip
KINDS = ("steady", "thresholds", "regions", "thresholds+regions")
MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class OkTopk(SparseStrategy):
    """Options. period: steps between exact thresholds; region_period: between new regions; balance: times the mean that a block may have."""

    name: ClassVar[str] = "oktopk"
    cite: ClassVar[Cite] = CITE

    period: int = 32
    region_period: int = 64
    balance: float = 4.0

    def plan(self, problem: SparseProblem) -> SparsePlan:
        """Raises: Unsupported beyond MAX_RANKS ranks, UsageError."""
        if self.period < 1 or self.region_period < 1 or self.balance < 1:
            raise UsageError("periods and balance must be >= 1", where="oktopk")
        if len(problem.ranks) > MAX_RANKS:
            raise Unsupported(f"{len(problem.ranks)} ranks, the headers of Ok-Topk are for {MAX_RANKS}", hint="sum inside servers first")
        works: dict[str, object] = {}
        programs = {kind: self._program(problem, kind, works) for kind in KINDS}
        n = len(problem.ranks)
        return SparsePlan(
            strategy=self.name, programs=programs, usual="steady", words=4 * problem.k * (n - 1) / n * problem.entry_bytes / 8,
            works=works, options=options_of(self), notes={"limit_words": problem.limit_words},  # type: ignore[arg-type]
        )  # fmt: skip

    def _program(self, problem: SparseProblem, kind: str, works: dict[str, object]) -> Program:
        n, exact = len(problem.ranks), "thresholds" in kind
        p = Phases(problem, f"oktopk {kind}", regions=n, parts=n)
        picked = p.select(exact=exact)
        p.headers()
        if "regions" in kind:
            p.gather_counts("counts", 8 * n)
        sums = p.sum_regions(picked)
        if not exact:
            p.gather_counts("edges", 8 * EDGES)
        p.histograms(always=exact)
        chosen = p.choose(sums, problem.most)
        p.gather_counts("histogram, then sizes", 16, always=exact)
        blocks = p.balance(chosen)
        rooms = p.gather(blocks, n, problem.k / n, problem.most)
        # chunk (region j, part q) of the result lies in the block of rank q, at j
        p.finish(rooms, [(c % n) * n + c // n for c in range(n * n)], problem.k)
        works.update(p.works)
        return p.b.build()
