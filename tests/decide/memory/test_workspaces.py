"""A strategy of plain operators where nodes may run with smaller workspaces: within the budget, never slower, and what bounds it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.check.training.step_memory import check_step_plan
from meshwright.decide.memory.fusionaware import FusionAware
from meshwright.decide.memory.step import keep_everything
from meshwright.decide.memory.workspaces import plan_with_workspaces, relaxed
from meshwright.errors import Infeasible
from meshwright.graph.step_graph import Alternative, StepGraph
from meshwright.testing.steps import random_step_graph

FAST = FusionAware(effort=20_000)


def graph_of(seed: int, in_flight: int = 1) -> StepGraph:
    """Every node with up to two implementations, slower or of a smaller workspace."""
    rng = random.Random(seed)
    plain = random_step_graph(rng, forward=7, alternatives=False)

    def ways(n: object) -> tuple[Alternative, ...]:
        return tuple(
            Alternative(name=f"images {k}", inputs=n.inputs, time_s=n.time_s * rng.uniform(1, 3), workspace_bytes=n.workspace_bytes // k)
            for k in (2, 4)[: rng.randint(0, 2)]
        )

    nodes = tuple(
        replace(m, alternatives=ways(m)) for n in plain.nodes
        for m in [replace(n, workspace_bytes=3 * n.workspace_bytes + rng.randint(0, 60)) if n.makes and n.phase != "input" else n]
    )  # fmt: skip
    nodes = tuple(n if n.makes and n.phase != "input" else replace(n, alternatives=()) for n in nodes)
    return replace(plain, nodes=nodes, in_flight=in_flight)


def bare(graph: StepGraph) -> StepGraph:
    return replace(graph, nodes=tuple(replace(n, alternatives=()) for n in graph.nodes))


def planned(graph: StepGraph, budget: int | None) -> object:
    try:
        return plan_with_workspaces(graph, budget, FAST, rng=np.random.default_rng(0))
    except Infeasible as error:
        return error


@pytest.mark.sample(10)
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_within_the_budget_and_never_slower_than_plain_operators(seed: int, in_flight: int) -> None:
    graph = graph_of(seed, in_flight)
    top, least = keep_everything(graph).peak_bytes, planned(graph, None)
    assert not check_step_plan(graph, least).findings
    assert least.peak_bytes <= planned(bare(graph), None).peak_bytes
    for budget in (least.peak_bytes + k * (top - least.peak_bytes) // 4 for k in range(5)):
        ours, plain = planned(graph, budget), planned(bare(graph), budget)
        if isinstance(ours, Infeasible):
            assert isinstance(plain, Infeasible)
            continue
        assert not check_step_plan(graph, ours).findings and ours.peak_bytes <= budget == ours.budget_bytes
        assert isinstance(plain, Infeasible) or ours.time_s <= plain.time_s * (1 + 1e-9)
    with pytest.raises(Infeasible) as refused:
        plan_with_workspaces(graph, graph.fixed_bytes(), FAST, rng=np.random.default_rng(0))
    assert refused.value.data["least_bytes"] > graph.fixed_bytes()


@pytest.mark.parametrize("seed", range(8))
def test_what_bounds_the_relaxed_graph_bounds_every_plan(seed: int) -> None:
    graph = graph_of(seed)
    easy = relaxed(graph)
    assert not any(n.alternatives for n in easy.nodes)
    least = planned(graph, None)
    for budget in sorted({least.peak_bytes, least.peak_bytes * 5 // 4, keep_everything(graph).peak_bytes}):
        ours, floor = planned(graph, budget), planned(easy, budget)
        if not isinstance(ours, Infeasible) and not isinstance(floor, Infeasible):
            assert floor.floor_s <= ours.time_s * (1 + 1e-9)


def test_small_workspaces_where_they_matter_and_fast_ones_elsewhere() -> None:
    mixed = 0
    for seed in range(12):
        graph = graph_of(seed)
        least = planned(graph, None)
        for p in (least, planned(graph, (least.peak_bytes + keep_everything(graph).peak_bytes) // 2)):
            if not isinstance(p, Infeasible):
                mixed += len({a.alternative >= 0 for a in p.actions if graph.nodes[a.node].alternatives}) == 2
    assert mixed
