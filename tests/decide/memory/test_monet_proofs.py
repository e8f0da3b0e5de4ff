"""What the joint programme proves of a step stands against the search of another strategy: nothing fits below, nothing is faster."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import Builder, chain, step_graphs

from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.fusionaware import frontier_of
from meshwright.decide.memory.monet import Monet
from meshwright.decide.memory.monet import closure as closure_module
from meshwright.decide.memory.monet.closure import closure
from meshwright.decide.memory.monet.merging import merged
from meshwright.errors import Infeasible, TimeLimit
from meshwright.graph.step_graph import Alternative, StepGraph, StepPlan

EFFORT = 10_000  # of fusionaware, in runs of nodes


def planned(graph: StepGraph, budget_bytes: int | None) -> StepPlan:
    plan = Monet().plan(graph, budget_bytes, rng=np.random.default_rng(0))
    verdict = check_step_plan(graph, plan)
    assert not verdict.findings, verdict.findings[0].message
    return plan


@settings(max_examples=40, deadline=None)
@given(graph=st.booleans().flatmap(lambda views: step_graphs(most=6, flights=(1,), views=views)), share=st.floats(0, 1))
def test_no_search_finds_what_is_proved_not_to_exist(graph: StepGraph, share: float) -> None:
    lean, frontier = planned(graph, None), frontier_of(graph, EFFORT)
    found = [(e.peak_bytes, e.time_s) for e in frontier.entries]
    assert lean.least_bytes == lean.peak_bytes <= min(found)[0]
    with pytest.raises(Infeasible) as refused:
        planned(graph, lean.peak_bytes - 1)
    assert refused.value.data["proved"]
    budget, time_s = found[int(share * (len(found) - 1))]
    plan = planned(graph, budget)
    assert plan.optimal and plan.time_s <= time_s * (1 + 1e-9)


def test_a_view_needs_what_it_reads_when_it_is_made_not_when_it_is_read() -> None:
    b = Builder()
    x = b.given(1)
    shape = b.op((x,), (50,))
    seen = b.op((x, shape))
    wide = b.op((x,), (50,))
    loss = b.op((wide,), (1,))
    plan = planned(b.graph((loss, b.op((loss, seen), (50,), phase="backward"))), None)
    assert plan.peak_bytes == plan.least_bytes == 52  # none of the three that have 50 bytes is beside another


def test_a_part_in_which_a_view_lies_stays_beside_the_one_that_is_made_again() -> None:
    b = Builder()
    x = b.given(1)
    both = b.op((x,), (1, 1))
    left, right = b.item(both, 0), b.item(both, 1)
    loss = b.op((right,), (1,))
    first = b.op((loss,), (1,), phase="backward")
    seen = b.op((left,), phase="backward")
    second = b.op((first, seen), (1,), phase="backward")
    third = b.op((seen, left, second), (1,), phase="backward")
    other = b.op((right,), phase="backward")
    plan = planned(b.graph((loss, b.op((third, other), (1,), phase="backward"))), None)
    assert plan.peak_bytes == plan.least_bytes == 5


def test_numbers_are_drawn_in_the_forward_pass_though_what_they_give_is_not_kept() -> None:
    b = Builder()
    x = b.given(1)
    first = b.op((x,), (40,), random=True)
    second = b.op((x,), (2,), random=True)
    wide = b.op((second,), (60,))
    loss = b.op((wide,), (1,))
    plan = planned(b.graph((loss, b.op((loss, first, second), (1,), phase="backward"))), None)
    assert [a.node for a in plan.actions[: plan.boundary] if a.node in (first, second)] == [first, second]
    assert first not in plan.saved


def test_what_one_implementation_spares_need_not_run() -> None:
    b = Builder()
    x = b.given(1)
    slow = b.op((x,), (5,), time_s=7.0)
    loss = b.op((slow,), (1,), time_s=1.0)
    b.nodes[loss] = msgspec.structs.replace(b.nodes[loss], alternatives=(Alternative(name="fused", inputs=(x,), time_s=3.0),))
    graph = b.graph((loss, b.op((loss,), (1,), phase="backward", time_s=1.0)))
    plan = planned(graph, 100)
    assert plan.optimal and plan.time_s == 4.0


def test_a_knapsack_without_an_answer_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain([9, 8, 7, 6], [5.0, 4.0, 3.0, 2.0])
    m, budget = merged(graph), planned(graph, None).peak_bytes + 5
    answered = closure(m, budget, nodes=1000)

    def ends(highs: object, **options: object) -> None:
        solved(highs, **options)
        raise TimeLimit("no answer")

    solved = closure_module.solve
    monkeypatch.setattr(closure_module, "solve", ends)
    found = closure(m, budget, nodes=1000)
    assert answered.held and not found.held and not found.backward
    assert found.floor_s == answered.floor_s  # what was proved stands
