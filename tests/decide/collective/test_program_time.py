"""Worth of programs: the busiest link's time is a lower bound of the simulation, and what large programs are given instead of it."""

from __future__ import annotations

import numpy as np
import pytest
from collective_oracle import bandwidth_time_s
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.collective import NAMES, CollectiveProblem, ForestColl, Ring, auto, choice
from meshwright.decide.collective.classic import direct
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.joint.strategy import Joint
from meshwright.decide.collective.program_time import busiest_link_s, simulated_steps, simulated_time_s
from meshwright.errors import Unsupported
from meshwright.io.fabric.name import load_fabric
from meshwright.report.collective_text import plan_line
from meshwright.testing.fabrics import fabrics


@settings(max_examples=40, deadline=None)
@given(fabrics(min_devices=2, max_devices=5), st.sampled_from(("ring", "direct", "bruck", "forestcoll")))
def test_no_simulation_beats_the_busiest_link(fabric, name):
    problem = CollectiveProblem.on(fabric, "all-gather", 1 << 16)
    try:
        plan = NAMES[name]().plan(problem, rng=np.random.default_rng(0))
    except Unsupported:
        return
    least_s = busiest_link_s(plan.program, fabric, problem.ranks)
    assert least_s <= simulated_time_s(plan.program, fabric, problem.ranks, None) * (1 + 1e-9)
    assert least_s >= float(bandwidth_time_s(plan.program, fabric, problem.ranks)) * (1 - 1e-9)
    assert simulated_steps(plan.program) == plan.program.executed_steps or plan.program.fold is not None


def test_large_programs_say_that_they_were_not_simulated(monkeypatch):
    monkeypatch.setattr(choice, "MAX_SIMULATED_STEPS", 10)
    monkeypatch.setattr(choice, "MAX_RANKS_ALWAYS_SIMULATED", 2)
    problem = CollectiveProblem.on(load_fabric("two-islands"), "all-gather", 1 << 20)
    ranked = auto(problem, candidates=[NAMES["ring"]()])
    assert "too many to simulate" in ranked[0].why and "too many to simulate" in plan_line(problem, ranked)
    assert ranked[0].time_s == busiest_link_s(ranked[0].plan.program, problem.fabric, problem.ranks) >= float(ranked[0].plan.bound)


def test_an_estimate_does_not_win_over_a_simulation(monkeypatch):
    problem = CollectiveProblem.on(load_fabric("two-islands"), "all-gather", 1 << 20)
    candidates = [NAMES["ring"](slices=8), NAMES["direct"]()]
    steps = [c.plan(problem, rng=np.random.default_rng(0)).program.executed_steps for c in candidates]
    assert auto(problem, candidates=candidates)[0].strategy == "ring" and steps[0] > steps[1]
    monkeypatch.setattr(choice, "MAX_SIMULATED_STEPS", steps[1])
    monkeypatch.setattr(choice, "MAX_RANKS_ALWAYS_SIMULATED", 2)
    ranked = auto(problem, candidates=candidates)
    assert [r.strategy for r in ranked] == ["direct", "ring"] and ranked[1].time_s < ranked[0].time_s


def test_programs_with_a_root_are_simulated_at_more_steps(monkeypatch):
    """Few of their messages share a link, so a step of theirs costs less."""
    for op, strategy in (("scatter", "direct"), ("gather", "direct"), ("broadcast", "rooted-tree"), ("all-gather", "direct")):
        problem = CollectiveProblem.on(load_fabric("two-islands"), op, 1 << 20)
        candidates = [NAMES[strategy]()]
        steps = candidates[0].plan(problem, rng=np.random.default_rng(0)).program.executed_steps
        monkeypatch.setattr(choice, "MAX_RANKS_ALWAYS_SIMULATED", 2)
        monkeypatch.setattr(choice, "MAX_SIMULATED_STEPS", -(-steps // choice.ONE_MESSAGE_FACTOR))
        assert ("too many to simulate" in auto(problem, candidates=candidates)[0].why) == (op == "all-gather"), op


def test_link_loads_of_switches_that_copy_are_refused():
    fabric = load_fabric("dgx-h100:1")
    plan = Joint(in_network=True).plan(CollectiveProblem.on(fabric, "all-reduce", 1 << 20), rng=np.random.default_rng(0))
    with pytest.raises(Unsupported, match="plain programs"):
        busiest_link_s(plan.program, fabric, (*(d.name for d in fabric.devices), *plan.switches))


def test_among_many_ranks_a_plan_near_the_bound_ends_the_search(monkeypatch):
    problem = CollectiveProblem.on(load_fabric("dgx-h100:1"), "all-gather", 1 << 28)
    candidates = (Ring(), Direct(), ForestColl())
    assert all(entry.plan for entry in auto(problem, candidates=candidates))
    monkeypatch.setattr(choice, "MAX_RANKS_ALWAYS_SIMULATED", 2)
    monkeypatch.setattr(choice, "MAX_ABOVE_BOUND", 1.0)
    first, *others = auto(problem, candidates=candidates)
    assert first.strategy == "forestcoll" and [entry.plan for entry in others] == [None, None]
    assert all("nothing can gain more" in entry.why for entry in others)
    monkeypatch.setattr(choice, "MAX_ABOVE_BOUND", -1.0)
    assert all(entry.plan for entry in auto(problem, candidates=candidates))
    # Among hundreds a plan need not be as near.
    monkeypatch.setattr(choice, "MAX_ABOVE_BOUND_OF_MANY", 1.0)
    monkeypatch.setattr(choice, "MANY_RANKS", 4)
    assert [entry.plan is not None for entry in auto(problem, candidates=candidates)] == [True, False, False]
    monkeypatch.setattr(choice, "MANY_RANKS", 8)
    assert all(entry.plan for entry in auto(problem, candidates=candidates))
    # Among thousands only what folds, unless it is asked for alone.
    monkeypatch.setattr(choice, "MAX_PLAIN_RANKS", 4)
    assert [entry.plan is not None for entry in auto(problem, candidates=candidates)] == [True, False, False]
    assert auto(problem, candidates=(Ring(),))[0].plan is not None
    everyone = CollectiveProblem.on(problem.fabric, "reduce-scatter", 1 << 20)
    with pytest.raises(Unsupported, match="fit no program"):
        auto(everyone, candidates=(Direct(), Ring()))


def test_direct_exchanges_that_fit_no_program_are_refused_before_they_are_written(monkeypatch):
    monkeypatch.setattr(direct, "MAX_EXECUTED_STEPS", 100)
    with pytest.raises(Unsupported, match="56 messages of 8 ranks are 112 steps, a program holds 100"):
        Direct().plan(CollectiveProblem.on(load_fabric("dgx-h100:1"), "all-to-all", 1 << 20), rng=np.random.default_rng(0))
