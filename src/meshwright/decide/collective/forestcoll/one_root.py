"""Trees of one root among many alike servers, as images of few: every other server passes on a part of its own.

A tree leaves the root's server for one other server, which sends to all the rest. Taking those servers round, with the root's staying where it is,
gives as many images of it as there are other servers, and each of them is once the one that passes on: so it receives all and sends all but its own
part, which is what its links can do. A piece goes four hops, however many servers there are. A few servers may differ from the rest, having lost a
NIC or an accelerator: they stay where they are, too, and pass on nothing.
Source: broadcast as scatter and all-gather (van de Geijn; Chan et al., "Collective communication: theory, practice, and experience", 2007), with
ForestColl's trees inside servers (arXiv 2402.06787); the fold is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from ....errors import Unsupported
from ....kernels.effort import Deadline
from ..cuts import worst_cut
from ..rates import RateGraph
from ..trees.pack import Path, Tree, merged
from ..trees.symmetry import Boxes, Shift, require_automorphism
from .boxes import HINT, BoxTree, Growth, Port, Stock, pack_box, ports_of, quotas_of, spread
from .forest import Forest, choose_trees, require_sound, rounded_capacities

__all__ = ["grown_from", "one_root_forest", "per_leaf", "reach"]

MIN_OTHER_SERVERS = 2
MIN_SHARE = Fraction(95, 100)  # of the optimum, where several servers differ: else other trees are looked for
MAX_ODD_SERVERS = 8  # beside the root's: every one of them is stored


def one_root_forest(graph: RateGraph, weight: Sequence[int], *, trees: int | None, max_trees: int, deadline: Deadline) -> Forest | None:
    """The forest of the one root, its first trees stored; None where the servers are not alike or trees do not come out.

    trees: of the root, images counted; None = the fewest that reach the optimum, or the best of 1..max_trees, times the other servers.
    Raises: TimeLimit, CheckFailed (an invariant broke).
    """
    try:
        boxes = Boxes.of(graph)
        root = next(v for v, w in enumerate(weight) if w)
        home = boxes.place[root][0]
        signatures = boxes.signature(graph, weight)
        usual = Counter(s for x, s in enumerate(signatures) if x != home).most_common(1)[0][0]
        odd = [x for x, s in enumerate(signatures) if x != home and s != usual]
        shift = Shift(boxes, tuple(sorted((home, *odd))))
        if shift.members < MIN_OTHER_SERVERS or len(odd) > MAX_ODD_SERVERS or (trees or 0) % shift.members:
            return None
        optimum = worst_cut(graph, weight).ratio
        k, stretch = choose_trees(
            graph, weight, optimum, trees=trees // shift.members if trees else None, max_trees=max_trees, deadline=deadline
        )  # fmt: skip
        found = _trees(graph, shift, root, k, rounded_capacities(graph, stretch), deadline)
        require_automorphism(graph, shift.generator)
    except Unsupported:
        return None
    forest = Forest(graph, tuple(weight), k * shift.members, stretch * shift.members, optimum, found, shift, "one root")
    # A server passes its part on to every one that differs, too: with more than one of them that is more than it receives.
    fullest = max(Fraction(used, graph.arcs.get(arc, 0) or 1) for arc, used in forest.load.items())
    forest = replace(forest, stretch=max(forest.stretch, fullest))
    require_sound(forest)
    return forest if forest.ratio >= MIN_SHARE or len(odd) < 2 else None


def _trees(graph: RateGraph, shift: Shift, root: int, k: int, capacities: dict[tuple[int, int], int], deadline: Deadline) -> tuple[Tree, ...]:
    """k trees that enter the first of the moving servers from the root's, and all others from there."""
    boxes, first, home = shift.boxes, shift.moving[0], shift.boxes.place[root][0]
    held = {arc: c for arc, c in capacities.items() if {boxes.place[v][0] for v in arc if v in boxes.place} & {first, *shift.stays}}
    odd = [x for x in shift.stays if x != home]
    # The server that has least to choose from says how many trees pass each outside node: one that differs, else the root's.
    least = min(odd, key=lambda x: sum(ports_of(boxes, x, graph, held, inward=True)[1].values()), default=-1)
    at_leaf = per_leaf(spread(*ports_of(boxes, least, graph, held, inward=True), k)) if odd else None
    exits = spread(*ports_of(boxes, home, graph, held, inward=False), k, at_leaf)
    if exits is None:
        raise Unsupported("the root's server has too few links to the network", hint=HINT)
    at_leaf = per_leaf(exits)
    quotas = quotas_of(graph, boxes, held, k, first, per_leaf=at_leaf)
    demand: dict[int, int] = {}
    for (_, into), amount in quotas.items():
        demand[into.rank] = demand.get(into.rank, 0) + amount
    ways: list[tuple[Port, Port, Port]] = []
    left = dict(exits)
    for (out, into), amount in quotas.items():
        for _ in range(amount):
            leave = next(port for port in left if left[port] and port.leaf == into.leaf)
            left[leave] -= 1
            ways.append((leave, out, into))
    inside = Stock(pack_box(boxes, first, graph, held, demand, deadline, low=True), boxes.members[first])
    own = _through(shift, root, [leave.rank for leave, _, _ in ways], held)
    if own is None:
        packed = Stock(pack_box(boxes, home, graph, held, {root: k}, deadline), boxes.members[home])
        at_root = [packed.take(root) for _ in range(k)]
        own = []
        for leave, _, _ in ways:
            own.append(min(at_root, key=lambda t, v=leave.rank: _depth(t, v)))  # type: ignore[misc]
            at_root.remove(own[-1])
    grown = [grown_from(shift, root, tree, way, inside.take(way[2].rank)) for tree, way in zip(own, ways, strict=True)]
    for x in odd:
        entries = spread(*ports_of(boxes, x, graph, held, inward=True), k, at_leaf)
        reach(graph, boxes, x, [way[1] for way in ways], grown, entries, held, deadline)
    return merged([tree.tree() for tree in grown])


