"""What is left of a placement when devices leave: what must run again, what stays where it is, and from where searches start."""

from __future__ import annotations

import numpy as np
import pytest
from cases import random_problem

from effort import few
from meshwright.decide.place import PlaceProblem
from meshwright.decide.place.giph.strategy import Giph
from meshwright.decide.place.lists import Heft, started
from meshwright.decide.place.remaining import AT, remaining
from meshwright.decide.place.search import Search
from meshwright.drive.place import devices_of, plan_placement
from meshwright.drive.plans import check_plan
from meshwright.errors import Infeasible, UsageError
from meshwright.fabric.edit import without


def needed_again(problem, on, finished, lost):
    """By the definition: a task runs if it did not end, or if one that runs reads what it made on a device that is lost."""
    names = [t.name for t in problem.graph.tasks]
    runs = {n for n in names if n not in finished}
    while more := {e.src for e in problem.graph.edges if e.dst in runs and on[e.src] == lost} - runs:
        runs |= more
    return runs


@pytest.mark.parametrize("seed", range(few(10)))
def test_results_that_remain_are_used_and_others_made_again(seed):
    problem = random_problem(seed, tasks=8, devices=4, switch=bool(seed % 2))
    plan, _, _ = plan_placement(problem, [Heft()])
    on, r = devices_of(plan), np.random.default_rng(seed)
    count = int(r.integers(1, 7))
    finished = {problem.graph.tasks[i].name for i in problem.graph.order[:count]}
    lost = f"d{2 * int(r.integers(2))}"
    left = remaining(problem.graph, without(problem.fabric, [lost]), on, finished)
    runs = needed_again(problem, on, finished, lost)
    held = {t.name: t.kind.removeprefix(AT) for t in left.graph.tasks if t.kind.startswith(AT)}
    assert {t.name for t in left.graph.tasks} - held.keys() == runs
    assert held == {e.src: on[e.src] for e in problem.graph.edges if e.dst in runs and e.src not in runs} and lost not in held.values()
    assert {(e.src, e.dst) for e in left.graph.edges} == {(e.src, e.dst) for e in problem.graph.edges if e.dst in runs}
    again, _, _ = plan_placement(left, [Search(evaluations=500)])
    now = devices_of(again)
    assert check_plan(again).ok and all(now[name] == where for name, where in held.items())


def test_a_search_starts_from_what_is_there():
    """A device that joins changes nothing by itself, one that leaves moves its tasks alone."""
    problem = random_problem(1, tasks=9, devices=4)
    on = devices_of(plan_placement(problem, [Search(evaluations=300)])[0])
    same = started(PlaceProblem(graph=problem.graph, fabric=problem.fabric, start=on))
    assert [problem.fabric.devices[k].name for k in same.on] == [on[t.name] for t in problem.graph.tasks]
    fabric = without(problem.fabric, ["d2"])
    moved = PlaceProblem(graph=problem.graph, fabric=fabric, start=on)
    first = started(moved)
    assert all(fabric.devices[k].name == on[t.name] for t, k in zip(problem.graph.tasks, first.on, strict=True) if on[t.name] != "d2")
    assert started(problem) is None
    for strategy in (Search(evaluations=300, links="own"), Giph(net=_net(), links="own")):
        assert strategy.plan(moved, rng=np.random.default_rng(0)).makespan_s <= first.makespan_s


def _net():
    pytest.importorskip("torch")
    from test_giph import untrained

    return untrained()


def test_refusals_of_what_remains():
    problem = random_problem(0, tasks=4, devices=2)
    on = {t.name: "d0" for t in problem.graph.tasks}
    with pytest.raises(UsageError, match="there is no task 'x'"):
        remaining(problem.graph, problem.fabric, on, ["x"])
    with pytest.raises(UsageError, match="no task is left"):
        remaining(problem.graph, problem.fabric, on, list(on))
    kinds = {t.kind for t in problem.graph.tasks}
    assert "b" in kinds  # which d1 alone can run
    with pytest.raises(Infeasible, match="of kind 'b'"):
        remaining(problem.graph, without(problem.fabric, ["d1"]), on, [])
