"""Graphs of nodes: compressed rows, coefficients, shares of workers, and graphs that are made here."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from effort import few
from meshwright.errors import UsageError
from meshwright.graph.generate import labelled_at_random, nearest_neighbours, rmat
from meshwright.graph.halo import halos, message_scores
from meshwright.graph.nodes import Labelled, NodeGraph, graph_of_edges, graph_of_networkx


def drawn(seed: int, nodes: int = 12, edges: int = 30) -> NodeGraph:
    """Directed, with self-loops, double edges and nodes without any."""
    rng = np.random.default_rng(seed)
    return graph_of_edges(rng.integers(nodes // 2 + 1, size=edges), rng.integers(nodes // 2 + 3, size=edges), nodes)


def dense(graph: NodeGraph, weights: np.ndarray) -> np.ndarray:
    found = np.zeros((graph.nodes, graph.nodes))
    np.add.at(found, (graph.rows, graph.indices), weights)
    return found


@pytest.mark.parametrize("seed", range(few(10)))
def test_shares_compute_what_the_whole_graph_does(seed):
    graph, workers = drawn(seed), 1 + seed % 5
    weights = graph.coefficients(("gcn", "mean", "sum")[seed % 3])
    of = np.random.default_rng(seed).integers(max(1, workers - seed % 2), size=graph.nodes)  # every other time a worker has nothing
    x = np.random.default_rng(seed + 1).standard_normal(graph.nodes)
    whole = dense(graph, weights) @ x
    shares = halos(graph, of, workers, weights)
    assert sorted(n for s in shares for n in s.nodes[: s.own].tolist()) == list(range(graph.nodes))
    for s in shares:
        rows = np.repeat(np.arange(s.own), np.diff(s.indptr))
        got = np.bincount(rows, weights=s.weights * x[s.nodes][s.indices], minlength=s.own)
        assert got == pytest.approx(whole[s.nodes[: s.own]], abs=1e-5)
        assert (s.indices[: s.indptr[s.central]] < s.own).all(), "central nodes need nobody"
        outside = [s.indices[s.indptr[v] : s.indptr[v + 1]].max(initial=0) >= s.own for v in range(s.central, s.own)]
        assert all(outside), "marginal nodes need someone"
        for other in shares:
            first, end = s.receive[other.rank]
            assert other.nodes[other.send[s.rank]].tolist() == s.nodes[first:end].tolist()
            if other is not s:
                into = dense(graph, weights)[np.ix_(s.nodes[: s.own], s.nodes[first:end])].sum(0)
                assert message_scores(shares, other.rank, s.rank) == pytest.approx(into**2, abs=1e-6)


def test_coefficients_are_those_of_the_whole_graph():
    graph = graph_of_edges(np.array([0, 1, 2, 2]), np.array([1, 2, 1, 2]), 4).looped()
    assert dense(graph, np.ones(graph.edges)).diagonal().tolist() == [1, 1, 1, 1]
    degree = [1, 3, 2, 1]
    assert dense(graph, graph.coefficients("gcn"))[1, 0] == pytest.approx(1 / np.sqrt(degree[1] * degree[0]))
    assert dense(graph, graph.coefficients("mean")).sum(1) == pytest.approx([1, 1, 1, 1])


@pytest.mark.parametrize("seed", range(few(6)))
def test_networkx_graphs(seed):
    made = nx.gnm_random_graph(9, 14, seed=seed, directed=bool(seed % 2))
    made.add_edge(3, 3)
    graph, order = graph_of_networkx(made)
    assert dense(graph, np.ones(graph.edges)).T.tolist() == nx.to_numpy_array(made, nodelist=order).tolist()
    assert graph.symmetric.edges == 2 * sum(a != b for a, b in nx.Graph(made).edges())


def test_graphs_that_are_made_here():
    graph = rmat(1000, 8000, seed=3)
    assert (graph.indptr == rmat(1000, 8000, seed=3).indptr).all() and graph.nodes == 1000 and 6000 < graph.edges <= 8000
    degrees = np.sort(np.diff(graph.indptr))
    assert degrees[-10:].sum() > 0.05 * graph.edges, "a few nodes have many neighbours"
    points = np.random.default_rng(0).standard_normal((40, 2)).astype(np.float32)
    near = nearest_neighbours(points, 3)
    far = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(far, np.inf)
    asked = far <= np.sort(far, axis=1)[:, 2:3]
    assert dense(near, np.ones(near.edges)).astype(bool).tolist() == (asked | asked.T).tolist()
    data = labelled_at_random(graph, 5, 3)
    assert data.features.shape == (1000, 5) and data.classes == 3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: NodeGraph(np.array([0, 2, 1]), np.array([0])), "indptr must rise"),
        (lambda: NodeGraph(np.array([0, 1]), np.array([4])), "4 is none of 1 nodes"),
        (lambda: graph_of_edges(np.array([0]), np.array([7]), 3), "none of the 3 nodes"),
        (lambda: graph_of_edges(np.array([0]), np.array([]), 3), "1 sources and 0 targets"),
        (lambda: rmat(1, 10), "1 nodes and 10 edges"),
        (lambda: nearest_neighbours(np.zeros((3, 1), np.float32), 3), "3 neighbours of 3 points"),
        (lambda: halos(drawn(0), np.full(12, 2), 2, np.ones(30, np.float32)), "parts of shape"),
        (lambda: Labelled(drawn(0), np.zeros((11, 2), np.float32), np.zeros(12, int), np.ones(12, bool)), "12 nodes have"),
        (lambda: Labelled(drawn(0), np.full((12, 2), np.nan, np.float32), np.zeros(12, int), np.ones(12, bool)), "node 0 are not finite"),
        (lambda: Labelled(drawn(0), np.zeros((12, 2), np.float32), np.full(12, -1), np.ones(12, bool)), "labels must be"),
    ],
)
def test_what_is_refused(make, text):
    with pytest.raises(UsageError, match=text):
        make()
