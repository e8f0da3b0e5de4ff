"""Trees over servers to a `Program` in turns: in turn d every root serves the server d further on, and no other.

`lower` gives every tree edge a lane, so all trees are under way at once and a link's rate is shared by hundreds of messages: what enters last enters
everywhere at the end of a piece, and a pipeline of few pieces fills slowly. Here a rank has one lane per link that it sends into and one per link
that it receives from, and they take the edges of all trees in one order, slot after slot. A message has its links to itself, what was received is
passed on while the next turn enters, and only the last turn's way inside a server comes on top: one part in (servers · pieces).
Trees must enter every server from the root's own (`is_in_turns`). Reductions run the same order backwards. An all-reduce has lanes of its own for
either half, so that a piece climbs while the one before it descends. Pieces are iterations.
No deadlock: all lanes and channels follow one order in which an edge comes after the one that feeds it, so the first step that is not done can run.
Invariant: all chunks, contracts and folds as in `lower`. Cost: O(edges log edges).
Source: the rounds of direct exchange (Thakur and Gropp, EuroPVM/MPI 2003), per level of a forest; the order is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ....program.builder import LaneBuilder, ProgramBuilder, StepRef
from ....program.program import Program
from .lower import Home, Lowering, Part, Routes, contract, fold_of
from .pack import Tree
from .symmetry import Boxes

__all__ = ["is_in_turns", "lower_in_turns", "turn_steps"]


def is_in_turns(trees: Sequence[Tree], boxes: Boxes) -> bool:
    """Whether every tree enters each server from the root's server or from within."""
    place = boxes.place
    return all(place[tree.parent[v]][0] in (place[v][0], place[tree.root][0]) for tree in trees for v in tree.order[1:])


def turn_steps(parts: Sequence[Part]) -> int:
    """Steps for one piece: a send and a receive per edge."""
    return sum(2 * (len(tree.order) - 1) for part in parts for tree in (part.up, part.down) if tree is not None)


@dataclass(frozen=True, order=True)
class _Edge:
    """One message, in its place among all."""

    down: bool
    slot: int  # the turn of the child's server, and one later with every hop from the root; backwards where it climbs
    apart: int  # places of the server between parent and child
    number: int  # of the part
    child: int
    tree: Tree = field(compare=False)


def lower_in_turns(parts: Sequence[Part], how: Lowering, boxes: Boxes) -> Program:
    """The program of all parts. `pace`, `lead` and uneven shards are for `lower_parts`."""
    n, role = len(how.ranks), "output" if how.op in ("all-gather", "broadcast", "gather") else "input"
    b = ProgramBuilder(ranks=n, name=how.name)
    for r in range(how.stored):
        b.buffer(r, chunks=how.chunks, chunk_bytes=how.chunk_bytes, role=role, name=f"data:{r}")
    lower = _Lower(b, how, boxes, [Home(part, how) for part in parts])
    for edge in sorted(edge for number, part in enumerate(parts) for edge in _edges(number, part, boxes)):
        lower.add(edge)
    promise = contract(how.op, list(range(n)), how.chunks, how.root)
    if how.servers > 1:
        return replace(b.build(), fold=fold_of(how), contracts=(promise,))
    b.contract = promise
    return b.build()


def _edges(number: int, part: Part, boxes: Boxes) -> Iterator[_Edge]:
    servers = len(boxes.members)
    for tree, down in ((part.up, False), (part.down, True)):
        if tree is None:
            continue
        home, hops = boxes.place[tree.root][0], {tree.root: 0}
        leads_on = {tree.parent[v] for v in tree.order[1:] if boxes.place[v][0] != home}  # in the root's server, what others hang below
        for v in reversed(tree.order[1:]):
            if v in leads_on:
                leads_on.add(tree.parent[v])
        for v in tree.order[1:]:
            u = tree.parent[v]
            hops[v] = hops[u] + 1
            (box, at), (other, before) = boxes.place[v], boxes.place[u]
            # Of one slot, ranks of a server begin with unlike neighbours, so that nobody is sent to by all at once.
            apart = (at - before) % boxes.ranks[box] if box == other else 0
            # What the root's own ranks add comes first, or the root's sums, which follow each other, would wait for the network's last turn.
            turn = (box - home) % servers or (0 if down or v in leads_on else servers)
            slot = turn + hops[v]
            yield _Edge(down, slot if down else -slot, apart, number, v, tree)


class _Lower:
    """Lanes by the link that they fill, channels by their way, and what a rank's next step on a part must wait for."""

    def __init__(self, b: ProgramBuilder, how: Lowering, boxes: Boxes, homes: Sequence[Home]) -> None:
        self.b, self.how, self.boxes, self.homes = b, how, boxes, homes
        self.routes = Routes(how)
        self.lanes: dict[tuple[object, ...], LaneBuilder] = {}
        self.channels: dict[tuple[object, ...], int] = {}
        self.added: dict[tuple[int, int], StepRef] = {}  # (part, rank): its last sum
        self.sent: dict[tuple[int, int], StepRef] = {}  # ... the step that passed its sum on
        self.got: dict[tuple[int, int], StepRef] = {}  # ... the step that received the result

    def add(self, edge: _Edge) -> None:
        """The step that sends and the step that receives."""
        home, tree, child = self.homes[edge.number], edge.tree, edge.child
        parent, path = tree.parent[child], tree.paths[child]
        src, dst, way = (parent, child, path) if edge.down else (child, parent, path[::-1])
        out, into = self._lane(home, src, edge.down, "out", way[1]), self._lane(home, dst, edge.down, "in", way[-2])
        channel = self._channel(home, src, dst, way, edge.down)
        (give,), (take,) = home.spans(src), home.spans(dst)
        above, below = (edge.number, parent), (edge.number, child)
        if edge.down:
            ready, sent = self.got.get(above) or self.added.get(above), self.sent.get(below)
            out.send(channel, home.actor(src), *give, after=[ready] if ready else ())
            self.got[below] = into.recv(channel, home.actor(dst), *take, after=[sent] if sent else ())
            return
        ready, before = self.added.get(below), self.added.get(above)
        self.sent[below] = out.send(channel, home.actor(src), *give, after=[ready] if ready else ())
        # Sums into one place follow each other, whatever link they come over.
        self.added[above] = into.recv_add(channel, home.actor(dst), *take, after=[before] if before and before.lane != into.number else ())

    def _lane(self, home: Home, v: int, down: bool, side: str, neighbour: int) -> LaneBuilder:
        key = home.actor(v), down, side, self._seen_from(v, neighbour)
        if key not in self.lanes:
            self.lanes[key] = self.b.lane(home.actor(v), repeat=self.how.repeat)
        return self.lanes[key]

    def _channel(self, home: Home, src: int, dst: int, way: tuple[int, ...], down: bool) -> int:
        ends = home.channel(src, dst)
        key = ends, down, tuple(self._seen_from(src, v) for v in way)
        if key not in self.channels:
            self.channels[key] = self.b.channel(*ends, depth=self.how.depth, route=self.routes.of(way))
        return self.channels[key]

    def _seen_from(self, v: int, node: int) -> tuple[int, int]:
        """A node as (servers further on, place in it), the same for all images of the two; (-1, node) outside of servers."""
        place = self.boxes.place
        return ((place[node][0] - place[v][0]) % len(self.boxes.members), place[node][1]) if node in place else (-1, node)
