"""Trees to a `Program`: reductions climb in-trees, broadcasts descend out-trees, cut into pieces that follow each other.

One buffer per rank, in place. Its chunks are those of the contract: the shard of weight unit r is `units` equal parts (trees), each of
`pieces` chunks, so chunk `(r · units + u) · pieces + i` is piece i of part u of shard r when pieces are unrolled. With `repeat` the
buffer covers one iteration (chunk `r · units + u`), and iteration i's chunk c lies at `i · C + c`: the message is cut into `pieces`
equal slices first and every slice is a collective of its own (window 0).

Per part of a root and per rank: one lane climbs (receive and add from each child, the last one passed on to the parent), one
lane receives from the parent and passes on to the first child, one lane for each further child.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...fabric import Fabric
from ...program import Contract, Program
from ...program_builder import LaneBuilder, ProgramBuilder, StepRef
from .forest import Tree

__all__ = ["Lowering", "Part", "contract", "lower_parts", "tree_steps"]


@dataclass(frozen=True)
class Part:
    """`units` units of shard `shard` from `first` on. `up` is an out-tree of the reversed graph (climbed), `down` one of the graph."""

    shard: int
    first: int
    units: int
    up: Tree | None
    down: Tree | None


@dataclass(frozen=True)
class Lowering:
    """How trees become steps. `shards`: weight units (ranks, or 1); `units` parts per shard; `depth` of every channel."""

    fabric: Fabric
    ranks: tuple[str, ...]
    names: tuple[str, ...]  # of the forest's nodes
    op: str
    root: int
    shards: int
    units: int
    pieces: int
    unroll: bool
    chunk_bytes: int
    name: str

    @property
    def chunks(self) -> int:
        return self.shards * self.units * (self.pieces if self.unroll else 1)

    @property
    def depth(self) -> int:
        return min(2, self.pieces)


def contract(op: str, buffers: Sequence[int], chunks: int, root: int) -> Contract:
    """The contract of an in-place collective whose rank r has `buffers[r]` with `chunks` chunks."""
    n = len(buffers)
    own = chunks // n
    whole = tuple((b, 0, chunks) for b in buffers)
    block = tuple((b, r * own, own) for r, b in enumerate(buffers))
    return Contract(
        op=op,
        inputs=block if op == "all-gather" else whole,
        outputs=block if op == "reduce-scatter" else whole,
        root=root if op in ("broadcast", "reduce") else -1,
    )


def tree_steps(parts: Sequence[Part], ranks: int, *, single: bool = False) -> int:
    """Steps for one piece of the program, before it is built; `single`: every unit becomes a part of its own."""
    steps = 0
    for part in parts:
        for tree in (part.up, part.down):
            if tree is not None:
                extra = sum(max(0, c - 1) for c in _child_counts(tree, ranks))
                steps += (ranks + extra) * (part.units if single else 1)
    return steps


def _child_counts(tree: Tree, ranks: int) -> list[int]:
    counts = [0] * ranks
    for v in tree.order[1:]:
        counts[tree.parent[v]] += 1
    return counts


def lower_parts(parts: Sequence[Part], how: Lowering) -> Program:
    """The program of all parts, running side by side."""
    n = len(how.ranks)
    b = ProgramBuilder(ranks=n, name=how.name)
    role = {"all-gather": "output", "broadcast": "output"}.get(how.op, "input")
    buffers = [b.buffer(r, chunks=how.chunks, chunk_bytes=how.chunk_bytes, role=role, name=f"data:{r}") for r in range(n)]
    routes = _Routes(how)
    for part in parts:
        _lower_part(b, buffers, part, how, routes)
    b.contract = contract(how.op, buffers, how.chunks, how.root)
    return b.build()


class _Routes:
    """Route of a path: None where the fabric's own routing takes it anyway, so that the program stays free of names."""

    def __init__(self, how: Lowering) -> None:
        self.how = how
        self.known: dict[tuple[int, ...], tuple[str, ...] | None] = {}

    def of(self, path: tuple[int, ...]) -> tuple[str, ...] | None:
        if path not in self.known:
            names = tuple(self.how.names[v] for v in path)
            fabric = self.how.fabric
            links = fabric.route(fabric.actor_of[names[0]], fabric.actor_of[names[-1]])
            default = (names[0], *(fabric.links[x].dst for x in links))
            self.known[path] = None if default == names else names
        return self.known[path]


