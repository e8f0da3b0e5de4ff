"""Trees by which data arrives soon: hops cost what their links' latencies say, and trees swap entries until the latest arrival is early.

The optimum of bytes says nothing about which tree takes which links. Where a network's latency is a percent of the whole time, a tree that passes
it twice, or takes many hops after it, loses what the full links won. Loads stay within the same limits, link by link (`kernels.treepack_anneal`).
For one root, links back into its server are worth nothing (`without_way_back`): all data starts there.
Deviation: the paper does not treat latency.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from ....errors import Disconnected
from ....fabric.fabric import Fabric
from ....kernels.treepack_anneal import anneal_parents
from ..cuts import worst_cut
from ..rates import RateGraph
from ..trees.pack import Path, Tree, merged
from .forest import Forest

__all__ = ["HopTimes", "arrival_s", "quicker", "without_way_back"]

# What is annealed: trees, each counted as often as it occurs, and entries (trees times ranks). Larger forests stay as they are.
MAX_ANNEALED_TREES = 1024
MAX_ANNEALED_ENTRIES = 1 << 17
# Proposals of an attempt: so many per entry, and times ranks (a proposal moves what hangs below an entry) at most so many.
MAX_PROPOSALS_PER_ENTRY = 2000
MAX_PROPOSALS_TIMES_RANKS = 16_000_000
# The same of the first, short attempt. A long one follows; where a forest is so small that it would be no longer, short ones from other seeds.
MAX_FIRST_PROPOSALS_TIMES_RANKS = 4_000_000
MAX_SEEDS = 4
MAX_SPARE_ENTRIES = 64  # paths into one rank that no tree uses, offered to the trees beside their own
MIN_HOP_S = 1e-6  # what a hop counts for where links state no latency, so that fewer hops still win


class HopTimes:
    """What a message's data takes over a path of the graph, its size apart; `turned`: the graph is the fabric's, reversed."""

    def __init__(self, fabric: Fabric, graph: RateGraph, *, turned: bool) -> None:
        number = {name: v for v, name in enumerate(graph.names)}
        self.wire: dict[tuple[int, int], float] = {}
        self.library: dict[tuple[int, int], float] = {}
        self.known: dict[Path, tuple[float, float]] = {}
        for x in fabric.links:
            hop = number.get(x.src, -1), number.get(x.dst, -1)
            hop = hop[::-1] if turned else hop
            self.wire[hop] = max(x.latency_s, self.wire.get(hop, 0.0))
            self.library[hop] = max(x.library_latency_s, self.library.get(hop, 0.0))

    def of(self, path: Path) -> tuple[float, float]:
        """Seconds on the wire, and the library's once per message."""
        if path not in self.known:
            hops = list(pairwise(path))
            self.known[path] = sum(self.wire[hop] for hop in hops), max((self.library[hop] for hop in hops), default=0.0)
        return self.known[path]

    def __call__(self, path: Path) -> float:
        return sum(self.of(path))


def arrival_s(forest: Forest, seconds: HopTimes) -> float:
    """When data of any tree has reached the last device, if it waits for nothing."""
    latest = 0.0
    for tree in forest.trees:
        at = {tree.root: 0.0}
        for v in tree.order[1:]:
            at[v] = at[tree.parent[v]] + seconds(tree.paths[v])
        latest = max(latest, *at.values())
    return latest


def without_way_back(graph: RateGraph, root: int) -> RateGraph | None:
    """The graph without links into the root's server, nor out of one other like it; None where that costs throughput or unbalances switches.

    Of the servers some need not send: the last one is taken, which with the root's makes up for what other switches no longer pass on.
    """
    home, group = graph.group[root], graph.group
    others = [x for x in dict.fromkeys(group[: graph.ranks]) if x != home]
    if not others:
        return None
    last = others[-1]
    # Nothing needs to come back to the root's server, and the last one need not send, so that switches between servers stay balanced. Below, the
    # root's switches pass less inwards, since they are no longer entered, and the last server's take in less, since they no longer give out.
    kept = {(u, v): rate for (u, v), rate in graph.arcs.items() if not (group[u] != home == group[v]) and not (group[u] == last != group[v])}
    wanted = _surplus(graph, graph.arcs)
    for _ in range(graph.nodes):  # a switch that is entered less has less to pass on inside; one that gives out less needs less from inside
        now = _surplus(graph, kept)
        uneven = [w for w in range(graph.ranks, graph.nodes) if now[w] != wanted[w]]
        if not uneven:
            return _as_good(graph, replace(graph, arcs=kept), root)
        for w in uneven:
            amount = now[w] - wanted[w]
            arcs = [a for a in kept if a[int(amount > 0)] == w and group[a[0]] == group[a[1]] == (last if amount > 0 else home)]
            left = abs(amount)
            for arc in arcs:
                taken = min(kept[arc], left)
                left -= taken
                kept[arc] -= taken
                if not kept[arc]:
                    del kept[arc]
    return None


def _as_good(graph: RateGraph, pruned: RateGraph, root: int) -> RateGraph | None:
    """The pruned graph, if the root reaches all as fast in it."""
    weight = [int(r == root) for r in range(graph.ranks)]
    try:
        return pruned if worst_cut(pruned, weight).ratio == worst_cut(graph, weight).ratio else None
    except Disconnected:
        return None


def _surplus(graph: RateGraph, arcs: dict[tuple[int, int], int]) -> list[int]:
    """What every node takes in more than it gives out."""
    sums = [0] * graph.nodes
    for (u, v), rate in arcs.items():
        sums[u] -= rate
        sums[v] += rate
    return sums


