"""Trees whose nodes may be switches to a `Program`: a switch adds what its ports bring in one step, and copies to its ports in one step.

Numbers below `ranks` are ranks, the next are switch actors. A switch holds one slot per tree: what it adds up or passes on. Branches that end in
a switch carry nothing and are cut off. At a root that is a switch both come together: it adds what all bring and sends the sum back to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....fabric.fabric import Fabric
from ....program.builder import ProgramBuilder, StepRef
from ....program.program import Program, Space
from ..trees.lower import Part, contract
from ..trees.pack import Tree

__all__ = ["InNetworkLowering", "lower_in_network", "pruned"]

Children = dict[int, list[int]]
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class InNetworkLowering:
    """As `trees.lower.Lowering`, in place, every shard of `units` units; `switches` follow the ranks as actors."""

    fabric: Fabric
    ranks: tuple[str, ...]
    switches: tuple[str, ...]
    names: tuple[str, ...]  # of the trees' nodes
    op: str
    root: int
    shards: int
    units: int
    pieces: int
    unroll: bool
    depth: int
    chunk_bytes: int


def pruned(tree: Tree, ranks: int) -> Children:
    """Children of every node, without branches that hold no rank; in the order in which they joined."""
    # From the leaves up: a node is kept if it is a rank or leads to one.
    alive = [v < ranks for v in range(len(tree.parent))]
    for v in reversed(tree.order[1:]):
        if alive[v]:
            alive[tree.parent[v]] = True
    out: Children = {}
    for v in tree.order[1:]:
        if alive[v]:
            out.setdefault(tree.parent[v], []).append(v)
    return out


def lower_in_network(parts: Sequence[Part], how: InNetworkLowering) -> Program:
    """The program of all parts side by side."""
    n = len(how.ranks)
    b = ProgramBuilder(ranks=n, switches=len(how.switches), name=f"in-network {how.op}")
    chunks = how.shards * how.units * (how.pieces if how.unroll else 1)
    role = "output" if how.op in ("all-gather", "broadcast") else "input"
    buffers = [b.buffer(r, chunks=chunks, chunk_bytes=how.chunk_bytes, role=role, name=f"data:{r}") for r in range(n)]
    for part in parts:
        _Lowered(b, buffers, part, how).run()
    b.contract = contract(how.op, buffers, chunks, how.root)
    return b.build()


class _Lowered:
    """The lanes of one part."""

    def __init__(self, b: ProgramBuilder, buffers: Sequence[int], part: Part, how: InNetworkLowering) -> None:
        self.b, self.buffers, self.how, self.part = b, buffers, how, part
        self.units, self.ranks = part.units, len(how.ranks)
        base = (part.shard * how.units + part.first) * (how.pieces if how.unroll else 1)
        self.spans: Spans = [(base + i * part.units, part.units) for i in range(how.pieces if how.unroll else 1)]
        self.repeat = 1 if how.unroll else how.pieces
        self.sent: dict[int, list[StepRef]] = {}  # per rank: after these its chunks may be written again

    def run(self) -> None:
        brought = self._climb(self.part.up) if self.part.up is not None else []
        if self.part.down is not None:
            self._descend(self.part.down, brought)

    def _climb(self, tree: Tree) -> list[int]:
        """Returns the channels that end at the root, where that is a switch: what follows adds them."""
        children = pruned(tree, self.ranks)
        climb = self._channels(tree, children, lambda v, parent: (v, parent), reverse=True)
        for v in tree.order:
            if v != tree.root and v not in climb:
                continue
            incoming = [climb[c] for c in reversed(children.get(v, []))]
            if v < self.ranks:
                self._climb_rank(v, incoming, climb.get(v))
            elif v != tree.root:
                self._pass(v, incoming, [climb[v]])
        return [climb[c] for c in reversed(children.get(tree.root, []))] if tree.root >= self.ranks else []

    def _descend(self, tree: Tree, brought: list[int]) -> None:
        children = pruned(tree, self.ranks)
        descend = self._channels(tree, children, lambda v, parent: (parent, v), reverse=False)
        for v in tree.order:
            if v != tree.root and v not in descend:
                continue
            outgoing = [descend[c] for c in children.get(v, [])]
            if v < self.ranks:
                self._descend_rank(v, descend.get(v), outgoing)
            else:
                self._pass(v, [descend[v]] if v != tree.root else brought, outgoing)

    def _channels(self, tree: Tree, children: Children, ends: Callable[[int, int], tuple[int, int]], *, reverse: bool) -> dict[int, int]:
        """By child: its channel to or from its parent."""
        found: dict[int, int] = {}
        for parent, below in children.items():
            for v in below:
                names = tuple(self.how.names[x] for x in (tree.paths[v][::-1] if reverse else tree.paths[v]))
                found[v] = self.b.channel(*ends(v, parent), depth=self.how.depth, route=self._route(names))
        return found

    def _route(self, names: tuple[str, ...]) -> tuple[str, ...] | None:
        """None where the fabric's own routing goes this way."""
        fabric = self.how.fabric
        links = fabric.route(fabric.actor_of[names[0]], fabric.actor_of[names[-1]])
        return None if (names[0], *(fabric.links[x].dst for x in links)) == names else names

    def _climb_rank(self, v: int, incoming: list[int], out: int | None) -> None:
        lane = self.b.lane(v, repeat=self.repeat)
        steps: list[StepRef] = []
        for first, count in self.spans:
            for channel in incoming if out is None else incoming[:-1]:
                step = lane.recv_add(channel, self.buffers[v], first, count)
            if out is not None and incoming:
                step = lane.recv_add_send(incoming[-1], out, self.buffers[v], first, count)
            elif out is not None:
                step = lane.send(out, self.buffers[v], first, count)
            steps.append(step)
        self.sent[v] = steps

    def _descend_rank(self, v: int, incoming: int | None, outgoing: list[int]) -> None:
        ready = [[step] for step in self.sent.get(v, [])] or [[] for _ in self.spans]
        if incoming is not None:
            lane = self.b.lane(v, repeat=self.repeat)
            for i, (first, count) in enumerate(self.spans):
                if outgoing:
                    ready[i] = [lane.recv_send(incoming, outgoing[0], self.buffers[v], first, count, after=ready[i])]
                else:
                    ready[i] = [lane.recv(incoming, self.buffers[v], first, count, after=ready[i])]
            outgoing = outgoing[1:]
        for out in outgoing:
            lane = self.b.lane(v, repeat=self.repeat)
            for (first, count), after in zip(self.spans, ready, strict=True):
                lane.send(out, self.buffers[v], first, count, after=after)

    def _pass(self, w: int, incoming: list[int], outgoing: list[int]) -> None:
        """A switch: add what comes in, send it to all that follow, in one step per piece."""
        slot = self.b.buffer(w, chunks=self.units, chunk_bytes=self.how.chunk_bytes, role="scratch", space=Space.SWITCH, window=1)
        lane = self.b.lane(w, repeat=self.repeat)
        # One step for all ports: the switch adds what comes in and copies what goes out at line rate, so a port carries the data once.
        adds, copies = len(incoming) > 1, len(outgoing) > 1
        source = self.b.channel_set(incoming) if adds else incoming[0]
        target = self.b.channel_set(outgoing) if copies else outgoing[0]
        for _ in self.spans:
            lane.transfer(recv=source, send=target, dst=(slot, 0), count=self.units, add=adds, store=True, in_set=adds, out_set=copies)

