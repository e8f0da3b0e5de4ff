"""What would make an infeasible memory budget feasible: the nearest changes, each found by planning with it.

Tried on the same layer: another strategy within the same budget; the least budget (of the leanest policy); the most layers that the tightest stage
can hold, and the most micro-batches in flight. A smaller micro-batch needs another graph: `smaller` makes its problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from ...errors import Infeasible, MeshwrightError
from .problem import RecomputePlan, RecomputeProblem, RecomputeStrategy, StageBudget

__all__ = ["MemoryChange", "nearest_feasible"]


class MemoryChange(msgspec.Struct, frozen=True, kw_only=True):
    """`time_s`: of recomputing per micro-batch then, on the slowest stage."""

    kind: str  # "strategy" | "micro-batch" | "layers" | "in-flight" | "budget"
    what: str
    value: int
    time_s: float


def nearest_feasible(
    error: Infeasible, problem: RecomputeProblem, strategy: RecomputeStrategy, others: Mapping[str, RecomputeStrategy],
    *, smaller: Iterator[tuple[int, RecomputeProblem]] | None = None,
) -> Infeasible:  # fmt: skip
    """The same error with what would help in `hint` and `data["changes"]`. `smaller`: (micro-batch, its problem), largest first."""
    found = list(_changes(error, problem, strategy, others, smaller))
    if not found:
        return error
    hint = "; or ".join(f"{c.what} (recomputing takes {c.time_s:.4g} s per micro-batch)" for c in found)
    data: dict[str, Any] = {**error.data, "changes": [msgspec.to_builtins(c) for c in found]}
    return Infeasible(error.message, where=error.where, hint=f"nearest changes: {hint}", data=data)


def _changes(
    error: Infeasible, problem: RecomputeProblem, strategy: RecomputeStrategy, others: Mapping[str, RecomputeStrategy],
    smaller: Iterator[tuple[int, RecomputeProblem]] | None,
) -> Iterator[MemoryChange]:  # fmt: skip
    fitting = [(made.slowest_s, name) for name, s in others.items() if (made := _plan(s, problem)) is not None]
    if fitting:
        time_s, name = min(fitting)
        yield MemoryChange(kind="strategy", what=f"the strategy {name}", value=0, time_s=time_s)
    for batch, changed in smaller or ():
        if (made := _plan(strategy, changed)) is not None:
            yield MemoryChange(kind="micro-batch", what=f"micro-batches of {batch}", value=batch, time_s=made.slowest_s)
            break
    stage = error.data.get("stage")
    if not isinstance(stage, int):
        return
    budget = problem.stages[stage]

    def with_stage(**fields: int) -> RecomputeProblem:
        stages = [*problem.stages]
        stages[stage] = msgspec.structs.replace(budget, **fields)
        return msgspec.structs.replace(problem, stages=tuple(stages))

    for kind, field, words in (("layers", "layers", "layers on stage"), ("in-flight", "in_flight", "micro-batches in flight on stage")):
        def tried(n: int, field: str = field) -> RecomputeProblem:
            return with_stage(**{field: n})

        most = _most(getattr(budget, field), lambda n, tried=tried: _alone(strategy, tried(n), stage) is not None)  # type: ignore[misc]
        if most:
            made = _alone(strategy, tried(most), stage)
            assert made is not None
            yield MemoryChange(kind=kind, what=f"{most} {words} {stage} instead of {getattr(budget, field)}", value=most, time_s=made.slowest_s)
    needed = _least_budget(budget, lambda size: _alone(strategy, with_stage(budget_bytes=size), stage) is not None, error.data.get("needed_bytes"))
    if needed and (made := _alone(strategy, with_stage(budget_bytes=needed), stage)) is not None:
        yield MemoryChange(kind="budget", what=f"a budget of {needed} bytes on stage {stage}", value=needed, time_s=made.slowest_s)


def _plan(strategy: RecomputeStrategy, problem: RecomputeProblem) -> RecomputePlan | None:
    try:
        return strategy.plan(problem, rng=np.random.default_rng(0))
    except MeshwrightError:
        return None


def _alone(strategy: RecomputeStrategy, problem: RecomputeProblem, stage: int) -> RecomputePlan | None:
    """The plan for one stage by itself: others may be impossible too, and are named when this one is mended."""
    return _plan(strategy, msgspec.structs.replace(problem, stages=(problem.stages[stage],)))


def _most(now: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 1..now-1 that fits (less never needs more); 0 for none."""
    low, high = 0, now
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _least_budget(budget: StageBudget, fits: Callable[[int], bool], needed: Any) -> int:
    """What the error says is needed, if that is enough; it is exact for the strategy, so nothing below fits."""
    return needed if isinstance(needed, int) and needed > budget.budget_bytes and fits(needed) else 0
