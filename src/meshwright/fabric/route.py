"""Finding the one route between two actors that `meshwright.fabric` defines.

Key of a path, smallest wins: (devices passed through, links, -narrowest rate, link numbers in order). The first two add
up along a path, so all paths that are best in them form an acyclic graph. Among those the widest is found by passing
widths along the graph, and of the widest paths the one with the smallest link numbers by walking from the source over
links wide enough that still lead to the destination. (One Dijkstra over the whole key would be wrong: a path that is
narrower half-way may tie in the end and have the smaller numbers.)

Cost: a pair joined through switches only is met from both ends, the cheaper side first, which on a cluster touches tens
of actors, not the thousands behind the network switch. A source of which many routes are asked gets its shortest paths to
all actors once, in O(links). Other pairs take one Dijkstra per source, kept.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

__all__ = ["Router"]

_UNREACHED = 1 << 62  # above every distance and every rate
_THROUGH_DEVICE = 1 << 32  # one device passed through weighs more than any number of links
# Routes of one source from which on its paths to all actors are found, and actors per such route: that costs about as much as so many routes.
MIN_ASKED_OF_A_TREE, ACTORS_PER_ASKED = 64, 64
MAX_TREES = 32  # sources whose paths to all actors are kept


class Router:
    """Routes of one fabric; actors and links by number, devices before switches."""

    def __init__(
        self,
        devices: int,
        ends: Sequence[tuple[int, int]],
        out_links: Sequence[Sequence[int]],
        in_links: Sequence[Sequence[int]],
        rates: Sequence[int],
    ) -> None:
        self._devices = devices
        self._ends = ends
        self._out = out_links
        self._in = in_links
        self._rates = rates
        self._routes: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self._distances: dict[int, array[int]] = {}
        self._asked: dict[int, int] = {}  # by source
        self.few = max(MIN_ASKED_OF_A_TREE, len(out_links) // ACTORS_PER_ASKED)
        self._trees: dict[int, tuple[dict[int, list[int]], dict[int, int]]] = {}

    def route(self, src: int, dst: int) -> tuple[int, ...] | None:
        """Links of the route from `src` to another actor `dst`, or None if there is none."""
        pair = (src, dst)
        if pair not in self._routes:
            widths: dict[int, int] = {}
            self._asked[src] = asked = self._asked.get(src, 0) + 1
            if src not in self._trees and asked < self.few:
                before = self._through_switches(src, dst)
            else:
                tree, widths = self._tree(src)
                before = tree if dst in tree else None
            if before is None:
                before, widths = self._through_devices(src, dst), {}
            self._routes[pair] = self._best(src, dst, before, widths) if before else None
        return self._routes[pair]

    def _tree(self, src: int) -> tuple[dict[int, list[int]], dict[int, int]]:
        """Links into every actor on shortest paths from `src` that pass only through switches, and the widths found so far."""
        if src not in self._trees:
            if len(self._trees) >= MAX_TREES:
                gone = next(iter(self._trees))
                del self._trees[gone], self._asked[gone]
            level, towards, front = {src: 0}, dict[int, list[int]](), [src]
            for actor in front:  # grows while it is walked
                if actor != src and actor < self._devices:
                    continue
                for link in self._out[actor]:
                    found = self._ends[link][1]
                    if found not in level:
                        level[found], towards[found] = level[actor] + 1, []
                        front.append(found)
                    if level[found] == level[actor] + 1:
                        towards[found].append(link)
            self._trees[src] = towards, {}
        return self._trees[src]

    def reach(self, start: int, *, forward: bool) -> set[int]:
        """Actors that `start` reaches, or that reach `start`."""
        side, links = (1, self._out) if forward else (0, self._in)
        seen, todo = {start}, [start]
        while todo:
            for link in links[todo.pop()]:
                actor = self._ends[link][side]
                if actor not in seen:
                    seen.add(actor)
                    todo.append(actor)
        return seen

    # ---- all shortest paths, as links into each actor on them ------------------------------------------------------
    def _through_switches(self, src: int, dst: int) -> dict[int, list[int]] | None:
        """Links into every actor on a shortest path that passes only through switches; None if there is no such path."""
        ends = self._ends
        # per side: level of each actor found, links towards the start, the newest level
        level: tuple[dict[int, int], dict[int, int]] = ({src: 0}, {dst: 0})
        links: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
        front: list[list[int]] = [[src], [dst]]
        while front[0] and front[1]:
            costs = [sum(len(self._out[a]) for a in front[0]), sum(len(self._in[a]) for a in front[1])]
            side = 0 if costs[0] <= costs[1] else 1
            mine, other, towards = level[side], level[1 - side], links[side]
            goal = (dst, src)[side]
            depth = mine[front[side][0]] + 1
            fresh: list[int] = []
            for actor in front[side]:
                for link in self._out[actor] if side == 0 else self._in[actor]:
                    found = ends[link][1 - side]
                    if found < self._devices and found != goal:
                        continue
                    if found not in mine:
                        mine[found] = depth
                        towards[found] = []
                        fresh.append(found)
                    if mine[found] == depth:
                        towards[found].append(link)
            # The other side is complete up to its newest level, so the first meeting is at the least total length.
            newest = other[front[1 - side][0]]
            meeting = [a for a in fresh if other.get(a) == newest]
            front[side] = fresh
            if meeting:
                return self._join(meeting, links[0], links[1])
        return None

    def _join(self, meeting: list[int], back: dict[int, list[int]], on: dict[int, list[int]]) -> dict[int, list[int]]:
        before: dict[int, list[int]] = {}
        todo = list(meeting)
        while todo:  # from the meeting actors back to the source
            actor = todo.pop()
            if actor in back and actor not in before:
                before[actor] = back[actor]
                todo += [self._ends[link][0] for link in back[actor]]
        todo, seen = list(meeting), set(meeting)
        while todo:  # and on to the destination
            actor = todo.pop()
            for link in on.get(actor, ()):
                head = self._ends[link][1]
                before.setdefault(head, []).append(link)
                if head not in seen:
                    seen.add(head)
                    todo.append(head)
        return before

    def _through_devices(self, src: int, dst: int) -> dict[int, list[int]] | None:
        """The same with devices on the way: fewest of them, then fewest links."""
        if src not in self._distances:
            self._distances[src] = self._dijkstra(src)
        distance = self._distances[src]
        if distance[dst] == _UNREACHED:
            return None
        before: dict[int, list[int]] = {}
        todo = [dst]
        while todo:
            actor = todo.pop()
            if actor in before or actor == src:
                continue
            tight = [x for x in self._in[actor] if distance[self._ends[x][0]] + self._weight(src, self._ends[x][0]) == distance[actor]]
            before[actor] = tight
            todo += [self._ends[link][0] for link in tight]
        return before

    def _weight(self, src: int, tail: int) -> int:
        return 1 + _THROUGH_DEVICE if tail < self._devices and tail != src else 1

    def _dijkstra(self, src: int) -> array[int]:
        distance = array("q", [_UNREACHED]) * len(self._out)
        distance[src] = 0
        heap = [(0, src)]
        while heap:
            here, actor = heapq.heappop(heap)
            if here > distance[actor]:
                continue
            there = here + self._weight(src, actor)
            for link in self._out[actor]:
                head = self._ends[link][1]
                if there < distance[head]:
                    distance[head] = there
                    heapq.heappush(heap, (there, head))
        return distance

    # ---- the best of them ------------------------------------------------------------------------------------------
    def _best(self, src: int, dst: int, before: dict[int, list[int]], widths: dict[int, int]) -> tuple[int, ...]:
        """`widths`: of actors on the way, as far as they are known; the rest is added."""
        ends, rates = self._ends, self._rates
        widths[src] = _UNREACHED
        stack = [dst]
        while stack:  # depth first, because a path may be thousands of links long
            actor = stack[-1]
            waiting = [tail for x in before.get(actor, ()) if (tail := ends[x][0]) not in widths]
            if actor not in widths and waiting:
                stack += waiting
                continue
            stack.pop()
            if actor not in widths:
                widths[actor] = max(min(widths[ends[x][0]], rates[x]) for x in before[actor])
        width = widths[dst]
        after: dict[int, int] = {}  # the smallest wide enough link out of each actor that leads to dst
        stack, seen = [dst], {dst}
        while stack:
            for link in before.get(stack.pop(), ()):
                tail = ends[link][0]
                if rates[link] >= width:
                    after[tail] = min(link, after.get(tail, link))
                    if tail not in seen:
                        seen.add(tail)
                        stack.append(tail)
        path = [after[src]]
        while ends[path[-1]][1] != dst:
            path.append(after[ends[path[-1]][1]])
        return tuple(path)
