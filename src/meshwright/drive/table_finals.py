"""Finalists of a table decision: lookups of many plans are measured, the costs learn from them, and the best are measured with their exchanges.

Lookups are a matter of one device and of milliseconds, so many plans are looked at: the cheapest, and each strategy's own, which differ more. What
they take teaches the costs (`decide.tables.learned`), and the strategies plan again. Exchanges want a process per device, which takes longer to start
than to measure: the finalists' are measured together, once. Repetitions are counted, not timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..decide.tables import TablePlan, TableProblem, TableStrategy
from ..decide.tables.learned import learned
from ..errors import Infeasible, MeshwrightError, Unsupported
from ..kernels.effort import time_is_up

__all__ = ["Measure", "Measured", "Tried", "finals"]

LOOKED_AT = 4  # plans per finalist whose lookups are measured first
LEAST_CUT = 2  # of the plans with the fewest shards, measured too, however dear: what a cut costs is what nets know least of
LESSONS = 3  # times that the costs learn, and as many plans as there are finalists are made anew
LOOKS = 12  # at a plan that gets among the finalists: the best of many that were looked at once is the luckiest too


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of one device each, and of the slowest all together."""

    compute_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        return max(sum(x) for x in zip(self.compute_s, self.backward_s, self.forward_s, strict=True))


class Measure(Protocol):
    """What a machine takes for plans."""

    def lookups_s(self, plans: Sequence[TablePlan]) -> Sequence[Sequence[float]]:
        """Seconds of each plan's devices, one at a time. One look: medians of several are better."""
        ...

    def __call__(self, plans: Sequence[TablePlan], compute_s: Sequence[Sequence[float]]) -> Sequence[Measured]:
        """With both exchanges, after lookups that took so long."""
        ...


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A strategy's plan and, where it was a finalist, what was measured of it. Without a plan: its refusal."""

    strategy: TableStrategy
    plan: TablePlan | None = None
    measured: Measured | None = None
    refused: MeshwrightError | None = None

    @property
    def time_s(self) -> float:
        """Measured, else by the costs."""
        return float("inf") if self.plan is None else self.measured.total_s if self.measured is not None else self.plan.cost_s

    @property
    def why(self) -> str:
        return self.refused.message if self.refused is not None else ""


class _Looked:
    """A plan, and what its devices' lookups took each time."""

    def __init__(self, strategy: TableStrategy, plan: TablePlan) -> None:
        self.strategy, self.plan, self.taken = strategy, plan, list[Sequence[float]]()
        self.compute_s, self.price_s = list[float](), 0.0

    def look(self, problem: TableProblem, compute_s: Sequence[float]) -> None:
        """Once more. The price is of the lookups measured, and of exchanges as the costs say."""
        self.taken.append(compute_s)
        self.compute_s = [statistics.median(x) for x in zip(*self.taken, strict=True)]
        self.price_s = float(problem.timed(np.array(self.compute_s), np.array(self.plan.columns, float)).total_s)


def finals(problem: TableProblem, ranked: Sequence[Tried], measure: Measure, finalists: int, *, seed: int = 0) -> list[Tried]:
    """So many plans, no two alike, measured, the best first: the strategies' own, those they thought worth a measurement, and those they make of
    costs that have learned."""
    pool: dict[object, _Looked] = {}
    for t in ranked:
        for plan in () if t.plan is None else (t.plan, *t.plan.others):
            pool.setdefault(plan.shards, _Looked(t.strategy, plan))
    own = {t.plan.shards for t in ranked if t.plan is not None}
    cheap = _worth_a_look(pool.values(), LOOKED_AT * finalists)
    looked = cheap + [x for x in pool.values() if x.plan.shards in own and x not in cheap]
    _look(problem, looked, measure)
    for _ in range(LESSONS):
        if time_is_up():
            break
        told = replace(problem, learned=learned(problem, [x.plan for x in looked], [x.compute_s for x in looked]))
        known, new = {x.plan.shards for x in looked}, dict[object, _Looked]()
        for t in ranked:
            for plan in () if t.plan is None else _again(t.strategy, told, seed):
                if plan.shards not in known:
                    new.setdefault(plan.shards, _Looked(t.strategy, plan))
        more = _worth_a_look(new.values(), finalists)
        _look(problem, [*more, *_best(looked, finalists)], measure)
        looked += more
    while (short := [x for x in _best(looked, finalists) if len(x.taken) < LOOKS]) and not time_is_up():
        _look(problem, short, measure)
    chosen = _best(looked, finalists)
    taken = measure([x.plan for x in chosen], [x.compute_s for x in chosen])
    done = [Tried(strategy=x.strategy, plan=replace(x.plan, others=()), measured=m) for x, m in zip(chosen, taken, strict=True)]
    return sorted(done, key=lambda t: t.time_s)


def _best(looked: Sequence[_Looked], count: int) -> list[_Looked]:
    return sorted(looked, key=lambda x: x.price_s)[:count]


def _worth_a_look(plans: Iterable[_Looked], count: int) -> list[_Looked]:
    """The cheapest, and of those that are cut least the cheapest."""
    listed = sorted(plans, key=lambda x: x.plan.cost_s)
    fewest = min((len(x.plan.shards) for x in listed), default=0)
    return list(dict.fromkeys([*listed[:count], *[x for x in listed if len(x.plan.shards) == fewest][:LEAST_CUT]]))


def _again(strategy: TableStrategy, told: TableProblem, seed: int) -> tuple[TablePlan, ...]:
    try:
        plan = strategy.plan(told, rng=np.random.default_rng(seed))
    except (Unsupported, Infeasible):
        return ()
    return (plan, *plan.others)


def _look(problem: TableProblem, plans: Sequence[_Looked], measure: Measure) -> None:
    for x, compute_s in zip(plans, measure.lookups_s([x.plan for x in plans]), strict=True):
        x.look(problem, compute_s)
