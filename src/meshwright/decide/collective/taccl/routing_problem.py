"""A routing problem, which links a chunk may take (stage 0), and a first routing by earliest arrival.

The first routing is greedy in simulated time: of all moves of a chunk to a rank that lacks it, the one that arrives first is made, on links that
are busy with the moves made before. A chunk enters another box once. Under symmetries a move is made together with all its images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from ....errors import TimeLimit
from ....kernels.effort import NEVER, Deadline, count_work
from .chunks import Chunk
from .schedule import Timing, Transfer

__all__ = ["Hints", "Orbits", "RoutingProblem", "greedy_routes", "transfers_of"]

MAX_SYMMETRIES = 128  # of the group that the given ones generate: a greedy move is copied to all of them
WORK_PER_MOVE_S = 2e-5  # counted work (`kernels.effort`) of a greedy move, in seconds of a quiet core
Routes = tuple[tuple[int, ...], ...]  # links of every chunk, each after the one that brings the chunk to its source
T = TypeVar("T")


class _Sizeless(Generic[T]):
    """A property made once for a routing problem and all that `RoutingProblem.at` derives from it."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.__doc__ = make, make.__doc__

    def __get__(self, problem: RoutingProblem, owner: type[RoutingProblem] | None = None) -> T:
        home: RoutingProblem = problem.__dict__.get("_home", problem)
        kept: dict[str, Any] = home.__dict__.setdefault("_made", {})
        name = self.make.__name__
        if name not in kept:
            kept[name] = self.make(home)
        found: T = kept[name]
        return found


@dataclass(frozen=True)
class Orbits:
    """What symmetries make equal. `x[chunk, link]`, `start[chunk, rank]`: number of the orbit, counted from 0 each (`moves`, `stays` of them).

    `pairs`: all (chunk, link) that are allowed; `representatives`: the first chunk of every orbit.
    """

    pairs: list[tuple[int, int]]
    x: dict[tuple[int, int], int]
    moves: int
    start: dict[tuple[int, int], int]
    stays: int
    representatives: list[int]


