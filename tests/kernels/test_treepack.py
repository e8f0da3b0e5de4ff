"""Packed trees span, respect capacities and come in the numbers asked for."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import CheckFailed, TimeLimit
from meshwright.kernels.effort import Deadline
from meshwright.kernels.treepack import TreeBatch, pack_trees

Arcs = dict[tuple[int, int], int]


def random_arcs(rng: np.random.Generator, nodes: int) -> Arcs:
    arcs = {(int(u), int(v)): int(rng.integers(1, 7)) for u in range(nodes) for v in range(nodes) if u != v and rng.random() < 0.6}
    cycle = rng.permutation(nodes)
    for u, v in zip(cycle, np.roll(cycle, -1), strict=True):
        arcs.setdefault((int(u), int(v)), int(rng.integers(1, 4)))
    return arcs


def packable(nodes: int, arcs: Arcs, demand: dict[int, int]) -> bool:
    """Edmonds' condition, by networkx."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(nodes + 1))
    graph.add_edges_from((u, v, {"capacity": c}) for (u, v), c in arcs.items())
    graph.add_edges_from((nodes, r, {"capacity": d}) for r, d in demand.items())
    return all(nx.maximum_flow_value(graph, nodes, v) >= sum(demand.values()) for v in range(nodes))


def assert_packed(nodes: int, arcs: Arcs, demand: dict[int, int], batches: list[TreeBatch]) -> None:
    load: Arcs = {}
    count = dict.fromkeys(demand, 0)
    for batch in batches:
        assert batch.count > 0 and batch.parent[batch.root] == -1 and batch.order[0] == batch.root
        joined = {batch.root}
        for v in map(int, batch.order[1:]):
            u = int(batch.parent[v])
            assert u in joined and v not in joined
            joined.add(v)
            load[u, v] = load.get((u, v), 0) + batch.count
        assert joined == set(range(nodes))
        count[batch.root] += batch.count
    assert count == demand
    assert all(used <= arcs.get(arc, 0) for arc, used in load.items())


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 8), st.booleans())
def test_a_maximal_demand_is_packed(seed: int, nodes: int, one_root: bool) -> None:
    """The demand grows root by root until Edmonds' condition is tight: the hardest packable case."""
    rng = np.random.default_rng(seed)
    arcs = random_arcs(rng, nodes)
    demand: dict[int, int] = {}
    for r in [0] if one_root else [int(x) for x in rng.permutation(nodes)]:
        while packable(nodes, arcs, {**demand, r: demand.get(r, 0) + 1}):
            demand[r] = demand.get(r, 0) + 1
    assert_packed(nodes, arcs, demand, pack_trees(nodes, arcs, demand))


def test_large_multiplicities_stay_few_batches() -> None:
    big = 10**9
    arcs = {(u, v): big for u in range(4) for v in range(4) if u != v}
    batches = pack_trees(4, arcs, dict.fromkeys(range(4), big))
    assert_packed(4, arcs, dict.fromkeys(range(4), big), batches)
    assert len(batches) < 60


def test_too_much_demand_is_an_error() -> None:
    with pytest.raises(CheckFailed, match="stuck at root") as caught:
        pack_trees(3, {(0, 1): 1, (1, 2): 1, (2, 0): 1}, {0: 1, 1: 1})
    assert caught.value.data["root"] in (0, 1)


def test_nothing_to_pack() -> None:
    assert pack_trees(2, {(0, 1): 1}, {}) == []


def test_a_deadline_that_passed_is_a_typed_error() -> None:
    with pytest.raises(TimeLimit, match="the time limit was reached"):
        pack_trees(2, {(0, 1): 1}, {0: 1}, deadline=Deadline(clock_s=0.0))
