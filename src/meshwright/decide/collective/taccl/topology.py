"""Logical topology: which ranks may send to which, over which links of the fabric, and which permutations of the ranks keep all that.

A logical link is a route of the fabric that passes through no other rank. Every fabric link on it is a resource that serves one message
at a time; so switch ports (a GPU's link to its switch), shared NICs and trunks are constraints without being named. A sketch says which
logical links exist; without one, a default is derived: all links inside a box, and between boxes one sender and one receiver per NIC (or
as many as it takes to fill the NIC), the k-th NIC of one box paired with the k-th of the other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, permutations

from ....errors import Unsupported, UsageError
from ....fabric.fabric import Fabric
from ....sketch import Sketch

__all__ = ["LogicalLink", "LogicalTopology", "Symmetry", "default_symmetries", "logical_topology", "sketch_symmetries"]


@dataclass(frozen=True)
class LogicalLink:
    """`route`: fabric links in order; `latency_s` of a whole message on it, the library's share included; `remote`: between boxes."""

    src: int
    dst: int
    route: tuple[int, ...]
    latency_s: float
    remote: bool


@dataclass(frozen=True)
class LogicalTopology:
    """`box[r]`: box of rank r. `carriers[r]`: ranks that may take rank r's data out of its box, None = any.

    `relayed`: a chunk leaves its own box only, straight to every box that needs it (every pair of boxes has a link).
    """

    fabric: Fabric
    ranks: tuple[str, ...]
    box: tuple[int, ...]
    links: tuple[LogicalLink, ...]
    carriers: tuple[tuple[int, ...] | None, ...]
    relayed: bool

    @cached_property
    def link_of(self) -> dict[tuple[int, int], int]:
        return {(x.src, x.dst): i for i, x in enumerate(self.links)}

    @cached_property
    def leaving(self) -> tuple[tuple[int, ...], ...]:
        out: list[list[int]] = [[] for _ in self.ranks]
        for i, link in enumerate(self.links):
            out[link.src].append(i)
        return tuple(map(tuple, out))

    @cached_property
    def entering(self) -> tuple[tuple[int, ...], ...]:
        into: list[list[int]] = [[] for _ in self.ranks]
        for i, link in enumerate(self.links):
            into[link.dst].append(i)
        return tuple(map(tuple, into))

    def reversed(self) -> LogicalTopology:
        """Every link turned round, on the same fabric links: routing there, read backwards, is a reduction here."""
        links = tuple(LogicalLink(x.dst, x.src, x.route[::-1], x.latency_s, x.remote) for x in self.links)
        if not any(self.carriers):
            return replace(self, links=links)
        return replace(self, links=links, carriers=self._reversed_carriers(links))

    def _reversed_carriers(self, links: Sequence[LogicalLink]) -> tuple[tuple[int, ...] | None, ...]:
        """The k-th set of senders of a box gives way to its k-th receiver, which sends there; None where they do not pair up."""
        out = {x.src for x in links if x.remote}
        found: list[tuple[int, ...] | None] = [None] * len(self.ranks)
        for box in range(max(self.box) + 1):
            members = [r for r in range(len(self.ranks)) if self.box[r] == box]
            sets = sorted({c for r in members if (c := self.carriers[r]) is not None})
            exits = [r for r in members if r in out]
            if len(exits) == sum(map(len, sets)):
                split = {c: tuple(exits[i : i + len(c)]) for c, i in zip(sets, accumulate((len(c) for c in sets), initial=0), strict=False)}
                for r in members:
                    found[r] = split.get(self.carriers[r] or ())
        return tuple(found)

    def describe(self, link: int) -> str:
        x = self.links[link]
        return f"{self.ranks[x.src]} -> {self.ranks[x.dst]}"