def _numbered(items: Sequence[tuple[int, int]], maps: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Number of the orbit of every item under pairs of permutations, one for each half of an item; items are closed under them."""
    number = {item: i for i, item in enumerate(items)}
    root = list(range(len(items)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    for first, second in maps:
        for (c, k), i in number.items():
            a, b = find(i), find(number[first[c], second[k]])
            if a != b:
                root[max(a, b)] = min(a, b)
    names: dict[int, int] = {}
    return [names.setdefault(find(i), len(names)) for i in range(len(items))]


@dataclass(frozen=True)
class Hints:
    """What a sketch asks beyond links: weight of connections used on logical links (+ few, - many), balance of links in a box, order at senders."""

    used: tuple[tuple[int, int], ...] = ()  # (link, +1 uc-min | -1 uc-max)
    balance: str = "none"  # none | minmax | maxmin
    own_first: bool = False


@dataclass(frozen=True)
class RoutingProblem:
    """All that routing depends on, hashable. `links`: (source, destination, remote) of every logical link.

    `symmetries`: (chunk permutation, link permutation, resource pairs, rank permutation). `shortest`: a chunk moves on hop-shortest paths only.
    `floor_s`: a lower bound on the time, exact where it is known.
    """

    ranks: int
    box: tuple[int, ...]
    links: tuple[tuple[int, int, bool], ...]
    carriers: tuple[tuple[int, ...] | None, ...]
    relayed: bool
    chunks: tuple[Chunk, ...]
    timing: Timing
    symmetries: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...]], ...] = ()
    hints: Hints = Hints()
    shortest: bool = False
    floor_s: float = 0.0

    def at(self, timing: Timing, floor_s: float) -> RoutingProblem:
        """The same problem for chunks of another size; what does not depend on it is made once for all of them."""
        other = replace(self, timing=timing, floor_s=floor_s)
        other.__dict__["_home"] = self.__dict__.get("_home", self)
        return other

    @_Sizeless
    def link_of(self) -> dict[tuple[int, int], int]:
        return {(a, b): i for i, (a, b, _) in enumerate(self.links)}

    @_Sizeless
    def orbits(self) -> Orbits:
        pairs = [(c, i) for c, links in enumerate(self.allowed) for i in sorted(links)]
        moved = _numbered(pairs, [(gc, gk) for gc, gk, _, _ in self.symmetries])
        visited = sorted({(c, self.links[i][1]) for c, i in pairs})
        stays = _numbered(visited, [(gc, gr) for gc, _, _, gr in self.symmetries])
        whole = _numbered([(c, 0) for c in range(len(self.chunks))], [(gc, (0,)) for gc, _, _, _ in self.symmetries])
        first: dict[int, int] = {}
        for c, orbit in enumerate(whole):
            first.setdefault(orbit, c)
        return Orbits(
            pairs, dict(zip(pairs, moved, strict=True)), max(moved, default=-1) + 1, dict(zip(visited, stays, strict=True)),
            max(stays, default=-1) + 1, sorted(first.values()),
        )  # fmt: skip

    @_Sizeless
    def leaving(self) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in range(self.ranks)]
        for i, (a, _, _) in enumerate(self.links):
            out[a].append(i)
        return out

    @_Sizeless
    def allowed(self) -> tuple[frozenset[int], ...]:
        """Links that each chunk may take (stage 0)."""
        known: dict[tuple[int, frozenset[int]], frozenset[int]] = {}
        for c in self.chunks:
            if (c.source, c.dests) not in known:
                known[c.source, c.dests] = self._allowed(c)
        return tuple(known[c.source, c.dests] for c in self.chunks)

    def _allowed(self, chunk: Chunk) -> frozenset[int]:
        box, home = self.box, self.box[chunk.source]
        needed = {box[d] for d in chunk.dests} | {home}
        carriers = self.carriers[chunk.source]

        def fits(a: int, b: int, remote: bool) -> bool:
            if not self.relayed:
                return True
            if not remote:
                return box[a] in needed
            return box[a] == home and box[b] in needed and (carriers is None or a in carriers)

        links = [i for i, (a, b, remote) in enumerate(self.links) if b != chunk.source and fits(a, b, remote)]
        # The relay rule is a choice, not a must: where it cuts a destination off, all links are allowed.
        if not chunk.dests <= self._reach(chunk.source, links):
            links = [i for i, (_, b, _) in enumerate(self.links) if b != chunk.source]
        if len(chunk.dests) > 1 and not self.shortest:
            return frozenset(links)
        before = self._hops([chunk.source], links, forward=True)
        found: set[int] = set()
        for d in chunk.dests:
            behind = self._hops([d], links, forward=False)
            far = before[d]
            if len(chunk.dests) == 1 and not self.shortest:  # the vertices on shortest paths, and all links between them
                nodes = {v for v in range(self.ranks) if before[v] + behind[v] <= far}
                inner = [(i, *self.links[i][:2]) for i in links]
                # Towards the destination only, so that no chunk goes round in a circle.
                found |= {i for i, a, b in inner if a in nodes and b in nodes and behind[b] < behind[a]}
            else:
                found |= {i for i in links if before[self.links[i][0]] + 1 + behind[self.links[i][1]] <= far}
        return frozenset(found)

    @_Sizeless
    def once(self) -> bool:
        """Whether a chunk need not enter a box twice: every box is connected by its own links."""
        local = [i for i, (_, _, remote) in enumerate(self.links) if not remote]
        for box in range(max(self.box) + 1):
            members = [r for r in range(self.ranks) if self.box[r] == box]
            if any(not set(members) <= self._reach(r, local) for r in members):
                return False
        return True

    def _reach(self, source: int, links: Sequence[int]) -> set[int]:
        return {v for v, hops in enumerate(self._hops([source], links, forward=True)) if hops < self.ranks}

    def _hops(self, start: Sequence[int], links: Sequence[int], *, forward: bool) -> list[int]:
        """Hops from (or to) the nearest of `start`; `ranks` or more where there is no way."""
        near: list[list[int]] = [[] for _ in range(self.ranks)]
        for i in links:
            a, b, _ = self.links[i]
            near[a if forward else b].append(b if forward else a)
        out = [2 * self.ranks] * self.ranks
        todo = list(start)
        for v in todo:
            out[v] = 0
        for v in todo:
            for w in near[v]:
                if out[w] > out[v] + 1:
                    out[w] = out[v] + 1
                    todo.append(w)
        return out

    @_Sizeless
    def group(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """(chunk, link) permutations of the group that the symmetries generate, the identity first; [] when it is larger than MAX_SYMMETRIES."""
        one = (tuple(range(len(self.chunks))), tuple(range(len(self.links))))
        found = {one}
        todo = [one]
        for c, k in todo:
            for gc, gk, _, _ in self.symmetries:
                new = (tuple(gc[i] for i in c), tuple(gk[i] for i in k))
                if new not in found:
                    found.add(new)
                    todo.append(new)
                    if len(found) > MAX_SYMMETRIES:
                        return []
        return list(todo)

    def distance_s(self, chunk: int) -> list[float]:
        """Earliest arrival of a chunk at every rank, on empty links (inf where it cannot get)."""
        out = [float("inf")] * self.ranks
        out[self.chunks[chunk].source] = 0.0
        heap = [(0.0, self.chunks[chunk].source)]
        allowed = self.allowed[chunk]
        while heap:
            at, v = heappop(heap)
            if at > out[v]:
                continue
            for i in self.leaving[v]:
                if i in allowed and (new := at + self.timing.delay_s[i]) < out[self.links[i][1]]:
                    out[self.links[i][1]] = new
                    heappush(heap, (new, self.links[i][1]))
        return out


class _Greedy:
    def __init__(self, problem: RoutingProblem, group: Sequence[tuple[Sequence[int], Sequence[int]]], rare: bool, apart: bool) -> None:
        self.p, self.group, self.apart = problem, group, apart
        self.user: dict[int, int] = {}  # who sent last over a resource
        self.dear_s = max((max(h) for h in problem.timing.hold_s), default=0.0) if rare else 0.0
        self.first = [min(g[c] for g, _ in group) for c in range(len(problem.chunks))]  # moves are offered for one chunk of its images
        self.free: dict[int, float] = {}
        self.have = [{c.source: 0.0} for c in problem.chunks]
        self.entered: set[tuple[int, int]] = set()
        self.routes: list[list[int]] = [[] for _ in problem.chunks]
        self.single = [len(c.dests) == 1 for c in problem.chunks]
        self.place = [c.source for c in problem.chunks]
        self.to_go: dict[tuple[frozenset[int], int], list[float]] = {}

    def rest_s(self, c: int, rank: int) -> float:
        """Travel time still to go for a chunk with one destination, on empty links."""
        if not self.single[c]:
            return 0.0
        (dest,) = self.p.chunks[c].dests
        key = (self.p.allowed[c], dest)
        if key not in self.to_go:
            out = [float("inf")] * self.p.ranks
            out[dest] = 0.0
            heap = [(0.0, dest)]
            into: list[list[int]] = [[] for _ in range(self.p.ranks)]
            for i in self.p.allowed[c]:
                into[self.p.links[i][1]].append(i)
            while heap:
                at, v = heappop(heap)
                for i in into[v]:
                    if (new := at + self.p.timing.delay_s[i]) < out[self.p.links[i][0]]:
                        out[self.p.links[i][0]] = new
                        heappush(heap, (new, self.p.links[i][0]))
            self.to_go[key] = out
        return self.to_go[key][rank]

    def possible(self, c: int, i: int) -> bool:
        a, b, remote = self.p.links[i]
        if a not in self.have[c] or b in self.have[c] or (self.single[c] and (self.place[c] != a or a in self.p.chunks[c].dests)):
            return False
        # A second entry would use the links between boxes again for what the box can spread itself.
        return not (remote and (c, self.p.box[b]) in self.entered and self.p.once)

    def start_s(self, c: int, i: int) -> float:
        timing, at = self.p.timing, self.have[c][self.p.links[i][0]]
        for r, offset in zip(timing.resources[i], timing.offset_s[i], strict=True):
            at = max(at, self.free.get(r, 0.0) - offset)
        return at

    def key(self, c: int, i: int) -> tuple[float, float, int, int]:
        at = self.start_s(c, i)
        arrives = at + self.p.timing.delay_s[i]
        if self.apart:
            a, timing = self.p.links[i][0], self.p.timing
            # How long the message would wait behind another sender's: in truth both share the link and end late, so the wait counts twice.
            others = [self.free[r] - o for r, o in zip(timing.resources[i], timing.offset_s[i], strict=True) if self.user.get(r, a) != a]
            arrives += max(0.0, max(others, default=0.0) - self.have[c][a])
        return arrives + self.rest_s(c, self.p.links[i][1]) + self.dear_s * len(self.have[c]), at, c, i

    def move(self, c: int, i: int) -> None:
        timing, (_, b, remote) = self.p.timing, self.p.links[i]
        at = self.start_s(c, i)
        for r, offset, hold in zip(timing.resources[i], timing.offset_s[i], timing.hold_s[i], strict=True):
            self.free[r] = at + offset + hold
            self.user[r] = self.p.links[i][0]
        self.have[c][b] = at + timing.delay_s[i]
        self.place[c] = b
        self.routes[c].append(i)
        if remote:
            self.entered.add((c, self.p.box[b]))

    def run(self, deadline: Deadline) -> Routes | None:
        heap: list[tuple[float, float, int, int]] = []

        def offer(c: int, rank: int) -> None:
            for i in self.p.leaving[rank]:
                if i in self.p.allowed[c] and self.possible(c, i):
                    heappush(heap, self.key(c, i))

        for c, chunk in enumerate(self.p.chunks):
            if self.first[c] == c:
                offer(c, chunk.source)
        moves = 0
        while heap:
            moves += 1
            count_work(WORK_PER_MOVE_S)
            if moves % 1024 == 0 and deadline.past:
                hint = "raise the time limit, or give a sketch with fewer links"
                raise TimeLimit("the time limit was reached before every chunk had a route", where="taccl", hint=hint)
            found = heappop(heap)
            _, _, c, i = found
            if not self.possible(c, i):
                continue
            # Keys only grow as links get busy, so a stale entry is put back with its new key; the first that is still right is the earliest arrival.
            if (now := self.key(c, i)) != found and heap and now > heap[0]:
                heappush(heap, now)
                continue
            images = list(dict.fromkeys((g[c], k[i]) for g, k in self.group))
            arrivals = {(x, self.p.links[j][1]) for x, j in images}
            # Images that collide, or of which one is not possible, would break the symmetry: the move is dropped. Should a rank stay unserved,
            # the caller routes again without symmetries.
            if len(arrivals) < len(images) or not all(j in self.p.allowed[x] and self.possible(x, j) for x, j in images):
                continue
            for x, j in images:
                self.move(x, j)
            for x, j in images:
                if self.first[x] == x:
                    offer(x, self.p.links[j][1])
        if any(not chunk.dests <= self.have[c].keys() for c, chunk in enumerate(self.p.chunks)):
            return None
        return tuple(tuple(r) for r in self.routes)


def greedy_routes(problem: RoutingProblem, deadline: Deadline = NEVER, *, rare: bool = False, apart: bool = False) -> Routes:
    """A first routing, symmetric if that works out. `rare`: chunks that few ranks have go first, which suits many chunks of one source.
    `apart`: waiting behind another sender's message counts twice, since in truth both share the link and the other is late as well.

    Raises: TimeLimit after `deadline`.
    """
    group = problem.group
    found = _Greedy(problem, group, rare, apart).run(deadline) if len(group) > 1 else None
    if found is None:
        one = [(range(len(problem.chunks)), range(len(problem.links)))]
        found = _Greedy(problem, one, rare, apart).run(deadline)
    assert found is not None, "every chunk can reach its destinations over allowed links"
    return found


def transfers_of(problem: RoutingProblem, routes: Sequence[Sequence[int]], instances: int = 1) -> list[Transfer]:
    """The transfers of every chunk's tree; instance k of chunk c is chunk c · instances + k."""
    out: list[Transfer] = []
    for c, links in enumerate(routes):
        for k in range(instances):
            by: dict[int, int] = {}
            for i in links:
                a, b, _ = problem.links[i]
                out.append(Transfer(c * instances + k, i, (by[a],) if a in by else ()))
                by[b] = len(out) - 1
    return out
