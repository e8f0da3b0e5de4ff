"""Choosing by itself: never slower than any strategy alone by more than it says, and offers that are plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from random_steps import chain, step_graphs

from meshwright.check.step_memory import check_step_plan
from meshwright.decide.memory.auto import auto_plan, offers
from meshwright.decide.memory.baselines import Chen, Revolve, Rotor
from meshwright.decide.memory.step import keep_everything, least_bound_bytes
from meshwright.errors import Infeasible

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
    """Below the bound of every plan nothing is asked; between it and what is reached, every strategy is. Both name a peak that can be had."""
    bound = least_bound_bytes(LONG)
    for budget in (bound - 1, bound):
        with pytest.raises(Infeasible, match="no plan at all needs less") as refused:
            auto_plan(LONG, budget, rng=rng())
        data = refused.value.data
        assert data["bound_bytes"] == bound < data["least_bytes"] and data["proved"] and "chen" in data["strategies"]
        assert auto_plan(LONG, data["least_bytes"], rng=rng())[0].peak_bytes <= data["least_bytes"]