def logical_topology(
    fabric: Fabric, ranks: Sequence[str], sketch: Sketch | None, *, rooted: bool = False, most_links: int = sys.maxsize
) -> LogicalTopology:
    """`rooted`: few ranks have all the data; without a sketch it may leave by any sender and pass through other boxes.

    Raises: Unsupported where some rank cannot reach another, and where there are more than `most_links`; UsageError when the sketch names links or
        GPUs that are not there, or does not fit the boxes.
    """
    builder = _Builder(fabric, ranks, most_links)
    links = builder.sketched(sketch) if sketch is not None else builder.derived()
    box_pairs = {(builder.box[x.src], builder.box[x.dst]) for x in links if x.remote}
    boxes = len(builder.boxes)
    relayed = boxes > 1 and len(box_pairs) == boxes * (boxes - 1) and (sketch is not None or not rooted)
    carriers = builder.carriers(sketch, links) if relayed else (None,) * len(ranks)
    topology = LogicalTopology(fabric, tuple(ranks), builder.box, tuple(links), carriers, relayed)
    _require_reachable(topology, sketch)
    return topology


def _require_reachable(topology: LogicalTopology, sketch: Sketch | None) -> None:
    """Every rank reaches every rank over logical links."""
    for forward in (True, False):
        seen, todo = {0}, [0]
        while todo:
            v = todo.pop()
            for i in topology.leaving[v] if forward else topology.entering[v]:
                w = topology.links[i].dst if forward else topology.links[i].src
                if w not in seen:
                    seen.add(w)
                    todo.append(w)
        if len(seen) < len(topology.ranks):
            lost = next(r for r in range(len(topology.ranks)) if r not in seen)
            a, b = (0, lost) if forward else (lost, 0)
            text = f"no way from {topology.ranks[a]} to {topology.ranks[b]}"
            if sketch is not None:
                raise UsageError(f"{text} over the links of the sketch", where="sketch", hint="add connections to the sketch")
            raise Unsupported(f"{text}, and routes need ways between all ranks", hint="use --strategy auto", data={"src": topology.ranks[a]})