def per_leaf(ports: dict[Port, int] | None) -> dict[int, int]:
    """Trees at every outside node. Raises: Unsupported where there are no such ports."""
    if ports is None:
        raise Unsupported("a server has too few links to the network", hint=HINT)
    out: dict[int, int] = {}
    for port, amount in ports.items():
        out[port.leaf] = out.get(port.leaf, 0) + amount
    return out


def reach(
    graph: RateGraph, boxes: Boxes, x: int, ways: Sequence[Port], grown: Sequence[Growth], entries: dict[Port, int] | None,
    capacities: dict[tuple[int, int], int], deadline: Deadline,
) -> None:  # fmt: skip
    """Let every tree enter box x from where it leaves the first of the moving servers. Raises: Unsupported where links are too few."""
    if entries is None:
        raise Unsupported("a server that differs has too few links from the network", hint=HINT)
    demand: dict[int, int] = {}
    for port, amount in entries.items():
        demand[port.rank] = demand.get(port.rank, 0) + amount
    inside, left = Stock(pack_box(boxes, x, graph, capacities, demand, deadline, low=True), boxes.members[x]), dict(entries)
    for out, tree in zip(ways, grown, strict=True):
        into = next(port for port in left if left[port] and port.leaf == out.leaf)
        left[into] -= 1
        tree.join(out.rank, into.rank, out.leave() + into.enter()[1:])
        tree.add(x, inside.take(into.rank), 0)


def _through(shift: Shift, root: int, exits: Sequence[int], capacities: dict[tuple[int, int], int]) -> list[BoxTree] | None:
    """A tree inside the root's server for each exit: straight to it, which serves the rest; where the root is the exit, they pass it on in a row.

    None where links, direct or through one switch, are too narrow for that.
    """
    home = shift.boxes.place[root][0]
    ranks, left, found = shift.boxes.members[home][: shift.boxes.ranks[home]], dict(capacities), []

    def hop(u: int, v: int) -> Path | None:
        for path in [(u, v), *((u, w, v) for a, w in left if a == u and (w, v) in left)]:
            arcs = list(pairwise(path))
            if all(left.get(arc, 0) for arc in arcs):
                for arc in arcs:
                    left[arc] -= 1
                return path
        return None

    for leave in exits:
        rest = [v for v in ranks if v not in (root, leave)]
        row = [root, *rest] if leave == root else [root, leave]
        parent = {v: u for u, v in pairwise(row)} | {v: leave for v in rest if leave != root}
        paths = {v: hop(u, v) for v, u in parent.items()}
        if any(path is None for path in paths.values()):
            return None
        order = tuple(row) + tuple(v for v in rest if leave != root)
        found.append(BoxTree(root, order, {**parent, root: -1}, {v: path or () for v, path in paths.items()} | {root: ()}))
    return found


def _depth(tree: BoxTree, v: int) -> int:
    hops = 0
    while v != tree.root:
        v, hops = tree.parent[v], hops + 1
    return hops


def grown_from(shift: Shift, root: int, own: BoxTree, way: tuple[Port, Port, Port], inside: BoxTree) -> Growth:
    """One tree: the root's server, the first of the moving ones, and from there the rest of those, all alike inside."""
    leave, out, into = way
    grown = Growth(shift.boxes, root)
    grown.add(shift.boxes.place[root][0], own, 0)
    grown.join(leave.rank, into.rank, leave.leave() + into.enter()[1:])
    grown.add(shift.moving[0], inside, 0)
    for d in range(1, shift.members):
        entry = shift.image(into.rank, d)
        grown.join(out.rank, entry, out.leave() + tuple(shift.image(v, d) for v in into.enter()[1:]))
        grown.add(shift.moving[d], inside, d, shift)
    return grown
