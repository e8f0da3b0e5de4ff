"""Allocations as graphs of paths between ranks, and their isomorphism classes.

Trees join ranks only; what lies between two ranks (switches, NICs, relaying devices) becomes a path. Equal allocations get equal
numbers: `canonical_order` numbers a graph's nodes so that isomorphic graphs (with equal rates, ranks mapped to ranks, root to root)
have equal arcs, and a packing found once serves the whole class.

Source of the numbering: individualisation and refinement, as in B. McKay, "Practical graph isomorphism" (1981), with automorphisms found
at equal leaves used to skip equal branches. A budget bounds the search; beyond it a graph keeps its own numbering, which costs repeated
work and never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ....errors import Disconnected
from ....kernels.treesearch import PathEdges
from ..rates import RateGraph

__all__ = ["Allocation", "canonical", "canonical_order", "path_edges"]

MAX_PATHS_PER_PAIR = 4  # paths kept per ordered pair of ranks, and per source and switch on the way: parallel ones multiply at every switch
MAX_ARCS_LOOKED_AT = 60_000  # during one canonical numbering; a graph that needs more keeps its own numbers, and is packed once more than needed
MAX_CANONICAL_NODES = 64  # larger graphs keep their own numbers


@dataclass(frozen=True)
class Allocation:
    """A graph in canonical numbers; hashable, so that packings can be kept. Node i < ranks is a rank. `root` is -1 where none is marked."""

    ranks: int
    nodes: int
    arcs: tuple[tuple[int, int, int], ...]  # (from, to, rate in units), sorted
    root: int


@dataclass(frozen=True)
class Paths:
    """Paths between ranks: `nodes_of[e]` are the nodes of edge e, both ends included; `arcs` numbers the arcs in use."""

    edges: PathEdges
    nodes_of: tuple[tuple[int, ...], ...]
    arcs: tuple[tuple[int, int], ...]


def canonical(graph: RateGraph, root: int = -1) -> tuple[Allocation, tuple[int, ...]]:
    """(allocation in canonical numbers, canonical number -> node of `graph`). Ranks get the smallest numbers."""
    order = canonical_order(graph.nodes, graph.arcs, [int(v < graph.ranks) + int(v == root) for v in range(graph.nodes)])
    number = {v: i for i, v in enumerate(order)}
    arcs = tuple(sorted((number[u], number[v], rate) for (u, v), rate in graph.arcs.items()))
    return Allocation(graph.ranks, graph.nodes, arcs, number[root] if root >= 0 else -1), order


def canonical_order(nodes: int, arcs: dict[tuple[int, int], int], colour: Sequence[int]) -> tuple[int, ...]:
    """Nodes in canonical order, higher colours first. Isomorphic coloured graphs give equal arcs in these numbers, within the budget."""
    if nodes > MAX_CANONICAL_NODES:
        return tuple(sorted(range(nodes), key=lambda v: (-colour[v], v)))
    search = _Search(nodes, arcs, colour)
    search.descend(search.refine([-c for c in colour]), ())
    if search.exhausted:
        return tuple(sorted(range(nodes), key=lambda v: (-colour[v], v)))
    assert search.best is not None
    return search.best[1]


class _Search:
    def __init__(self, nodes: int, arcs: dict[tuple[int, int], int], colour: Sequence[int]) -> None:
        self.nodes, self.arcs = nodes, arcs
        self.near: list[list[tuple[int, int, int]]] = [[] for _ in range(nodes)]
        for u, v in sorted({tuple(sorted(arc)) for arc in arcs}):
            out, back = arcs.get((u, v), 0), arcs.get((v, u), 0)
            self.near[u].append((v, out, back))
            self.near[v].append((u, back, out))
        self.best: tuple[tuple[tuple[int, int, int], ...], tuple[int, ...]] | None = None
        self.moves: list[tuple[int, ...]] = []  # automorphisms found
        self.left = MAX_ARCS_LOOKED_AT
        self.exhausted = False

    def refine(self, colours: list[int]) -> list[int]:
        """Split colours by the colours and rates around, until nothing splits; colours become ranks of their cells."""
        count = len(set(colours))
        while True:
            self.left -= 2 * len(self.arcs) + self.nodes
            signature = [(colours[v], sorted((colours[w], out, back) for w, out, back in self.near[v])) for v in range(self.nodes)]
            first: dict[str, int] = {}
            for place, v in enumerate(sorted(range(self.nodes), key=lambda v: signature[v])):
                first.setdefault(repr(signature[v]), place)
            colours = [first[repr(signature[v])] for v in range(self.nodes)]
            if len(first) == count:
                return colours
            count = len(first)

    def descend(self, colours: list[int], prefix: tuple[int, ...]) -> None:
        if self.left < 0:
            self.exhausted = True
            return
        cells: dict[int, list[int]] = {}
        for v, c in enumerate(colours):
            cells.setdefault(c, []).append(v)
        several = [c for c in sorted(cells) if len(cells[c]) > 1]
        if not several:
            self._leaf(tuple(cells[c][0] for c in sorted(cells)))
            return
        cell = cells[several[0]]
        tried: list[int] = []
        orbits = _Orbits(self.nodes)
        # One node of the first ambiguous cell is told apart after the other. Where an automorphism that keeps the prefix takes it to one already
        # tried, its branch has the same leaves, so it is skipped: without that a fully symmetric graph has n! leaves.
        for v in cell:
            if tried and orbits.under(self.moves, prefix).join(v, tried):
                continue
            tried.append(v)
            # Odd numbers leave room for v's own colour just below its cell's.
            single = [2 * c + 1 for c in colours]
            single[v] -= 1
            self.descend(self.refine(single), (*prefix, v))
            if self.exhausted:
                return

    def _leaf(self, order: tuple[int, ...]) -> None:
        number = {v: i for i, v in enumerate(order)}
        form = tuple(sorted((number[u], number[v], rate) for (u, v), rate in self.arcs.items()))
        if self.best is None or form < self.best[0]:
            self.best = (form, order)
        # Two numberings that give the same arcs differ by an automorphism.
        elif form == self.best[0]:
            move = [0] * self.nodes
            for a, b in zip(self.best[1], order, strict=True):
                move[a] = b
            self.moves.append(tuple(move))


class _Orbits:
    """Which nodes the automorphisms found so far take to one another, where they keep a prefix. They only get more, so each is looked at once."""

    def __init__(self, nodes: int) -> None:
        self.label = list(range(nodes))
        self.seen = 0  # of the moves

    def _find(self, x: int) -> int:
        label = self.label
        while label[x] != x:
            label[x] = label[label[x]]
            x = label[x]
        return x

    def under(self, moves: list[tuple[int, ...]], prefix: tuple[int, ...]) -> _Orbits:
        for move in moves[self.seen :]:
            if all(move[x] == x for x in prefix):
                for a, b in enumerate(move):
                    self.label[self._find(a)] = self._find(b)
        self.seen = len(moves)
        return self

    def join(self, v: int, tried: list[int]) -> bool:
        own = self._find(v)
        return any(own == self._find(u) for u in tried)


def path_edges(allocation: Allocation, *, undirected: bool = False) -> Paths:
    """Paths between all pairs of ranks that pass no other rank: the shortest, and others up to MAX_PATHS_PER_PAIR by length, then by number.

    `undirected`: only pairs that have a path each way. Raises: Disconnected when a rank has no path from or to any other.
    """
    out: list[list[int]] = [[] for _ in range(allocation.nodes)]
    for u, v, _ in allocation.arcs:
        out[u].append(v)
    paths: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for rank in range(allocation.ranks):
        layer: list[tuple[int, ...]] = [(rank,)]
        passed = [0] * allocation.nodes
        while layer:
            longer = []
            for path in layer:
                for v in out[path[-1]]:
                    if v in path or passed[v] >= MAX_PATHS_PER_PAIR:
                        continue
                    passed[v] += 1
                    if v < allocation.ranks:
                        paths.setdefault((rank, v), []).append((*path, v))
                    else:
                        longer.append((*path, v))
            layer = longer
    chosen = [path for pair, found in sorted(paths.items()) for path in found if not undirected or pair[::-1] in paths]
    for rank in range(allocation.ranks):
        if not any(rank in (path[0], path[-1]) for path in chosen):
            raise Disconnected(f"rank {rank} of the allocation has no path to another", hint="add links, or name a connected part of the devices")
    rates = {(u, v): rate for u, v, rate in allocation.arcs}
    used = sorted({arc for path in chosen for arc in pairwise(path)})
    number = {arc: i for i, arc in enumerate(used)}
    ptr = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum([len(path) - 1 for path in chosen], out=ptr[1:])
    edges = PathEdges(
        allocation.ranks,
        np.array([path[0] for path in chosen], np.int32),
        np.array([path[-1] for path in chosen], np.int32),
        ptr,
        np.array([number[arc] for path in chosen for arc in pairwise(path)], np.int32),
        np.array([rates[arc] for arc in used], np.float64),
    )
    return Paths(edges, tuple(chosen), tuple(used))
