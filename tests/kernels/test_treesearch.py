"""Cheapest trees equal networkx's, and brute force where its tie-breaking constants fail; packings are feasible and near the optimum."""

from __future__ import annotations

from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UsageError
from meshwright.kernels.treesearch import ARBORESCENCE, SHORTEST, SPANNING, PathEdges, cheapest_trees, pack_by_weights

Arcs = dict[tuple[int, int], float]
ROOT = np.array([0], np.int32)


def random_arcs(rng: np.random.Generator, nodes: int, symmetric: bool = False) -> Arcs:
    arcs = {(u, v): int(rng.integers(1, 30)) for u in range(nodes) for v in range(nodes) if u != v and rng.random() < 0.7}
    cycle = [int(x) for x in rng.permutation(nodes)]
    for u, v in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        arcs.setdefault((u, v), int(rng.integers(1, 30)))
    if symmetric:
        for u, v in list(arcs):
            arcs.setdefault((v, u), int(rng.integers(1, 30)))
    return dict(sorted(arcs.items()))


def direct_edges(nodes: int, arcs: Arcs) -> PathEdges:
    pairs = np.array(list(arcs), np.int32).reshape(-1, 2)
    count = len(pairs)
    numbers = np.arange(count + 1, dtype=np.int32)
    return PathEdges(nodes, pairs[:, 0].copy(), pairs[:, 1].copy(), numbers, numbers[:-1].copy(), np.array(list(arcs.values()), float))


def parents(edges: PathEdges, row: np.ndarray) -> list[int]:
    return [int(edges.src[e]) if e >= 0 else -1 for e in row]


def spans(parent: list[int], root: int) -> bool:
    seen = {root}
    for v in range(len(parent)):
        walk = []
        while v not in seen and v >= 0 and v not in walk:
            walk.append(v)
            v = parent[v]
        if v not in seen:
            return False
        seen.update(walk)
    return parent[root] == -1


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5), st.sampled_from([0.0, -30.0, -200.0]))
def test_the_cheapest_arborescence_is_brute_forces_also_when_lengths_differ_by_hundreds_of_decades(seed: int, nodes: int, decades: float) -> None:
    rng = np.random.default_rng(seed)
    arcs = {pair: 10 ** float(rng.uniform(decades, 0)) for pair in random_arcs(rng, nodes)}
    edges = direct_edges(nodes, arcs)
    into = [[u for u in range(nodes) if (u, v) in arcs] for v in range(nodes)]
    best = min(sum(arcs[p, v] for v, p in enumerate((-1, *choice)) if v) for choice in product(*into[1:]) if spans([-1, *choice], 0))
    found = cheapest_trees(edges, ARBORESCENCE, ROOT, np.array(list(arcs.values())))
    assert found is not None
    parent = parents(edges, found[0][0])
    assert spans(parent, 0)
    assert sum(arcs[p, v] for v, p in enumerate(parent) if v) == pytest.approx(best, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(6, 14))
def test_arborescences_spanning_and_shortest_path_trees_equal_networkx(seed: int, nodes: int) -> None:
    rng = np.random.default_rng(seed)
    arcs = random_arcs(rng, nodes, symmetric=True)
    edges, length = direct_edges(nodes, arcs), np.array(list(arcs.values()), float)
    graph = nx.DiGraph()
    graph.add_weighted_edges_from((u, v, w) for (u, v), w in arcs.items() if v)
    out = cheapest_trees(edges, ARBORESCENCE, ROOT, length)
    assert out is not None and length @ out[1] == nx.minimum_spanning_arborescence(graph).size(weight="weight")
    both = nx.Graph()
    both.add_weighted_edges_from((u, v, w + arcs[v, u]) for (u, v), w in arcs.items() if u < v)
    tree = cheapest_trees(edges, SPANNING, ROOT, length)
    assert tree is not None and length @ tree[1] == nx.minimum_spanning_tree(both).size(weight="weight")
    full = nx.DiGraph()
    full.add_weighted_edges_from((u, v, w) for (u, v), w in arcs.items())
    short = cheapest_trees(edges, SHORTEST, ROOT, length)
    distance = nx.single_source_dijkstra_path_length(full, 0)
    assert short is not None and length @ short[1] == pytest.approx(sum(distance.values()) / nodes)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 7), st.sampled_from([0.3, 0.1]))
def test_packings_by_weights_are_within_twice_epsilon_of_the_minimum_cut(seed: int, nodes: int, epsilon: float) -> None:
    rng = np.random.default_rng(seed)
    arcs = random_arcs(rng, nodes)
    edges = direct_edges(nodes, arcs)
    graph = nx.DiGraph()
    graph.add_edges_from((u, v, {"capacity": c}) for (u, v), c in arcs.items())
    optimum = min(nx.maximum_flow_value(graph, 0, v) for v in range(1, nodes))
    done = pack_by_weights(edges, ARBORESCENCE, ROOT, epsilon=epsilon, most=200_000)
    assert done is not None
    load = np.zeros(len(arcs))
    for chosen, amount in zip(*done, strict=True):
        row = chosen[0]
        assert spans(parents(edges, row), 0)
        load[row[row >= 0]] += amount
    rate = done[1].sum() / (load / edges.capacity).max()
    assert (1 - 2 * epsilon) * optimum <= rate <= optimum * (1 + 1e-9)
    early = pack_by_weights(edges, ARBORESCENCE, ROOT, epsilon=epsilon, most=200_000, target=rate / 2)
    assert early is not None and len(early[1]) <= len(done[1])


def test_small_epsilon_does_not_leave_the_range_of_floats() -> None:
    """The published starting length would be about 10^-700 here."""
    edges = direct_edges(4, {(u, v): 1 for u in range(4) for v in range(4) if u != v})
    done = pack_by_weights(edges, ARBORESCENCE, ROOT, epsilon=0.002, most=2_000_000)
    assert done is not None and np.isfinite(done[1]).all()
    load = np.bincount(done[0].ravel()[done[0].ravel() >= 0], minlength=12)
    assert done[1].sum() / load.max() == pytest.approx(3, rel=0.01)


def test_many_roots_share_the_arcs() -> None:
    """All-gather on a one-way ring of 4: each root's trees fill a quarter of what its three arcs carry."""
    edges = direct_edges(4, {(v, (v + 1) % 4): 1 for v in range(4)})
    done = pack_by_weights(edges, ARBORESCENCE, np.arange(4, dtype=np.int32), epsilon=0.1, most=10_000)
    assert done is not None
    usage = sum(a * np.bincount(c.ravel()[c.ravel() >= 0], minlength=4) for c, a in zip(*done, strict=True))
    assert done[1].sum() / usage.max() == pytest.approx(1 / 3)


def test_unreachable_nodes_have_no_tree() -> None:
    edges = direct_edges(3, {(0, 1): 1, (2, 1): 1})
    for mode in (ARBORESCENCE, SPANNING, SHORTEST):
        assert cheapest_trees(edges, mode, ROOT, np.ones(2)) is None
        assert pack_by_weights(edges, mode, ROOT, epsilon=0.1, most=10) is None


@pytest.mark.parametrize("epsilon", [0.0, 1.0, -0.1])
def test_epsilon_must_be_a_share(epsilon: float) -> None:
    with pytest.raises(UsageError, match="epsilon"):
        pack_by_weights(direct_edges(2, {(0, 1): 1}), ARBORESCENCE, ROOT, epsilon=epsilon, most=10)
