"""Sets of trees that carry one collective: packed, one hop, one tree, and two channels side by side.

A set is what `blink` lowers to a program: trees in the numbers of one rate graph, each with a count of equal units. Sources: Blink
(arXiv 1910.04940), sections on hybrid channels (NVLink and PCIe) and on one-hop trees for switched boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ....errors import Disconnected, Unsupported
from ....kernels.strength import pack_spanning_trees, strength
from ..cuts import worst_cut
from ..problem import CollectiveProblem
from ..rates import RateGraph, rate_graph
from ..trees.lower import Part
from ..trees.pack import Tree
from .graph import canonical, path_edges
from .pack import Packing, Rooted, pack

__all__ = [
    "REVERSED", "SHAPE_OF", "Chosen", "TreeSet", "channel_graphs", "channel_set", "few_exact_trees", "one_hop_set", "one_tree_set", "own_path",
    "packed_set", "parts_of", "switch_path",
]  # fmt: skip

SHAPE_OF = {
    "broadcast": "broadcast", "reduce": "broadcast", "all-reduce": "all-reduce", "all-gather": "all-gather", "reduce-scatter": "all-gather",
    "scatter": "scatter", "gather": "scatter",
}  # fmt: skip
REVERSED = ("reduce", "reduce-scatter", "gather")  # packed on the reversed graph, climbed
MAX_EXACT_TREES = 4096  # trees of an exact packing that is asked for; more are refused, since matroid union takes them one by one
MAX_FEW_EXACT_TREES = 32  # trees, and ranks, up to which an exact packing is tried unasked
MAX_CHANNEL_UNITS = 96  # units of both channels together, in which the message is shared between them
FAST_KINDS = ("NV", "XGMI")


@dataclass(frozen=True)
class Chosen:
    """A tree over ranks and its units. `down[v]`, `up[v]`: nodes from v's parent to v and back, in the numbers of the set's graph."""

    root: int
    units: int
    parent: tuple[int, ...]
    order: tuple[int, ...]
    down: tuple[tuple[int, ...], ...]
    up: tuple[tuple[int, ...], ...]

    @property
    def depth(self) -> int:
        depth = {self.root: 0}
        for v in self.order[1:]:
            depth[v] = depth[self.parent[v]] + 1
        return max(depth.values())


@dataclass(frozen=True)
class TreeSet:
    """Trees of one form. `rate_Bps`: message bytes per second that their links carry. Facts go to the plan's notes."""

    form: str
    graph: RateGraph
    trees: tuple[Chosen, ...]
    rate_Bps: Fraction
    facts: dict[str, Any]
    exact: bool = False

    @property
    def depth(self) -> int:
        return max(t.depth for t in self.trees)


def per_root(op: str) -> bool:
    """Whether every rank is the root of its own shard."""
    return op in ("all-gather", "reduce-scatter")


def chosen_tree(root: int, units: int, down: Sequence[tuple[int, ...]], up: Sequence[tuple[int, ...]]) -> Chosen:
    """A tree from its paths; order breadth first from the root, children by number after the root, going round."""
    n = len(down)
    parent = tuple(path[0] if path else -1 for path in down)
    near: list[list[int]] = [[] for _ in range(n)]
    for v in range(n):
        child = (root + v) % n
        if parent[child] >= 0:
            near[parent[child]].append(child)
    order = [root]
    for u in order:
        order += near[u]
    return Chosen(root, units, parent, tuple(order), tuple(down), tuple(up))


def set_rate(problem: CollectiveProblem, graph: RateGraph, trees: Sequence[Chosen]) -> Fraction:
    """Message bytes per second at which the busiest arc is full, exactly."""
    n, op = graph.ranks, problem.op
    blocks = op in ("scatter", "gather")
    load: dict[tuple[int, int], int] = {}
    for t in trees:
        # Blocks travel alone: a link carries those of all ranks below it.
        below = [1] * n
        if blocks:
            for v in reversed(t.order[1:]):
                below[t.parent[v]] += below[v]
        for v in t.order[1:]:
            amount = t.units * below[v]
            for path, passed in ((t.down[v], op not in REVERSED), (t.up[v], op in (*REVERSED, "all-reduce"))):
                if passed:
                    for hop in pairwise(path):
                        load[hop] = load.get(hop, 0) + amount
    whole = sum(t.units for t in trees) * (n if blocks else 1)
    return graph.unit_Bps * whole / max(Fraction(x, graph.arcs[hop]) for hop, x in load.items())