def quicker(forest: Forest, seconds: HopTimes, *, hurried: bool = False) -> Forest:
    """The forest with other trees that reach their last device earlier, or itself: as it is cut, or in trees of one unit if that helps more.

    `hurried`: what the first of several attempts finds.
    """
    if forest.symmetry is not None or len(forest.trees) < 2 or len(forest.trees) * forest.graph.ranks > MAX_ANNEALED_ENTRIES:
        return forest
    found, arrives = forest, arrival_s(forest, seconds)
    total = sum(tree.units for tree in forest.trees)
    ways = [list(forest.trees)]
    if len(forest.trees) < total <= MAX_ANNEALED_TREES:
        ways.append([replace(tree, units=1) for tree in forest.trees for _ in range(tree.units)])
    for trees in ways:
        n = forest.graph.ranks
        if len(trees) > MAX_ANNEALED_TREES or len(trees) * n > MAX_ANNEALED_ENTRIES:
            continue
        long = max(1, min(MAX_PROPOSALS_PER_ENTRY * len(trees) * n, MAX_PROPOSALS_TIMES_RANKS // n))
        short = min(long, max(1, MAX_FIRST_PROPOSALS_TIMES_RANKS // n))
        attempts = [(short, 1)] if hurried else [(short, 1), (long, 1)] if long > short else [(short, seed) for seed in range(1, 1 + MAX_SEEDS)]
        table = _Table(forest, trees, seconds)
        for proposals, seed in attempts:
            other = table.annealed(proposals, seed)
            if (at := arrival_s(other, seconds)) < arrives * (1 - 1e-9):  # earlier by more than rounding
                found, arrives = other, at
    return found


class _Table:
    """What is annealed. Rows: the trees, then paths that no tree uses. A swap takes the first half of an entry from one row and the second from
    another at the same hub, so no link carries more than it did or has room for."""

    def __init__(self, forest: Forest, trees: list[Tree], seconds: HopTimes) -> None:
        n = forest.graph.ranks
        spare = _spare(forest, trees, seconds)
        rows = max(map(len, spare), default=0)
        self.forest, self.trees = forest, trees
        self.paths: list[tuple[Path, ...]] = [tree.every_path for tree in trees]
        self.paths += [tuple(column[i] if i < len(column) else () for column in spare) for i in range(rows)]
        known = {path: _halves(path, seconds) for path in dict.fromkeys(path for row in self.paths for path in row)}
        self.parent = np.array([[path[0] if path else -1 for path in row] for row in self.paths], np.int32)
        self.hub = np.array([[path[len(path) // 2] if len(path) > 2 else -1 for path in row] for row in self.paths], np.int32)
        self.halves = np.array([[known[path] for path in row] for row in self.paths], float).reshape(len(self.paths), n, 4).transpose(2, 0, 1).copy()
        self.units = np.array([tree.units for tree in trees] + [1] * rows, np.int32)

    def annealed(self, proposals: int, seed: int) -> Forest:
        paths, n = self.paths, self.forest.graph.ranks
        tables = self.parent, self.hub, self.halves, self.units
        found, first, second, after = anneal_parents(*tables, len(self.trees), proposals=proposals, seed=seed)
        out = []
        for t, tree in enumerate(self.trees):
            order = tuple(sorted(range(n), key=lambda v: (after[t, v], v != tree.root, v)))
            entries = enumerate(zip(first[t].tolist(), second[t].tolist(), strict=True))
            taken = tuple(_joined(paths[a // n][a % n], paths[b][v]) for v, (a, b) in entries)
            out.append(Tree(tree.root, tree.units, tuple(found[t].tolist()), order, taken))
        return replace(self.forest, trees=merged(out))


def _halves(path: Path, seconds: HopTimes) -> tuple[float, float, float, float]:
    """Wire and library of either half; what has no latency at all counts as a short hop."""
    if not path:
        return 0.0, 0.0, 0.0, 0.0
    middle = len(path) // 2 if len(path) > 2 else 1
    first, second = seconds.of(path[: middle + 1]), seconds.of(path[middle:])
    return (first if sum(first) else (MIN_HOP_S, 0.0)) + second


def _joined(first: Path, second: Path) -> Path:
    """The first half of one path and the second half of another that meets it at the same switch; or a direct one."""
    return first if len(first) <= 2 else first[: len(first) // 2] + second[len(second) // 2 :]


def _spare(forest: Forest, trees: list[Tree], seconds: HopTimes) -> list[list[Path]]:
    """For every device, paths by which it could be entered besides all that trees do: direct ones, and such as trees take somewhere."""
    graph = forest.graph
    left = {arc: forest.stretch.numerator * rate // forest.stretch.denominator - forest.load.get(arc, 0) for arc, rate in graph.arcs.items()}
    known: dict[Path, None] = dict.fromkeys([arc for arc in graph.arcs if max(arc) < graph.ranks])
    known.update(dict.fromkeys(path for tree in trees for path in tree.every_path if path))
    out: list[list[Path]] = [[] for _ in range(graph.ranks)]
    for path in sorted(known, key=lambda path: (seconds(path), path)):
        amount = min(MAX_SPARE_ENTRIES - len(out[path[-1]]), *(left[arc] for arc in pairwise(path)))
        if amount > 0:
            out[path[-1]] += [path] * amount
            for arc in pairwise(path):
                left[arc] -= amount
    return out
