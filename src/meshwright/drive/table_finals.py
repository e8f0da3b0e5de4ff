"""Finalists of a table decision: lookups of many cheap plans are measured, plans are corrected by them, and the best are measured with their exchanges.

Lookups are a matter of one device and of milliseconds, so many plans are looked at, and costs err differently on each. What a measured plan's devices
take goes back into the costs, and moves and swaps make new plans of it (`corrected`). Exchanges want a process per device, so few plans have them
measured: those that stay close to the best are measured again, and medians decide.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..decide.tables import TablePlan, TableProblem, TableStrategy
from ..decide.tables.refine import corrected
from ..errors import MeshwrightError
from ..kernels.effort import time_is_up

__all__ = ["Measure", "Measured", "Tried", "finals"]

LOOKED_AT = 4  # plans per finalist whose lookups are measured
CORRECTED = 2  # plans per finalist that are corrected by what was measured
CLOSE, ROUNDS = 0.03, 3  # of the best: measured again, so often at most


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
        """Seconds of each plan's devices, one at a time."""
        ...

    def __call__(self, plans: Sequence[TablePlan]) -> Sequence[Measured]:
        """With both exchanges."""
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


@dataclass(frozen=True)
class _Looked:
    strategy: TableStrategy
    plan: TablePlan
    compute_s: tuple[float, ...]
    price_s: float  # by the lookups measured, and exchanges as the costs say


def finals(problem: TableProblem, ranked: Sequence[Tried], measure: Measure, finalists: int) -> list[Tried]:
    """So many plans, no two alike, measured, the best first: the strategies' own, those they thought worth a measurement, and corrected ones."""
    pool: dict[object, tuple[TableStrategy, TablePlan]] = {}
    for t in ranked:
        for plan in () if t.plan is None else (t.plan, *t.plan.others):
            pool.setdefault(plan.shards, (t.strategy, plan))
    cheapest = sorted(pool.values(), key=lambda x: x[1].cost_s)[: LOOKED_AT * finalists]
    looked = _looked(problem, cheapest, measure)
    spent: set[object] = set()
    known = {x.plan.shards for x in looked}
    for _ in range(CORRECTED * finalists):
        left = [x for x in looked if x.plan.shards not in spent]
        if not left or time_is_up():
            break
        best = min(left, key=lambda x: x.price_s)
        spent.add(best.plan.shards)
        new = [p for p in corrected(problem, best.plan, best.compute_s, best.strategy) if p.shards not in known]
        known |= {p.shards for p in new}
        looked += _looked(problem, [(best.strategy, p) for p in {p.shards: p for p in new}.values()], measure)
    return _decided(sorted(looked, key=lambda x: x.price_s)[:finalists], measure)


def _looked(problem: TableProblem, plans: Sequence[tuple[TableStrategy, TablePlan]], measure: Measure) -> list[_Looked]:
    found = []
    for (strategy, plan), compute_s in zip(plans, measure.lookups_s([p for _, p in plans]) if plans else (), strict=True):
        phases = problem.timed(np.array(compute_s), np.array(plan.columns, float))
        found.append(_Looked(strategy, plan, tuple(compute_s), float(phases.total_s)))
    return found


def _decided(chosen: Sequence[_Looked], measure: Measure) -> list[Tried]:
    """Measured with exchanges until one is left, the others being dearer by more than `CLOSE`, or often enough."""
    taken: list[list[Measured]] = [[] for _ in chosen]
    alive = list(range(len(chosen)))
    for _ in range(ROUNDS):
        for i, found in zip(alive, measure([chosen[i].plan for i in alive]), strict=True):
            taken[i].append(found)
        best = min(_median(taken[i]).total_s for i in alive)
        alive = [i for i in alive if _median(taken[i]).total_s <= best * (1 + CLOSE)]
        if len(alive) < 2 or time_is_up():
            break
    done = [(i not in alive, Tried(strategy=x.strategy, plan=replace(x.plan, others=()), measured=_median(taken[i]))) for i, x in enumerate(chosen)]
    return [t for _, t in sorted(done, key=lambda x: (x[0], x[1].time_s))]


def _median(taken: Sequence[Measured]) -> Measured:
    columns = ([getattr(x, kind) for x in taken] for kind in ("compute_s", "backward_s", "forward_s"))
    compute, back, fore = (tuple(statistics.median(d) for d in zip(*rows, strict=True)) for rows in columns)
    return Measured(compute_s=compute, backward_s=back, forward_s=fore)