# ---- packed trees ---------------------------------------------------------------------------------------------------------
def packed_set(problem: CollectiveProblem, graph: RateGraph, *, epsilon: float, theta: float, exact: bool, form: str = "trees") -> TreeSet:
    """Trees packed into one graph. Raises: Disconnected; Unsupported (no exact packing known for this case)."""
    op, shape = problem.op, SHAPE_OF[problem.op]
    used = graph.reversed() if op in REVERSED else graph
    root = problem.root if shape in ("broadcast", "scatter") else -1
    optimum: Fraction | None = None
    if shape in ("broadcast", "all-gather"):
        weight = [int(r == root) for r in range(graph.ranks)] if shape == "broadcast" else [1] * graph.ranks
        # For out-trees the worst cut is the optimum (Edmonds), so weights may stop as soon as they come near it.
        optimum = 1 / worst_cut(used, weight).ratio
    allocation, order = canonical(used, root)
    if exact:
        if shape != "all-reduce" or allocation.nodes != allocation.ranks:
            raise Unsupported(
                f"an exact packing of {op} trees is made for all-reduce on devices joined directly only",
                hint="leave `exact` off, or use --strategy forestcoll",
            )
        packing = _exact_spanning(problem, graph)
        order = tuple(range(graph.nodes))
    else:
        packing = pack(allocation, shape, epsilon=epsilon, theta=theta, optimum=optimum)
    trees = tuple(_renamed(op, tree, units, order) for tree, units in zip(packing.trees, packing.units, strict=True))
    facts = {
        "trees": len(trees), "units": sum(packing.units) // (graph.ranks if per_root(op) else 1), "trees_before": packing.distinct,
        "optimum_Bps": float(packing.optimum) * graph.unit_Bps * (graph.ranks if per_root(op) else 1), "method": packing.method,
    }  # fmt: skip
    return TreeSet(form, graph, trees, set_rate(problem, graph, trees), facts, exact)


def _renamed(op: str, tree: Rooted, units: int, order: Sequence[int]) -> Chosen:
    """From canonical numbers, and from the reversed graph where the operation climbs."""
    n = len(tree.down)
    down: list[tuple[int, ...]] = [()] * n
    up: list[tuple[int, ...]] = [()] * n
    for v in range(n):
        path = tuple(order[x] for x in tree.down[v])
        back = tuple(order[x] for x in tree.up[v]) if tree.up else ()
        if op in REVERSED:
            back = path[::-1]
        down[order[v]], up[order[v]] = path, back
    return chosen_tree(order[tree.root], units, down, up)


def _undirected(graph: RateGraph) -> dict[tuple[int, int], int]:
    """What the narrower direction of every pair carries."""
    found = {(u, v): min(r, graph.arcs.get((v, u), 0)) for (u, v), r in graph.arcs.items() if u < v}
    return {pair: r for pair, r in found.items() if r}


def few_exact_trees(graph: RateGraph) -> bool:
    """Whether an exact packing of undirected trees exists here and needs at most MAX_FEW_EXACT_TREES of them."""
    if graph.nodes > graph.ranks or graph.ranks > MAX_FEW_EXACT_TREES:
        return False
    try:
        return strength(graph.ranks, _undirected(graph)).ratio.numerator <= MAX_FEW_EXACT_TREES
    except Disconnected:
        return False


def _exact_spanning(problem: CollectiveProblem, graph: RateGraph) -> Packing:
    """As many whole trees as the strength says, by matroid union, after scaling capacities by its denominator."""
    edges = _undirected(graph)
    best = strength(graph.ranks, edges)
    count, scale = best.ratio.numerator, best.ratio.denominator
    if count > MAX_EXACT_TREES:
        raise Unsupported(
            f"the exact packing needs {count} trees, more than {MAX_EXACT_TREES}",
            hint="give links rates with a larger common unit, or leave `exact` off", data={"trees": count},
        )  # fmt: skip
    # Nash-Williams and Tutte: the strength p / q means that q copies of the graph hold p disjoint spanning trees, and no more.
    found = pack_spanning_trees(graph.ranks, {pair: r * scale for pair, r in edges.items()}, count)
    trees = [_lowest(graph.ranks, pairs) for pairs, _ in found]
    return Packing(
        tuple(trees), tuple(copies for _, copies in found), best.ratio, float(best.ratio), len(found), float(best.ratio), "matroid union, exact"
    )


def _lowest(n: int, pairs: Sequence[tuple[int, int]]) -> Rooted:
    near: list[list[int]] = [[] for _ in range(n)]
    for u, v in pairs:
        near[u].append(v)
        near[v].append(u)
    return min((rooted_at(near, r) for r in range(n)), key=lambda t: (t.depth, t.root))


