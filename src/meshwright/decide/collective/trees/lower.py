"""Trees to a `Program`: reductions climb in-trees, broadcasts descend out-trees, cut into pieces that follow each other.

One buffer per rank, in place. Its chunks are those of the contract: the shard of weight unit r is `units` equal parts (trees), each of
`pieces` chunks, so chunk `(r · units + u) · pieces + i` is piece i of part u of shard r when pieces are unrolled. With `repeat` the
buffer covers one iteration (chunk `r · units + u`), and iteration i's chunk c lies at `i · C + c`: the message is cut into `pieces`
equal slices first and every slice is a collective of its own (window 0).

Folded (see `program.fold`), where servers are alike: only the first server's lanes are stored. A rank of server x in the stored tree is
written down at its twin in the first server, in the tree's image by -x, whose shard is the stored one's image by -x. So a folded program is
what lowering the stored trees gives, with every rank's lanes taken home. Trees of one root: its server stays where it is (`fixed`). Where ranks that
stay have shards, too, chunks move with their ranks' (`Fold.by_rank`); a shard of theirs has a run of chunks for every alike server.

Per part of a root and per rank: one lane climbs (receive and add from each child, the last one passed on to the parent), one
lane receives from the parent and passes on to the first child, one lane for each further child. Not `fused`: where there are several children,
the first has a lane of its own, too. A step that receives and sends is complete when it has sent, and the others wait for that: a piece's time.

Paced (`pace` > 0): links share their rate evenly between messages, whatever part of the data a channel has, so channels of few bytes run
ahead and leave the others late. So of each rank's lanes that only send what it has (a root's to its children, a leaf's to its parent) the one
with the longest way is the leader: it goes at most `pace` pieces ahead of any other, and nobody overtakes it. Long ways end first this way.
With a `lead` of some pieces, ways of fewer hops stay so far behind: what others have to pass on sets off early, and the short ways use the links
while the last of it still travels. Lanes then repeat in iterations of `lead` pieces, and shorter ways are an iteration behind.

Limbs (`Part.limbs`) take ranges of a part on to other ranks from one that its trees reach. A reduction's limbs end there before that rank passes on
its sum, and a broadcast's begin when it has what is broadcast. All alike servers send theirs at once, so with a `window` they cut a piece finer.

With a `window` (folded), a tree serves so many servers at once: a lane takes those that are `window` apart one after the other, in every piece. All
at once, a piece enters all servers together, at its end, and what a server then still passes on inside is a part of one in `pieces`; in windows it is
one in `pieces` times servers / `window`. Lanes take edges in the order of the tree, in which an edge comes after the one that feeds it: no deadlock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ....errors import Unsupported
from ....program.builder import LaneBuilder, ProgramBuilder, StepRef
from ....program.program import Contract, Fold, FoldAxis, Program
from ..rates import pinned_route
from .pack import Tree
from .parts import Lowering, Part
from .shards import ShardTable, shard_contract

__all__ = ["Lowering", "Part", "contract", "lower_parts", "tree_steps"]


def contract(op: str, buffers: Sequence[int], chunks: int, root: int) -> Contract:
    """The contract of an in-place collective whose rank r has `buffers[r]` with `chunks` chunks."""
    n = len(buffers)
    own = chunks // n
    whole = tuple((b, 0, chunks) for b in buffers)
    block = tuple((b, r * own, own) for r, b in enumerate(buffers))
    inputs = block if op in ("all-gather", "gather") else whole
    if op == "scatter":
        inputs = tuple((b, 0, chunks if r == root else 0) for r, b in enumerate(buffers))
    outputs = block if op in ("reduce-scatter", "scatter") else whole
    return Contract(op=op, inputs=inputs, outputs=outputs, root=root if op in ("broadcast", "reduce", "scatter", "gather") else -1)


def tree_steps(parts: Sequence[Part], *, fused: bool = True) -> int:
    """Steps for one piece of the program, before it is built."""
    known: dict[tuple[int, bool], int] = {}
    steps = 0
    for part in (x for whole in parts for x in (whole, *whole.limbs)):
        for tree, own in ((part.up, 0), (part.down, int(not fused))):
            if tree is None:
                continue
            key = id(tree), bool(own)
            if key not in known:
                counts = Counter(tree.parent[v] for v in tree.order[1:])
                known[key] = len(tree.order) + sum(c - 1 + own * (c > 1 and v != tree.root) for v, c in counts.items())
            steps += known[key]
    return steps


def lower_parts(parts: Sequence[Part], how: Lowering) -> Program:
    """The program of all parts, running side by side."""
    n = len(how.ranks)
    b = ProgramBuilder(ranks=n, name=how.name)
    role = "output" if how.op in ("all-gather", "broadcast", "gather") else "input"
    for r in sorted((*how.moving[: how.size], *how.fixed)):
        b.buffer(r, chunks=how.chunks, chunk_bytes=how.chunk_bytes, role=role, name=f"data:{r}")
    routes = _Routes(how)
    sources: dict[int, list[_Source]] = {}
    for part in parts:
        _lower_part(b, part, how, routes, sources)
    if how.pace:
        for row in sources.values():
            _keep_pace(row, how)
    if how.table is not None:
        promise = shard_contract(how.op, list(range(n)), how.table, how.root)
    else:
        promise = contract(how.op, [how.buffer[r] for r in range(n)], how.chunks, how.root)
    if how.servers == 1:
        b.contract = promise
        return b.build()
    return replace(b.build(), fold=_fold(how), contracts=(promise,))


def _fold(how: Lowering) -> Fold:
    axes = (FoldAxis("place", how.size, 1, "plain"), FoldAxis("server", how.servers, how.size, "shift"))
    return Fold(axes, np.full((1, how.size + len(how.fixed)), how.turn * how.stored_pieces, np.int32), how.fixed, how.by_rank)


@dataclass(frozen=True)
class _Source:
    """A lane that sends what its rank has, the hops that its data goes, and the units of a step."""

    lane: LaneBuilder
    hops: int
    units: int
    steps: tuple[StepRef, ...]


def _keep_pace(sources: list[_Source], how: Lowering) -> None:
    """Couple the lanes of one rank, where they are unlike."""
    if len({(s.hops, s.units) for s in sources}) < 2:
        return
    # The longest way, and of those the largest share, leads: it may be `pace` pieces ahead, and no other lane overtakes it.
    first = max(sources, key=lambda s: (s.hops, s.units))
    for other in sources:
        if other is first:
            continue
        ahead = how.lead - 1 if other.hops < first.hops else 0
        for i in range(len(other.steps)):
            other.lane.wait(i, first.steps[min(i + ahead, len(first.steps) - 1)])
        # Lanes that repeat can only wait for an earlier iteration of another: pace is counted in iterations of `lead` pieces.
        if not how.unroll:
            first.lane.wait(0, (other.steps[-1], max(1, how.pace // how.lead)))
            continue
        pace = max(how.pace, how.lead)
        for i, step in enumerate(other.steps[: max(0, len(first.steps) - pace)]):
            first.lane.wait(i + pace, step)


_Done = tuple[list[tuple[int, int]], list[StepRef]]  # spans of chunks, and the last step of each


class _Routes:
    """Route of a path: None where the fabric's own routing takes it anyway, so that the program stays free of names."""

    def __init__(self, how: Lowering) -> None:
        self.how = how
        self.known: dict[tuple[int, ...], tuple[str, ...] | None] = {}
        self.joined: set[tuple[int, int]] = set()

    def of(self, path: tuple[int, ...], src: int, dst: int) -> tuple[str, ...] | None:
        """Of a channel from `src` to `dst`. Raises Unsupported for a path of its own in a folded program.

        Folded, of all channels with the same two ends one path is looked at: the others are images of it that the fabric's routing takes alike.
        """
        if self.how.servers > 1:
            if (src, dst) in self.joined:
                return None
            self.joined.add((src, dst))
        if path not in self.known:
            names = tuple(self.how.names[v] for v in path)
            self.known[path] = pinned_route(self.how.fabric, names)
            if self.known[path] is not None and self.how.servers > 1:
                raise Unsupported(f"a folded program cannot pin the route {' -> '.join(names)}", hint="plan with fold=False")
        return self.known[path]