class _Builder:
    def __init__(self, fabric: Fabric, ranks: Sequence[str], most_links: int) -> None:
        self.fabric, self.ranks, self.most_links = fabric, tuple(ranks), most_links
        self._few(len(ranks))  # every rank is left by a link
        self.actor = [fabric.actor_of[name] for name in ranks]
        self.rank_at = {actor: r for r, actor in enumerate(self.actor)}
        self.label = labels = [fabric.devices[a].group for a in self.actor]
        order = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        self.box = tuple(order[label] for label in labels)
        self.boxes: list[list[int]] = [[] for _ in order]
        for r, box in enumerate(self.box):
            self.boxes[box].append(r)
        self.group_of = [d.group for d in fabric.devices] + [s.group for s in fabric.switches]
        self.lone_reach: dict[int, frozenset[int]] = {}
        self.clusters_of: dict[tuple[int, bool], list[list[int]]] = {}

    def _few(self, links: int) -> None:
        if links > self.most_links:
            text = f"more than {self.most_links} links between ranks: too many to route every chunk on its own"
            raise Unsupported(text, hint="use --strategy forestcoll, or a sketch with fewer links")

    def link(self, a: int, b: int) -> LogicalLink | None:
        """The logical link from rank a to rank b; None when the fabric's route passes another rank."""
        src = self.actor[a]
        if src not in self.lone_reach:
            self.lone_reach[src] = frozenset(self.fabric.reachable(src))
        if self.actor[b] not in self.lone_reach[src]:
            return None
        route = self.fabric.route(src, self.actor[b])
        ends = self.fabric.link_ends
        if any(ends[k][1] in self.rank_at for k in route[:-1]):
            return None
        links = [self.fabric.links[k] for k in route]
        latency_s = sum(x.latency_s for x in links) + max(x.library_latency_s for x in links)
        return LogicalLink(a, b, route, latency_s, self.box[a] != self.box[b])

    def stays(self, link: LogicalLink) -> bool:
        """Whether the route stays among the actors of its box."""
        return all(self.group_of[self.fabric.link_ends[k][1]] == self.label[link.src] for k in link.route)

    # ---- from a sketch ----
    def sketched(self, sketch: Sketch) -> list[LogicalLink]:
        sizes = {len(b) for b in self.boxes}
        if len(self.boxes) != sketch.nnodes or len(sizes) != 1:
            found = f"{len(self.boxes)} boxes of {', '.join(map(str, sorted(sizes)))} GPUs"
            text = f"is written for {sketch.nnodes} equal boxes, the ranks are in {found}"
            raise UsageError(text, where="sketch.nnodes", hint="use another sketch")
        size = sizes.pop()
        links = [x for number in range(len(self.boxes)) for x in self._sketched_box(sketch, number, size)]
        links += self._sketched_remote(sketch, size)
        self._few(len(links))
        return links

    def _sketched_box(self, sketch: Sketch, number: int, size: int) -> list[LogicalLink]:
        box = self.boxes[number]
        if sketch.intranode != "switch":
            return self._local(box)
        pairs: dict[tuple[int, int], None] = {}
        for index, gpus in enumerate(sketch.switches):
            for g in gpus:
                self._known(g, size, f"sketch.switches[{index}]")
            pairs |= dict.fromkeys((box[a], box[b]) for a in gpus for b in gpus if a != b)
        return [self._wanted(a, b, "sketch.switches") for a, b in pairs]

    def _sketched_remote(self, sketch: Sketch, size: int) -> list[LogicalLink]:
        if len(self.boxes) == 1:
            return []
        if sketch.connections == "direct-map":
            pairs = [(i, i) for i in range(size)]
        elif sketch.connections == "fully-connected":
            pairs = [(i, j) for i in range(size) for j in range(size)]
        else:
            assert not isinstance(sketch.connections, str)
            pairs = [(s, d) for s, receivers in sketch.connections for d in receivers]
        for s, d in pairs:
            self._known(s, size, f"sketch.connections.{s}")
            self._known(d, size, f"sketch.connections.{s}")
        every = [(a, b) for a in self.boxes for b in self.boxes if a is not b]
        if isinstance(sketch.connections, str):  # whatever the fabric has of these
            found = [self.link(a[s], b[d]) for a, b in every for s, d in pairs]
            return [x for x in found if x is not None]
        return [self._wanted(a[s], b[d], f"sketch.connections.{s}") for a, b in every for s, d in pairs]

    def _known(self, gpu: int, size: int, where: str) -> None:
        if gpu >= size:
            raise UsageError(f"names GPU {gpu}, but a box has GPUs 0..{size - 1}", where=where)

    def _wanted(self, a: int, b: int, where: str) -> LogicalLink:
        link = self.link(a, b)
        if link is None:
            text = f"names the link {self.ranks[a]} -> {self.ranks[b]}, which the fabric does not have (its route passes other ranks)"
            raise UsageError(text, where=where, hint="see `meshwright fabric show`", data={"src": self.ranks[a], "dst": self.ranks[b]})
        return link

    # ---- by default ----
    def derived(self) -> list[LogicalLink]:
        found: list[LogicalLink] = []
        for box in self.boxes:
            found += self._local(box)
            self._few(len(found))
        missing = False
        for i, j in permutations(range(len(self.boxes)), 2):
            between = self._between(i, j)
            found += between
            self._few(len(found))
            missing |= not between
        if missing and len(self.boxes) > 1:
            self.clusters_of.clear()
        return found

    def _local(self, box: Sequence[int]) -> list[LogicalLink]:
        """Links inside a box; detours outside only where the box is not connected without them."""
        links = [x for a in box for b in box if a != b and (x := self.link(a, b)) is not None]
        # A route that leaves its box uses ports that messages between boxes need.
        inside = [x for x in links if self.stays(x)]
        return inside if _strong(box, inside) else links

    def _between(self, i: int, j: int) -> list[LogicalLink]:
        pairs = {(a, b): x for a in self.boxes[i] for b in self.boxes[j] if (x := self.link(a, b)) is not None}
        direct = [x for x in pairs.values() if len(x.route) == 1]
        if direct:
            return direct
        mine, theirs = self._clusters(i), self._clusters(j, receive=True)
        chosen: dict[tuple[int, int], LogicalLink] = {}
        for k in range(max(len(mine), len(theirs))):
            out, into = mine[k % len(mine)], theirs[k % len(theirs)]
            # As many pairs as it takes to fill the port at either end; more would only share it.
            many = max(self._senders(out, pairs), self._senders(into, pairs, receive=True))
            for s in range(many):
                a = [r for r in out if any(p[0] == r for p in pairs)][-many:]
                b = [r for r in into if any(p[1] == r for p in pairs)][:many]
                if a and b and (pair := (a[s % len(a)], b[s % len(b)])) in pairs:
                    chosen[pair] = pairs[pair]
        return list(chosen.values()) or list(pairs.values())

    def _port(self, rank: int, receive: bool) -> int:
        """The switch of the box by which a rank leaves it (or is reached); its own actor when it has none (a port of its own); -1: never."""
        for other in range(len(self.ranks)):
            if self.box[other] != self.box[rank] and (link := self.link(other, rank) if receive else self.link(rank, other)) is not None:
                ends = self.fabric.link_ends
                near = ends[link.route[-1]][0] if receive else ends[link.route[0]][1]
                return near if near >= len(self.fabric.devices) and self.group_of[near] == self.label[rank] else self.actor[rank]
        return -1

    def _clusters(self, box: int, *, receive: bool = False) -> list[list[int]]:
        """Ranks of a box by the port that they send (or receive) through, ports in order of their first rank."""
        if (box, receive) not in self.clusters_of:
            found: dict[int, list[int]] = {}
            for r in self.boxes[box]:
                found.setdefault(self._port(r, receive), []).append(r)
            found.pop(-1, None)
            self.clusters_of[box, receive] = list(found.values()) or [list(self.boxes[box])]
        return self.clusters_of[box, receive]

    def _senders(self, cluster: Sequence[int], pairs: dict[tuple[int, int], LogicalLink], *, receive: bool = False) -> int:
        """How many ranks it takes to fill the shared port."""
        routes = [x.route[::-1] if receive else x.route for p, x in pairs.items() if p[1 if receive else 0] in cluster]
        if not routes or len(routes[0]) < 3:
            return len(cluster)
        rate = self.fabric.links
        # The port's own link is the second of the route; the first is the rank's link to it.
        return max(1, min(len(cluster), round(rate[routes[0][1]].rate_Bps / rate[routes[0][0]].rate_Bps)))

    def carriers(self, sketch: Sketch | None, links: Sequence[LogicalLink]) -> tuple[tuple[int, ...] | None, ...]:
        out = {x.src for x in links if x.remote}
        found: list[tuple[int, ...] | None] = [None] * len(self.ranks)
        if sketch is not None:
            for sender, gpus in sketch.senders:
                for box in self.boxes:
                    for g in (sender, *gpus):
                        self._known(g, len(box), f"sketch.senders.{sender}")
                    for g in gpus:
                        if box[sender] not in out:
                            raise UsageError(f"GPU {sender} has no connection out of its box", where=f"sketch.senders.{sender}")
                        found[box[g]] = (box[sender],)
            return tuple(found)
        for (_, receive), clusters in self.clusters_of.items():
            if receive or sum(map(len, clusters)) < len(self.boxes[self.box[clusters[0][0]]]) or len(clusters) < 2:
                continue
            for cluster in clusters:
                senders = tuple(r for r in cluster if r in out)
                for r in cluster:
                    found[r] = senders or None
        return tuple(found)


