"""Symmetries of a fabric: permutations of its nodes that map every link onto one of equal rate.

A planner that has one tree per orbit of roots has all trees: the others are images. Every generator is verified link by link on the
graph before it is used, whoever gave it; one that is no automorphism is refused with the link that it breaks.
Source: ForestColl (arXiv 2402.06787), symmetric variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ....errors import Unsupported
from ..rates import RateGraph

__all__ = ["Boxes", "Shift", "alike", "require_automorphism", "sinks_of_each_kind"]

Arc = tuple[int, int]
MIN_RANKS_FOR_SYMMETRY = 128  # among fewer ranks looking for symmetry costs more than it saves


def require_automorphism(graph: RateGraph, goes_to: Sequence[int]) -> None:
    """Raises Unsupported, naming a link, unless node v -> goes_to[v] is a permutation that keeps ranks ranks and every arc's rate."""
    if sorted(goes_to) != list(range(graph.nodes)):
        raise Unsupported("a symmetry must map every node to exactly one node", hint="name every device and switch once on either side")
    for v in range(graph.ranks):
        if goes_to[v] >= graph.ranks:
            raise Unsupported(f"a symmetry maps rank {graph.names[v]} to {graph.names[goes_to[v]]}, which is none", hint="map ranks to ranks")
    for (u, v), rate in graph.arcs.items():
        found = graph.arcs.get((goes_to[u], goes_to[v]), 0)
        if found != rate:
            here, there = f"{graph.names[u]} -> {graph.names[v]}", f"{graph.names[goes_to[u]]} -> {graph.names[goes_to[v]]}"
            raise Unsupported(
                f"no symmetry of this fabric: link {here} has {rate * graph.unit_Bps} B/s, its image {there} has {found * graph.unit_Bps} B/s",
                hint="correct the symmetry, or leave it out",
                data={"link": here, "image": there, "rate_Bps": rate * graph.unit_Bps, "image_Bps": found * graph.unit_Bps},
            )


@dataclass(frozen=True)
class Boxes:
    """Servers that meet only in nodes of no server: `members[x]` their nodes, ranks first and in order; `outside` the rest."""

    members: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]  # ranks of every box: the first so many of its members
    outside: tuple[int, ...]

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """Node -> (box, position)."""
        return {v: (x, i) for x, nodes in enumerate(self.members) for i, v in enumerate(nodes)}

    @staticmethod
    def of(graph: RateGraph) -> Boxes:
        """The servers by group, found once for a graph. Raises Unsupported where there is one only, or where servers are joined directly."""
        found: Boxes | None = graph.__dict__.get("_boxes")
        if found is None:
            found = graph.__dict__["_boxes"] = Boxes._of(graph)
        return found

    @staticmethod
    def _of(graph: RateGraph) -> Boxes:
        by_group: dict[int, list[int]] = {}
        for v in range(graph.nodes):
            by_group.setdefault(graph.group[v], []).append(v)
        boxes = [nodes for nodes in by_group.values() if nodes[0] < graph.ranks]
        if len(boxes) < 2:
            raise Unsupported("there is only one server", hint="use the general method")
        where = {v: x for x, nodes in enumerate(boxes) for v in nodes}
        near: dict[int, set[int]] = {v: set() for v in where}
        for u, v in graph.arcs:
            if u in where and v in where and where[u] != where[v]:
                raise Unsupported(f"servers are joined directly by {graph.names[u]} -> {graph.names[v]}", hint="use the general method")
            for a, b in ((u, v), (v, u)):
                if a in where:
                    near[a].add(b)
        members, ranks = [], []
        for nodes in boxes:
            own = [v for v in nodes if v < graph.ranks]
            at = {v: i for i, v in enumerate(own)}

            def key(w: int, at: dict[int, int] = at) -> tuple[list[int], list[int], int]:
                """Switches by the ranks and the outside nodes they touch, so that equal servers are numbered alike."""
                return sorted(at[v] for v in near[w] if v in at), sorted(v for v in near[w] if v not in where), w

            members.append(tuple(own + sorted((v for v in nodes if v >= graph.ranks), key=key)))
            ranks.append(len(own))
        return Boxes(tuple(members), tuple(ranks), tuple(v for v in range(graph.nodes) if v not in where))

    def signature(self, graph: RateGraph, weight: Sequence[int]) -> list[tuple[object, ...]]:
        """Per box what two alike boxes share: weights, links inside and to the outside."""
        place = self.place
        links: list[list[tuple[int, int, int, int]]] = [[] for _ in self.members]
        for (u, v), rate in graph.arcs.items():
            if u in place and v in place:
                links[place[u][0]].append((0, place[u][1], place[v][1], rate))
            elif u in place:
                links[place[u][0]].append((1, place[u][1], v, rate))
            elif v in place:
                links[place[v][0]].append((2, u, place[v][1], rate))
        return [
            (tuple(weight[v] for v in nodes[:n]), len(nodes), tuple(sorted(found)))
            for nodes, n, found in zip(self.members, self.ranks, links, strict=True)
        ]


