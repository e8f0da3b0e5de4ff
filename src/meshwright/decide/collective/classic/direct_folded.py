"""The direct all-to-all of many alike servers, of which only the first one's steps are stored (`program.fold`).

Every rank sends each other its block. The servers that are d further on, for all d, are served by lanes of their own, each of which takes those
`WINDOW_SERVERS` apart one after the other, so few messages share a link; where ranks are symmetric, every link still has as many at any time.
A stored step that receives means the image of the channel that arrives there: the block of the rank d servers before.
Servers that differ stay where they are (`Fold.fixed`) and are stored too; blocks among their own ranks are cut in as many parts as there are alike
servers, since every image of their lanes runs. Where such a server has lost a link to the network, its blocks leave and enter by the links that are
left, as their rates say: what a rank's own cannot take, others of its server pass on (`Shares`).
Source: the rounds of direct exchange (Thakur and Gropp, EuroPVM/MPI 2003), several at once; the fold and the relays are ours.
Cost: two steps per peer of one server's ranks, four per peer and relay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil

import numpy as np

from ....errors import Unsupported
from ....program.builder import LaneBuilder, ProgramBuilder
from ....program.program import Contract, Fold, FoldAxis, Program
from ..problem import CollectiveProblem
from ..rates import RateGraph, rate_graph
from ..trees.ports import ports_of, spread
from ..trees.symmetry import Boxes, Shift

__all__ = ["alike_servers", "folded_all_to_all", "passes_on"]

WINDOW_SERVERS = 32  # that a rank serves at once
MIN_ALIKE_SERVERS = 3  # beside servers that differ
MAX_ODD_SERVERS = 8  # every one of them is stored
MAX_UNEVENNESS = Fraction(1, 150)  # that whole chunks may leave among links; blocks are cut finer until it is less ...
MAX_FINER = 8  # ... or in so many times as many chunks as there are alike servers
# Of a block: at 32 KiB, among four servers of eight ranks with 50 GB/s, less than 0.3 of the time is won (simulated), for one more hop.
MIN_PASSED_ON_BYTES = 1 << 16
Shares = Mapping[int, tuple[tuple[int, int, int], ...]]  # of a rank's block: (rank that has the link, first chunk, chunks)


def alike_servers(problem: CollectiveProblem) -> Shift | None:
    """The alike servers, whose ranks are equal runs in order, and those that differ; None = the problem's servers are not mostly alike."""
    if problem.shard_bytes is not None:
        return None
    try:
        graph = rate_graph(problem.fabric, problem.ranks)
        boxes = Boxes.of(graph)
    except Unsupported:
        return None
    signatures = boxes.signature(graph, [1] * graph.ranks)
    usual = Counter(signatures).most_common(1)[0][0]
    odd = tuple(x for x, s in enumerate(signatures) if s != usual)
    shift = Shift(boxes, odd)
    if len(odd) > MAX_ODD_SERVERS or (odd and shift.members < MIN_ALIKE_SERVERS) or not shift.stride():
        return None
    return shift


def _chunks_of_a_block(graph: RateGraph, shift: Shift) -> int:
    """A multiple of the alike servers, so fine that blocks leave and enter servers that differ about evenly."""
    ways = []
    for x in shift.stays:
        for inward in (True, False):
            ports, _ = ports_of(shift.boxes, x, graph, graph.arcs, inward=inward)
            ways.append((shift.boxes.ranks[x], max(1, len({p.rank for p in ports}))))

    def uneven(own: int) -> Fraction:
        return max(Fraction(ceil(Fraction(ranks * own, n)) * n, ranks * own) - 1 for ranks, n in ways)

    return min((shift.members * t for t in range(1, MAX_FINER + 1)), key=lambda own: (max(uneven(own), MAX_UNEVENNESS), own))


