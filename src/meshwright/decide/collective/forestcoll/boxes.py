"""Structure first: trees over servers, then trees inside servers. Loads are compared with the proven optimum, so no optimality test is needed.

Every tree enters every other server once. A server's links to the network then carry as many trees in as are rooted elsewhere, and
inside it every tree is a spanning tree from where it entered. So three small problems replace a large one: how entries and exits
spread over a server's ports (flows), which server feeds which (doubling: offsets 1, 2, 4, ... while all send; low trees), and packing trees
inside a server (the general method, once per kind of server).
Servers that are alike: one tree per rank of the first server, all others are its images under rotation of the servers.
Servers that differ: the same, tree by tree, with every server's exits and entries counted down; which server may send is decided by
what it has left. Whatever does not come out exactly is refused, and the caller takes the general method.
Source: ForestColl (arXiv 2402.06787), symmetric variant; the two levels are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ....errors import TimeLimit, Unsupported
from ....kernels.effort import Deadline
from ....kernels.maxflow import FlowNetwork
from ..rates import RateGraph
from ..trees.pack import Path, Tree, merged, pack_capacities, zipped
from ..trees.ports import Port, ports_of, spread
from ..trees.symmetry import Boxes, Shift

__all__ = [
    "BoxTree", "Growth", "Port", "Stock", "alike_forest", "pack_box", "ports_of", "quotas_of", "require_time", "spread", "stars",
    "switches_to_network",
]  # fmt: skip

Arc = tuple[int, int]
# Trees that are built one by one: of one server where servers are alike, else of all. Beyond it equal trees must be counted instead of
# repeated, which the general method does.
MAX_TREES = 1 << 14
HINT = "use the general method"


# ---- trees inside one box ----------------------------------------------------------------------------------------------
class Stock:
    """Box trees by the rank they grow from, low ones first, taken one at a time."""

    def __init__(self, trees: Sequence[Tree], members: Sequence[int]) -> None:
        self.lists: dict[int, list[list[object]]] = {}
        for tree in sorted(trees, key=lambda t: -t.height):
            parent = tuple(members[p] if p >= 0 else -1 for p in tree.parent)
            order = tuple(members[v] for v in tree.order)
            paths = tuple(tuple(members[v] for v in path) for path in tree.every_path)
            moved = BoxTree(members[tree.root], order, dict(zip(members, parent, strict=False)), dict(zip(members, paths, strict=False)))
            self.lists.setdefault(members[tree.root], []).append([tree.units, moved])

    def take(self, root: int) -> BoxTree:
        rows = self.lists[root]
        entry = rows[-1]
        tree = entry[1]
        assert isinstance(tree, BoxTree) and isinstance(entry[0], int)
        entry[0] -= 1
        if not entry[0]:
            rows.pop()
        return tree

    def next_is(self, root: int, tree: BoxTree) -> bool:
        """Whether `take` gives this one again."""
        rows = self.lists[root]
        return bool(rows) and rows[-1][1] is tree


@dataclass(frozen=True)
class BoxTree:
    root: int
    order: tuple[int, ...]
    parent: dict[int, int]
    paths: dict[int, Path]


def switches_to_network(boxes: Boxes, x: int, capacities: Mapping[Arc, int]) -> set[int]:
    """Switches of box x with a link to or from an outside node."""
    own, outside = set(boxes.members[x][boxes.ranks[x] :]), set(boxes.outside)
    return {a for u, v in capacities for a, b in ((u, v), (v, u)) if a in own and b in outside}


def pack_box(
    boxes: Boxes, x: int, graph: RateGraph, capacities: Mapping[Arc, int], demand: Mapping[int, int], deadline: Deadline, *, low: bool = False
) -> tuple[Tree, ...]:
    """Trees inside box x, nodes by position. Switches that lead to the network are left to the ports. `low`: of one hop, where those fit.

    Raises: Unsupported when the demand does not fit.
    """
    members = boxes.members[x]
    skip = switches_to_network(boxes, x, capacities)
    at = {v: i for i, v in enumerate(members)}
    inside = {(at[u], at[v]): c for (u, v), c in capacities.items() if u in at and v in at and u not in skip and v not in skip}
    n, wanted = boxes.ranks[x], {at[r]: d for r, d in demand.items() if d}
    if n == 1:
        return tuple(Tree(0, d, (-1,), (0,), ((),)) for d in wanted.values())
    if low and (found := stars(n, inside, wanted)):
        return found
    arcs = dict(inside)
    arcs.update({(len(members), r): d for r, d in wanted.items()})
    total = sum(wanted.values())
    # Edmonds: trees with these roots exist exactly if every rank can receive one unit of each of them, one max-flow per rank.
    network = FlowNetwork.of(len(members) + 1, arcs)
    for v in range(n):
        if network.max_flow(len(members), v, limit=total) < total:
            raise Unsupported(f"the links inside the server of {graph.names[members[0]]} are too few for trees that enter once", hint=HINT)
    return pack_capacities(len(members), inside, n, wanted, [0] * len(members), names=[graph.names[v] for v in members], deadline=deadline)


def stars(n: int, inside: Mapping[Arc, int], wanted: Mapping[int, int]) -> tuple[Tree, ...] | None:
    """Every root sends to all others itself, directly or through one switch; None where the capacities are too few for that."""
    left, found = dict(inside), []
    leaves: dict[int, list[int]] = {}
    for u, w in inside:
        leaves.setdefault(u, []).append(w)
    for root, amount in wanted.items():
        ways: list[list[tuple[Path, int]]] = []
        for v in (v for v in range(n) if v != root):
            rest, row = amount, []
            for path in [(root, v), *((root, w, v) for w in leaves.get(root, ()) if w >= n)]:
                hops = list(pairwise(path))
                used = min(rest, *(left.get(hop, 0) for hop in hops))
                if used:
                    row.append((path, used))
                    rest -= used
                    for hop in hops:
                        left[hop] -= used
            if rest:
                return None
            ways.append(row)
        order = (root, *(v for v in range(n) if v != root))
        for paths, units in zipped(ways):
            own = dict(zip(order[1:], paths, strict=True))
            found.append(Tree(root, units, tuple(-1 if v == root else root for v in range(n)), order, tuple(own.get(v, ()) for v in range(n))))
    return tuple(found)


# ---- boxes that are alike ----------------------------------------------------------------------------------------------
def alike_forest(
    graph: RateGraph, boxes: Boxes, weight: Sequence[int], k: int, capacities: Mapping[Arc, int], deadline: Deadline, *, low: bool
) -> tuple[tuple[Tree, ...], Shift]:
    """Trees of the first box's ranks; all others are images. The caller has checked that the boxes are alike.

    `low`: servers are entered from the root's, and ranks inside from where their server was entered, which among many saves the latency of hops;
    else servers pass on what they received, doubling those that have it.

    Raises: Unsupported when trees that enter every server once do not fit.
    """
    count, first = len(boxes.members), boxes.members[0]
    own = {r: k * weight[r] for r in first[: boxes.ranks[0]]}
    here = set(first)
    capacities = {arc: c for arc, c in capacities.items() if arc[0] in here or arc[1] in here}
    # Every tree enters each other server once; by symmetry as many trees leave a server, their own and others' together, as enter it.
    need = sum(own.values()) * (count - 1)
    if not 0 < need <= MAX_TREES * count:
        raise Unsupported(f"{sum(own.values())} trees per server", hint=HINT)
    quotas = quotas_of(graph, boxes, capacities, need)
    entering: dict[int, int] = {}
    for (_, into), amount in quotas.items():
        entering[into.rank] = entering.get(into.rank, 0) + amount
    demand = {r: own.get(r, 0) + entering.get(r, 0) for r in own}
    require_time(deadline)
    stock = Stock(pack_box(boxes, 0, graph, capacities, demand, deadline, low=low), first)
    shift = Shift(boxes)
    trees = []
    roots = [r for r, units in own.items() for _ in range(units)]
    taken = _assign(quotas, roots, count - 1)
    for root, ways in zip(roots, taken, strict=True):
        trees.append(_spun(shift, root, ways, stock, low=low))
    return merged(trees), shift


def quotas_of(
    graph: RateGraph, boxes: Boxes, capacities: Mapping[Arc, int], need: int, x: int = 0, *, per_leaf: Mapping[int, int] | None = None
) -> dict[tuple[Port, Port], int]:  # fmt: skip
    """How many trees take each (exit, entry) of box x, both at one leaf; the same rank at both ends where possible. `per_leaf`: as `spread`.

    Raises: Unsupported where so many do not fit.
    """
    entries = spread(*ports_of(boxes, x, graph, capacities, inward=True), need, per_leaf)
    if entries is None:
        raise Unsupported("a server's links from the network are too few for trees that enter once", hint=HINT)
    at_leaf: dict[int, int] = {}
    for port, amount in entries.items():
        at_leaf[port.leaf] = at_leaf.get(port.leaf, 0) + amount
    exits = spread(*ports_of(boxes, x, graph, capacities, inward=False), need, at_leaf)
    if exits is None:
        raise Unsupported("a server's links to the network are too few for trees that enter once", hint=HINT)
    left_in, left_out = dict(entries), dict(exits)
    quotas: dict[tuple[Port, Port], int] = {}
    # The same rank at both ends first: then a rank that received data can send it on itself, without a hop inside its server.
    for same in (True, False):
        for out in left_out:
            for into in left_in:
                amount = min(left_out[out], left_in[into])
                if amount and out.leaf == into.leaf and (out.rank == into.rank or not same):
                    quotas[out, into] = quotas.get((out, into), 0) + amount
                    left_out[out] -= amount
                    left_in[into] -= amount
    return quotas


def _assign(quotas: Mapping[tuple[Port, Port], int], roots: Sequence[int], each: int) -> list[list[tuple[Port, Port]]]:
    """`each` ways per tree: those that leave and enter at the root's own place first, then straight ones, then the rest."""
    left = dict(quotas)
    out: list[list[tuple[Port, Port]]] = []
    for root in roots:
        row: list[tuple[Port, Port]] = []
        for way in [w for w in left if w[0].rank == root == w[1].rank]:
            used = min(left[way], each - len(row))
            left[way] -= used
            row += [way] * used
        out.append(row)
    rest = sorted((w for w in left if left[w]), key=lambda w: (w[0].rank != w[1].rank, w[0].rank, w[1].rank))
    for row in out:
        while len(row) < each:
            while not left[rest[0]]:
                rest.pop(0)
            used = min(left[rest[0]], each - len(row))
            left[rest[0]] -= used
            row += [rest[0]] * used
    return out


