"""Trees two hops high, one per orbit of roots: where the ranks of a server can be rotated among themselves, as well as servers among each other.

A root sends to its own server's ranks at once, and into every other server several times: each rank it enters there sends on to an equal share
of the server. So the network may carry more than one copy into a server, which trees over servers (`boxes`) never do, and inside a server links
then carry less: with m entries of B ranks, B - m sends instead of B - 1. Rotations make all links of an orbit equally full, so whether trees fit
is a count per orbit. Low trees matter where ranks are so many that few pieces can be in flight.
Source: ForestColl (arXiv 2402.06787), symmetric variant; the shape of the trees is ours.
Invariant: every map used is verified link by link (`require_automorphism`). Cost: O(entries tried · ranks) and one pass over all images.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ....errors import Unsupported
from ..rates import RateGraph
from ..trees.pack import Path, Tree
from ..trees.symmetry import Boxes, Shift, require_automorphism
from .boxes import HINT

__all__ = ["rotated_trees"]

Arc = tuple[int, int]


def rotated_trees(graph: RateGraph, boxes: Boxes, k: int, capacities: Mapping[Arc, int]) -> tuple[Tree, ...]:
    """k trees of every rank, all of height 2, within the capacities. Weights are equal.

    Raises: Unsupported where the fabric has no such rotations, or where trees of this shape do not fit.
    """
    inside, between = _rotation(graph, boxes), Shift(boxes).generator
    require_automorphism(graph, inside)
    require_automorphism(graph, between)
    local, others = boxes.ranks[0], len(boxes.members) - 1
    orbit = _orbits(graph, inside, between)
    size: dict[Arc, int] = {}
    for first in orbit.values():
        size[first] = size.get(first, 0) + 1
    routes: dict[Arc, Path] = {}
    # Entries of a root's k trees together into one other server, fewest first: each is a copy over the network, and relieves the links inside.
    for entries in range(k, k * local + 1):
        shares = [entries // k + (t < entries % k) for t in range(k)]
        trees = [_tree(graph, boxes, share, routes) for share in shares]
        used: dict[Arc, int] = {}
        for tree in trees:
            for arc in (arc for path in tree.every_path for arc in pairwise(path)):
                used[orbit[arc]] = used.get(orbit[arc], 0) + 1
        # All arcs of an orbit carry the same, by symmetry: uses by one rank's trees, times ranks, over the arcs of the orbit.
        if all(count * graph.ranks <= capacities.get(arc, 0) * size[arc] for arc, count in used.items()):
            return tuple(image for tree in trees for image in _images(tree, graph, inside, between, local, others + 1))
    raise Unsupported("trees of two hops do not fit", hint=HINT)


def _rotation(graph: RateGraph, boxes: Boxes) -> tuple[int, ...]:
    """Every server's ranks moved on by one place, and its switches after the ranks that they touch."""
    goes_to = list(range(graph.nodes))
    for nodes, count in zip(boxes.members, boxes.ranks, strict=True):
        position = {v: i for i, v in enumerate(nodes[:count])}
        touched: dict[int, set[tuple[int, int, int]]] = {w: set() for w in nodes[count:]}
        for w, found in touched.items():
            found.update((i, graph.arcs.get((v, w), 0), graph.arcs.get((w, v), 0)) for v, i in position.items())
        # A switch has no number to rotate by: it is known by the ranks that it touches, at which rates, and goes where the next ranks are touched so.
        place = {frozenset(found): w for w, found in touched.items()}
        if len(place) < len(touched):
            raise Unsupported("switches of a server that touch the same ranks cannot be told apart", hint=HINT)
        for v, i in position.items():
            goes_to[v] = nodes[(i + 1) % count]
        for w, found in touched.items():
            image = frozenset(((i + 1) % count, into, out) for i, into, out in found)
            if image not in place:
                raise Unsupported(f"rotating its server's ranks leaves no place for switch {graph.names[w]}", hint=HINT)
            goes_to[w] = place[image]
    return tuple(goes_to)


def _orbits(graph: RateGraph, *generators: Sequence[int]) -> dict[Arc, Arc]:
    """Every arc's representative: the first of those that the maps take it to."""
    first: dict[Arc, Arc] = {}
    for arc in graph.arcs:
        if arc in first:
            continue
        first[arc], todo = arc, [arc]
        while todo:
            u, v = todo.pop()
            for image in ((g[u], g[v]) for g in generators):
                if image not in first:
                    first[image] = arc
                    todo.append(image)
    return first


def _tree(graph: RateGraph, boxes: Boxes, entries: int, routes: dict[Arc, Path]) -> Tree:
    """The first rank's tree with so many entries into every other server."""
    root, count = boxes.members[0][0], boxes.ranks[0]
    parent, order = [-1] * graph.ranks, [root]
    for nodes in boxes.members[1:]:
        for v in nodes[:entries]:
            parent[v] = root
            order.append(v)
    for nodes in boxes.members[1:]:
        for i, v in enumerate(nodes[entries:count]):
            parent[v] = nodes[i % entries]
            order.append(v)
    for v in boxes.members[0][1:count]:
        parent[v] = root
        order.append(v)
    for v in order[1:]:
        if (parent[v], v) not in routes:
            routes[parent[v], v] = _route(graph, parent[v], v)
    return Tree(root, 1, tuple(parent), tuple(order), tuple(routes[parent[v], v] if v != root else () for v in range(graph.ranks)))


def _route(graph: RateGraph, src: int, dst: int) -> Path:
    """The fewest hops through switches alone."""
    before, todo = {src: src}, deque([src])
    while todo and dst not in before:
        u = todo.popleft()
        for v in range(graph.nodes):
            if (u, v) in graph.arcs and v not in before and (v == dst or v >= graph.ranks):
                before[v] = u
                todo.append(v)
    if dst not in before:
        raise Unsupported(f"no way through switches from {graph.names[src]} to {graph.names[dst]}", hint=HINT)
    path = [dst]
    while path[-1] != src:
        path.append(before[path[-1]])
    return tuple(path[::-1])


def _images(tree: Tree, graph: RateGraph, inside: Sequence[int], between: Sequence[int], turns: int, shifts: int) -> list[Tree]:
    """The tree under all rotations and shifts, itself first."""
    out, moved = [], list(range(graph.nodes))
    for _ in range(shifts):
        for _ in range(turns):
            parent, paths = [-1] * graph.ranks, [()] * graph.ranks  # type: list[int], list[Path]
            for v in tree.order[1:]:
                parent[moved[v]], paths[moved[v]] = moved[tree.parent[v]], tuple(moved[w] for w in tree.paths[v])
            out.append(Tree(moved[tree.root], 1, tuple(parent), tuple(moved[v] for v in tree.order), tuple(paths)))
            moved = [inside[w] for w in moved]
        moved = [between[w] for w in moved]
    return out
