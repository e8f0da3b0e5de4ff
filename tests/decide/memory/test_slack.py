"""Implementations that differ in time and workspace only: the choice run by run is the best of all choices."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from meshwright.decide.memory.monet.slack import hurried, lean
from meshwright.decide.memory.step import finished
from meshwright.graph.step_graph import Alternative, StepGraph, StepNode, StepStorage


def graph_of(seed: int) -> StepGraph:
    """A chain of four forward and four backward operators, each with two to three ways of the same operands."""
    rng = np.random.default_rng(seed)
    storages = [StepStorage(size_bytes=64, owner="x", kind="input")]
    nodes = [StepNode(name="x", target="placeholder", phase="input", storages=(0,))]
    for i in range(8):
        storages.append(StepStorage(size_bytes=int(rng.integers(50, 200)), owner=f"n{i}"))
        inputs = (len(nodes) - 1,) if i < 4 else tuple(sorted({len(nodes) - 1, 8 - i}))
        ways = tuple(
            Alternative(
                name=f"w{k}", inputs=inputs, time_s=float(rng.integers(1, 20)), workspace_bytes=int(rng.integers(0, 150)), lossless=bool(k != 1)
            )
            for k in range(int(rng.integers(1, 3)))
        )
        nodes.append(
            StepNode(
                name=f"n{i}", target="op", phase="forward" if i < 4 else "backward", inputs=inputs, storages=(i + 1,), makes=(i + 1,),
                time_s=float(rng.integers(1, 20)), workspace_bytes=int(rng.integers(0, 150)), alternatives=ways,
            )
        )  # fmt: skip
    return StepGraph(name="ways", nodes=tuple(nodes), storages=tuple(storages), boundary=5, results=(8,))


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_of_ways_is_faster(seed: int, lossy: bool) -> None:
    graph = graph_of(seed)
    able = [[-1, *(k for k, a in enumerate(n.alternatives) if lossy or a.lossless)] for n in graph.nodes[1:]]
    plans = {ways: finished(graph, [(i + 1, w) for i, w in enumerate(ways)], 4, strategy="all") for ways in product(*able)}
    least = min(p.peak_bytes for p in plans.values())
    for budget in (least, least + 40, least + 120):
        small = lean(graph, {}, lossy=lossy, slower=float("inf"))
        runs = hurried(graph, [(i, small.get(i, -1)) for i in range(1, 9)], 4, budget, lossy=lossy)
        found = finished(graph, runs, 4, strategy="slack")
        assert found.peak_bytes <= budget
        assert found.time_s == min(p.time_s for p in plans.values() if p.peak_bytes <= budget)


def test_a_run_that_fits_nowhere_stays_as_it_was() -> None:
    graph = graph_of(0)
    runs = [(i, -1) for i in range(1, 9)]
    assert hurried(graph, runs, 4, 1, lossy=True) == runs


def test_small_workspaces_are_bought_up_to_a_limit() -> None:
    graph = graph_of(3)
    for i, way in lean(graph, {}, lossy=True, slower=1.0).items():
        node = graph.nodes[i]
        time_s = node.time_s if way < 0 else node.alternatives[way].time_s
        assert time_s == min(node.time_s, *(a.time_s for a in node.alternatives))
