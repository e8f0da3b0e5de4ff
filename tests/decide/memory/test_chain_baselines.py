"""Chen, Revolve and Rotor on chains, against closed forms and exhaustive search."""

from __future__ import annotations

from functools import cache
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import chain, step_graphs

from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.baselines import Chen, Revolve, Rotor, chain_of, fewest_steps
from meshwright.decide.memory.baselines.rotor import rotor_table
from meshwright.decide.memory.lifetimes import lifetimes_of
from meshwright.decide.memory.step import keep_everything
from meshwright.errors import Infeasible, Unsupported

RNG = np.random.default_rng(0)


def test_revolve_takes_the_closed_forms_number_of_steps_at_most():
    """Fewer where a checkpoint is also what the backward of the stage before it reads."""
    graph = chain([1] * 17, [1.0] * 17)
    assert len(chain_of(lifetimes_of(graph))) == 17
    for checkpoints in (1, 2, 3, 4, 6):
        plan = Revolve(checkpoints=checkpoints).plan(graph, None, rng=RNG)
        forward = sum(graph.nodes[a.node].phase == "forward" for a in plan.actions)
        assert forward <= fewest_steps(17, checkpoints) + 17 and (checkpoints > 1 or forward == fewest_steps(17, 1) + 17)
        assert plan.time_s == forward + 17


@pytest.mark.parametrize("strategy", [Chen, Revolve, Rotor])
def test_a_step_without_a_result_of_its_forward_pass_is_planned(strategy):
    """A loss that nobody asks for: all of the forward pass runs for backward alone. No plan is above keeping everything."""
    graph = chain([5, 7, 3, 4], [1.0, 2.0, 1.0, 1.0])
    graph = msgspec.structs.replace(graph, results=tuple(r for r in graph.results if r >= graph.boundary))
    for budget in (None, 1000):
        plan = strategy().plan(graph, budget, rng=RNG)
        assert not check_step_plan(graph, plan).findings and plan.peak_bytes <= keep_everything(graph).peak_bytes
    nothing = msgspec.structs.replace(graph, results=())
    with pytest.raises(Unsupported, match="nothing of the forward pass is wanted"):
        strategy().plan(nothing, None, rng=RNG)


@cache
def least(steps: int, checkpoints: int) -> int:
    if steps <= 1:
        return 0
    if checkpoints == 1:
        return steps * (steps - 1) // 2
    return min(j + least(steps - j, checkpoints - 1) + least(j, checkpoints) for j in range(1, steps))


@given(st.integers(1, 40), st.integers(1, 7))
def test_the_closed_form_is_the_recurrences_optimum(steps, checkpoints):
    assert fewest_steps(steps, checkpoints) == least(steps, checkpoints)


def fastest(stages: tuple[tuple[int, int, int], ...], limit: int) -> float:
    """Least time of a chain of (forward s, output bytes, bytes of keeping all) with `limit` bytes: every choice tried, no slots."""

    @cache
    def cost(s: int, t: int, m: int) -> float:
        best = float("inf")
        size = [0, *(x[1] for x in stages)]
        if m >= stages[s][2]:
            best = 2 * stages[s][0] + (cost(s + 1, t, m - stages[s][2]) if t > s else 0.0)
        if t > s:
            need = max((size[j] if j > s else 0) + size[j + 1] for j in range(s, t))
            if m >= need:
                for k in range(s + 1, t + 1):
                    if m >= size[k]:
                        run = sum(x[0] for x in stages[s:k])
                        best = min(best, run + cost(k, t, m - size[k]) + cost(s, k - 1, m))
        return best

    return cost(0, len(stages) - 1, limit)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=6), st.integers(4, 40))
def test_rotor_solves_its_recurrence(stages, limit):
    stages = tuple((f, size, size + more) for f, size, more in stages)
    table = rotor_table(
        [float(f) for f, _, _ in stages], [float(f) for f, _, _ in stages], [0, *(size for _, size, _ in stages[:-1])],
        [every for _, _, every in stages], [0] * (len(stages) + 1), [0] * len(stages), [0] * len(stages), limit_bytes=limit, slots=limit,
    )  # fmt: skip
    assert table.slot_bytes == 1
    assert table.cost[0, len(stages) - 1, limit] == fastest(stages, limit)


@settings(deadline=None)
@given(step_graphs(), st.floats(0, 1.2))
@pytest.mark.parametrize("strategy", [Chen(), Revolve(), Rotor()])
def test_plans_are_right_and_within_their_budget(strategy, graph, share):
    plain = keep_everything(graph).peak_bytes
    least = strategy.plan(graph, None, rng=RNG)
    budget = int(graph.fixed_bytes() + share * (plain - graph.fixed_bytes()))
    if budget < least.peak_bytes:
        with pytest.raises(Infeasible) as refused:
            strategy.plan(graph, budget, rng=RNG)
        assert refused.value.data == {"least_bytes": least.peak_bytes, "budget_bytes": budget}
        return
    plan = strategy.plan(graph, budget, rng=RNG)
    assert plan.peak_bytes <= budget and plan.budget_bytes == budget
    assert not check_step_plan(graph, plan).findings and not check_step_plan(graph, least).findings


def test_more_memory_is_never_slower_and_rotor_is_no_slower_than_revolve_and_chen_on_a_chain():
    sizes = [5, 9, 3, 8, 2, 7, 4, 6, 9, 3, 5, 1]
    graph = chain(sizes, [3.0, 1.0, 2.0, 5.0, 1.0, 4.0, 2.0, 2.0, 3.0, 1.0, 2.0, 1.0])
    plain = keep_everything(graph).peak_bytes
    last = {}
    for budget, strategy in product(range(plain, 0, -1), (Rotor(), Revolve(), Chen())):
        try:
            last[type(strategy), budget] = strategy.plan(graph, budget, rng=RNG).time_s
        except Infeasible:
            continue
        assert last[type(strategy), budget] >= last.get((type(strategy), budget + 1), 0)
        rotor = last.get((Rotor, budget))
        assert rotor is not None and rotor <= last[type(strategy), budget] + 1e-9
