"""Trees of all roots among many alike servers and a few that differ, having lost a NIC, an accelerator or a cable: stored once for the alike ones.

Trees of the alike servers are those that they would have alone, one server's stored (`boxes`), with limbs: what a tree carries also goes to every
server that differs, cut finer than the tree, so that it enters evenly by the links that are left. A limb hangs at the root, or where the root has no
link to where it must enter, at a rank of its server that has one. Trees of a server that differs are those of `one_root`: cut in as many parts as
there are alike servers, each of which passes on one. So the links of a server that differs carry what they must and nothing else; links out of an
alike one carry what it passes on besides, one part in so many as there are alike servers.
Source: ForestColl (arXiv 2402.06787), symmetric variant; limbs and the fold are ours.
Invariant: tested at run time: trees and limbs span, loads are counted link by link.
Cost: as `boxes` and `one_root`, and a flow per server that differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, lcm

from ....errors import CheckFailed, TimeLimit, Unsupported
from ....kernels.effort import Deadline
from ..cuts import worst_cut
from ..rates import RateGraph
from ..trees.pack import DEFECT, Tree, merged
from ..trees.symmetry import Boxes, Shift, require_automorphism
from .boxes import HINT, BoxTree, Port, Stock, pack_box, ports_of, quotas_of, spread
from .forest import Forest, Limb, build_forest, spread_load
from .one_root import grown_from, per_leaf, reach

__all__ = ["odd_forest"]

Arc = tuple[int, int]
MIN_ALIKE_SERVERS = 2
MAX_ODD_SERVERS = 8  # every one of them is stored
MIN_SHARE = Fraction(95, 100)  # of the optimum: else other trees are looked for, one by one
MAX_UNEVENNESS = Fraction(1, 150)  # that limbs' whole units may leave; parts of shards are made finer until it is less ...
MAX_FINER = 8  # ... or so many times as fine as the alike servers are many
SLACKS = tuple(Fraction(x, 1000) for x in (0, 2, 5, 10, 15, 20, 30, 50, 100, 200))  # room above the optimum that is tried in turn


def odd_forest(graph: RateGraph, *, max_trees: int, deadline: Deadline) -> Forest | None:
    """The forest of all ranks with equal weights; None where servers are not mostly alike, or trees do not come out well.

    Raises: TimeLimit, CheckFailed (an invariant broke).
    """
    weight = [1] * graph.ranks
    try:
        boxes = Boxes.of(graph)
        signatures = boxes.signature(graph, weight)
        usual = Counter(signatures).most_common(1)[0][0]
        odd = tuple(x for x, s in enumerate(signatures) if s != usual)
        shift = Shift(boxes, odd)
        if not odd or len(odd) > MAX_ODD_SERVERS or shift.members < MIN_ALIKE_SERVERS:
            return None
        require_automorphism(graph, shift.generator)
        alone, back = _without(graph, boxes, odd)
        main = build_forest(alone, [1] * alone.ranks, max_trees=max_trees, deadline=deadline)
        if main.symmetry is None:
            return None
        optimum = worst_cut(graph, weight).ratio
        trees = tuple(_renumbered(tree, back, graph.ranks) for tree in main.trees)
        found = _Odd(graph, shift, main.k, trees, optimum, deadline).forest()
    except (Unsupported, TimeLimit) as error:
        if isinstance(error, TimeLimit):
            raise
        return None
    return found if found.ratio >= MIN_SHARE else None


def _without(graph: RateGraph, boxes: Boxes, odd: Sequence[int]) -> tuple[RateGraph, list[int]]:
    """The graph of the alike servers alone, and its nodes' numbers in the whole one."""
    gone = {v for x in odd for v in boxes.members[x]}
    back = [v for v in range(graph.nodes) if v not in gone]
    number = {v: i for i, v in enumerate(back)}
    arcs = {(number[u], number[v]): rate for (u, v), rate in graph.arcs.items() if u in number and v in number}
    ranks = sum(v < graph.ranks for v in back)
    return RateGraph(tuple(graph.names[v] for v in back), ranks, tuple(graph.group[v] for v in back), arcs, graph.unit_Bps), back


