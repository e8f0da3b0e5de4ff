"""Exact optima of the preset fabrics against published and independently computed values."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from collective_oracle import assert_delivers, bandwidth_time_s
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.decide.collective import OPERATIONS, CollectiveProblem, ForestColl, Ring, collective_bound
from meshwright.decide.collective.bounds.bandwidth import bandwidth_bound
from meshwright.decide.collective.classic.direct import Direct
from meshwright.decide.collective.cuts import worst_cut
from meshwright.decide.collective.forestcoll.forest import build_forest
from meshwright.decide.collective.rates import RateGraph, rate_graph
from meshwright.errors import Unsupported
from meshwright.fabric.fabric import Fabric
from meshwright.io.fabric.name import load_fabric
from meshwright.testing.fabrics import fabrics

GB = 10**9


def graph_of(name: str) -> RateGraph:
    fabric = load_fabric(name)
    return rate_graph(fabric, [d.name for d in fabric.devices])


@pytest.mark.parametrize(
    ("name", "seconds_per_GB"),
    [
        ("dgx1-v100", Fraction(7, 150)),
        ("ndv2:2", Fraction(16, 25)),
        ("dgx-a100:2", Fraction(3, 65)),
        ("dgx-a100:4", Fraction(3, 25)),
        ("dgx-a100:8", Fraction(7, 25)),
        ("mi250:1", Fraction(7, 150)),
        ("mi250:2", Fraction(15, 166)),
        ("dgx-h100:128", Fraction(127, 50)),
    ],
)
def test_all_gather_optimum(name: str, seconds_per_GB: Fraction) -> None:
    graph = graph_of(name)
    assert worst_cut(graph, [1] * graph.ranks).ratio * GB / graph.unit_Bps == seconds_per_GB


@pytest.mark.parametrize(("name", "algbw_GBps"), [("ndv2:3", Fraction(75, 4)), ("ndv2:4", Fraction(50, 3))])
def test_all_gather_bandwidth(name: str, algbw_GBps: Fraction) -> None:
    bound = collective_bound(CollectiveProblem.on(load_fabric(name), "all-gather", GB))
    assert 1 / bound.exact == algbw_GBps


@pytest.mark.parametrize(("k", "algbw_GBps"), [(1, "320.00"), (2, "341.33"), (3, "342.86"), (4, "341.33"), (5, "347.83"), (83, "354.13")])
def test_published_bandwidth_of_few_trees_on_two_mi250_boxes(k: int, algbw_GBps: str) -> None:
    graph = graph_of("mi250:2")
    forest = build_forest(graph, [1] * 32, trees=k)
    assert f"{float(32 * k * graph.unit_Bps / forest.stretch / GB):.2f}" == algbw_GBps


@pytest.mark.parametrize(
    ("name", "k", "algbw_GBps"),
    [("dgx-a100:2", 13, "346.67"), ("dgx-a100:2", 1, "342.86"), ("mi250:1", 3, "342.86"), ("mi250:1", 1, "266.67"), ("dgx1-v100", 6, "171.43")],
)
def test_published_bandwidth_of_other_boxes(name: str, k: int, algbw_GBps: str) -> None:
    graph = graph_of(name)
    forest = build_forest(graph, [1] * graph.ranks, trees=k)
    assert f"{float(graph.ranks * k * graph.unit_Bps / forest.stretch / GB):.2f}" == algbw_GBps


def test_trees_of_sixteen_h100_boxes_reach_the_optimum_and_stay_low() -> None:
    forest = build_forest(graph_of("dgx-h100:16"), [1] * 128)
    assert forest.k == 1 and forest.stretch == forest.optimum and forest.height <= 6


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", ["dgx1-v100", "dgx-a100:2", "mi250:1", "two-islands:3", "dgx-h100:2"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_plans_on_presets_deliver(name: str, op: str) -> None:
    fabric = load_fabric(name)
    n = len(fabric.devices)
    problem = CollectiveProblem.on(fabric, op, 4 * 5040 * 10**5, root=3, peers=tuple((i + 1) % n for i in range(n)) if op == "permute" else ())
    planned = 0
    for strategy in (Ring(), ForestColl(pieces=2), Direct()):
        try:
            plan = strategy.plan(problem, rng=np.random.default_rng(0))
        except Unsupported as refusal:
            assert refusal.hint
            continue
        planned += 1
        assert_delivers(plan.program, np.random.default_rng(1))
        assert bandwidth_time_s(plan.program, problem.fabric, problem.ranks) >= bandwidth_bound(problem).exact
    assert planned >= (1 if op in ("all-to-all", "permute") else 2)


@settings(max_examples=100, deadline=None)
@given(fabrics(min_devices=2, max_devices=5), st.sampled_from(OPERATIONS))
def test_any_connected_fabric_gets_a_right_plan_or_a_typed_refusal(fabric: Fabric, op: str) -> None:
    n = len(fabric.devices)
    problem = CollectiveProblem.on(fabric, op, 4096, peers=tuple((i + 1) % n for i in range(n)) if op == "permute" else ())
    try:
        plan = ForestColl().plan(problem, rng=np.random.default_rng(0))
    except Unsupported as refusal:
        assert refusal.hint
        other = Direct() if op in ("all-to-all", "permute", "scatter", "gather") else Ring()
        plan = other.plan(problem, rng=np.random.default_rng(0))
    assert_delivers(plan.program, np.random.default_rng(1))
    assert bandwidth_time_s(plan.program, fabric, problem.ranks) >= bandwidth_bound(problem).exact
