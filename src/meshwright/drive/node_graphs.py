"""Graphs to train on by name: `rmat:NODES,EDGES`, `digits:K`, `knn:K,FILE.csv`, or a file that `io.model.node_graphs` reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingExtra, UsageError
from ..graph.generate import labelled_at_random, nearest_neighbours, rmat
from ..graph.nodes import Labelled
from ..io.model.node_graphs import read_node_graph, read_points, require_room

__all__ = ["load_node_graph"]

DRAWN_FEATURES, DRAWN_CLASSES = 64, 10  # of graphs that have none


def load_node_graph(name: str, *, seed: int = 0, directed: bool = True, features: int = 0) -> Labelled:
    """With features, labels and marks: of the file, or drawn (`features` of them, by default 64; 10 classes) where it has none.

    digits: scikit-learn's 1,797 digits, joined to their K nearest; a tenth of them, drawn, counts in the loss of digits and points.
    Raises: UsageError, MissingExtra, FormatError, Infeasible.
    """
    kind, _, rest = name.partition(":")
    if kind == "rmat" and rest:
        nodes, edges = _numbers(rest, 2, name)
        require_room(8 * (nodes + 1 + edges), name)
        return labelled_at_random(rmat(nodes, edges, seed=seed), features or DRAWN_FEATURES, DRAWN_CLASSES, seed=seed)
    if kind == "digits" and rest:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise MissingExtra("scikit-learn", extra="graphs", needed_for="its digits (or give knn:K,digits.csv.gz)") from None
        points, labels = load_digits(return_X_y=True)
        return _of_points(np.asarray(points, np.float32), np.asarray(labels, np.int64), _numbers(rest, 1, name)[0], name, seed)
    if kind == "knn" and rest:
        k, _, path = rest.partition(",")
        points, labels = read_points(path)
        return _of_points(points, labels, _numbers(k, 1, name)[0], name, seed)
    found = read_node_graph(name, directed=directed)
    graph, drawn = found.graph, labelled_at_random(found.graph, features or DRAWN_FEATURES, DRAWN_CLASSES, seed=seed)
    return Labelled(
        graph, drawn.features if found.features is None else found.features, drawn.labels if found.labels is None else found.labels,
        drawn.train if found.train is None else found.train,
    )  # fmt: skip


def _numbers(text: str, count: int, where: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count or min(found) < 1:
        said = f"{text[:64]!r} is not {count} whole number{'s' if count > 1 else ''} above 0"
        raise UsageError(said, where=where, hint="rmat:100000,1000000, digits:8")
    return found


def _of_points(points: NDArray[np.float32], labels: NDArray[np.int64], k: int, name: str, seed: int) -> Labelled:
    scale = np.abs(points).max() or 1.0
    train = np.random.default_rng(seed).random(len(points)) < 0.1
    train[int(labels.argmax())] = True  # one node at least
    return Labelled(nearest_neighbours(points, k, name=name), (points / scale).astype(np.float32), labels, train)