def _renumbered(tree: Tree, back: Sequence[int], ranks: int) -> Tree:
    """The tree in the whole graph's numbers; ranks that it does not reach have no parent."""
    parent = [-1] * ranks
    paths: list[tuple[int, ...]] = [()] * ranks
    for v in tree.order[1:]:
        parent[back[v]], paths[back[v]] = back[tree.parent[v]], tuple(back[w] for w in tree.paths[v])
    return Tree(back[tree.root], tree.units, tuple(parent), tuple(back[v] for v in tree.order), tuple(paths))


@dataclass
class _Odd:
    graph: RateGraph
    shift: Shift
    k: int  # of the alike servers' trees
    trees: tuple[Tree, ...]
    optimum: Fraction
    deadline: Deadline

    def forest(self) -> Forest:
        """Raises: Unsupported where links are too few, CheckFailed."""
        boxes, first = self.shift.boxes, self.shift.moving[0]
        local = boxes.members[first][: boxes.ranks[first]]
        self.units = self._units(len(local))
        main = [replace(tree, units=tree.units * self.units // self.k) for tree in self.trees]
        for slack in SLACKS:
            try:
                found = self._with(main, local, slack)
            except Unsupported:
                if slack == SLACKS[-1]:
                    raise
                continue
            return found
        raise AssertionError("unreachable")

    def _units(self, local: int) -> int:
        """Parts of a shard: a multiple of the alike servers and of their trees, fine enough to enter each server that differs evenly."""
        coarse = lcm(self.shift.members, self.k)

        def uneven(units: int) -> Fraction:
            """How much more than its share the fullest entry takes, where entries are alike."""
            worst = Fraction(0)
            for x in self.shift.stays:
                ports, _ = ports_of(self.shift.boxes, x, self.graph, self.graph.arcs, inward=True)
                ways = max(1, len({p.rank for p in ports}))
                worst = max(worst, Fraction(ceil(Fraction(local * units, ways)) * ways, local * units) - 1)
            return worst

        return min((coarse * t for t in range(1, MAX_FINER + 1)), key=lambda u: (max(uneven(u), MAX_UNEVENNESS), u))

    def _with(self, main: Sequence[Tree], local: Sequence[int], slack: Fraction) -> Forest:
        """The forest whose limbs and trees keep to so much above the optimum, if there is one."""
        shift, boxes = self.shift, self.shift.boxes
        first, k = shift.moving[0], shift.members
        stretch = self.optimum * self.units * (1 + slack)
        room = {arc: int(stretch * rate) for arc, rate in self.graph.arcs.items()}
        here = {first, *shift.stays}

        def left(used: Sequence[Tree]) -> dict[Arc, int]:
            """What one image may still use, once these trees' images are there."""
            rest = _minus(room, spread_load(_load(used), shift))
            return {arc: c // k for arc, c in rest.items() if c >= k and {boxes.place[v][0] for v in arc if v in boxes.place} & here}

        each = left(main)
        own = [r for x in shift.stays for r in boxes.members[x][: boxes.ranks[x]]]
        every = self.units // k  # trees of a rank of a server that differs, images not counted
        limbs: list[Limb] = []
        grown: list[Tree] = []
        entries = {x: self._entries(x, len(local), each) for x in shift.stays}
        inside = {x: self._inside(x, entries[x], every, each) for x in shift.stays}
        sending = dict.fromkeys(local, 0)
        for x in shift.stays:
            limbs += self._limbs(x, local, entries[x], inside[x], sending, each)
        each = left([*main, *(limb.tree for limb in limbs)])
        for x in shift.stays:
            ranks = [r for r in own if boxes.place[r][0] == x]
            grown += self._own(x, [r for r in ranks for _ in range(every)], inside, each)
        found = Forest(
            self.graph, (1,) * self.graph.ranks, self.units, Fraction(1), self.optimum, (*main, *merged(grown)), shift, "odd servers", tuple(limbs)
        )
        fullest = max(Fraction(used, self.graph.arcs.get(arc, 0) or 1) for arc, used in found.load.items())
        found = replace(found, stretch=fullest)
        _require_sound(found, own)
        return found

    def _entries(self, x: int, local: int, each: Mapping[Arc, int]) -> dict[Port, int]:
        """Units of one server's shards by where they enter server x, as evenly as its links' rates say."""
        ports, used = ports_of(self.shift.boxes, x, self.graph, self.graph.arcs, inward=True)
        _, room = ports_of(self.shift.boxes, x, self.graph, each, inward=True)
        need = local * self.units
        widest = max(used.values(), default=1)
        for most in range(ceil(need / max(1, len({p.rank for p in ports}))), need + 1):
            # So many units by the widest link, and as its rate says by the others.
            found = spread(ports, {arc: min(room.get(arc, 0), most * rate // widest) for arc, rate in used.items()}, need)
            if found is not None:
                return found
            if all(most * rate // widest >= room.get(arc, 0) for arc, rate in used.items()):
                break
        raise Unsupported("a server that differs has too few links from the network", hint=HINT)

    def _inside(self, x: int, entries: Mapping[Port, int], every: int, each: Mapping[Arc, int]) -> Stock:
        """Trees inside server x: from where limbs enter, from its own ranks, and where other such servers' trees enter."""
        boxes = self.shift.boxes
        ranks = boxes.members[x][: boxes.ranks[x]]
        demand = dict.fromkeys(ranks, every)
        for port, amount in entries.items():
            demand[port.rank] += amount
        foreign = every * sum(boxes.ranks[y] for y in self.shift.stays if y != x)
        for i in range(foreign):
            demand[ranks[i % len(ranks)]] += 1
        return Stock(pack_box(boxes, x, self.graph, each, demand, self.deadline, low=True), boxes.members[x])

    def _limbs(
        self, x: int, local: Sequence[int], entries: Mapping[Port, int], inside: Stock, sending: dict[int, int], each: Mapping[Arc, int]
    ) -> Iterator[Limb]:
        """Every root's shard from where it hangs into server x, unit by unit, equal neighbours joined."""
        first, boxes = self.shift.moving[0], self.shift.boxes
        ports, _ = ports_of(boxes, first, self.graph, each, inward=False)
        left = dict(entries)
        for root in local:
            own, start = {p.leaf for p in ports if p.rank == root}, 0
            while start < self.units:
                # Where the root has a link itself, and of those the entry that has most to take.
                into = max((p for p, amount in left.items() if amount), key=lambda p, own=own: (p.leaf in own, left[p]))  # type: ignore[misc]
                ways = [p for p in ports if p.leaf == into.leaf]
                if not ways:
                    raise Unsupported("the alike servers have no link to where a limb must enter", hint=HINT)
                out = min(ways, key=lambda p, root=root: (p.rank != root, sending[p.rank], p.rank))  # type: ignore[misc]
                below, amount = inside.take(into.rank), 1
                while start + amount < self.units and amount < left[into] and inside.next_is(into.rank, below):
                    inside.take(into.rank)
                    amount += 1
                left[into] -= amount
                sending[out.rank] += amount
                yield Limb(root, start, self._limb_tree(out, into, below, amount))
                start += amount

    def _limb_tree(self, out: Port, into: Port, below: BoxTree, units: int) -> Tree:
        n = self.graph.ranks
        parent = [-1] * n
        paths: list[tuple[int, ...]] = [()] * n
        parent[into.rank], paths[into.rank] = out.rank, out.leave() + into.enter()[1:]
        for v in below.order[1:]:
            parent[v], paths[v] = below.parent[v], below.paths[v]
        return Tree(out.rank, units, tuple(parent), (out.rank, *below.order), tuple(paths))

    def _own(self, x: int, roots: Sequence[int], inside: Mapping[int, Stock], each: dict[Arc, int]) -> list[Tree]:
        """Trees of server x's ranks, one for each of `roots`, by the first of the alike servers to all others; what they use is taken off `each`."""
        shift, boxes, need = self.shift, self.shift.boxes, len(roots)
        first = shift.moving[0]
        exits = spread(*ports_of(boxes, x, self.graph, each, inward=False), need)
        if exits is None:
            raise Unsupported("a server that differs has too few links to the network", hint=HINT)
        at_leaf = per_leaf(exits)
        quotas = quotas_of(self.graph, boxes, each, need, first, per_leaf=at_leaf)
        demand: dict[int, int] = {}
        for (_, into), amount in quotas.items():
            demand[into.rank] = demand.get(into.rank, 0) + amount
        box = Stock(pack_box(boxes, first, self.graph, each, demand, self.deadline, low=True), boxes.members[first])
        waiting = [way for way, amount in quotas.items() for _ in range(amount)]
        leaving = [port for port, amount in exits.items() for _ in range(amount)]
        grown, ways = [], []
        for root in roots:
            leave = min(leaving, key=lambda p, r=root: p.rank != r)  # type: ignore[misc]
            leaving.remove(leave)
            out, into = next(way for way in waiting if way[1].leaf == leave.leaf)
            waiting.remove((out, into))
            grown.append(grown_from(shift, root, inside[x].take(root), (leave, out, into), box.take(into.rank)))
            ways.append(out)
        for other in shift.stays:
            if other != x:
                entries = spread(*ports_of(boxes, other, self.graph, each, inward=True), need, per_leaf(_as_ports(ways)))
                reach(self.graph, boxes, other, ways, grown, entries, each, self.deadline)
        return [tree.tree() for tree in grown]


def _as_ports(ways: Sequence[Port]) -> dict[Port, int]:
    return dict(Counter(ways))


def _load(trees: Sequence[Tree]) -> dict[Arc, int]:
    out: dict[Arc, int] = {}
    for tree in trees:
        for v in tree.order[1:]:
            for arc in pairwise(tree.paths[v]):
                out[arc] = out.get(arc, 0) + tree.units
    return out


def _minus(room: Mapping[Arc, int], used: Mapping[Arc, int]) -> dict[Arc, int]:
    return {arc: c - used.get(arc, 0) for arc, c in room.items() if c > used.get(arc, 0)}


def _require_sound(forest: Forest, own: Sequence[int]) -> None:
    """Trees of alike servers span those, trees of the others all; limbs bring every unit of every stored shard to each other rank once.

    Raises: CheckFailed.
    """
    every, stays = set(range(forest.graph.ranks)), set(own)
    reached: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for limb in forest.limbs:
        for v in limb.tree.order[1:]:
            reached.setdefault((limb.shard, v), []).append((limb.first, limb.first + limb.tree.units))
    shards = set()
    for tree in (*forest.trees, *(limb.tree for limb in forest.limbs)):
        joined = {tree.root}
        for v in tree.order[1:]:
            if tree.parent[v] not in joined or v in joined or tree.paths[v][0] != tree.parent[v] or tree.paths[v][-1] != v:
                raise CheckFailed(f"a tree at {forest.graph.names[tree.root]} is broken at {forest.graph.names[v]}", hint=DEFECT)
            joined.add(v)
    for tree in forest.trees:
        if set(tree.order) != (every if tree.root in stays else every - stays):
            raise CheckFailed(f"a tree of root {forest.graph.names[tree.root]} spans {len(tree.order)} ranks", hint=DEFECT)
        shards.add(tree.root)
    for root in shards - stays:
        for v in stays:
            spans = sorted(reached.get((root, v), []))
            if [a for a, _ in spans] != [0, *(b for _, b in spans[:-1])] or not spans or spans[-1][1] != forest.k:
                raise CheckFailed(f"limbs of {forest.graph.names[root]} do not bring all to {forest.graph.names[v]} once", hint=DEFECT)