def _spans(part: Part, how: Lowering) -> list[tuple[int, int]]:
    """(first chunk, chunks) of every step of one lane of the part, piece after piece."""
    if not how.unroll:
        return [(part.shard * how.units + part.first, part.units)]
    base = (part.shard * how.units + part.first) * how.pieces
    return [(base + i * part.units, part.units) for i in range(how.pieces)]


def _lower_part(b: ProgramBuilder, buffers: Sequence[int], part: Part, how: Lowering, routes: _Routes) -> None:
    spans = _spans(part, how)
    repeat = 1 if how.unroll else how.pieces
    climbed: dict[int, list[StepRef]] = {}
    if part.up is not None:
        climbed = _climb(b, buffers, part.up, spans, repeat, how.depth, routes)
    if part.down is not None:
        _descend(b, buffers, part.down, spans, repeat, how.depth, routes, climbed)


def _climb(
    b: ProgramBuilder, buffers: Sequence[int], tree: Tree, spans: list[tuple[int, int]], repeat: int, depth: int, routes: _Routes
) -> dict[int, list[StepRef]]:
    """Reduce towards the root; returns for every rank the step after which its chunks may be written again, per piece."""
    children: dict[int, list[int]] = {}
    for v in reversed(tree.order[1:]):  # late joiners are leaves far from the root: their sums arrive first at their parents
        children.setdefault(tree.parent[v], []).append(v)
    channel = {v: b.channel(v, tree.parent[v], depth=depth, route=routes.of(tree.paths[v][::-1])) for v in tree.order[1:]}
    done: dict[int, list[StepRef]] = {}
    for v in tree.order:
        lane, out = b.lane(v, repeat=repeat), channel.get(v)
        done[v] = [_climb_piece(lane, [channel[c] for c in children.get(v, [])], out, buffers[v], first, count) for first, count in spans]
    return done


def _climb_piece(lane: LaneBuilder, incoming: list[int], out: int | None, buffer: int, first: int, count: int) -> StepRef:
    if not incoming:
        assert out is not None
        return lane.send(out, buffer, first, count)
    for channel in incoming[:-1]:
        lane.recv_add(channel, buffer, first, count)
    if out is None:
        return lane.recv_add(incoming[-1], buffer, first, count)
    return lane.recv_add_send(incoming[-1], out, buffer, first, count)


def _descend(
    b: ProgramBuilder, buffers: Sequence[int], tree: Tree, spans: list[tuple[int, int]], repeat: int, depth: int, routes: _Routes,
    climbed: dict[int, list[StepRef]],
) -> None:  # fmt: skip
    """Broadcast from the root; a rank's chunk is written only after its own contribution was sent (`climbed`)."""
    children: dict[int, list[int]] = {}
    for v in tree.order[1:]:
        children.setdefault(tree.parent[v], []).append(v)
    channel = {v: b.channel(tree.parent[v], v, depth=depth, route=routes.of(tree.paths[v])) for v in tree.order[1:]}
    for v in tree.order:
        below = [channel[c] for c in children.get(v, [])]
        ready = [[step] for step in climbed.get(v, [])] or [[] for _ in spans]
        if v != tree.root:
            lane = b.lane(v, repeat=repeat)
            for i, (first, count) in enumerate(spans):
                if below:
                    step = lane.recv_send(channel[v], below[0], buffers[v], first, count, after=ready[i])
                else:
                    step = lane.recv(channel[v], buffers[v], first, count, after=ready[i])
                ready[i] = [step]
            below = below[1:]
        for out in below:
            lane = b.lane(v, repeat=repeat)
            for (first, count), after in zip(spans, ready, strict=True):
                lane.send(out, buffers[v], first, count, after=after)
