"""Memory over a planned step, drawn: the highest point is the checker's peak, where the plan says it is; pictures say what they cannot draw."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import msgspec
import pytest

from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.step import finished
from meshwright.errors import UsageError
from meshwright.graph.step_graph import StepGraph, StepPlan
from meshwright.report.memory_svg import LEFT, RIGHT
from meshwright.report.step_memory_svg import WIDTH, step_memory_svg
from meshwright.testing.steps import random_runs, random_step_graph

NS = "{http://www.w3.org/2000/svg}"


def planned(seed: int) -> tuple[StepGraph, StepPlan]:
    rng = random.Random(seed)
    graph = random_step_graph(rng)
    runs, boundary = random_runs(graph, rng)
    return graph, finished(graph, runs, boundary, strategy="drawn")


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in (p.split(",") for p in line.get("points", "").split())]


@pytest.mark.parametrize("seed", range(8))
def test_the_highest_point_is_the_checkers_peak(seed: int) -> None:
    graph, plan = planned(seed)
    plan = msgspec.structs.replace(plan, budget_bytes=2 * plan.peak_bytes)
    facts = check_step_plan(graph, plan).facts
    svg = step_memory_svg(graph, plan)
    assert svg == step_memory_svg(graph, plan)
    root = ElementTree.fromstring(svg)
    curve, fixed, budget = (points(line) for line in root.iter(f"{NS}polyline"))
    (peak,) = root.iter(f"{NS}circle")
    zero = 2 * min(y for _, y in curve) - budget[0][1]  # the peak is half the budget, so it lies half way up
    assert float(peak.get("cy", 0)) == pytest.approx(min(y for _, y in curve), abs=0.2)
    per_byte = (zero - budget[0][1]) / (2 * plan.peak_bytes)
    assert (zero - min(y for _, y in curve)) / per_byte == pytest.approx(facts["peak_bytes"], rel=0.01)
    assert (zero - fixed[0][1]) / per_byte == pytest.approx(graph.fixed_bytes(), abs=0.3 / per_byte)
    times = [n.time_s if a.alternative < 0 else n.alternatives[a.alternative].time_s for a in plan.actions for n in [graph.nodes[a.node]]]
    before = sum(times[: plan.peak_at]) / sum(times)
    assert float(peak.get("cx", 0)) == pytest.approx(LEFT + before * (WIDTH - LEFT - RIGHT), abs=0.2)
    words = [t.text or "" for t in root.iter(f"{NS}text")]
    assert any(w.startswith("peak ") and graph.nodes[plan.actions[plan.peak_at].node].name in w for w in words)
    assert any(w.startswith("budget ") for w in words)


def test_names_are_escaped_and_steps_without_costs_are_drawn() -> None:
    graph, plan = planned(3)
    evil = "</text><script>alert(1)</script>" * 5
    free = tuple(
        msgspec.structs.replace(n, name=evil, time_s=0.0, alternatives=tuple(msgspec.structs.replace(a, time_s=0.0) for a in n.alternatives))
        for n in graph.nodes
    )
    svg = step_memory_svg(msgspec.structs.replace(graph, name=evil, nodes=free), plan)
    assert "<script" not in svg and not list(ElementTree.fromstring(svg).iter(f"{NS}script"))
    only_inputs = tuple(n for n in graph.nodes if n.phase == "input")
    empty = msgspec.structs.replace(graph, nodes=only_inputs, boundary=len(only_inputs), results=(), storages=graph.storages)
    nothing = msgspec.structs.replace(plan, actions=(), boundary=0, saved=(), peak_bytes=graph.fixed_bytes(), peak_at=0)
    assert "0 operators" in step_memory_svg(empty, nothing)


def test_a_plan_of_another_step_is_refused() -> None:
    graph, plan = planned(1)
    with pytest.raises(UsageError, match="is not held"):
        step_memory_svg(graph, msgspec.structs.replace(plan, actions=plan.actions[::-1]))
