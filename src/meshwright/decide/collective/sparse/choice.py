"""Which all-reduce to use for a gradient: every sparse one and the dense ring, simulated on the fabric, beside what must be received at least.

Expected sizes are simulated; `upper` is the same programs with every message as large as it may be. A program that runs every `period`-th step
counts for its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from ....cost import assumed_cost
from ....errors import Unsupported
from ....simulate import simulate_program
from ..classic.ring import Ring
from ..problem import CollectiveProblem
from .problem import SparsePlan, SparseProblem, SparseStrategy

__all__ = ["DENSE", "SparseRanked", "rank_sparse", "receive_bound_s"]

DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class SparseRanked:
    """`time_s`: of the usual step; `mean_s`: over a cycle; `upper_s`: with the largest messages. None, and `why`, where there is no plan. Words of 4
    bytes, sent and received by the busiest rank."""

    strategy: str
    plan: SparsePlan | None
    time_s: float | None
    mean_s: float | None = None
    upper_s: float | None = None
    words: float | None = None
    why: str = ""
    kinds_s: dict[str, float] = field(default_factory=dict)


def receive_bound_s(problem: SparseProblem) -> float:
    """Seconds that the bound's words need at least on the way into some device, over all its links at once."""
    rates = {name: sum(x.rate_Bps for x in problem.fabric.links if x.dst == name) for name in problem.ranks}
    return float(Fraction(4 * problem.bound_words) / min(rates.values()))


def rank_sparse(problem: SparseProblem, candidates: Sequence[tuple[str, SparseStrategy]]) -> list[SparseRanked]:
    """All candidates and the dense ring, by mean time of a step; refused ones last. Raises: what the simulator raises."""
    found = [_dense(problem)]
    for name, candidate in candidates:
        try:
            plan = candidate.plan(problem)
        except Unsupported as error:
            found.append(SparseRanked(strategy=name, plan=None, time_s=None, why=str(error)))
            continue
        found.append(_judged(problem, plan))
    return sorted(found, key=lambda x: (x.mean_s is None, x.mean_s, x.strategy))


def _judged(problem: SparseProblem, plan: SparsePlan) -> SparseRanked:
    cost = problem.cost or assumed_cost(problem.fabric)

    def time_s(name: str, sizes: str = "expected") -> float:
        done = simulate_program(
            plan.programs[name], problem.fabric, problem.ranks, cost, works=plan.works, sizes=sizes, record=False, memory=False,  # type: ignore[arg-type]
        )  # fmt: skip
        return done.makespan_s

    kinds = {name: time_s(name) for name in plan.programs}
    mean = kinds[plan.usual]
    for option, part in (("period", "thresholds"), ("region_period", "regions")):
        if part in kinds:
            mean += (kinds[part] - kinds[plan.usual]) / plan.options[option]
    usual_s, upper_s = kinds[plan.usual], time_s(plan.usual, "upper")
    return SparseRanked(strategy=plan.strategy, plan=plan, time_s=usual_s, mean_s=mean, upper_s=upper_s, words=plan.words, kinds_s=kinds)


def _dense(problem: SparseProblem) -> SparseRanked:
    n = len(problem.ranks)
    cost = problem.cost or assumed_cost(problem.fabric)
    asked = CollectiveProblem(
        fabric=problem.fabric, op="all-reduce", ranks=problem.ranks, size_bytes=4 * problem.elements, transport=cost.transport
    )
    plan = Ring().plan(asked, rng=np.random.default_rng(0))
    time_s = simulate_program(plan.program, problem.fabric, problem.ranks, cost, record=False, memory=False).makespan_s
    return SparseRanked(
        strategy=DENSE, plan=None, time_s=time_s, mean_s=time_s, upper_s=time_s, words=2 * problem.elements * (n - 1) / n,
        why="the ring, nothing left out",
    )  # fmt: skip
