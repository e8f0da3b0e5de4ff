"""What every memory strategy must do, on generated problems: for regions of layers, for whole steps, and for arenas."""

from __future__ import annotations

import random
from dataclasses import asdict, fields

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...arena import ArenaProblem
from ...check.arena import check_arena
from ...check.training.step_memory import check_step_plan
from ...decide.memory import MemoryStrategy, RecomputePlan, RecomputeProblem, StageBudget
from ...decide.memory.problem import ArenaStrategy, RecomputeStrategy, StepStrategy, policy_of
from ...decide.memory.step import least_bound_bytes
from ...errors import Infeasible, TimeLimit, Unsupported, UsageError
from ...graph.step_graph import StepGraph, StepPlan
from ...simulate.step_memory import simulate_step
from ..arenas import arena_problems
from ..recompute import layers
from ..steps import random_step_graph
from .chosen import named_and_cited, parametrized

EXAMPLES = settings(max_examples=15, deadline=None)
FEW = settings(max_examples=5, deadline=None)  # of searches
SMALL_EFFORT = 2_000  # effort of a search, in whatever it counts


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized(metafunc, "memory")


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_name_and_citation(kind: type[MemoryStrategy]) -> None:
    named_and_cited(kind)
    assert kind.answers in ("regions", "step", "arena")


# ---- regions of layers -------------------------------------------------------------------------------------------------
@st.composite
def region_problems(draw: st.DrawFn) -> RecomputeProblem:
    layer = draw(layers(most=6))
    stages = tuple(
        StageBudget(layers=draw(st.integers(1, 3)), in_flight=draw(st.integers(1, 3)), budget_bytes=draw(st.sampled_from([0, 300, 1000, 10**6])))
        for _ in range(draw(st.integers(1, 2)))
    )
    return RecomputeProblem(layer=layer, stages=stages, core=tuple(o.name for o in layer.operators[1:3]))


def regions(strategy: RecomputeStrategy, problem: RecomputeProblem) -> RecomputePlan | None:
    """The plan, or None for a refusal, which must say what to do or where."""
    try:
        return strategy.plan(problem, rng=rng())
    except (Infeasible, Unsupported, UsageError) as refusal:  # the last: `core` tears operators apart that write the same storage
        assert refusal.message and (refusal.hint or refusal.where)
        return None


@EXAMPLES
@given(problem=region_problems(), every=st.integers(1, 2))
def test_policies_keep_what_backward_needs_within_the_budget(regions_kind: type[RecomputeStrategy], problem: RecomputeProblem, every: int) -> None:
    for strategy in regions_kind.variants(problem, every=every):
        plan = regions(strategy, problem)
        if plan is None:
            continue
        assert plan.strategy == strategy.name and len(plan.stages) == len(problem.stages)
        for policy in plan.policies:
            whole = policy_of(problem.layer, policy.recompute)  # refuses operators that do not exist and torn in-place groups
            assert policy.time_s == pytest.approx(whole.time_s) and policy.workspace_bytes >= whole.workspace_bytes
            assert policy.kept_bytes >= sum(problem.layer.sizes[s] for s in policy.keep)
        for stage, chosen in zip(problem.stages, plan.stages, strict=True):
            assert sum(chosen.counts) == stage.layers * stage.in_flight and min(chosen.counts) >= 0
            kept = sum(n * p.kept_bytes for n, p in zip(chosen.counts, plan.policies, strict=True))
            assert chosen.kept_bytes == kept and kept + chosen.workspace_bytes <= stage.budget_bytes
            assert chosen.time_s >= chosen.bound_s * (1 - 1e-9) >= 0


@EXAMPLES
@given(problem=region_problems())
def test_regions_come_out_again_from_their_options(regions_kind: type[RecomputeStrategy], problem: RecomputeProblem) -> None:
    plan = regions(regions_kind(), problem)
    if plan is not None:
        again = regions(regions_kind(**msgspec.json.decode(msgspec.json.encode(plan.options))), problem)
        assert again is not None and msgspec.json.encode(again) == msgspec.json.encode(plan)


# ---- whole steps -------------------------------------------------------------------------------------------------------
def step_graph(seed: int, *, alternatives: bool = False) -> StepGraph:
    return random_step_graph(random.Random(seed), forward=5, alternatives=alternatives)


def made(kind: type[StepStrategy]) -> StepStrategy:
    """With its default options, but for an `effort`, which is little here."""
    return kind(effort=SMALL_EFFORT) if any(f.name == "effort" for f in fields(kind)) else kind()  # type: ignore[arg-type, call-arg]


def step(kind: type[StepStrategy], graph: StepGraph, budget: int | None) -> StepPlan | None:
    """The plan, or None for a refusal; one within a budget that it can keep is not refused."""
    try:
        return made(kind).plan(graph, budget, rng=rng())
    except Infeasible as refusal:
        least = refusal.data.get("least_bytes")
        assert refusal.message and (budget is None or least is None or least > budget)
    except (TimeLimit, Unsupported) as refusal:
        assert refusal.message and refusal.hint
    return None


@FEW
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.6, 0.8, 1.0]))
def test_steps_are_accepted_and_within_the_budget(step_kind: type[StepStrategy], seed: int, share: float) -> None:
    for graph in (step_graph(seed), step_graph(seed, alternatives=step_kind.chooses_ways)):
        least = step(step_kind, graph, None)
        if least is None:
            assert not step_kind.budgeted, "without a budget there is a plan"
            continue
        limit = int(least.peak_bytes / share)
        for plan, budget in ((least, None), (step(step_kind, graph, limit), limit)):
            if plan is None:
                continue
            verdict = check_step_plan(graph, plan)
            assert verdict.ok, verdict.findings
            run = simulate_step(graph, plan.actions, held_before=(plan.boundary,), boundary=plan.boundary)
            assert (run.peak_bytes, run.time_s) == (plan.peak_bytes, plan.time_s) and plan.strategy == step_kind.name
            assert budget is None or plan.peak_bytes <= budget
            assert plan.peak_bytes >= least_bound_bytes(graph) and (plan.floor_s is None or plan.time_s >= plan.floor_s * (1 - 1e-9))


@FEW
@given(seed=st.integers(0, 10**6))
def test_equal_steps_give_equal_bytes(step_kind: type[StepStrategy], seed: int) -> None:
    one, two = (step(step_kind, step_graph(seed), None) for _ in range(2))
    assert msgspec.json.encode(one) == msgspec.json.encode(two)
    assert step_kind(**asdict(step_kind())) == step_kind()  # type: ignore[call-overload]


# ---- arenas ------------------------------------------------------------------------------------------------------------
@EXAMPLES
@given(problem=arena_problems())
def test_arenas_are_accepted_and_come_out_again(arena_kind: type[ArenaStrategy], problem: ArenaProblem) -> None:
    plan = arena_kind().plan(problem, rng=rng())
    verdict = check_arena(problem, plan)
    assert verdict.ok, verdict.findings
    assert plan.arena_bytes >= plan.bound_bytes and plan.strategy == arena_kind.name
    again = arena_kind(**asdict(arena_kind())).plan(problem, rng=rng())  # type: ignore[call-overload]
    assert again.arena_bytes == plan.arena_bytes and again.offset_bytes.tolist() == plan.offset_bytes.tolist()
