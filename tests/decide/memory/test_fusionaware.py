"""The frontier against exhaustive search, its floor, its monotony; the parametric cut against enumeration."""

from __future__ import annotations

from itertools import combinations, product

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_steps import chain, step_graphs

from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.baselines import Chen, Revolve, Rotor
from meshwright.decide.memory.fusionaware import FusionAware, cut_points, frontier_of, moments
from meshwright.decide.memory.fusionaware.hull import floor_s
from meshwright.decide.memory.lifetimes import lifetimes_of
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import Infeasible
from meshwright.kernels.step_schedule import NEVER

RNG = np.random.default_rng(0)
EFFORT = 200_000


def every_schedule(lives):
    """(peak, seconds) of every assignment of hold times, as far as they differ."""
    movable = np.flatnonzero(lives.movable)
    held = lives.keep_all()
    stages = [*range(lives.stages + 1), NEVER]
    for values in product(stages, repeat=len(movable)):
        held[movable] = values
        yield lives.measure(held)


def test_the_frontier_is_the_best_of_all_schedules():
    """At 19 of 20 budgets at least, of every peak there is on small graphs; and its floor is never above the best."""
    met = [0, 0]

    @settings(deadline=None, max_examples=40, phases=[Phase.generate], derandomize=True, suppress_health_check=[*HealthCheck])
    @given(step_graphs(most=6))
    def compare(graph):
        lives = lifetimes_of(graph)
        if (lives.stages + 2) ** int(lives.movable.sum()) > 3_000:
            return
        frontier = frontier_of(graph, EFFORT)
        every = [x for x in every_schedule(lives) if np.isfinite(x[1])]
        for peak in sorted({p for p, _ in every}):
            best = min(s for p, s in every if p <= peak)
            entry = frontier.within(peak)
            met[entry is not None and entry.time_s <= best + 1e-9] += 1
            assert frontier.floor_s(peak) <= best + 1e-9
        assert frontier.least_bytes <= min(p for p, _ in every)

    compare()
    assert met[1] >= 50 and met[0] * 20 <= sum(met)


@settings(deadline=None, max_examples=30)
@given(step_graphs(most=9))
def test_plans_are_right_monotone_and_no_worse_than_the_published_ones(graph):
    plain, floor = keep_everything(graph), graph.fixed_bytes()
    last = None
    for share in (1.1, 0.8, 0.6, 0.4, 0.2):
        budget = int(floor + share * (plain.peak_bytes - floor))
        try:
            plan = FusionAware(effort=EFFORT).plan(graph, budget, rng=RNG)
        except Infeasible as refused:
            assert refused.data["least_bytes"] > budget >= 0 and refused.data["bound_bytes"] <= refused.data["least_bytes"]
            for other in (Chen(), Revolve(), Rotor()):
                with pytest.raises(Infeasible):
                    other.plan(graph, budget, rng=RNG)
            continue
        assert not check_step_plan(graph, plan).findings
        if last is not None:
            assert plan.peak_bytes <= last.peak_bytes and plan.time_s >= last.time_s - 1e-12
        last = plan
        for other in (Chen(), Revolve(), Rotor()):
            try:
                assert plan.time_s <= other.plan(graph, budget, rng=RNG).time_s + 1e-9
            except Infeasible:
                continue


@settings(deadline=None, max_examples=40)
@given(step_graphs(), st.data())
def test_no_schedule_is_below_the_floor_of_its_own_peak(graph, data):
    frontier = frontier_of(graph, EFFORT)
    lives = frontier.lives
    held = lives.keep_all()
    for s in np.flatnonzero(lives.movable):
        held[s] = data.draw(st.sampled_from([0, 0, 1, lives.stages // 2 + 1, NEVER]))
    peak, seconds = lives.measure(held)
    if np.isfinite(seconds):
        assert frontier.floor_s(peak) <= seconds + 1e-9 and frontier.least_bytes <= peak


def test_several_micro_batches_in_flight_are_kept_beside_the_one_that_runs():
    one = chain([8, 8, 8, 8], [1.0, 1.0, 1.0, 1.0])
    three = msgspec.structs.replace(one, in_flight=3)
    plain, more = keep_everything(one), keep_everything(three)
    assert more.peak_bytes == plain.peak_bytes + 2 * 32  # 1 of the input is there once
    budget = plain.peak_bytes + 20
    plan = FusionAware(effort=EFFORT).plan(three, budget, rng=RNG)
    assert plan.peak_bytes <= budget and not check_step_plan(three, plan).findings
    held = sum(three.storages[s].size_bytes for s in {s for x in plan.saved for s in three.nodes[x].storages})
    alone = msgspec.structs.replace(plan, peak_bytes=plan.peak_bytes - 2 * held)
    assert not check_step_plan(one, msgspec.structs.replace(alone, floor_s=None, least_bytes=None)).findings


@settings(deadline=None, max_examples=30)
@given(step_graphs(most=7))
def test_once_runs_nothing_more_than_twice(graph):
    plan = FusionAware(effort=EFFORT, once=True).plan(graph, None, rng=RNG)
    ran = [a.node for a in plan.actions]
    assert max(ran.count(x) for x in ran) <= 2
    assert not check_step_plan(graph, plan).findings


def least_again(lives, moment, keep):
    """Seconds run again when exactly `keep` is kept at a moment; inf when something cannot run again."""
    run, stack = set(), [s for s in moment.needed if s not in keep]
    while stack:
        m = int(lives.maker[stack.pop()])
        if m not in run:
            run.add(m)
            read = {s for x in lives.graph.nodes[m].inputs for s in lives.graph.nodes[x].storages if lives.movable[s]}
            stack += [s for s in read if s not in keep]
    return sum(lives.arrays.time[m] for m in run if lives.arrays.forward_wanted[m])


@settings(deadline=None, max_examples=60)
@given(step_graphs(most=8))
def test_the_hull_is_that_of_all_subsets(graph):
    lives = lifetimes_of(graph)
    movable = [int(s) for s in np.flatnonzero(lives.movable)]
    for moment in moments(lives, 2):
        subsets = [frozenset(c) for k in range(len(movable) + 1) for c in combinations(movable, k)]
        size = {s: 0 if s in moment.present else int(lives.arrays.size[s]) for s in movable}
        every = [(sum(size[s] for s in keep), least_again(lives, moment, keep)) for keep in subsets]
        points = cut_points(lives, moment)
        for p in points:
            assert (p.kept_bytes, pytest.approx(p.again_s)) == (sum(size[s] for s in p.keep), least_again(lives, moment, p.keep))
        for price in (0.01, 0.1, 0.3, 1.0, 5.0):
            assert min(p.again_s + price * p.kept_bytes for p in points) == pytest.approx(min(t + price * b for b, t in every))
        for capacity in sorted({b for b, _ in every}):
            assert floor_s(points, capacity) <= min(t for b, t in every if b <= capacity) + 1e-9


def test_a_long_chain_goes_below_rotor_and_says_how_far_the_bound_is():
    graph = chain([5, 9, 3, 8, 2, 7, 4, 6, 9, 3, 5, 1], [3.0, 1.0, 2.0, 5.0, 1.0, 4.0, 2.0, 2.0, 3.0, 1.0, 2.0, 1.0])
    ours, rotor = (s.plan(graph, 60, rng=RNG) for s in (FusionAware(effort=3_000_000), Rotor()))
    assert ours.time_s == 56.0 and rotor.time_s == 58.0
    assert ours.floor_s == pytest.approx(55 + 2 / 3) and "0.60%" in ours.notes[0]
    assert ours == FusionAware(effort=3_000_000).plan(graph, 60, rng=RNG)
