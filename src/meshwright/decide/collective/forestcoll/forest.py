"""Forests of spanning trees that reach the exact optimum of a fabric, in units; no bytes and no programs here.

The steps are ForestColl's: optimum by cuts, number of trees, switch removal by edge splitting, tree packing, mapping back to
physical paths. Every invariant is tested at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm

import numpy as np

from ....errors import CheckFailed, Unsupported
from ....kernels.effort import NEVER, Deadline
from ....kernels.maxflow import FlowNetwork
from ..cuts import network_below, worst_cut
from ..rates import RateGraph
from ..trees.pack import DEFECT, Tree, lowered, pack_capacities
from ..trees.symmetry import Boxes, Shift, require_automorphism, sinks_of_each_kind
from .balance import balanced_capacities, surpluses
from .boxes import alike_forest
from .rotation import rotated_trees
from .unlike_servers import unlike_forest

__all__ = [
    "Forest", "Limb", "Tree", "build_forest", "choose_trees", "require_loads", "require_sound", "rounded_capacities", "smallest_stretch",
    "spread_load",
]  # fmt: skip

Arc = tuple[int, int]
# Trees per root that count as few: tried before the exact optimum's number is taken, and the most that rotated trees come in.
MAX_FEW_TREES = 8
# Share of the optimal throughput from which on a forest is good enough: below it the exact optimum, or another number of trees, is looked for.
MIN_SHARE_OF_OPTIMUM = Fraction(995, 1000)
# Trees of all roots up to which the exact optimum is packed where few trees fall short of it: packing costs max-flows per tree.
MAX_SMALL_FOREST_TREES = 4096
# Shares that a message may be cut into where only the exact optimum keeps switches balanced: more than that are refused.
MAX_UNITS = 1 << 20
# Ranks up to which several forests are built and compared by height; among more, few pieces fit a program, and low trees are made by rotation.
MAX_FEW_RANKS = 72
# Ranks up to which rotated trees are written out: each has ranks² entries.
MAX_ROTATED_RANKS = 512
# Steps by which capacities may grow until switches can be balanced; each costs a sweep of max-flows per path that is tried.
MAX_WIDENINGS = 64


@dataclass(frozen=True)
class Limb:
    """A tree that takes units from `first` on of rank `shard`'s trees on to other ranks; its root is a rank that those trees reach."""

    shard: int
    first: int
    tree: Tree


@dataclass(frozen=True)
class Forest:
    """Trees for weights w: root r has k · w[r] units. An arc of rate b carries at most stretch · b trees.

    So time = (data per weight / k) · stretch (per rate unit). `optimum` is the smallest possible stretch / k, exactly.
    With a `symmetry` only the trees of the first box's roots are kept: the others are their images. `method` is how it was made:
    "general", "alike boxes", "rotated ranks", "unlike boxes", "one root" or "odd servers"; those last have `limbs`, stored like trees.
    """

    graph: RateGraph
    weight: tuple[int, ...]
    k: int
    stretch: Fraction
    optimum: Fraction
    trees: tuple[Tree, ...]
    symmetry: Shift | None = None
    method: str = "general"
    limbs: tuple[Limb, ...] = ()

    @cached_property
    def height(self) -> int:
        of = {(tree.root, v): depth for tree in self.trees for v, depth in tree.depths.items()} if self.limbs else {}
        return max(max(tree.height for tree in self.trees), *(of[x.shard, x.tree.root] + x.tree.height for x in self.limbs), 0)

    @property
    def ratio(self) -> Fraction:
        """Share of the optimal throughput that is reached."""
        return self.k * self.optimum / self.stretch

    @property
    def distinct(self) -> int:
        """Trees, images included."""
        return len(self.trees) * (self.symmetry.members if self.symmetry else 1)

    def every_tree(self) -> Iterator[Tree]:
        """All trees, images written out."""
        for tree in self.trees:
            yield tree
            for m in range(1, self.symmetry.members if self.symmetry else 1):
                yield _image(tree, self.symmetry, m)

    @cached_property
    def load(self) -> dict[tuple[int, int], int]:
        """Trees that every arc carries."""
        out: dict[tuple[int, int], int] = {}
        for tree in (*self.trees, *(x.tree for x in self.limbs)):
            for v in sorted(tree.order):  # a path of a gather joins few of all ranks
                for arc in pairwise(tree.paths[v]):
                    out[arc] = out.get(arc, 0) + tree.units
        return out if self.symmetry is None else spread_load(out, self.symmetry)