def _spun(shift: Shift, root: int, ways: Sequence[tuple[Port, Port]], stock: Stock, *, low: bool) -> Tree:
    """One tree from the first box: box d hangs under box d without its highest bit, or if `low` under the first."""
    grown = Growth(shift.boxes, root)
    grown.add(0, stock.take(root), 0)
    for d, (out, into) in enumerate(ways, start=1):
        # Doubling: in round i boxes 0 .. 2^i - 1 feed those 2^i further on, so the height over servers is the logarithm of their number.
        p = 0 if low else d - (1 << d.bit_length() - 1)
        sender, entry = shift.image(out.rank, p), shift.image(into.rank, d)
        path = tuple(shift.image(v, p) for v in out.leave()) + tuple(shift.image(v, d) for v in into.enter()[1:])
        grown.join(sender, entry, path)
        grown.add(d, stock.take(into.rank), d, shift)
    return grown.tree()


class Growth:
    """A tree in the making, over all ranks."""

    def __init__(self, boxes: Boxes, root: int) -> None:
        total = sum(boxes.ranks)
        self.root = root
        self.parent = [-1] * total
        self.paths: list[Path] = [()] * total
        self.depth = [0] * total
        self.order: list[int] = [root]

    def join(self, sender: int, entry: int, path: Path) -> None:
        self.parent[entry], self.paths[entry], self.depth[entry] = sender, path, self.depth[sender] + 1
        self.order.append(entry)

    def add(self, box: int, tree: BoxTree, member: int, shift: Shift | None = None) -> None:
        """Hang a box tree, moved by a member of the group, under its root, which has joined."""
        move = (lambda v: shift.image(v, member)) if shift is not None and member else (lambda v: v)
        for v in tree.order[1:]:
            here, above = move(v), move(tree.parent[v])
            self.parent[here], self.depth[here] = above, self.depth[above] + 1
            self.paths[here] = tuple(move(w) for w in tree.paths[v]) if member else tree.paths[v]
            self.order.append(here)

    def tree(self) -> Tree:
        order = sorted(self.order, key=self.depth.__getitem__)  # stable: servers before what is inside them
        return Tree(self.root, 1, tuple(self.parent), tuple(order), tuple(self.paths))


def require_time(deadline: Deadline) -> None:
    if deadline.past:
        raise TimeLimit("the time limit was reached before all trees were packed", hint="raise the time limit, or use --strategy ring")

