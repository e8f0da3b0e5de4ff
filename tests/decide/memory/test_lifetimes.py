"""Schedules from hold times: the checker accepts each, and the kernel's peak and time are the simulator's."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import Builder, step_graphs

from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.lifetimes import lifetimes_of
from meshwright.decide.memory.step import keep_everything
from meshwright.kernels.step_schedule import IMPOSSIBLE, NEVER


@settings(deadline=None)
@given(step_graphs(), st.data())
def test_every_assignment_is_a_right_schedule_and_its_figures_are_exact(graph, data):
    lives = lifetimes_of(graph)
    stages = lives.stages
    held = lives.keep_all()
    until = lives.to_the_end()
    for s in np.flatnonzero(lives.movable):
        held[s] = data.draw(st.sampled_from([0, 0, 1, stages // 2 + 1, NEVER]))
        until[s] = data.draw(st.sampled_from([NEVER, NEVER, stages // 2]))
    ahead = lives.lazy()
    if data.draw(st.booleans()):
        ahead[:] = stages
    plan = lives.plan(held, until, ahead, strategy="test")
    peak, seconds = lives.measure(held, until, ahead)
    if plan is None:
        assert peak == IMPOSSIBLE
        return
    verdict = check_step_plan(graph, plan)
    assert not verdict.findings
    assert (plan.peak_bytes, round(plan.time_s, 9)) == (peak, round(seconds, 9))


@settings(deadline=None)
@given(step_graphs())
def test_keeping_all_that_backward_reads_is_the_plain_step(graph):
    """Except that what only backward needs is not run before backward."""
    lives = lifetimes_of(graph)
    plan = lives.plan(lives.keep_all(), strategy="test")
    plain = keep_everything(graph)
    assert plan is not None and plan.time_s <= plain.time_s + 1e-9 and plan.peak_bytes <= plain.peak_bytes


def test_what_draws_random_numbers_stays_unless_its_state_is_replayed():
    b = Builder()
    x = b.given(4)
    mask = b.op((x,), (8,), random=True)
    y = b.op((mask,), (8,))
    loss = b.op((y,), (8,))
    graph = b.graph((loss, b.op((mask, y), (8,), phase="backward")))
    assert lifetimes_of(graph).movable.tolist() == [False, True, True, False, False]
    lives = lifetimes_of(graph, replay_random=False)
    assert lives.movable.tolist() == [False, False, True, False, False]
    dropped = lives.drop_all()
    dropped[1] = 1
    assert lives.plan(dropped, strategy="test") is None
