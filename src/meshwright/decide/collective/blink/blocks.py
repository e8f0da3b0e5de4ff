"""Scatter and gather over packed trees: every rank's block travels alone along its path of each tree.

One buffer per rank, in place, blocks in rank order; block b has `units` chunks (one per tree unit), each cut into `pieces`. A rank on the
way keeps blocks for ranks below it at their own place. Per unit and rank: a lane that receives, and a lane per child that passes on.
Blocks for the ranks furthest below go first in a scatter, those nearest come first in a gather, so links near the root never wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....fabric.fabric import Fabric
from ....program.builder import ProgramBuilder, StepRef
from ....program.program import Contract, Program
from ..problem import CollectiveProblem
from .tree_sets import Chosen, TreeSet

__all__ = ["block_steps", "lower_blocks"]


def block_steps(trees: TreeSet) -> int:
    """Steps for one piece of the program, before it is built: two per block and hop of its path."""
    return sum(2 * t.units * sum(len(x) for x in _below(t)[1:]) for t in trees.trees)


def _below(t: Chosen) -> list[list[int]]:
    """Ranks of every subtree but the root's, at the subtree's top's place in `t.order`; deepest first."""
    inside: dict[int, list[int]] = {v: [v] for v in t.order}
    for v in reversed(t.order[1:]):
        inside[t.parent[v]] += inside[v]
    depth = {t.root: 0}
    for v in t.order[1:]:
        depth[v] = depth[t.parent[v]] + 1
    # Deepest first: a block that still has far to go must not wait behind one that is nearly there.
    return [sorted(inside[v], key=lambda x: (-depth[x], (x - t.root) % len(t.parent))) for v in t.order]


class _Routes:
    """Routes of paths by name, None where the fabric goes there by itself."""

    def __init__(self, fabric: Fabric, names: Sequence[str]) -> None:
        self.fabric, self.names = fabric, names

    def of(self, path: Sequence[int]) -> tuple[str, ...] | None:
        names = tuple(self.names[v] for v in path)
        links = self.fabric.route(self.fabric.actor_of[names[0]], self.fabric.actor_of[names[-1]])
        return None if names == (names[0], *(self.fabric.links[x].dst for x in links)) else names


def lower_blocks(problem: CollectiveProblem, trees: TreeSet, *, pieces: int, unroll: bool) -> Program:
    """The program of a scatter or gather over the trees."""
    n, op = len(problem.ranks), problem.op
    units = sum(t.units for t in trees.trees)
    spans, repeat = (pieces, 1) if unroll else (1, pieces)
    own = units * spans
    elements = -(-problem.size_bytes // problem.element_bytes)
    chunk_bytes = -(-elements // (n * units * pieces)) * problem.element_bytes
    b = ProgramBuilder(ranks=n, name=f"blink {op}")
    role = "output" if op == "gather" else "input"
    buffers = [b.buffer(r, chunks=n * own, chunk_bytes=chunk_bytes, role=role, name=f"data:{r}") for r in range(n)]
    routes, first = _Routes(problem.fabric, trees.graph.names), 0
    for t in trees.trees:
        for _ in range(t.units):
            chunk = {v: [v * own + first * spans + i for i in range(spans)] for v in range(n)}
            (_scatter if op == "scatter" else _gather)(b, buffers, t, chunk, repeat, min(2, pieces * n), routes)
            first += 1
    whole = tuple((x, 0, n * own) for x in buffers)
    block = tuple((x, r * own, own) for r, x in enumerate(buffers))
    if op == "scatter":
        inputs = tuple((x, 0, n * own if r == problem.root else 0) for r, x in enumerate(buffers))
        b.contract = Contract(op=op, inputs=inputs, outputs=block, root=problem.root)
    else:
        b.contract = Contract(op=op, inputs=block, outputs=whole, root=problem.root)
    return b.build()


Chunks = dict[int, list[int]]


def _scatter(b: ProgramBuilder, buffers: Sequence[int], t: Chosen, chunk: Chunks, repeat: int, depth: int, routes: _Routes) -> None:
    below = dict(zip(t.order, _below(t), strict=True))
    channel = {v: b.channel(t.parent[v], v, depth=depth, route=routes.of(t.down[v])) for v in t.order[1:]}
    here: dict[tuple[int, int], StepRef] = {}
    for v in t.order:
        if v != t.root:
            lane = b.lane(v, repeat=repeat)
            for i in range(len(chunk[v])):
                for d in below[v]:
                    here[v, chunk[d][i]] = lane.recv(channel[v], buffers[v], chunk[d][i])
        for child in [w for w in t.order[1:] if t.parent[w] == v]:
            lane = b.lane(v, repeat=repeat)
            for i in range(len(chunk[v])):
                for d in below[child]:
                    at = chunk[d][i]
                    # The root has everything from the start; others pass a block on once it has arrived.
                    lane.send(channel[child], buffers[v], at, after=[here[v, at]] if (v, at) in here else [])


def _gather(b: ProgramBuilder, buffers: Sequence[int], t: Chosen, chunk: Chunks, repeat: int, depth: int, routes: _Routes) -> None:
    below = {v: blocks[::-1] for v, blocks in zip(t.order, _below(t), strict=True)}
    channel = {v: b.channel(v, t.parent[v], depth=depth, route=routes.of(t.up[v])) for v in t.order[1:]}
    here: dict[tuple[int, int], StepRef] = {}
    for v in reversed(t.order):
        for child in [w for w in t.order[1:] if t.parent[w] == v]:
            lane = b.lane(v, repeat=repeat)
            for i in range(len(chunk[v])):
                for d in below[child]:
                    here[v, chunk[d][i]] = lane.recv(channel[child], buffers[v], chunk[d][i])
        if v != t.root:
            lane = b.lane(v, repeat=repeat)
            for i in range(len(chunk[v])):
                for d in below[v]:
                    at = chunk[d][i]
                    lane.send(channel[v], buffers[v], at, after=[here[v, at]] if (v, at) in here else [])
