"""What keeps large graphs within their time: chains of few stages, and a floor by one minimum cut that holds whatever implementations are chosen."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from meshwright.decide.memory import auto
from meshwright.decide.memory.baselines import chain as chains
from meshwright.decide.memory.fusionaware import frontier
from meshwright.decide.memory.fusionaware.alike import alike, homes, searched_alike
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
    targets = {"f": ("product", "cheap"), "b": ("product_backward", "cheap_backward")}
    nodes = [msgspec.structs.replace(n, target=targets[n.name[0]][int(n.name[1:]) % 2]) if n.makes else n for n in nodes]
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


def test_storages_of_equal_layers_are_alike_and_held_alike() -> None:
    graph = layers(80)
    lives = lifetimes_of(graph)
    classes = alike(lives)
    assert [len({int(s) % 2 for s in c}) for c in classes] == [1, 1]  # what products make, what cheap operators make
    keep, plain_s = lives.measure(lives.keep_all())
    budget = int(0.6 * keep)
    (found, *_), spent = searched_alike(lives, [lives.keep_all()], budget, 2_000 * len(graph.nodes))
    peak, seconds = lives.measure(found)
    floor = cheapest_floor_s(graph, budget)
    assert peak <= budget and plain_s < floor <= seconds <= 1.05 * floor and spent <= 2_100 * len(graph.nodes)
    dear = next(c for c in classes if graph.nodes[int(lives.maker[c[0]])].target == "product")
    assert np.mean(found[dear] == 0) > 0.9  # hardly a product runs twice


def test_homes_are_where_the_last_uses_in_backward_begin() -> None:
    graph = layers(6)
    lives = lifetimes_of(graph)
    assert [int(homes(lives, 0)[s]) for s in range(1, 6)] == [5, 4, 3, 2, 1]  # each is read by one backward node
    assert [int(homes(lives, 6)[s]) for s in range(1, 6)] == [1] * 5  # made again for one another, if together


def test_a_large_step_is_planned_by_what_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(64)
    for module in (frontier, auto):
        monkeypatch.setattr(module, "MAX_PUBLISHED_NODES", 100)
    keep = keep_everything(graph)
    lives, entry = frontier.fastest_within(graph, int(0.7 * keep.peak_bytes), 300 * len(graph.nodes))
    assert entry.peak_bytes <= 0.7 * keep.peak_bytes and entry.time_s <= 1.05 * cheapest_floor_s(graph, int(0.7 * keep.peak_bytes))
    assert lives.measure(entry.hold_from)[0] == entry.peak_bytes
    # nothing in it repeats itself: the ordinary search plans it
    odd = msgspec.structs.replace(
        graph, nodes=tuple(msgspec.structs.replace(n, target=f"op{i}") if n.makes else n for i, n in enumerate(graph.nodes))
    )
    assert alike(lifetimes_of(odd)) == []
    _, plain = frontier.fastest_within(odd, int(0.7 * keep.peak_bytes), 3_000 * len(graph.nodes))
    assert plain.peak_bytes <= 0.7 * keep.peak_bytes