def _strong(box: Sequence[int], links: Sequence[LogicalLink]) -> bool:
    for forward in (True, False):
        seen, todo = {box[0]}, [box[0]]
        while todo:
            v = todo.pop()
            for x in links:
                a, b = (x.src, x.dst) if forward else (x.dst, x.src)
                if a == v and b not in seen:
                    seen.add(b)
                    todo.append(b)
        if len(seen) < len(box):
            return False
    return True


# ---- symmetry ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Symmetry:
    """A permutation of the ranks and the one of the logical links that it makes."""

    rank: tuple[int, ...]
    link: tuple[int, ...]
    resource: tuple[tuple[int, int], ...]  # (fabric link, its image)


def sketch_symmetries(topology: LogicalTopology, sketch: Sketch) -> tuple[Symmetry, ...]:
    """The sketch's offsets as permutations. Raises: UsageError naming the link that has no equal image."""
    found = []
    for index, (offset, group) in enumerate(sketch.symmetry):
        where, n = f"sketch.symmetry[{index}]", len(topology.ranks)
        if n % group:
            raise UsageError(f"groups of {group} do not divide the {n} ranks", where=where)
        if topology.box != tuple(r // (n // sketch.nnodes) for r in range(n)):
            raise Unsupported("offsets need ranks in order of their boxes", where=where, hint="list the devices box by box")
        symmetry, why = _automorphism(topology, tuple((r % group + offset) % group + r // group * group for r in range(n)))
        if symmetry is None:
            raise UsageError(f"[{offset}, {group}] is no symmetry: {why}", where=where, hint="correct the offset, or leave it out")
        found.append(symmetry)
    return tuple(found)


def default_symmetries(topology: LogicalTopology) -> tuple[Symmetry, ...]:
    """Turning the boxes round, and the GPUs inside every box by 1 or 2 places, where that keeps the topology."""
    n, boxes = len(topology.ranks), max(topology.box) + 1
    size = n // boxes
    if n % boxes or topology.box != tuple(r // size for r in range(n)):
        return ()
    found: list[Symmetry] = []
    if boxes > 1 and (s := _automorphism(topology, tuple((r + size) % n for r in range(n)))[0]):
        found.append(s)
    # By one place if every GPU is like the next, by two where pairs share a port.
    for step in (1, 2):
        if size > step and size % step == 0:
            inside, _ = _automorphism(topology, tuple((r % size + step) % size + r // size * size for r in range(n)))
            if inside is not None:
                return (inside, *found)
    return tuple(found)


def _automorphism(topology: LogicalTopology, rank: tuple[int, ...]) -> tuple[Symmetry | None, str]:
    """The symmetry, or None and the reason in words."""
    links, of = topology.links, topology.fabric.links
    image: list[int] = []
    resource: dict[int, int] = {}
    taken: dict[int, int] = {}
    for number, x in enumerate(links):
        other = topology.link_of.get((rank[x.src], rank[x.dst]))
        ends = f"{topology.ranks[rank[x.src]]} -> {topology.ranks[rank[x.dst]]}"
        if other is None:
            return None, f"link {topology.describe(number)} maps to {ends}, which is no link of the sketch"
        y = links[other]
        same = len(x.route) == len(y.route) and x.latency_s == y.latency_s and x.remote == y.remote
        if not same or any(of[a].rate_Bps != of[b].rate_Bps for a, b in zip(x.route, y.route, strict=True)):
            return None, f"link {topology.describe(number)} and its image {ends} differ in rate, latency or length"
        for a, b in zip(x.route, y.route, strict=True):
            # The image of a shared link must be shared by the images, or loads would not be alike.
            if resource.setdefault(a, b) != b or taken.setdefault(b, a) != a:
                return None, f"link {topology.describe(number)} shares ports that its image {ends} does not share"
        image.append(other)
    for r, allowed in enumerate(topology.carriers):
        if {rank[s] for s in allowed or ()} != set(topology.carriers[rank[r]] or ()):
            return None, f"the senders of {topology.ranks[r]} do not map to those of {topology.ranks[rank[r]]}"
    return Symmetry(rank, tuple(image), tuple(sorted(resource.items()))), ""