def _image(tree: Tree, symmetry: Shift | None, member: int) -> Tree:
    assert symmetry is not None
    n = len(tree.parent)
    goes_to = [symmetry.image(v, member) for v in range(n)]
    known: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    parent, paths = [-1] * n, [()] * n  # type: list[int], list[tuple[int, ...]]
    for v in tree.order[1:]:
        path = tree.paths[v]
        if path not in known:
            known[path] = tuple(symmetry.image(w, member) for w in path)
        parent[goes_to[v]], paths[goes_to[v]] = goes_to[tree.parent[v]], known[path]
    return Tree(goes_to[tree.root], tree.units, tuple(parent), tuple(goes_to[v] for v in tree.order), tuple(paths))


def spread_load(load: Mapping[tuple[int, int], int], symmetry: Shift) -> dict[tuple[int, int], int]:
    """Loads of all images together: every arc of an orbit carries what its arcs carry of the stored trees."""
    place = symmetry.boxes.place
    orbit: dict[tuple[int, int], int] = {}
    out: dict[tuple[int, int], int] = {}
    for (u, v), used in load.items():
        box = place[u][0] if u in place else place[v][0]
        if box in symmetry.stays:
            out[u, v] = used * symmetry.members  # the arc of all images
            continue
        first = symmetry.image(u, -symmetry.turn_of[box]), symmetry.image(v, -symmetry.turn_of[box])
        orbit[first] = orbit.get(first, 0) + used
    return out | {(symmetry.image(u, m), symmetry.image(v, m)): used for (u, v), used in orbit.items() for m in range(symmetry.members)}


def exact_counts(graph: RateGraph, optimum: Fraction) -> tuple[int, Fraction]:
    """(k, U): the fewest trees per weight that reach the optimum exactly, and the trees per unit of rate."""
    # With 1/x* = p/q, any U that makes all U · b whole is a multiple of 1/gcd(b), and k = U · q/p must be whole, too: U = p / gcd(q, all b).
    divisor = gcd(optimum.denominator, *graph.arcs.values())
    return optimum.denominator // divisor, Fraction(optimum.numerator, divisor)


