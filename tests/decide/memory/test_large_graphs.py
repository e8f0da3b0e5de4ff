"""What keeps large graphs within their time: chains of few stages, and a floor by one minimum cut that holds whatever implementations are chosen."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshwright.decide.memory.baselines import chain as chains
from meshwright.decide.memory.fusionaware.frontier import cheapest_floor_s
from meshwright.decide.memory.lifetimes import lifetimes_of
from meshwright.decide.memory.monet import Monet, searching
from meshwright.decide.memory.step import finished, keep_everything
from meshwright.graph.step_graph import StepGraph, StepNode, StepStorage
from meshwright.testing.steps import random_runs, random_step_graph


def layers(count: int) -> StepGraph:
    """A product and a cheap operator per layer, of which backward reads both operands."""
    nodes, storages = list[StepNode](), list[StepStorage]()

    def node(name: str, phase: str, inputs: tuple[int, ...], time_s: float) -> int:
        made = phase != "input"
        storages.append(StepStorage(size_bytes=1000, owner=name, kind="made" if made else "input"))
        s = (len(storages) - 1,)
        nodes.append(StepNode(name=name, target="op" if made else "placeholder", phase=phase, inputs=inputs, storages=s, makes=s if made else (),
                              time_s=time_s))  # type: ignore[arg-type]  # fmt: skip
        return len(nodes) - 1

    x = node("x", "input", (), 0.0)
    forward = []
    for k in range(count):
        forward.append((x, time_s := 5.0 if k % 2 == 0 else 1.0))
        x = node(f"f{k}", "forward", (x,), time_s)
    boundary, loss = len(nodes), x
    for k, (read, time_s) in reversed([*enumerate(forward)]):
        x = node(f"b{k}", "backward", (x, read), 2 * time_s)
    return StepGraph(name="layers", nodes=tuple(nodes), storages=tuple(storages), boundary=boundary, results=(loss, x))


def test_a_long_chain_has_no_more_stages_than_a_table_can_hold() -> None:
    graph = layers(600)
    found = chains.chain_of(lifetimes_of(graph))
    assert chains.MAX_STAGES / 2 < len(found) <= chains.MAX_STAGES
    assert list(found.cuts) == sorted(set(found.cuts)) and sum(found.forward_s) == sum(n.time_s for n in graph.nodes if n.phase == "forward")
    assert max(found.forward_s) <= 4 * sum(found.forward_s) / len(found)
    assert len(chains.chain_of(lifetimes_of(layers(60)))) == 60


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_faster_than_the_cheapest_floor(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        graph = random_step_graph(rng, forward=rng.randint(2, 7))
        runs, boundary = random_runs(graph, rng, keep=rng.random())
        other = {i: 0 for i, n in enumerate(graph.nodes) if n.alternatives and rng.random() < 0.7}
        plan = finished(graph, [(i, other.get(i, -1)) for i, _ in runs], boundary, strategy="random")
        assert cheapest_floor_s(graph, plan.peak_bytes) <= plan.time_s * (1 + 1e-9)


def test_beyond_the_knapsack_a_plan_has_a_floor_and_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(64)
    monkeypatch.setattr(searching, "MAX_CLOSURE_OPERATORS", 20)
    keep = keep_everything(graph)
    plan = Monet(exact_operators=0, effort=2000).plan(graph, keep.peak_bytes // 2, rng=np.random.default_rng(0))
    assert plan.peak_bytes <= keep.peak_bytes // 2 and plan.floor_s is not None
    assert keep.time_s < plan.floor_s <= plan.time_s <= 1.1 * plan.floor_s
