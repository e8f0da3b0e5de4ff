"""The joint programme against exhaustive search, and its plans against the checker."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monet_rig import least_time_s, step_graphs

from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.lifetimes import lifetimes_of
from meshwright.decide.memory.monet import Monet
from meshwright.decide.memory.monet.fixed import fixed, free_ways
from meshwright.decide.memory.monet.merging import merged
from meshwright.decide.memory.monet.schedule import runs_of
from meshwright.decide.memory.monet.solving import leanest
from meshwright.decide.memory.step import finished, keep_everything
from meshwright.errors import Infeasible, Unsupported
from meshwright.graph.step_graph import Alternative, StepGraph, StepNode, StepStorage
from meshwright.testing.steps import random_step_graph


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@settings(max_examples=50, deadline=None)
@given(graph=step_graphs(), share=st.floats(0, 1), alternatives=st.booleans())
def test_the_programme_finds_what_exhaustive_search_finds(graph: StepGraph, share: float, alternatives: bool) -> None:
    strategy = Monet(implementations=alternatives)
    lean = strategy.plan(graph, None, rng=rng())
    keep = keep_everything(graph)
    assert lean.least_bytes == lean.peak_bytes
    assert least_time_s(graph, lean.peak_bytes - 1, alternatives=alternatives) is None
    budget = lean.peak_bytes + round(share * max(0, keep.peak_bytes - lean.peak_bytes))
    plan = strategy.plan(graph, budget, rng=rng())
    verdict = check_step_plan(graph, plan)
    assert not verdict.findings, verdict.findings[0].message
    best = least_time_s(graph, budget, alternatives=alternatives)
    assert best is not None and plan.optimal
    assert math.isclose(plan.time_s, best) and plan.floor_s is not None and math.isclose(plan.floor_s, best, rel_tol=1e-6)


@settings(max_examples=20, deadline=None)
@given(graph=step_graphs(most_operators=7), share=st.floats(0, 1))
def test_choosing_implementations_too_is_never_slower(graph: StepGraph, share: float) -> None:
    alone = Monet(implementations=False)
    lean = alone.plan(graph, None, rng=rng())
    budget = lean.peak_bytes + round(share * max(0, keep_everything(graph).peak_bytes - lean.peak_bytes))
    best = alone.plan(graph, budget, rng=rng()).time_s * (1 + 1e-9)
    assert Monet().plan(graph, budget, rng=rng()).time_s <= best
    # as a large network, where only the plain operators are within the exact programme's reach
    plain = len(merged(graph, alternatives=False).operators)
    large = Monet(exact_operators=plain).plan(graph, budget, rng=rng())
    assert large.time_s <= best and not check_step_plan(graph, large).findings


@settings(max_examples=20, deadline=None)
@given(graph=step_graphs(most_operators=7), share=st.floats(0, 1))
def test_lossy_implementations_never_make_it_slower_and_can_be_left_out(graph: StepGraph, share: float) -> None:
    def lossy(n: StepNode) -> StepNode:
        return msgspec.structs.replace(n, alternatives=tuple(msgspec.structs.replace(a, lossless=a.over >= 0) for a in n.alternatives))

    graph = msgspec.structs.replace(graph, nodes=tuple(map(lossy, graph.nodes)))
    exact = Monet(lossy=False, exact_operators=0)
    try:
        budget = exact.plan(graph, None, rng=rng()).peak_bytes + round(share * 8)
        without = exact.plan(graph, budget, rng=rng())
    except Infeasible:
        return
    assert not check_step_plan(graph, without).findings
    assert all(a.alternative < 0 or graph.nodes[a.node].alternatives[a.alternative].lossless for a in without.actions)
    assert Monet(exact_operators=0).plan(graph, budget, rng=rng()).time_s <= without.time_s * (1 + 1e-9)


def test_the_programme_counts_as_the_simulator_does() -> None:
    for seed in range(60):
        m = merged(random_step_graph(random.Random(seed), forward=5))
        lean = leanest(m, nodes=1000)
        runs, boundary = runs_of(m, lean.decisions)
        assert finished(m.graph, runs, boundary, strategy="monet").peak_bytes == round(lean.value), seed


@settings(max_examples=25, deadline=None)
@given(graph=step_graphs(most_operators=7), share=st.floats(0, 1))
def test_the_knapsack_is_a_floor_and_its_plans_fit(graph: StepGraph, share: float) -> None:
    """The way of large networks, on graphs small enough for the exact one."""
    exact, large = Monet(), Monet(exact_operators=0)
    least = exact.plan(graph, None, rng=rng()).peak_bytes
    budget = least + round(share * max(0, keep_everything(graph).peak_bytes - least))
    best = exact.plan(graph, budget, rng=rng())
    try:
        plan = large.plan(graph, budget, rng=rng())
    except Infeasible as refused:
        assert refused.data["least_bytes"] > budget and not refused.data["proved"]
        return
    assert not check_step_plan(graph, plan).findings
    assert plan.time_s >= best.time_s * (1 - 1e-9)
    assert plan.least_bytes is not None and plan.least_bytes <= least
    assert plan.floor_s is None or plan.floor_s <= best.time_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(graph=step_graphs(most_operators=7), data=st.data())
def test_a_schedule_of_chosen_implementations_is_one_of_the_graph_itself(graph: StepGraph, data: st.DataObject) -> None:
    ways = {i: data.draw(st.integers(0, len(n.alternatives) - 1)) for i, n in enumerate(graph.nodes) if n.alternatives and data.draw(st.booleans())}
    one = fixed(graph, ways)
    assert all(a in (-1, ways.get(i, -1)) for i, a in enumerate(one.alternative))
    over = {i for i, w in ways.items() if graph.nodes[i].alternatives[w].over >= 0}
    assert all(one.alternative[i] == w for i, w in ways.items() if i not in over)
    lives = lifetimes_of(one.graph)
    held = lives.keep_all()
    for s in np.flatnonzero(lives.movable):
        held[s] = data.draw(st.integers(0, lives.stages + 1))
    peak, seconds = lives.measure(held)
    line = lives.runs(held)
    assert line is not None
    runs, boundary = one.runs(*line)
    plan = finished(graph, runs, boundary, strategy="test")
    verdict = check_step_plan(graph, plan)
    assert not verdict.findings, verdict.findings[0].message
    assert plan.peak_bytes <= peak and math.isclose(plan.time_s, seconds)


def test_a_result_that_somebody_else_reads_is_not_written_over() -> None:
    for backward_reads, wanted in ((False, 0), (True, -1)):
        storages = tuple(StepStorage(size_bytes=4, owner=str(s), kind="input" if s == 0 else "made") for s in range(4))
        way = Alternative(name="in place", inputs=(1,), time_s=1.0, over=1)
        nodes = (
            StepNode(name="x", target="placeholder", phase="input", storages=(0,)),
            StepNode(name="f", target="op", phase="forward", inputs=(0,), storages=(1,), makes=(1,), time_s=1.0),
            StepNode(name="g", target="op", phase="forward", inputs=(1,), storages=(2,), makes=(2,), time_s=1.0, alternatives=(way,)),
            StepNode(name="b", target="op", phase="backward", inputs=(2, *([1] if backward_reads else [])), storages=(3,), makes=(3,), time_s=1.0),
        )
        graph = StepGraph(name="test", nodes=nodes, storages=storages, boundary=3, results=(3,))
        assert free_ways(graph) == {2: 0}
        one = fixed(graph, {2: 0})
        assert one.alternative[2] == wanted and one.place[2] == (2 if backward_reads else 1)


@settings(max_examples=20, deadline=None)
@given(graph=step_graphs())
def test_a_budget_below_the_least_is_refused_with_the_least(graph: StepGraph) -> None:
    least = Monet().plan(graph, None, rng=rng()).peak_bytes
    with pytest.raises(Infeasible) as caught:
        Monet().plan(graph, least - 1, rng=rng())
    assert caught.value.data["least_bytes"] == least and caught.value.data["proved"]


def test_several_micro_batches_in_flight_are_refused() -> None:
    graph = msgspec.structs.replace(random_step_graph(random.Random(0)), in_flight=2)
    with pytest.raises(Unsupported, match="monet plans one micro-batch"):
        Monet().plan(graph, None, rng=rng())
