"""Forests of spanning trees that reach the exact optimum of a fabric, in units; no bytes and no programs here.

The steps are ForestColl's: optimum by cuts, number of trees, switch removal by edge splitting, tree packing, mapping back to
physical paths. Every invariant is tested at run time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm
from time import monotonic

import numpy as np

from ...errors import CheckFailed, Unsupported
from ...kernels.edgesplit import Split, remove_switches
from ...kernels.maxflow import FlowNetwork
from ...kernels.treepack import TreeBatch, pack_trees
from .rates import RateGraph, worst_cut

__all__ = ["Forest", "Tree", "build_forest", "choose_trees", "smallest_stretch"]

DEFECT = "this is a defect of the planner: please report it with the fabric file"
MAX_UNITS = 1 << 20  # shares that a message may be cut into
Path = tuple[int, ...]  # nodes from the sender to the receiver, both included


@dataclass(frozen=True)
class Tree:
    """`units` equal out-trees of `root`. `order`: ranks in the order they join; `paths[v]` from parent[v] to v (root: empty)."""

    root: int
    units: int
    parent: tuple[int, ...]
    order: tuple[int, ...]
    paths: tuple[Path, ...]

    @property
    def height(self) -> int:
        depth = {self.root: 0}
        for v in self.order[1:]:
            depth[v] = depth[self.parent[v]] + 1
        return max(depth.values())


@dataclass(frozen=True)
class Forest:
    """Trees for weights w: root r has k · w[r] units. An arc of rate b carries at most stretch · b trees.

    So time = (data per weight / k) · stretch (per rate unit). `optimum` is the smallest possible stretch / k, exactly.
    """

    graph: RateGraph
    weight: tuple[int, ...]
    k: int
    stretch: Fraction
    optimum: Fraction
    trees: tuple[Tree, ...]

    @property
    def height(self) -> int:
        return max(tree.height for tree in self.trees)

    @property
    def load(self) -> dict[tuple[int, int], int]:
        """Trees that every arc carries."""
        out: dict[tuple[int, int], int] = {}
        for tree in self.trees:
            for path in tree.paths:
                for arc in pairwise(path):
                    out[arc] = out.get(arc, 0) + tree.units
        return out


def exact_counts(graph: RateGraph, optimum: Fraction) -> tuple[int, Fraction]:
    """(k, U): the fewest trees per weight that reach the optimum exactly, and the trees per unit of rate."""
    divisor = gcd(optimum.denominator, *graph.arcs.values())
    return optimum.denominator // divisor, Fraction(optimum.numerator, divisor)


def smallest_stretch(graph: RateGraph, weight: Sequence[int], k: int, optimum: Fraction) -> Fraction:
    """Smallest U such that capacities floor(U · b) let every rank receive k trees of every weight, exactly.

    U only matters at multiples of 1/b, so the search runs over those: from k · optimum (never less) to k · optimum + 1/min b
    (always enough). Cost: O(log) sweeps.
    """
    widths = sorted(set(graph.arcs.values()))

    def at_most(x: Fraction) -> Fraction:
        return max(Fraction(x.numerator * b // x.denominator, b) for b in widths)

    def next_above(x: Fraction) -> Fraction:
        return min(Fraction(x.numerator * b // x.denominator + 1, b) for b in widths)

    order = np.arange(graph.ranks, dtype=np.int32)

    def enough(stretch: Fraction) -> bool:
        return _receives_all(graph, _capacities(graph, stretch), [k * w for w in weight], order)

    low = k * optimum
    if enough(low):
        return at_most(low)
    high = at_most(low + Fraction(1, widths[0]))
    low = at_most(low)
    while True:
        middle = at_most((low + high) / 2)
        if middle <= low:
            middle = next_above(low)
        if middle >= high:
            return high
        if enough(middle):
            high = middle
        else:
            low = middle


def _capacities(graph: RateGraph, stretch: Fraction) -> dict[tuple[int, int], int]:
    return {arc: c for arc, rate in graph.arcs.items() if (c := rate * stretch.numerator // stretch.denominator)}


def _receives_all(graph: RateGraph, capacities: dict[tuple[int, int], int], demand: Sequence[int], order: np.ndarray) -> bool:
    arcs = dict(capacities)
    arcs.update({(graph.nodes, r): d for r, d in enumerate(demand) if d})
    return FlowNetwork.of(graph.nodes + 1, arcs).sweep(graph.nodes, order, sum(demand)).failed < 0


def choose_trees(
    graph: RateGraph, weight: Sequence[int], optimum: Fraction, *, trees: int | None, max_trees: int, deadline: float
) -> tuple[int, Fraction]:
    """(k, U): as many trees as asked, or the exact optimum when it needs no more than `max_trees`, or the best of 1..max_trees.

    Counts whose rounding unbalances a switch are passed over (only one-way links of unlike rates do that); when all are, the exact
    optimum is taken. Past `deadline` (monotonic seconds) the best k found so far is taken.
    """
    if trees is not None:
        return trees, smallest_stretch(graph, weight, trees, optimum)
    k, stretch = exact_counts(graph, optimum)
    if k <= max_trees:
        return k, stretch
    best: tuple[int, Fraction] | None = None
    for count in range(1, max_trees + 1):
        found = count, smallest_stretch(graph, weight, count, optimum)
        if (best is None or found[1] / found[0] < best[1] / best[0]) and _balanced(graph, _capacities(graph, found[1])):
            best = found
        if best is not None and monotonic() > deadline:
            break
    if best is not None:
        return best
    if k * sum(weight) > MAX_UNITS:
        raise Unsupported(
            f"no count of 1 to {max_trees} trees keeps the switches balanced, and the exact optimum needs {k} trees per root",
            hint="raise max_trees, or give links rates with a larger common unit",
            data={"k": k, "max_trees": max_trees},
        )
    return k, stretch


def _balanced(graph: RateGraph, capacities: dict[tuple[int, int], int]) -> bool:
    """Every switch that took in what it gave out still does."""
    surplus, rounded = [0] * graph.nodes, [0] * graph.nodes
    for (u, v), rate in graph.arcs.items():
        surplus[u] -= rate
        surplus[v] += rate
        rounded[u] -= capacities.get((u, v), 0)
        rounded[v] += capacities.get((u, v), 0)
    return all(not rounded[w] or surplus[w] for w in range(graph.ranks, graph.nodes))


def build_forest(graph: RateGraph, weight: Sequence[int], *, trees: int | None = None, max_trees: int = 8, deadline: float = float("inf")) -> Forest:
    """Pack trees for the weights. All ranks are spanned by every tree.

    Raises: Disconnected, Unsupported (unbalanced switches, rates beyond 63 bits), TimeLimit, CheckFailed (an invariant broke).
    """
    optimum = worst_cut(graph, weight).ratio
    k, stretch = choose_trees(graph, weight, optimum, trees=trees, max_trees=max_trees, deadline=deadline)
    demand = {r: k * w for r, w in enumerate(weight) if w}
    capacities = _capacities(graph, stretch)
    logical = remove_switches(graph.nodes, capacities, list(range(graph.ranks)), demand, graph.group, names=graph.names, deadline=deadline)
    batches = pack_trees(graph.ranks, logical.arcs, demand, deadline=deadline)
    pools = _path_pools(capacities, logical.splits)
    found = tuple(tree for batch in batches for tree in _with_paths(batch, pools))
    forest = Forest(graph, tuple(weight), k, stretch, optimum, found)
    _require_sound(forest)
    return forest


# ---- back to physical paths ------------------------------------------------------------------------------------
class _Pool:
    """Physical paths of one logical arc, with how many trees each may carry; first in, first out."""

    def __init__(self) -> None:
        self.items: deque[tuple[Path, int]] = deque()

    def put(self, path: Path, amount: int) -> None:
        self.items.append((path, amount))

    def take(self, amount: int) -> list[tuple[Path, int]]:
        taken = []
        while amount:
            if not self.items:
                raise CheckFailed("a logical edge carries more trees than its physical paths", hint=DEFECT)
            path, there = self.items.popleft()
            used = min(there, amount)
            taken.append((path, used))
            if used < there:
                self.items.appendleft((path, there - used))
            amount -= used
        return taken


def _path_pools(capacities: dict[tuple[int, int], int], splits: Sequence[Split]) -> dict[tuple[int, int], _Pool]:
    pools: dict[tuple[int, int], _Pool] = {}
    for arc, amount in capacities.items():
        pools.setdefault(arc, _Pool()).put(arc, amount)
    for split in splits:
        first = pools[split.src, split.switch].take(split.amount)
        second = pools[split.switch, split.dst].take(split.amount)
        if split.src == split.dst:
            continue
        pool = pools.setdefault((split.src, split.dst), _Pool())
        for (before, after), amount in _zipped([first, second]):
            pool.put(_without_loops(before + after[1:]), amount)
    return pools


def _zipped(lists: Sequence[Sequence[tuple[Path, int]]]) -> list[tuple[list[Path], int]]:
    """Cut several lists of (path, amount) with equal totals at the union of their borders."""
    queues = [deque(items) for items in lists]
    out = []
    while queues and queues[0]:
        amount = min(queue[0][1] for queue in queues)
        out.append(([queue[0][0] for queue in queues], amount))
        for queue in queues:
            path, there = queue.popleft()
            if there > amount:
                queue.appendleft((path, there - amount))
    return out


def _without_loops(path: Path) -> Path:
    """A path that comes back to a node skips what lies between: fewer links, so no load grows."""
    out: list[int] = []
    for node in path:
        if node in out:
            del out[out.index(node) :]
        out.append(node)
    return tuple(out)


def _with_paths(batch: TreeBatch, pools: dict[tuple[int, int], _Pool]) -> list[Tree]:
    parent, order = tuple(int(p) for p in batch.parent), tuple(int(v) for v in batch.order)
    children = order[1:]
    taken = [pools[parent[v], v].take(batch.count) for v in children]
    found = []
    for paths, amount in _zipped(taken):
        by_child = dict(zip(children, paths, strict=True))
        found.append(Tree(batch.root, amount, parent, order, tuple(by_child.get(v, ()) for v in range(len(parent)))))
    return found


def _require_sound(forest: Forest) -> None:
    """Every tree spans, every root has its number of trees, no arc carries more than stretch · rate."""
    graph = forest.graph
    units = [0] * graph.ranks
    for tree in forest.trees:
        units[tree.root] += tree.units
        joined = {tree.root}
        for v in tree.order[1:]:
            path = tree.paths[v]
            if tree.parent[v] not in joined or v in joined or path[0] != tree.parent[v] or path[-1] != v:
                raise CheckFailed(f"a tree of root {graph.names[tree.root]} is broken at {graph.names[v]}", hint=DEFECT)
            joined.add(v)
        if len(joined) != graph.ranks:
            raise CheckFailed(f"a tree of root {graph.names[tree.root]} spans {len(joined)} of {graph.ranks} ranks", hint=DEFECT)
    wanted = [forest.k * w for w in forest.weight]
    if units != wanted:
        raise CheckFailed(f"trees per root are {units}, wanted {wanted}", hint=DEFECT)
    for (u, v), load in forest.load.items():
        rate = graph.arcs.get((u, v), 0)
        if load > forest.stretch * rate:
            raise CheckFailed(
                f"link {graph.names[u]} -> {graph.names[v]} carries {load} trees, more than {forest.stretch * rate}", hint=DEFECT
            )


def common_units(first: Forest, second: Forest) -> int:
    """Units per weight in which the trees of both forests have whole numbers of units."""
    return lcm(first.k, second.k)
