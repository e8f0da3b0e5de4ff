"""Which operations are packed in trees, and what each asks of the linear program: whose shares spread, whose contributions are collected."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ..problem import CollectiveProblem
from ..trees.lp import Demand

__all__ = ["COLLECTED", "PACKED", "SPREAD", "demand_of"]

SPREAD = ("all-reduce", "all-gather", "broadcast")
COLLECTED = ("all-reduce", "reduce-scatter", "reduce")
PACKED = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")


def demand_of(problem: CollectiveProblem, members: Sequence[int]) -> Demand:
    """The demand of a packed operation with equal shards; `members`: nodes of its ranks in order, then others that take part without a share."""
    n = len(problem.ranks)
    shares = [Fraction(1, n)] * n if problem.op in ("all-gather", "reduce-scatter") else [Fraction(int(r == problem.root)) for r in range(n)]
    weight = None if problem.op == "all-reduce" else (*shares, *[Fraction(0)] * (len(members) - n))
    return Demand(tuple(members), spread=problem.op in SPREAD, collect=problem.op in COLLECTED, weight=weight)
