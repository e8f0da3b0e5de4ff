"""Large broadcasts and reductions in two halves: scatter and all-gather, reduce-scatter and gather.

Cite: M. Barnett, L. Shuler, S. Gupta, D. G. Payne, R. van de Geijn, J. Watts, "Building a high-performance collective communication library"
(Supercomputing 1994).
Left open by the paper: which all-gather. Our answer: an option, a ring (n - 1 rounds with the next neighbour) or Bruck's (log n rounds).
Deviations: reduce is the mirror: reduce-scatter by the same exchange backwards, then a binomial gather.
Invariant: after the first half every rank holds its own block of n.
Cost: (log2 n + n - 1) or 2 log2 n rounds; 2 (n - 1) / n of the message through the busiest rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from ....cite import Cite
from ....errors import UsageError
from ..bounds.collective import collective_bound
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy
from .bruck import all_gather_rounds
from .contract import refuse
from .rooted_tree import binomial_scatter
from .rounds import Area, Move, Order, plan_rounds, resolve_order, reverse

__all__ = ["CITE", "DEVIATIONS", "ScatterAllGather", "ring_rounds"]

CITE = Cite(
    key="barnett1994building",
    title="Building a High-Performance Collective Communication Library",
    authors="M. Barnett, L. Shuler, S. Gupta, D. G. Payne, R. van de Geijn, J. Watts",
    year=1994,
    venue="Supercomputing",
    doi="10.1109/SUPERC.1994.344271",
)
DEVIATIONS = ("the all-gather may be a ring or Bruck's", "reduce is the mirror image")
OPS = ("broadcast", "reduce")


def ring_rounds(n: int) -> list[list[Move]]:
    """All-gather round a ring: in round k every position passes on the block of its k-th predecessor."""
    return [[Move(i, (i + 1) % n, ((i - k) % n,)) for i in range(n)] for k in range(n - 1)]


@dataclass(frozen=True, kw_only=True)
class ScatterAllGather(CollectiveStrategy):
    """Options. exchange: `ring` or `bruck`; order: as elsewhere, turned so that the root comes first; unroll: there is no other form."""

    name: ClassVar[str] = "scatter-all-gather"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = OPS

    exchange: Literal["ring", "bruck"] = "ring"
    order: Order = "rank"
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Broadcast and reduce. Raises: Disconnected, Unsupported, UsageError (options)."""
        bound, n = collective_bound(problem), len(problem.ranks)
        if self.exchange not in ("ring", "bruck"):
            raise UsageError(f"exchange must be ring or bruck, got {self.exchange!r}", where="scatter-all-gather")
        if problem.op not in OPS:
            raise refuse(problem, "scatter and all-gather", OPS)
        order = list(resolve_order(problem, self.order, "scatter-all-gather"))
        start = order.index(problem.root)
        placed = order[start:] + order[:start]
        gather = ring_rounds(n) if self.exchange == "ring" else all_gather_rounds(n)
        first = binomial_scatter(n)
        if problem.op == "broadcast":
            rounds = [*first, *gather]
        else:
            rounds = [*reverse(gather), *([replace(m, src=m.dst, dst=m.src) for m in step] for step in reversed(first))]
        areas = {"data": Area("output" if problem.op == "broadcast" else "input", n)}
        chosen = replace(self, order=tuple(order))
        return plan_rounds(problem, chosen, rounds, areas, order=placed, pack=False, name=self.name, bound=bound)