class _Home:
    """Where the lanes of a part's ranks are stored: every rank at itself, or folded, at its twin in the first server. `of`: a limb's part."""

    def __init__(self, part: Part, how: Lowering, of: Part | None = None) -> None:
        self.part, self.how, self.whole = part, how, of or part
        self.cuts = min(how.turns, part.units) if of else 1  # of a piece
        self.known: dict[int, list[tuple[int, int]]] = {}

    def actor(self, v: int) -> int:
        return self.how.stored[v]

    def buffer(self, v: int) -> int:
        return self.how.buffer[self.actor(v)]

    def channel(self, src: int, dst: int) -> tuple[int, int]:
        """Both ends of a channel that starts at home."""
        return self.actor(src), self.how.moved(dst, -self.how.member(src))

    def spans(self, v: int) -> list[tuple[int, int]]:
        """(first chunk, chunks) of every step of one lane of rank v, piece after piece."""
        server = self.how.member(v)
        if server not in self.known:
            part, how = self.part, self.how
            if how.table is not None:
                self.known[server] = _uneven_spans(part, how, how.table)
                return self.known[server]
            # A limb's piece is a part of its part's.
            whole, total = self.whole, how.shards * how.units
            if not how.by_rank:
                base = (part.shard * how.units + whole.first - server * how.turn) % total
            elif part.shard in how.place:
                base = how.moved(part.shard, -server) * how.units + whole.first
            else:
                base = part.shard * how.units + (whole.first - server * how.turn) % how.units
            first = base * how.stored_pieces + part.first - whole.first
            borders = [first + part.units * t // self.cuts for t in range(self.cuts + 1)]
            self.known[server] = [(a + i * whole.units, z - a) for i in range(how.stored_pieces) for a, z in pairwise(borders)]
        return self.known[server]


class _Lanes:
    """Lanes of one tree: every edge has its own, or with a `window`, edges of servers so far apart share one."""

    def __init__(self, b: ProgramBuilder, tree: Tree, how: Lowering) -> None:
        self.b, self.how, self.home = b, how, how.member(tree.root)
        self.shared: dict[tuple[int, ...], LaneBuilder] = {}

    def of(self, here: int, v: int, *what: int) -> LaneBuilder:
        """At `here`, for the edge into or out of v; `what` tells apart lanes at one place for one server."""
        apart = (self.how.member(v) - self.home) % self.how.servers
        if not self.how.window or not apart:
            return self.b.lane(here, repeat=self.how.repeat)
        key = here, apart % self.how.window, *what
        if key not in self.shared:
            self.shared[key] = self.b.lane(here, repeat=self.how.repeat)
        return self.shared[key]


def _uneven_spans(part: Part, how: Lowering, table: ShardTable) -> list[tuple[int, int]]:
    """The part's share of its shard's chunks, rounded at both borders, in at most `pieces` spans."""
    start, count, units = table.start[part.shard], table.count[part.shard], how.shard_units[part.shard]
    lo, hi = part.first * count // units, (part.first + part.units) * count // units
    pieces = min(how.pieces, hi - lo)
    borders = [lo + (hi - lo) * i // max(pieces, 1) for i in range(pieces + 1)]
    return [(start + a, b - a) for a, b in pairwise(borders)]


def _lower_part(b: ProgramBuilder, part: Part, how: Lowering, routes: _Routes, sources: dict[int, list[_Source]]) -> None:
    home = _Home(part, how)
    if not home.spans(0):
        return  # rounding left it nothing
    climbed: dict[int, list[StepRef]] = {}
    limbs = [(limb, _Home(limb, how, part)) for limb in part.limbs]
    below: list[dict[int, list[StepRef]]] = [{} for _ in limbs]
    if part.up is not None:
        # Limbs first: where one ends, its sums are there before the rank passes on its own. Limbs that add to the same chunks take turns.
        ends: dict[int, list[_Done]] = {}
        for i, (limb, at) in enumerate(limbs):
            root = _tree(limb.up).root
            before = [
                (other.spans(root), below[j][root])
                for j, (x, other) in enumerate(limbs[:i]) if _tree(x.up).root == root and limb.meets(x)
            ]  # fmt: skip
            below[i] = _climb(b, _tree(limb.up), at, how, routes, sources, {root: before})
            ends.setdefault(root, []).append((at.spans(root), below[i][root]))
        climbed = _climb(b, part.up, home, how, routes, sources, ends)
    if part.down is not None:
        ready = _descend(b, part.down, home, how, routes, climbed, sources)
        for (limb, at), done in zip(limbs, below, strict=True):
            # The first waits for what the rank has from this part's trees, the others until their own contribution is sent.
            root = _tree(limb.down).root
            here = [step for span in at.spans(root) for step in _latest([(home.spans(root), ready[root])], span)]
            _descend(b, _tree(limb.down), at, how, routes, {**done, root: here}, {})


def _latest(done: Sequence[_Done], span: tuple[int, int]) -> list[StepRef]:
    """Of each, the last step whose chunks begin before the span ends: those before it come earlier in its lane."""
    found = [(steps, bisect_left(spans, (sum(span),)) - 1) for spans, steps in done if steps]
    return [steps[at] for steps, at in found if at >= 0]


def _tree(tree: Tree | None) -> Tree:
    assert tree is not None
    return tree


def _climb(
    b: ProgramBuilder, tree: Tree, home: _Home, how: Lowering, routes: _Routes, sources: dict[int, list[_Source]],
    ends: dict[int, list[_Done]] | None = None,
) -> dict[int, list[StepRef]]:  # fmt: skip
    """Reduce towards the root; returns for every rank the step after which its chunks may be written again, per piece.

    `ends`: by rank, last steps of what must have been added there before.
    """
    children: dict[int, list[int]] = {}
    # Late joiners are leaves far from the root: their sums arrive first at their parents; in windows lanes take all edges in the tree's order.
    for v in tree.order[1:] if how.window else reversed(tree.order[1:]):
        children.setdefault(tree.parent[v], []).append(v)
    channel = {}
    for v in tree.order[1:]:
        src, dst = home.channel(v, tree.parent[v])
        channel[v] = b.channel(src, dst, depth=how.depth, route=routes.of(tree.paths[v][::-1], src, dst))
    done: dict[int, list[StepRef]] = {}
    hops, lanes = {tree.root: 0}, _Lanes(b, tree, how)
    for v in tree.order:
        here = home.actor(v)
        if v != tree.root:
            hops[v] = hops[tree.parent[v]] + 1
        lane, out = lanes.of(here, v), channel.get(v)
        incoming, buffer = [channel[c] for c in children.get(v, [])], home.buffer(v)
        before = [_latest((ends or {}).get(v, ()), span) for span in home.spans(v)]
        done[v] = [_climb_piece(lane, incoming, out, buffer, *span, after) for span, after in zip(home.spans(v), before, strict=True)]
        if v not in children and how.pace:
            sources.setdefault(here, []).append(_Source(lane, hops[v], home.part.units, tuple(done[v])))
    return done


def _climb_piece(
    lane: LaneBuilder, incoming: list[int], out: int | None, buffer: int, first: int, count: int, after: list[StepRef]
) -> StepRef:  # fmt: skip
    if not incoming:
        assert out is not None
        return lane.send(out, buffer, first, count, after=after)
    for channel in incoming[:-1]:
        lane.recv_add(channel, buffer, first, count, after=after)
        after = []
    if out is None:
        return lane.recv_add(incoming[-1], buffer, first, count, after=after)
    return lane.recv_add_send(incoming[-1], out, buffer, first, count, after=after)


def _descend(
    b: ProgramBuilder, tree: Tree, home: _Home, how: Lowering, routes: _Routes, climbed: dict[int, list[StepRef]],
    sources: dict[int, list[_Source]],
) -> dict[int, list[StepRef]]:  # fmt: skip
    """Broadcast from the root; a rank's chunk is written only after its own contribution was sent (`climbed`).

    Returns for every rank the steps after which it has what is broadcast, per piece, where it does not have it from the start.
    """
    children: dict[int, list[int]] = {}
    for v in tree.order[1:]:
        children.setdefault(tree.parent[v], []).append(v)
    channel = {}
    for v in tree.order[1:]:
        src, dst = home.channel(tree.parent[v], v)
        # Cut pieces wait to be passed on as whole ones do: as many bytes are in flight. What climbs is there at once, and would run ahead.
        channel[v] = b.channel(src, dst, depth=how.depth * home.cuts, route=routes.of(tree.paths[v], src, dst))
    lanes = _Lanes(b, tree, how)
    below_height, has = dict.fromkeys(tree.order, 0), dict[int, list[StepRef]]()
    for v in reversed(tree.order[1:]):
        below_height[tree.parent[v]] = max(below_height[tree.parent[v]], below_height[v] + 1)
    for v in tree.order:
        here, buffer, spans = home.actor(v), home.buffer(v), home.spans(v)
        below = children.get(v, [])
        ready = [[step] for step in climbed.get(v, [])] or [[] for _ in spans]
        if v != tree.root:
            lane = lanes.of(here, v, 0)
            fused = len(below) == 1 or (bool(below) and how.fused)
            for i, (first, count) in enumerate(spans):
                if fused:
                    step = lane.recv_send(channel[v], channel[below[0]], buffer, first, count, after=ready[i])
                else:
                    step = lane.recv(channel[v], buffer, first, count, after=ready[i])
                ready[i] = [step]
            below = below[1:] if fused else below
        has[v] = [row[0] for row in ready if row]
        ways = [1 + below_height[c] for c in children.get(v, [])] if v == tree.root and how.pace and not climbed else []
        # Ranks of other servers than v's, entered once each, share lanes by server; those of its own have one each.
        server, inside = how.place.get(v, (-1, v))
        for number, child in enumerate(below):
            other, twin = how.place.get(child, (-1, child))
            lane = lanes.of(here, child, 1, twin if other == server else inside)
            steps = [lane.send(channel[child], buffer, first, count, after=after) for (first, count), after in zip(spans, ready, strict=True)]
            if ways:
                sources.setdefault(here, []).append(_Source(lane, ways[number], home.part.units, tuple(steps)))
    return has
