"""Strength equals brute force over partitions, and whole spanning trees reach it."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import CheckFailed, Disconnected, TimeLimit
from meshwright.kernels.effort import Deadline
from meshwright.kernels.strength import pack_spanning_trees, strength

Edges = dict[tuple[int, int], int]


def random_edges(rng: np.random.Generator, nodes: int) -> Edges:
    edges = {(u, v): int(rng.choice([1, 1, 2, 3, 7, 20])) for u in range(nodes) for v in range(u + 1, nodes) if rng.random() < 0.7}
    for v in range(1, nodes):
        edges.setdefault((v - 1, v), int(rng.integers(1, 6)))
    return edges


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


def ratio(edges: Edges, parts: list[list[int]]) -> Fraction:
    label = {v: i for i, part in enumerate(parts) for v in part}
    return Fraction(sum(c for (u, v), c in edges.items() if label[u] != label[v]), len(parts) - 1)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6))
def test_strength_is_the_least_ratio_over_all_partitions_and_trees_reach_it(seed: int, nodes: int) -> None:
    edges = random_edges(np.random.default_rng(seed), nodes)
    found = strength(nodes, edges)
    assert found.ratio == min(ratio(edges, p) for p in partitions(list(range(nodes))) if len(p) > 1)
    assert ratio(edges, [list(p) for p in found.parts]) == found.ratio
    assert sorted(v for part in found.parts for v in part) == list(range(nodes))
    room = {pair: c * found.ratio.denominator for pair, c in edges.items()}
    trees = pack_spanning_trees(nodes, room, found.ratio.numerator)
    assert sum(copies for _, copies in trees) == found.ratio.numerator
    load: Edges = {}
    for tree, copies in trees:
        assert nx.is_tree(nx.Graph(tree)) and len(nx.Graph(tree)) == nodes
        for pair in tree:
            load[pair] = load.get(pair, 0) + copies
    assert all(used <= room[pair] for pair, used in load.items())
    with pytest.raises(CheckFailed, match="spanning trees fit"):
        pack_spanning_trees(nodes, room, found.ratio.numerator + 1)


def test_known_strengths() -> None:
    complete = {(u, v): 1 for u in range(8) for v in range(u + 1, 8)}
    assert strength(8, complete).ratio == 4
    assert strength(5, {(v, v + 1): 3 for v in range(4)}).ratio == 3
    dumbbell = {(0, 1): 9, (1, 2): 9, (0, 2): 9, (3, 4): 9, (4, 5): 9, (3, 5): 9, (2, 3): 1}
    assert strength(6, dumbbell).ratio == 1 and set(strength(6, dumbbell).parts) == {(0, 1, 2), (3, 4, 5)}


def test_a_graph_in_two_parts_has_none() -> None:
    with pytest.raises(Disconnected, match="no spanning tree"):
        strength(4, {(0, 1): 1, (2, 3): 1})
    with pytest.raises(Disconnected):
        strength(1, {})


def test_the_deadline_ends_the_packing() -> None:
    with pytest.raises(TimeLimit, match="spanning trees"):
        pack_spanning_trees(3, {(0, 1): 2, (1, 2): 2, (0, 2): 2}, 3, deadline=Deadline(clock_s=0.0))