def rooted_at(near: Sequence[Sequence[int]], root: int) -> Rooted:
    """The tree with these neighbours, hung up at `root`, over direct arcs."""
    down: list[tuple[int, ...]] = [()] * len(near)
    todo, seen = [root], {root}
    for u in todo:
        for v in near[u]:
            if v not in seen:
                seen.add(v)
                down[v] = (u, v)
                todo.append(v)
    return Rooted(root, tuple(down), tuple(path[::-1] for path in down))


# ---- few hops ---------------------------------------------------------------------------------------------------------------
def switch_path(problem: CollectiveProblem, graph: RateGraph, u: int, v: int) -> tuple[int, ...] | None:
    """The fabric's own route between two ranks in the graph's numbers; None if it passes a device."""
    path = own_path(problem, graph, u, v)
    if path is None or any(problem.fabric.actor_of[graph.names[x]] < len(problem.fabric.devices) for x in path[1:-1]):
        return None
    return path


def own_path(problem: CollectiveProblem, graph: RateGraph, u: int, v: int) -> tuple[int, ...] | None:
    """The fabric's own route between two ranks in the graph's numbers; None if it leaves the graph."""
    fabric = problem.fabric
    try:
        links = fabric.route(fabric.actor_of[graph.names[u]], fabric.actor_of[graph.names[v]])
    except Disconnected:
        return None
    number = _numbers(graph.names)
    names = [graph.names[u], *(fabric.links[x].dst for x in links)]
    return tuple(number[name] for name in names) if all(name in number for name in names) else None


