"""The floor of a rank's stages against every mix of plans that there is for their segments."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_steps import chain, step_graphs

from meshwright.decide.memory.fusionaware import FusionAware
from meshwright.decide.memory.stage_floor import Holding, floor_of, least_again_s
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import Infeasible
from meshwright.simulate.step_memory import simulate_step

RNG = np.random.default_rng(0)
BUDGETS = 6


def plans_of(graph):
    """Different plans, each as (bytes held between the passes, bytes there at most while backward runs, seconds run again)."""
    keep = keep_everything(graph)
    found = {}
    for plan in [keep, *_frontier(graph, keep.peak_bytes)]:
        alive = [b - graph.fixed_bytes() for b in simulate_step(graph, plan.actions, boundary=plan.boundary).bytes_at]
        given_away = {s for r in graph.results if r < graph.boundary for s in graph.nodes[r].storages if graph.storages[s].kind == "made"}
        held = {s for x in plan.saved for s in graph.nodes[x].storages if graph.storages[s].kind == "made"} - given_away
        border = sum(graph.storages[s].size_bytes for s in given_away)
        tangents = sum(s.size_bytes for s in graph.storages if s.kind == "tangent")
        own = sum(graph.storages[s].size_bytes for s in held)
        once = sum(graph.nodes[n].time_s for n in {a.node for a in plan.actions})
        found[own, max(alive[plan.boundary :], default=0) - border + tangents] = max(0.0, plan.time_s - once)
    return [(own, most, again) for (own, most), again in found.items()]


def _frontier(graph, top):
    for i in range(BUDGETS):
        try:
            yield FusionAware(effort=20_000).plan(graph, None if not i else top * i // BUDGETS, rng=RNG)
        except Infeasible:
            continue


def floor(graph):
    own, most, _ = plans_of(graph)[0]
    given_away = [r for r in graph.results if r < graph.boundary]
    return floor_of(graph, plain_bytes=own, plain_workspace_bytes=most - own, elsewhere=given_away, whole=True)


@settings(deadline=None, max_examples=25, phases=[Phase.generate], derandomize=True, suppress_health_check=[*HealthCheck])
@given(step_graphs(most=6), step_graphs(most=6), st.integers(1, 3), st.integers(0, 20))
def test_no_mix_of_plans_runs_again_for_less(first, second, flight, part):
    """Two segments in one stage, `flight` micro-batches held, a backward next: every mix that fits takes at least the floor."""
    plans = [plans_of(g) for g in (first, second)]
    mixes = []
    for a, b in product(*plans):
        both = a[0] + b[0]
        mixes.append((max(flight * both, (flight - 1) * both + a[0] + b[1], (flight - 1) * both + a[1]), a[2] + b[2]))
    sizes = sorted(b for b, _ in mixes)
    room = sizes[min(part, len(sizes) - 1)]
    least = least_again_s({0: [floor(first), floor(second)]}, [Holding(counts={0: flight}, back=0)], room)[0]
    assert least <= min(s for b, s in mixes if b <= room) + 1e-9


def test_a_chain_that_must_drop_half_runs_that_half_again():
    """Equal results, equal times, every one read by backward: with room for half of them, half of the seconds."""
    graph = chain([100] * 8, [1.0] * 8)
    own = plans_of(graph)[0][0]
    assert own == 700  # the last is given away
    two = [Holding(counts={0: 2})]
    assert least_again_s({0: [floor(graph)] * 4}, two, 4 * 2 * own // 2)[0] == pytest.approx(4 * 3.5, rel=1e-6)
    assert least_again_s({0: [floor(graph)] * 4}, two, 4 * 2 * own) == {0: 0.0}
    assert least_again_s({0: [floor(graph)]}, two, -1) == {0: 0.0}


def test_what_is_there_while_a_backward_node_runs_counts():
    graph = chain([100] * 5, [1.0] * 5)
    own, most, _ = plans_of(graph)[0]
    room = most - 50
    assert room >= own
    held = {0: [floor(graph)]}
    assert least_again_s(held, [Holding(counts={0: 1}, back=0)], room)[0] > least_again_s(held, [Holding(counts={0: 1})], room)[0] == 0.0
    border = {0: [dataclasses.replace(floor(graph), border_bytes=room - own + 100)]}
    assert least_again_s(border, [Holding(counts={0: 1})], room)[0] == pytest.approx(1.0)
