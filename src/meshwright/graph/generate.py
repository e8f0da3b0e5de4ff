"""Graphs made here: R-MAT (power-law degrees), and nearest neighbours among points. Equal seeds give equal graphs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .nodes import Labelled, NodeGraph, graph_of_edges

__all__ = ["labelled_at_random", "nearest_neighbours", "rmat"]

QUADRANTS = (0.57, 0.19, 0.19, 0.05)  # of the Graph500 benchmark; Chakrabarti, Zhan, Faloutsos: R-MAT, SDM 2004
MAX_POINTS = 20_000  # their table of distances takes 3.2 GB


def rmat(nodes: int, edges: int, *, seed: int = 0) -> NodeGraph:
    """Undirected: `edges` are entries, both directions counted; a few less come out where draws fall together. Nodes are shuffled."""
    if nodes < 2 or edges < 2:
        raise UsageError(f"{nodes} nodes and {edges} edges", where="rmat", hint="at least 2 of either, e.g. rmat:1000,10000")
    rng = np.random.default_rng(seed)
    bits = max(1, (nodes - 1).bit_length())
    a, b, c, _ = QUADRANTS
    src, dst = np.empty(0, np.int64), np.empty(0, np.int64)
    while len(src) < edges // 2:
        count = edges // 2 - len(src)
        x, y = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for _ in range(bits):
            u = rng.random(count)
            x = 2 * x + (u >= a + b)
            y = 2 * y + (((u >= a) & (u < a + b)) | (u >= a + b + c))
        inside = (x < nodes) & (y < nodes)
        src, dst = np.concatenate([src, x[inside]]), np.concatenate([dst, y[inside]])
    order = rng.permutation(nodes)
    return graph_of_edges(order[src], order[dst], nodes, directed=False, name=f"rmat:{nodes},{edges}")


def nearest_neighbours(points: NDArray[np.float32], k: int, *, name: str = "neighbours") -> NodeGraph:
    """Undirected: an edge where either end is among the k nearest of the other (Euclidean; ties by number)."""
    n = len(points)
    if not 1 <= k < n <= MAX_POINTS:
        raise UsageError(f"{k} neighbours of {n} points", where=name, hint=f"1 <= k < points <= {MAX_POINTS}")
    x = points.astype(np.float64)
    square = (x * x).sum(1)
    far = square[:, None] + square[None] - 2 * (x @ x.T)
    np.fill_diagonal(far, np.inf)
    near = np.argsort(far, axis=1, kind="stable")[:, :k]
    return graph_of_edges(near.ravel(), np.repeat(np.arange(n), k), n, directed=False, name=name)


def labelled_at_random(graph: NodeGraph, features: int, classes: int, *, seed: int = 0) -> Labelled:
    """Features and labels for a graph that has none: a speed test has no accuracy."""
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((graph.nodes, features), dtype=np.float32)
    return Labelled(graph, drawn, rng.integers(classes, size=graph.nodes), np.ones(graph.nodes, bool))