@lru_cache(maxsize=8)
def _numbers(names: tuple[str, ...]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def one_hop_set(problem: CollectiveProblem, graph: RateGraph) -> TreeSet | None:
    """Stars: every rank exchanges its share with every other directly. None where some pair has no path of its own."""
    n, op = graph.ranks, problem.op
    roots = range(n) if per_root(op) or op == "all-reduce" else [problem.root]
    trees = []
    for root in roots:
        down: list[tuple[int, ...]] = [()] * n
        up: list[tuple[int, ...]] = [()] * n
        for v in range(n):
            if v == root:
                continue
            there = switch_path(problem, graph, root, v) if op not in REVERSED else switch_path(problem, graph, v, root)
            back = switch_path(problem, graph, v, root) if op == "all-reduce" else None
            if there is None or (op == "all-reduce" and back is None):
                return None
            up[v] = there if op in REVERSED else (back or ())
            down[v] = there[::-1] if op in REVERSED else there
        trees.append(chosen_tree(root, 1, down, up))
    return TreeSet("one-hop", graph, tuple(trees), set_rate(problem, graph, trees), {"trees": len(trees), "units": 1 if per_root(op) else len(trees)})


def one_tree_set(problem: CollectiveProblem, graph: RateGraph) -> TreeSet:
    """One tree per root of fewest rank-to-rank hops, then widest paths: for messages that latency rules. Raises: Disconnected."""
    op, n = problem.op, graph.ranks
    used = graph.reversed() if op in REVERSED else graph
    allocation, order = canonical(used, problem.root if SHAPE_OF[op] in ("broadcast", "scatter") else -1)
    paths = path_edges(allocation, undirected=op == "all-reduce")
    rate = {(u, v): r for u, v, r in allocation.arcs}
    best: dict[tuple[int, int], tuple[int, ...]] = {}
    for path in paths.nodes_of:
        key = path[0], path[-1]
        if key not in best or _worth(path, rate) < _worth(best[key], rate):
            best[key] = path
    near: list[list[int]] = [[] for _ in range(n)]
    for u, v in sorted(best, key=lambda pair: (*_worth(best[pair], rate), pair)):
        near[u].append(v)
    wanted = range(n) if per_root(op) else [allocation.root] if allocation.root >= 0 else range(n)
    found = [_breadth_first(near, best, r, op == "all-reduce") for r in wanted]
    spanning = [t for t in found if t is not None]
    if not spanning or (per_root(op) and len(spanning) < n):
        raise Disconnected("no tree of the devices' links spans all ranks", hint="add links, or name a connected part of the devices")
    if op == "all-reduce":
        spanning = [min(spanning, key=lambda t: (t.depth, t.root))]
    trees = tuple(_renamed(op, t, 1, order) for t in spanning)
    return TreeSet("one-tree", graph, trees, set_rate(problem, graph, trees), {"trees": len(trees), "units": 1})


def _worth(path: tuple[int, ...], rate: dict[tuple[int, int], int]) -> tuple[int, int]:
    return len(path), -min(rate[hop] for hop in pairwise(path))


def _breadth_first(near: list[list[int]], best: dict[tuple[int, int], tuple[int, ...]], root: int, both: bool) -> Rooted | None:
    down: list[tuple[int, ...]] = [()] * len(near)
    todo, seen = [root], {root}
    for u in todo:
        for v in near[u]:
            if v not in seen:
                seen.add(v)
                down[v] = best[u, v]
                todo.append(v)
    if len(seen) < len(near):
        return None
    return Rooted(root, tuple(down), tuple(best[v, p[0]] if p else () for v, p in enumerate(down)) if both else ())


# ---- two channels ---------------------------------------------------------------------------------------------------------------
def channel_graphs(problem: CollectiveProblem, *, relay: bool) -> tuple[RateGraph, RateGraph] | None:
    """(device-to-device links, all other links) as graphs of their own, if each joins all ranks by itself."""
    fabric = problem.fabric
    halves = []
    for fast in (True, False):
        links = tuple(x for x in fabric.links if x.kind.startswith(FAST_KINDS) == fast)
        if not links:
            return None
        graph = rate_graph(replace(fabric, links=links), problem.ranks, relay=relay)
        try:
            worst_cut(graph, [1] * graph.ranks)
            worst_cut(graph.reversed(), [1] * graph.ranks)
        except Disconnected:
            return None
        halves.append(graph)
    return halves[0], halves[1]


def channel_set(problem: CollectiveProblem, fast: TreeSet, slow: TreeSet, extra_s: float) -> TreeSet | None:
    """Both channels at once, shares such that they end together; None if the slow one has nothing to do.

    D_slow / B_slow + extra = D_fast / B_fast, D_slow + D_fast = D, so D_slow = B_slow (D - extra · B_fast) / (B_slow + B_fast).
    """
    size = Fraction(problem.size_bytes)
    # Solved from the equation above; at or below 0 the fast channel is done before the slow one could start.
    share = slow.rate_Bps * (size - Fraction(extra_s) * fast.rate_Bps) / ((slow.rate_Bps + fast.rate_Bps) * size)
    if share <= 0:
        return None
    parts = 1 if not per_root(problem.op) else fast.graph.ranks
    units = [sum(t.units for t in one.trees) // parts for one in (fast, slow)]
    best: tuple[Fraction, int, int] | None = None
    # The exact share is hardly ever a ratio of whole trees: of small multiples of both sets the pair that ends first is taken.
    for a in range(1, 17):
        for b in range(1, 17):
            total = a * units[0] + b * units[1]
            if total > MAX_CHANNEL_UNITS:
                break
            part = Fraction(b * units[1], total)
            time = max(part * size / slow.rate_Bps + Fraction(extra_s), (1 - part) * size / fast.rate_Bps)
            if best is None or time < best[0]:
                best = time, a, b
    if best is None:
        return None
    number = {name: i for i, name in enumerate(fast.graph.names)}
    moved = [number[name] for name in slow.graph.names]
    trees = [_scaled(t, best[1], list(range(len(number)))) for t in fast.trees] + [_scaled(t, best[2], moved) for t in slow.trees]
    facts = {
        "trees": len(trees), "units": best[1] * units[0] + best[2] * units[1], "fast_Bps": float(fast.rate_Bps), "slow_Bps": float(slow.rate_Bps),
        "slow_share": float(Fraction(best[2] * units[1], best[1] * units[0] + best[2] * units[1])), "extra_s": extra_s,
    }  # fmt: skip
    return TreeSet("channels", fast.graph, tuple(trees), size / best[0], facts)


def _scaled(t: Chosen, factor: int, number: Sequence[int]) -> Chosen:
    def names(paths: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(number[x] for x in path) for path in paths)

    return Chosen(t.root, t.units * factor, t.parent, t.order, names(t.down), names(t.up))


# ---- to parts of a program ----------------------------------------------------------------------------------------------------------
def parts_of(problem: CollectiveProblem, trees: TreeSet, *, single: bool) -> tuple[list[Part], int]:
    """(parts of every shard, units per shard). `single`: every unit a part of its own, so that links shared evenly share by units."""
    op, n = problem.op, trees.graph.ranks
    first = [0] * n
    parts: list[Part] = []
    for t in trees.trees:
        shard = t.root if per_root(op) else 0
        climb = Tree(t.root, t.units, t.parent, t.order, tuple(path[::-1] for path in t.up)) if op in (*REVERSED, "all-reduce") else None
        descend = Tree(t.root, t.units, t.parent, t.order, t.down) if op not in REVERSED else None
        pieces = [1] * t.units if single else [t.units]
        for units in pieces:
            parts.append(Part(shard, first[shard], units, climb, descend))
            first[shard] += units
    return parts, max(first)
