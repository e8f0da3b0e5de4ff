"""Plans do not depend on how busy the machine is: searches stop after counted work, the clock is the user's limit only.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from meshwright.decide.collective import CollectiveProblem, CollectiveStrategy, ForestColl, auto, default_candidates
from meshwright.decide.collective.memo import remember
from meshwright.decide.collective.sweep import sweep
from meshwright.errors import MeshwrightError, TimeLimit, UsageError
from meshwright.io.fabric.name import load_fabric
from meshwright.io.plan.program import program_bytes
from meshwright.kernels import effort
from meshwright.kernels.effort import count_work, worked_s

FABRIC = load_fabric("dgx1-v100:1")


def starved(patched: pytest.MonkeyPatch) -> None:
    """A machine on which everything takes a thousand times as long."""
    began = time.monotonic()
    patched.setattr(effort, "monotonic", lambda: began + 1000 * (time.monotonic() - began))


def candidates(problem: CollectiveProblem) -> list[CollectiveStrategy]:
    return list(default_candidates(problem))


def shown(problem: CollectiveProblem, candidate: CollectiveStrategy) -> object:
    """The plan of a strategy, or why there is none, on a fabric that nothing is remembered of."""
    try:
        plan = candidate.plan(replace(problem, fabric=replace(FABRIC)), rng=np.random.default_rng(0))
    except MeshwrightError as error:
        return type(error), error.message
    return program_bytes(plan.program), plan.options, plan.notes


def test_every_strategy_plans_the_same_on_a_starved_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CollectiveProblem.on(FABRIC, "all-reduce", 1 << 22, effort_s=0.5)
    quiet = [shown(problem, c) for c in candidates(problem)]
    starved(monkeypatch)
    assert [shown(problem, c) for c in candidates(problem)] == quiet


def test_the_choice_and_the_sweep_are_the_same_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1 << 10, 1 << 13, 1 << 18]

    def rows() -> list[list[tuple[str, float | None]]]:
        problem = CollectiveProblem.on(FABRIC.subset([d.name for d in FABRIC.devices[:6]]), "all-gather", 1 << 20)  # a fabric of its own each time
        out = [[(r.strategy, r.time_s) for r in auto(problem, candidates=candidates(problem), search=True, each_s=0.2)]]
        return out + [[(r.strategy, r.time_s) for r in row.ranked] for row in sweep(problem, sizes, candidates(problem), each_s=0.2)]

    quiet = rows()
    starved(monkeypatch)
    assert rows() == quiet


def test_more_effort_finds_more_and_the_clock_still_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CollectiveProblem.on(load_fabric("dgx-a100:2"), "broadcast", 1 << 20)
    heights = []
    for effort_s in (0.05, 60.0):
        plan = ForestColl().plan(replace(problem, fabric=replace(problem.fabric), effort_s=effort_s), rng=np.random.default_rng(0))
        heights.append(plan.notes["height"])
    assert heights[0] > heights[1]
    starved(monkeypatch)
    with pytest.raises(TimeLimit):
        ForestColl().plan(replace(problem, fabric=replace(problem.fabric), time_limit_s=1e-3), rng=np.random.default_rng(0))


def test_what_is_remembered_counts_as_the_work_that_it_was() -> None:
    fabric = replace(FABRIC)

    def inner() -> int:
        count_work(0.25)
        return 1

    def outer() -> int:
        count_work(0.5)
        return remember(fabric, "inner", inner)

    spent = []
    for _ in range(2):
        before = worked_s()
        assert remember(fabric, "outer", outer) == 1
        spent.append(worked_s() - before)
    assert spent[0] == pytest.approx(0.75, abs=1e-6) and spent[1] == pytest.approx(spent[0], abs=1e-6)


@pytest.mark.parametrize("limits", [{"effort_s": 0.0}, {"effort_s": -1.0}, {"effort_s": float("nan")}, {"time_limit_s": 0.0}])
def test_limits_must_leave_something(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(limits))):
        CollectiveProblem.on(FABRIC, "all-gather", 64, **limits)


def test_the_effort_is_what_is_given_whatever_the_time_limit() -> None:
    problem = CollectiveProblem.on(FABRIC, "all-gather", 64)
    assert problem.budget_s == replace(problem, time_limit_s=7.0).budget_s == 60.0
    assert replace(problem, time_limit_s=7.0, effort_s=2.0).budget_s == 2.0
    assert problem.deadline().clock_s == float("inf")