def sinks_of_each_kind(graph: RateGraph, weight: Sequence[int]) -> list[int]:
    """Ranks of which every other rank is an image under a symmetry that keeps the weights: one server of each kind.

    Swapping two servers that have equal signatures, position by position, is such a symmetry, since servers meet in outside nodes only.
    """
    if graph.ranks < MIN_RANKS_FOR_SYMMETRY:
        return list(range(graph.ranks))
    try:
        boxes = Boxes.of(graph)
    except Unsupported:
        return list(range(graph.ranks))
    first: dict[tuple[object, ...], int] = {}
    for x, signature in enumerate(boxes.signature(graph, weight)):
        first.setdefault(signature, x)
    return [r for x in first.values() for r in boxes.members[x][: boxes.ranks[x]]]


def alike(graph: RateGraph, weight: Sequence[int]) -> bool:
    """Whether the ranks lie in several servers that all have the same links and weights."""
    try:
        return len(set(Boxes.of(graph).signature(graph, weight))) == 1
    except Unsupported:
        return False


@dataclass(frozen=True)
class Shift:
    """Boxes that are alike, taken round: member m of the group maps box x to box (x + m) mod boxes, position by position.

    `stays`: boxes that are not among them and go nowhere, rising.
    """

    boxes: Boxes
    stays: tuple[int, ...] = ()

    @cached_property
    def moving(self) -> tuple[int, ...]:
        """The boxes that move, in order."""
        return tuple(x for x in range(len(self.boxes.members)) if x not in self.stays)

    @cached_property
    def members(self) -> int:
        return len(self.moving)

    @cached_property
    def turn_of(self) -> dict[int, int]:
        """How many boxes further every moving box is than the first."""
        return {box: turns for turns, box in enumerate(self.moving)}

    def image(self, v: int, member: int) -> int:
        """Where a member of the group takes node v."""
        box, position = self.boxes.place.get(v, (-1, 0))
        turns = self.turn_of.get(box)
        return v if turns is None else self.boxes.members[self.moving[(turns + member) % self.members]][position]

    @property
    def fixed(self) -> tuple[int, ...]:
        """Ranks of the boxes that go nowhere."""
        return tuple(sorted(v for x in self.stays for v in self.boxes.members[x][: self.boxes.ranks[x]]))

    @property
    def generator(self) -> tuple[int, ...]:
        return tuple(self.image(v, 1) for v in range(len(self.boxes.place) + len(self.boxes.outside)))

    def stride(self) -> int:
        """The rank numbers that a box lies apart from the one before, if the boxes are equal runs of rank numbers in order; else 0."""
        n = self.boxes.ranks[self.moving[0]]
        others = [v for v in range(sum(self.boxes.ranks)) if v not in set(self.fixed)]
        runs = [v for x in self.moving for v in self.boxes.members[x][:n]]
        return n if runs == others else 0