def _shares(graph: RateGraph, shift: Shift, own: int, *, inward: bool) -> Shares:
    """By which links the blocks of ranks that stay leave or enter, in chunks of a block of `own`: as evenly as the links' rates say, their own first.

    Raises: Unsupported.
    """
    found: dict[int, tuple[tuple[int, int, int], ...]] = {}
    for x in shift.stays:
        ranks = shift.boxes.members[x][: shift.boxes.ranks[x]]
        ports, used = ports_of(shift.boxes, x, graph, graph.arcs, inward=inward)
        need, widest = len(ranks) * own, max(used.values(), default=1)
        room = None
        for most in range(ceil(need / max(1, len({p.rank for p in ports}))), need + 1):
            room = spread(ports, {arc: most * rate // widest for arc, rate in used.items()}, need)
            if room is not None:
                break
        if room is None:
            raise Unsupported("a server that differs has no links to the network", where="direct")
        left = dict.fromkeys(ranks, 0)
        for port, amount in room.items():
            left[port.rank] += amount
        taken = {r: min(own, left[r]) for r in ranks}
        for r in ranks:
            left[r] -= taken[r]
        for r in ranks:
            row, at = [(r, 0, taken[r])] if taken[r] else [], taken[r]
            # What is left goes by all that have room, in equal parts as far as they have.
            while at < own:
                relay = max(left, key=lambda v: (left[v], -v))
                amount = min(left[relay], max(1, -(-(own - taken[r]) // sum(1 for v in left.values() if v))), own - at)
                row.append((relay, at, amount))
                left[relay] -= amount
                at += amount
            found[r] = tuple(row)
    return found


@dataclass
class _Exchange:
    problem: CollectiveProblem
    shift: Shift
    own: int  # chunks of a block
    lanes: dict[tuple[int, ...], LaneBuilder] = field(default_factory=dict)
    known: dict[tuple[str, int, int], int] = field(default_factory=dict)  # buffers of what is passed on

    def build(self, out_by: Shares, in_by: Shares) -> Program:
        n = len(self.problem.ranks)
        fixed = self.shift.fixed
        self.moving = [v for v in range(n) if v not in set(fixed)]
        self.local = local = len(self.moving) // self.shift.members
        elements, total = -(-self.problem.size_bytes // self.problem.element_bytes), n * self.own
        self.chunk_bytes = -(-elements // total) * self.problem.element_bytes
        self.b = b = ProgramBuilder(ranks=n, name="direct all-to-all")
        first, shift = self.moving[:local], list[int]()
        self.buffers: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for row in (first, fixed):
            for role, table in zip(("input", "output"), self.buffers, strict=True):
                for r in row:
                    table[r] = b.buffer(r, chunks=total, chunk_bytes=self.chunk_bytes, role=role, name=f"{role}:{r}")
                    shift.append(self.own // self.shift.members if row is fixed else 0 if fixed else local)
        self.scratch: list[int] = []
        for r in first:
            b.lane(r).copy((self.buffers[0][r], r * self.own), (self.buffers[1][r], r * self.own), self.own)
        for d in range(self.shift.members):
            self._between(first, d)
        self._among(fixed)
        for f in fixed:
            for d in first:
                self._out(f, d, out_by[f])
                self._in(d, f, in_by[f])
        shift += [self.own // self.shift.members] * len(self.scratch)
        axes = (FoldAxis("place", local, 1, "plain"), FoldAxis("server", self.shift.members, local, "shift"))
        fold = Fold(axes, np.array([shift], np.int32), fixed, bool(fixed))
        return replace(b.build(), fold=fold, contracts=(self._promise(total),))

    def _promise(self, total: int) -> Contract:
        """Stored buffers come first in the plain form, then those of the first server's images."""
        stored = 2 * (self.local + len(self.shift.fixed)) + len(self.scratch)
        rows = []
        for table in self.buffers:
            where = dict(table)
            for i, v in enumerate(self.moving[self.local :]):
                member, place = divmod(i, self.local)
                where[v] = stored + member * 2 * self.local + table[self.moving[place]]
            rows.append(tuple((where[r], 0, total) for r in range(len(self.problem.ranks))))
        return Contract(op="all-to-all", inputs=rows[0], outputs=rows[1], root=-1)

    def _lane(self, *key: int) -> LaneBuilder:
        if key not in self.lanes:
            self.lanes[key] = self.b.lane(key[0])
        return self.lanes[key]

    def _between(self, first: list[int], d: int) -> None:
        """From the first server's ranks to those of the alike server d further on, and what arrives from as far before."""
        b, own, local, servers = self.b, self.own, self.local, self.shift.members
        for i, src in enumerate(first):
            for apart in range(local):  # ranks of a server begin with unlike peers
                at = (i + apart) % local
                peer, back = self.moving[d * local + at], self.moving[(servers - d) % servers * local + i]
                if peer == src:
                    continue
                channel = b.channel(src, peer)
                self._lane(src, d % WINDOW_SERVERS, at, 0).send(channel, self.buffers[0][src], peer * own, own)
                self._lane(first[at], d % WINDOW_SERVERS, i, 1).recv(channel, self.buffers[1][first[at]], back * own, own)

    def _among(self, fixed: tuple[int, ...]) -> None:
        """Among ranks that stay: a part of every block, the others being its images'."""
        part = self.own // self.shift.members
        for f in fixed:
            self.b.lane(f).copy((self.buffers[0][f], f * self.own), (self.buffers[1][f], f * self.own), part)
            for g in fixed:
                if f != g:
                    channel = self.b.channel(f, g)
                    self.b.lane(f).send(channel, self.buffers[0][f], g * self.own, part)
                    self.b.lane(g).recv(channel, self.buffers[1][g], f * self.own, part)

    def _passed_on(self, relay: int, chunks: int) -> int:
        """A buffer of the relay, with so many chunks for every rank."""
        n = len(self.problem.ranks)
        self.scratch.append(self.b.buffer(relay, chunks=n * chunks, chunk_bytes=self.chunk_bytes, role="scratch", name=f"passed on:{relay}"))
        return self.scratch[-1]

    def _out(self, f: int, d: int, by: tuple[tuple[int, int, int], ...]) -> None:
        """Rank f's block for d, by the links that its server has."""
        b, own = self.b, self.own
        for relay, start, count in by:
            arrives = f * own + start
            if relay == f:
                channel = b.channel(f, d)
                b.lane(f).send(channel, self.buffers[0][f], d * own + start, count)
            else:
                first, channel = b.channel(f, relay), b.channel(relay, d)
                at = self._held(("out", f, relay), relay, count)
                self._lane(f, d, relay, 2).send(first, self.buffers[0][f], d * own + start, count)
                self._lane(relay, d, f, 3).recv_send(first, channel, at, d * count, count)
            self._lane(d, f, relay, 4).recv(channel, self.buffers[1][d], arrives, count)

    def _in(self, d: int, f: int, by: tuple[tuple[int, int, int], ...]) -> None:
        """Rank d's block for f, by the links that f's server has."""
        b, own = self.b, self.own
        for relay, start, count in by:
            channel = b.channel(d, relay)
            self._lane(d, f, relay, 5).send(channel, self.buffers[0][d], f * own + start, count)
            if relay != f:
                second, at = b.channel(relay, f), self._held(("in", f, relay), relay, count)
                self._lane(relay, d, f, 6).recv_send(channel, second, at, d * count, count)
                channel = second
            b.lane(f).recv(channel, self.buffers[1][f], d * own + start, count)

    def _held(self, what: tuple[str, int, int], relay: int, count: int) -> int:
        if what not in self.known:
            self.known[what] = self._passed_on(relay, count)
        return self.known[what]


def passes_on(problem: CollectiveProblem, shift: Shift) -> bool:
    """Whether a server that differs has lost links, so that some of its ranks pass on what others send or receive."""
    if not shift.fixed or problem.size_bytes < MIN_PASSED_ON_BYTES * len(problem.ranks):
        return False
    graph = rate_graph(problem.fabric, problem.ranks)
    own = _chunks_of_a_block(graph, shift)
    try:
        return any(relay != r for inward in (True, False) for r, row in _shares(graph, shift, own, inward=inward).items() for relay, _, _ in row)
    except Unsupported:
        return False


def folded_all_to_all(problem: CollectiveProblem, shift: Shift) -> Program:
    """The program: rank r's input has a block for every rank, its output one from every rank. Raises: Unsupported where a server has no links."""
    if not shift.fixed:
        return _Exchange(problem, shift, 1).build({}, {})
    graph = rate_graph(problem.fabric, problem.ranks)
    own = _chunks_of_a_block(graph, shift)
    return _Exchange(problem, shift, own).build(_shares(graph, shift, own, inward=False), _shares(graph, shift, own, inward=True))