def smallest_stretch(graph: RateGraph, weight: Sequence[int], k: int, optimum: Fraction, sinks: Sequence[int] | None = None) -> Fraction:
    """Smallest U such that capacities floor(U · b) let every rank (or all `sinks`) receive k trees of every weight, exactly.

    U only matters at multiples of 1/b, so the search runs over those: from k · optimum (never less) to k · optimum + 1/min b
    (always enough). Cost: O(log) sweeps.
    """
    widths = sorted(set(graph.arcs.values()))

    def at_most(x: Fraction) -> Fraction:
        return max(Fraction(x.numerator * b // x.denominator, b) for b in widths)

    def next_above(x: Fraction) -> Fraction:
        return min(Fraction(x.numerator * b // x.denominator + 1, b) for b in widths)

    order, demand = np.array(sinks_of_each_kind(graph, weight) if sinks is None else sinks, np.int32), [k * w for w in weight]

    def enough(stretch: Fraction) -> bool:
        network = network_below(graph, lambda rate: rate * stretch.numerator // stretch.denominator, demand)
        return network.sweep(graph.nodes, order, sum(demand)).failed < 0

    # Below k · optimum the bottleneck cut itself is too narrow. At 1/min b more, floor(U · b) >= b · k · optimum on every arc, so all cuts suffice.
    low = k * optimum
    if enough(low):
        return at_most(low)
    high = at_most(low + Fraction(1, widths[0]))
    low = at_most(low)
    # Invariant: `low` fails, `high` suffices, both are multiples of some 1/b, between which capacities do not change.
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


def rounded_capacities(graph: RateGraph, stretch: Fraction) -> dict[tuple[int, int], int]:
    """Whole trees that every arc may carry: floor(stretch · rate), where that is any."""
    trees = {rate: rate * stretch.numerator // stretch.denominator for rate in set(graph.arcs.values())}
    return {arc: c for arc, rate in graph.arcs.items() if (c := trees[rate])}


def _receive_all(graph: RateGraph, capacities: Mapping[Arc, int], demand: Sequence[int]) -> Callable[[Mapping[Arc, int]], bool]:
    """Whether all ranks still receive everything when these arcs have other capacities; an arc that is left out has none."""
    # A source above the roots, wide as what each has to give: all cuts suffice exactly if the maximum flow to every rank is all of it.
    source, order = graph.nodes, np.arange(graph.ranks, dtype=np.int32)
    network = FlowNetwork.of(graph.nodes + 1, {**capacities, **{(source, r): d for r, d in enumerate(demand) if d}})
    slots = network.slots([u for u, _ in capacities], [v for _, v in capacities])

    def enough(changed: Mapping[Arc, int]) -> bool:
        # Asked for every path that is tried: to lay the network out anew takes longer than the flows.
        network.capacity[slots] = [changed.get(arc, 0) for arc in capacities]
        return network.sweep(source, order, sum(demand)).failed < 0

    return enough


def choose_trees(
    graph: RateGraph, weight: Sequence[int], optimum: Fraction, *, trees: int | None, max_trees: int, deadline: Deadline,
    sinks: Sequence[int] | None = None, strict: bool = False,
) -> tuple[int, Fraction]:  # fmt: skip
    """(k, U): as many trees as asked, or the fewest known that reach the optimum if they are no more than `max_trees`, or the best of
    1..max_trees; unless `strict`, the exact optimum also where that best falls short of MIN_SHARE_OF_OPTIMUM and the forest stays small.

    Counts whose rounding unbalances a switch are passed over (only one-way links of unlike rates do that); when all are, the exact
    optimum is taken. Past `deadline` the best k found so far is taken.
    """
    sinks = sinks_of_each_kind(graph, weight) if sinks is None else sinks
    if trees is not None:
        return trees, smallest_stretch(graph, weight, trees, optimum, sinks)
    k, stretch = exact_counts(graph, optimum)
    best: tuple[int, Fraction] | None = None
    for count in range(1, min(k - 1, max_trees, MAX_FEW_TREES) + 1):
        found = count, smallest_stretch(graph, weight, count, optimum, sinks)
        if (best is None or found[1] / found[0] < best[1] / best[0]) and _balanced(graph, rounded_capacities(graph, found[1])):
            best = found
            if found[1] == count * optimum:  # links with slack need not carry whole trees per unit of rate
                return best
        if best is not None and deadline.past:
            return best
    falls_short = best is not None and best[0] * optimum < MIN_SHARE_OF_OPTIMUM * best[1]
    if k <= max_trees or (not strict and falls_short and k * sum(weight) <= MAX_SMALL_FOREST_TREES):
        return k, stretch
    for count in range(MAX_FEW_TREES + 1, max_trees + 1):
        found = count, smallest_stretch(graph, weight, count, optimum, sinks)
        if (best is None or found[1] / found[0] < best[1] / best[0]) and _balanced(graph, rounded_capacities(graph, found[1])):
            best = found
        if best is not None and deadline.past:
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
    # A switch that is unlike by its rates is left to `_without_surplus`; one that only rounding made unlike speaks against this number of trees.
    surplus, rounded = [0] * graph.nodes, [0] * graph.nodes
    for (u, v), rate in graph.arcs.items():
        surplus[u] -= rate
        surplus[v] += rate
        rounded[u] -= capacities.get((u, v), 0)
        rounded[v] += capacities.get((u, v), 0)
    return all(not rounded[w] or surplus[w] for w in range(graph.ranks, graph.nodes))


def build_forest(
    graph: RateGraph, weight: Sequence[int], *, trees: int | None = None, max_trees: int = 8, deadline: Deadline = NEVER,
    structure: bool = True, symmetric: bool = True, strict: bool = False,
) -> Forest:  # fmt: skip
    """Pack trees for the weights. All ranks are spanned by every tree.

    Args: `structure`: try trees over servers first, which is quick and low, and the general method only where those do not fit; `symmetric`:
        keep one tree per orbit where servers are alike; `strict`: `max_trees` holds even where few trees fall short of the optimum.
    Raises: Disconnected, Unsupported (unbalanced switches, rates beyond 63 bits), TimeLimit, CheckFailed (an invariant broke).
    """
    optimum = worst_cut(graph, weight).ratio
    k, stretch = choose_trees(graph, weight, optimum, trees=trees, max_trees=max_trees, deadline=deadline, strict=strict)
    stretch, capacities = _without_surplus(graph, weight, k, stretch, deadline)
    forest = _structured(graph, weight, k, stretch, optimum, capacities, deadline, symmetric) if structure else None
    if forest is None:
        demand = {r: k * w for r, w in enumerate(weight) if w}
        # Edge splitting, packing and mapping back: works on any fabric, and costs most.
        found = pack_capacities(graph.nodes, capacities, graph.ranks, demand, graph.group, names=graph.names, deadline=deadline)
        forest = Forest(graph, tuple(weight), k, stretch, optimum, lowered(found))
    require_sound(forest)
    return forest


def _without_surplus(
    graph: RateGraph, weight: Sequence[int], k: int, stretch: Fraction, deadline: Deadline
) -> tuple[Fraction, dict[tuple[int, int], int]]:  # fmt: skip
    """(U, capacities) with balanced switches, at the least stretch from `stretch` on where that is found; else as they are.

    Where switches take in and give out unlike rates, that every cut is wide enough does not suffice for a packing: a little more room may be needed.
    """
    demand = [k * w for w in weight]
    wider = stretch
    for _ in range(MAX_WIDENINGS):
        capacities = rounded_capacities(graph, wider)
        if not surpluses(graph.nodes, graph.ranks, capacities):
            return wider, capacities
        found = balanced_capacities(graph.nodes, graph.ranks, capacities, _receive_all(graph, capacities, demand))
        if found is not None:
            return wider, found
        if deadline.past:
            break
        # To the next stretch at which some arc carries one tree more: in between all capacities are the same.
        wider = min(Fraction(wider.numerator * rate // wider.denominator + 1, rate) for rate in set(graph.arcs.values()))
    return stretch, rounded_capacities(graph, stretch)


def _structured(
    graph: RateGraph, weight: Sequence[int], k: int, stretch: Fraction, optimum: Fraction, capacities: dict[tuple[int, int], int],
    deadline: Deadline, symmetric: bool,
) -> Forest | None:  # fmt: skip
    """Trees over servers, or None where the fabric or its optimum is not of that kind."""
    try:
        boxes = Boxes.of(graph)
        signatures = boxes.signature(graph, weight)
        if symmetric and len(set(signatures)) == 1:
            try:
                trees, shift = alike_forest(graph, boxes, weight, k, capacities, deadline, low=graph.ranks > MAX_FEW_RANKS)
            except Unsupported:  # entering every server once does not fit inside a server: entering several times may
                if not MAX_FEW_RANKS < graph.ranks <= MAX_ROTATED_RANKS or k > MAX_FEW_TREES or set(weight) != {1}:
                    raise
                return Forest(graph, tuple(weight), k, stretch, optimum, rotated_trees(graph, boxes, k, capacities), None, "rotated ranks")
            require_automorphism(graph, shift.generator)
            return Forest(graph, tuple(weight), k, stretch, optimum, trees, shift, "alike boxes")
        trees = unlike_forest(graph, boxes, weight, k, capacities, signatures, deadline, low=sum(weight) == 1 and graph.ranks > MAX_FEW_RANKS)
    except Unsupported:
        return None
    return Forest(graph, tuple(weight), k, stretch, optimum, lowered(trees), None, "unlike boxes")


def require_sound(forest: Forest) -> None:
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
    if forest.symmetry is not None:
        for root, count in enumerate(tuple(units)):
            for m in range(1, forest.symmetry.members if count else 1):
                units[forest.symmetry.image(root, m)] += count
    wanted = [forest.k * w for w in forest.weight]
    if units != wanted:
        raise CheckFailed(f"trees per root are {units}, wanted {wanted}", hint=DEFECT)
    require_loads(forest)


def require_loads(forest: Forest) -> None:
    """Raise CheckFailed if an arc carries more than stretch · rate."""
    graph, above, below = forest.graph, forest.stretch.numerator, forest.stretch.denominator
    for (u, v), load in forest.load.items():
        rate = graph.arcs.get((u, v), 0)
        if load * below > above * rate:
            raise CheckFailed(
                f"link {graph.names[u]} -> {graph.names[v]} carries {load} trees, more than {forest.stretch * rate}", hint=DEFECT
            )


def common_units(first: Forest, second: Forest) -> int:
    """Units per weight in which the trees of both forests have whole numbers of units."""
    return lcm(first.k, second.k)
