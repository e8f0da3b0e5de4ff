"""Choosing by itself: never slower than any strategy alone by more than it says, and offers that are plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace
from random_steps import chain, step_graphs

from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.auto import auto_plan, offers
from meshwright.decide.memory.baselines import Chen, Revolve, Rotor
from meshwright.decide.memory.monet.strategy import Monet
from meshwright.decide.memory.step import keep_everything, least_bound_bytes
from meshwright.errors import Infeasible
from meshwright.graph.step_graph import Alternative

LONG = chain([5, 9, 3, 8, 2, 7, 4, 6, 9, 3, 5, 1], [3.0, 1.0, 2.0, 5.0, 1.0, 4.0, 2.0, 2.0, 3.0, 1.0, 2.0, 1.0])


def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("budget", [70, 60, 50])
def test_it_is_within_a_hundredth_of_the_bound_or_has_tried_everything(budget):
    plan, others = auto_plan(LONG, budget, rng=rng())
    assert check_step_plan(LONG, plan).ok and plan.peak_bytes <= budget and plan.floor_s is not None
    assert plan.time_s <= 1.01 * plan.floor_s or "ms" in others["monet"] or plan.strategy == "monet"
    for strategy in (Chen(), Revolve(), Rotor()):
        name = type(strategy).__name__.lower()
        try:
            alone = strategy.plan(LONG, budget, rng=rng())
        except Infeasible as refused:
            assert f"{refused.data['least_bytes']:,} B at least" in others[name]
            continue
        assert plan.time_s <= alone.time_s + 1e-9
        assert name == plan.strategy or others[name] == f"{alone.time_s * 1e3:.4g} ms, peak {alone.peak_bytes:,} B"


@settings(deadline=None, max_examples=8)
@given(step_graphs(most=6, flights=(1,)))
def test_what_more_and_fewer_bytes_give(graph):
    plain = keep_everything(graph)
    floor = graph.fixed_bytes()
    try:
        plan, _ = auto_plan(graph, int(floor + 0.7 * (plain.peak_bytes - floor)), rng=rng())
    except Infeasible:
        return
    more, less = offers(graph, plan)
    assert [o.peak_bytes for o in more] == sorted({o.peak_bytes for o in more}) and all(o.time_s < plan.time_s for o in more)
    assert [-o.peak_bytes for o in less] == sorted({-o.peak_bytes for o in less}) and all(o.time_s > plan.time_s for o in less)
    for o in (*more, *less):
        there, _ = auto_plan(graph, o.peak_bytes, rng=rng())
        assert there.time_s <= o.time_s * 1.011


def test_nothing_that_fits_says_the_least():
    """Below the bound of every plan nothing is asked; between it and what is reached, strategies are until one proves it.
    Both name a peak that can be had."""
    bound = least_bound_bytes(LONG)
    for budget in (bound - 1, bound):
        with pytest.raises(Infeasible, match="no plan at all needs less") as refused:
            auto_plan(LONG, budget, rng=rng())
        data = refused.value.data
        assert data["bound_bytes"] == bound < data["least_bytes"] and data["proved"] and "chen" in data["strategies"]
        assert auto_plan(LONG, data["least_bytes"], rng=rng())[0].peak_bytes <= data["least_bytes"]


def with_ways(graph, *, in_flight=1):
    """Every second operator may run with another time and workspace."""
    draw = np.random.default_rng(1)
    nodes = [
        replace(n, alternatives=(Alternative(name="w", inputs=n.inputs, time_s=n.time_s * 0.8, workspace_bytes=int(draw.integers(0, 5))),))
        if n.makes and i % 2 else n
        for i, n in enumerate(graph.nodes)
    ]  # fmt: skip
    return replace(graph, nodes=tuple(nodes), in_flight=in_flight)


@pytest.mark.parametrize("budget", [75, 60, None])
def test_other_implementations_never_make_it_slower(budget):
    graph = with_ways(LONG)
    plain, _ = auto_plan(LONG, budget, rng=rng())
    plan, said = auto_plan(graph, budget, rng=rng())
    assert check_step_plan(graph, plan).ok
    if budget is None:
        assert plan.peak_bytes <= plain.peak_bytes
    else:
        assert plan.peak_bytes <= budget and plan.time_s <= plain.time_s and any(a.alternative >= 0 for a in plan.actions)
        assert plan.floor_s is None or plan.floor_s <= plan.time_s + 1e-9
    assert "monet" not in said


def test_with_several_in_flight_operators_run_plainly():
    graph = with_ways(LONG, in_flight=2)
    plan, said = auto_plan(graph, 150, rng=rng())
    assert check_step_plan(graph, plan).ok and "in flight" in said["monet"] and all(a.alternative < 0 for a in plan.actions)


def test_nothing_that_fits_with_other_implementations_says_the_least_of_both(monkeypatch):
    """Where it is proved for all implementations, those of plain operators are not asked."""
    graph = with_ways(LONG)
    with pytest.raises(Infeasible) as refused:
        auto_plan(graph, 12, rng=rng())
    proved = refused.value.data
    assert proved["proved"] and {*proved["strategies"]} == {"monet"}
    found = Monet.plan

    def unproved(self, graph, budget_bytes, *, rng):
        try:
            return found(self, graph, budget_bytes, rng=rng)
        except Infeasible as error:
            error.data["proved"] = False
            raise

    monkeypatch.setattr(Monet, "plan", unproved)
    with pytest.raises(Infeasible) as refused:
        auto_plan(graph, 12, rng=rng())
    assert refused.value.data["bound_bytes"] == proved["bound_bytes"] == least_bound_bytes(graph)
    assert {*refused.value.data["strategies"]} == {"monet", "plain"} and refused.value.data["least_bytes"] == proved["least_bytes"] > 12
