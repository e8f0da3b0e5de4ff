"""Structured trees over servers that differ: a port is missing, a server is smaller, roots have unlike weights.

Entries of every server are laid down first, so that its inside can be packed; exits are counted down while trees grow. In every round
each server of the tree that has exits to spare feeds one more, those with the most to spare first, so heights grow with the
logarithm of the number of servers; where there are fewer trees than servers, one feeds as many as it has exits. An exit is kept back for
every tree that is still to leave its own server.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

from ....errors import Unsupported
from ....kernels.effort import Deadline
from ....kernels.maxflow import FlowNetwork
from ..rates import RateGraph
from ..trees.pack import Tree, merged
from ..trees.symmetry import Boxes
from .boxes import HINT, MAX_TREES, Growth, Port, Stock, pack_box, ports_of, require_time, spread

__all__ = ["unlike_forest"]

Arc = tuple[int, int]


def unlike_forest(
    graph: RateGraph, boxes: Boxes, weight: Sequence[int], k: int, capacities: Mapping[Arc, int], signatures: Sequence[Hashable], deadline: Deadline,
    *, low: bool,
) -> tuple[Tree, ...]:  # fmt: skip
    """All trees, one by one; boxes with equal signatures are packed once. `low`: with one hop inside every server where that fits.

    Raises: Unsupported when trees that enter every server once do not come out, TimeLimit.
    """
    if k * sum(weight) > MAX_TREES:
        raise Unsupported(f"{k * sum(weight)} trees one by one", hint=HINT)
    return _Unlike(graph, boxes, weight, k, capacities, signatures, deadline, low).trees()


class _Unlike:
    def __init__(
        self, graph: RateGraph, boxes: Boxes, weight: Sequence[int], k: int, capacities: Mapping[Arc, int], signatures: Sequence[Hashable],
        deadline: Deadline, low: bool,
    ) -> None:  # fmt: skip
        self.graph, self.boxes, self.deadline = graph, boxes, deadline
        self.count = len(boxes.members)
        self.units = [[k * weight[r] for r in nodes[:n]] for nodes, n in zip(boxes.members, boxes.ranks, strict=True)]
        self.unbuilt = [sum(units) for units in self.units]
        total = sum(self.unbuilt)
        # Many trees: one more box per round, so that all run down their exits alike. Few: as many as there are, which is lowest.
        self.children = 1 if total >= self.count else self.count
        self.position = {v: i for v, (_, i) in boxes.place.items()}
        by_box = _by_box(boxes, capacities)
        self.entries: list[dict[Port, int]] = []
        self.exits: list[list[Port]] = []
        self.left: dict[Arc, int] = {}  # capacity left on the links that exits use
        self.budget: list[int] = []
        packed: dict[Hashable, Sequence[Tree]] = {}
        self.stock: list[Stock] = []
        for x in range(self.count):
            require_time(deadline)
            # Every tree rooted elsewhere enters this server once, so entries are known before any tree is grown, and so is the demand inside.
            need = total - self.unbuilt[x]
            entries = spread(*ports_of(boxes, x, graph, by_box[x], inward=True), need)
            if entries is None:
                raise Unsupported(f"{self._server(x)} has too few links from the network for trees that enter once", hint=HINT)
            self.entries.append(entries)
            exits, used = ports_of(boxes, x, graph, by_box[x], inward=False)
            self.exits.append(exits)
            self.left |= used
            self.budget.append(_most(used, {p.rank for p in exits}, {p.leaf for p in exits}))
            demand = dict(zip(boxes.members[x], self.units[x], strict=False))
            for port, amount in entries.items():
                demand[port.rank] += amount
            key = (signatures[x], tuple(demand.values()))
            if key not in packed:
                packed[key] = pack_box(boxes, x, graph, by_box[x], demand, deadline, low=low)
            self.stock.append(Stock(packed[key], boxes.members[x]))

    def _server(self, x: int) -> str:
        return f"the server of {self.graph.names[self.boxes.members[x][0]]}"

    def trees(self) -> tuple[Tree, ...]:
        """Roots in turn from all boxes, so that all run down their exits alike."""
        found = []
        homes = zip(self.boxes.members, self.units, strict=True)
        rows = [[r for r, units in zip(nodes, own, strict=False) for _ in range(units)] for nodes, own in homes]
        for turn in range(max(map(len, rows))):
            for x, row in enumerate(rows):
                if turn < len(row):
                    require_time(self.deadline)
                    found.append(self._grow(x, row[turn]))
        return merged(found)

    def _spare(self, x: int) -> int:
        return self.budget[x] - self.unbuilt[x]

    def _grow(self, home: int, root: int) -> Tree:
        grown = Growth(self.boxes, root)
        grown.add(home, self.stock[home].take(root), 0)
        entry = {home: root}
        joined = [home]
        # Until a tree leaves its own server, one of that server's exits is kept for it: others may not use them up before its turn.
        self.unbuilt[home] -= 1  # its first exit is no longer kept back
        waiting = sorted((x for x in range(self.count) if x != home), key=lambda x: (-self._spare(x), (x - home) % self.count))
        while waiting:
            before = len(waiting)
            for p in list(joined):
                for _ in range(self.children):
                    if not waiting or self._spare(p) <= 0 or not self._feed_one(grown, p, entry, joined, waiting):
                        break
            if len(waiting) == before:
                raise Unsupported(f"no server has an exit left for the tree of {self.graph.names[root]}", hint=HINT)
        return grown.tree()

    def _feed_one(self, grown: Growth, p: int, entry: dict[int, int], joined: list[int], waiting: list[int]) -> bool:
        """Let box p feed the first waiting box that it can; whether there was one."""
        for i, x in enumerate(waiting):
            way = self._way(p, entry[p], x)
            if way is not None:
                self._feed(grown, p, way, x)
                entry[x] = way[1].rank
                joined.append(x)
                del waiting[i]
                return True
        return False

    def _way(self, p: int, held: int, x: int) -> tuple[Port, Port] | None:
        """Exit and entry at one leaf: from the rank that has the data, straight to the same position, else where most is left."""
        best: tuple[tuple[bool, int, bool], Port, Port] | None = None
        for out in self.exits[p]:
            free = min(self.left[hop] for hop in _hops(out))
            if not free:
                continue
            for into, amount in self.entries[x].items():
                if amount and into.leaf == out.leaf:
                    straight = self.position[into.rank] == self.position[out.rank]
                    if out.rank == held and straight:
                        return out, into
                    key = (out.rank == held, min(free, amount), straight)
                    if best is None or key > best[0]:
                        best = key, out, into
        return None if best is None else best[1:]

    def _feed(self, grown: Growth, p: int, way: tuple[Port, Port], x: int) -> None:
        out, into = way
        for hop in _hops(out):
            self.left[hop] -= 1
        self.budget[p] -= 1
        self.entries[x][into] -= 1
        grown.join(out.rank, into.rank, out.leave() + into.enter()[1:])
        grown.add(x, self.stock[x].take(into.rank), 0)


def _hops(port: Port) -> tuple[Arc, ...]:
    return tuple(pairwise(port.leave()))


def _by_box(boxes: Boxes, capacities: Mapping[Arc, int]) -> list[dict[Arc, int]]:
    """The capacities that touch each box."""
    place = boxes.place
    out: list[dict[Arc, int]] = [{} for _ in boxes.members]
    for arc, c in capacities.items():
        end = place.get(arc[0]) or place.get(arc[1])
        if end is not None:
            out[end[0]][arc] = c
    return out


def _most(used: Mapping[Arc, int], ranks: set[int], leaves: set[int]) -> int:
    """Most trees that can leave a box."""
    if not used:
        return 0
    nodes = sorted({v for arc in used for v in arc})
    at = {v: i for i, v in enumerate(nodes)}
    total = sum(used.values())
    arcs = {(at[u], at[v]): c for (u, v), c in used.items()}
    arcs.update({(len(nodes), at[r]): total for r in ranks})
    arcs.update({(at[x], len(nodes) + 1): total for x in leaves})
    return FlowNetwork.of(len(nodes) + 2, arcs).max_flow(len(nodes), len(nodes) + 1)
