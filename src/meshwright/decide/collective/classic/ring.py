"""Rings: every rank sends to its successor, in an order of ranks found for the fabric.

Cite: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (JPDC 69(2), 2009).
Left open by the paper: the order on a fabric that is no tree. Our answer: the order whose most loaded link is least loaded when all
ranks send at once, among device order, server by server, nearest neighbour, and (small rings) exchanges of these.
Deviations: slices, two directions and several rings at once are options (several rings leave every server through another device, as
vendor libraries do to use all NICs); broadcast and reduce are chains along the ring.
Invariant: every link of the ring carries the same bytes; 2 (n - 1) / n of the message for an all-reduce.
Cost: O(n²) routes for the order, O(n² · slices) steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np

from ....bound import Bound
from ....cite import Cite
from ....cost import Transport
from ....errors import Disconnected, Unsupported, UsageError
from ....fabric.fabric import Fabric
from ....kernels.effort import Deadline, count_work
from ....kernels.torus_rings import ring_pair
from ....program.builder import ProgramBuilder, StepRef
from ....program.program import Fold, FoldAxis, Program
from ..bounds.collective import collective_bound
from ..memo import remember, with_chunk_bytes
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy, Use, options_of, require_operation
from ..trees.lower import contract
from .rounds import Area, plan_rounds, reverse
from .scatter_allgather import ring_rounds

__all__ = ["CITE", "DEVIATIONS", "Ring", "ring_order"]

CITE = Cite(
    key="patarasuk2009ring",
    title="Bandwidth optimal all-reduce algorithms for clusters of workstations",
    authors="P. Patarasuk, X. Yuan",
    year=2009,
    venue="Journal of Parallel and Distributed Computing 69(2)",
    doi="10.1016/j.jpdc.2008.09.002",
)
DEVIATIONS = ("slices, two directions and several rings at once are options", "broadcast and reduce are pipelined chains along the ring")
MAX_RINGS = 32  # that share a message
MAX_EXCHANGED_RANKS = 16  # up to so many, ranks of a ring are exchanged; larger rings keep the best constructed order
WORK_PER_HOP_S = 1e-6  # counted work (`kernels.effort`) of judging a ring, per hop, in seconds of a quiet core


@dataclass(frozen=True, kw_only=True)
class Ring(CollectiveStrategy):
    """Options.

    slices: parts of every chunk that follow each other round the ring; for broadcast and reduce, pieces of the chain (None: chosen).
    rings: rings that share the message, ring i shifted by i inside every server; None = as many as lower the load of the busiest link.
    bidirectional: half of the message goes round the other way.
    folded: store rank 0's lanes only (`Program.fold`); needs a ring in rank order, one direction, all-reduce, all-gather or reduce-scatter.
    unroll: slices as explicit chunks (repeat 1), or as iterations of repeated lanes.
    order: rank order round the ring; None = found for the fabric.
    torus: [rows, columns] of ranks in row order: two rings that share no cable of the torus, with `bidirectional` over all four links of a rank.
    """

    name: ClassVar[str] = "ring"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")

    slices: int | None = None
    rings: int | None = None
    bidirectional: bool = False
    folded: bool = False
    unroll: bool = True
    order: tuple[int, ...] | None = None
    torus: tuple[int, int] | None = None

    @classmethod
    def variants(cls, problem: CollectiveProblem, use: Use = "alone") -> tuple[Self, ...]:
        return (cls(), cls(bidirectional=True)) if use in ("alone", "inlined", "beside") else ()

    @property
    def label(self) -> str:
        return f"{self.name} both ways" if self.bidirectional else self.name

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, UsageError (options), Unsupported (ranks that no ring joins, folding a ring that is not symmetric)."""
        plain = not (self.bidirectional or self.folded or self.torus) and (self.slices or 1) == (self.rings or 1) == 1
        require_operation(problem, self.name, self.operations, uneven=plain)
        n = len(problem.ranks)
        for option, value in (("slices", self.slices), ("rings", self.rings)):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be >= 1, got {value}", where="ring")
        if self.order is not None and sorted(self.order) != list(range(n)):
            raise UsageError(f"order must hold every rank of 0..{n - 1} once, got {self.order}", where="ring")
        if self.torus is not None:
            self._require_torus(n)
        bound = collective_bound(problem)
        hops = _Hops(problem.fabric, problem.ranks)
        try:
            key = ("ring order", problem.ranks, problem.seed, repr(self))
            order, rings, load, links = remember(problem.fabric, key, lambda: self._rings(problem, hops, rng))
        except Disconnected as error:  # a broadcast or reduce may be possible nevertheless: the bound found no cut without links
            text = f"a ring needs every rank to reach every other: {error.message}"
            raise Unsupported(text, hint="use --strategy forestcoll", data=error.data) from None
        if problem.shard_bytes is not None and len(set(problem.shard_bytes)) > 1:
            return self._uneven(problem, order, bound)
        slices = self.slices or _choose_slices(problem, load, len(rings))
        chosen = replace(self, slices=slices)
        if self.torus is None:
            chosen = replace(chosen, rings=len(rings) // (2 if self.bidirectional else 1), order=order)
        builder = _Builder(problem, chosen, rings, slices)
        shape = ("ring program", problem.op, problem.ranks, problem.root, repr(chosen))
        program = with_chunk_bytes(remember(problem.fabric, shape, builder.build), builder.chunk_bytes)
        names = [problem.ranks[r] for r in rings[0]]
        notes = {"order": names, "rings": len(rings), "slices": slices, "bottleneck_s_per_byte": str(load), "links_used": links}
        return CollectivePlan(program=program, bound=bound, strategy=self.name, options=options_of(chosen), notes=notes)

    def _require_torus(self, ranks: int) -> None:
        sides = tuple(self.torus or ())
        if len(sides) != 2 or not all(type(x) is int for x in sides) or sides[0] * sides[1] != ranks:
            raise UsageError(f"torus must be the rows and columns of {ranks} ranks, got {self.torus!r}"[:200], where="ring", hint="e.g. torus=[4,4]")
        if self.order is not None or self.rings is not None or self.folded:
            raise UsageError("torus gives order and number of rings, unfolded", where="ring", hint="leave order, rings and folded out")

    def _uneven(self, problem: CollectiveProblem, order: tuple[int, ...], bound: Bound) -> CollectivePlan:
        """Shards of unlike sizes: one ring, one way, a shard per round."""
        gathers = problem.op == "all-gather"
        walk = order if gathers else (order[0], *reversed(order[1:]))  # backwards twice: sums travel the same way round
        rounds = ring_rounds(len(order)) if gathers else reverse(ring_rounds(len(order)))
        areas = {"data": Area("output" if gathers else "input", len(order), by_rank=True)}
        chosen = replace(self, slices=1, rings=1, order=order)
        return plan_rounds(problem, chosen, rounds, areas, order=walk, pack=False, name=self.name, bound=bound)

    def _rings(
        self, problem: CollectiveProblem, hops: _Hops, rng: np.random.Generator
    ) -> tuple[tuple[int, ...], list[tuple[int, ...]], Fraction, int]:
        """(rank order, rings, load of the busiest link, links used): nothing of it depends on the size."""
        if self.torus is not None:
            pair = list(ring_pair(*self.torus))
            rings = pair + [(ring[0], *reversed(ring[1:])) for ring in pair] * self.bidirectional
            return pair[0], rings, *_load(hops, rings)
        order = tuple(self.order) if self.order is not None else ring_order(problem, rng)
        rings = _rings(problem, hops, order, self)
        return order, rings, *_load(hops, rings)


# ---- rank order ------------------------------------------------------------------------------------------------
class _Hops:
    """Routes between ranks, looked up once."""

    def __init__(self, fabric: Fabric, ranks: Sequence[str]) -> None:
        self.fabric = fabric
        self.actor = [fabric.actor_of[name] for name in ranks]
        self.rate = [x.rate_Bps for x in fabric.links]

    def links(self, i: int, j: int) -> tuple[int, ...]:
        return self.fabric.route(self.actor[i], self.actor[j])


def _load(hops: _Hops, rings: Sequence[Sequence[int]]) -> tuple[Fraction, int]:
    """(seconds per byte of the most loaded link when every rank sends a byte to its successors, links used in all)."""
    count: dict[int, int] = {}
    for order in rings:
        for i, rank in enumerate(order):
            for link in hops.links(rank, order[(i + 1) % len(order)]):
                count[link] = count.get(link, 0) + 1
    return max(Fraction(c, hops.rate[link] * len(rings)) for link, c in count.items()), sum(count.values())


def _rings(problem: CollectiveProblem, hops: _Hops, order: tuple[int, ...], options: Ring) -> list[tuple[int, ...]]:
    """The rings that share the message: `order` shifted by 0, 1, ... inside every server, and each of them reversed if asked.

    With several rings every second server may be walked backwards, so that a ring enters a server by the twin of the device by which
    it left the one before (planes and rails join equal positions); the better of the two forms is taken.
    """
    group = [problem.fabric.device(name).group for name in problem.ranks]
    runs: list[list[int]] = []
    start = next((i for i in range(len(order)) if group[order[i - 1]] != group[order[i]]), 0)
    for rank in order[start:] + order[:start]:
        if runs and group[runs[-1][0]] == group[rank]:
            runs[-1].append(rank)
        else:
            runs.append([rank])

    def shifted(count: int, zigzag: bool) -> list[tuple[int, ...]]:
        rings = [order] if count == 1 else []
        for i in range(count if count > 1 else 0):
            turned = [run[i % len(run) :] + run[: i % len(run)] for run in runs]
            rings.append(tuple(r for j, run in enumerate(turned) for r in (reversed(run) if zigzag and j % 2 else run)))
        return rings + ([(ring[0], *reversed(ring[1:])) for ring in rings] if options.bidirectional else [])

    def several(count: int) -> list[tuple[int, ...]]:
        return min((shifted(count, zigzag) for zigzag in (False, True)), key=lambda rings: _load(hops, rings)[0])

    if options.rings is not None:
        return several(options.rings)
    widest = 1 if options.folded or len(runs) == 1 else min(max(len(run) for run in runs), MAX_RINGS)
    return min((several(count) for count in range(1, widest + 1)), key=lambda rings: (_load(hops, rings)[0], len(rings)))


def ring_order(problem: CollectiveProblem, rng: np.random.Generator) -> tuple[int, ...]:
    """The order with the least loaded bottleneck among the candidates (ties: fewest links, then first candidate)."""
    hops = _Hops(problem.fabric, problem.ranks)
    n = len(problem.ranks)
    deadline = problem.deadline(0.5)
    group = [problem.fabric.device(name).group for name in problem.ranks]
    first_of = {g: i for i, g in reversed(list(enumerate(group)))}
    candidates = [tuple(range(n)), tuple(sorted(range(n), key=lambda r: (first_of[group[r]], r)))]
    if n <= 256:
        candidates.append(_nearest(hops, n))
    best = min(dict.fromkeys(candidates), key=lambda order: _load(hops, [order]))
    if n <= MAX_EXCHANGED_RANKS:
        best = _exchanged(best, lambda order: _load(hops, [order]), rng, deadline)
    start = best.index(0)
    return best[start:] + best[:start]


def _nearest(hops: _Hops, n: int) -> tuple[int, ...]:
    order, left = [0], set(range(1, n))
    while left:

        def far(r: int) -> tuple[int, Fraction, int]:
            links = hops.links(order[-1], r)
            return len(links), max(Fraction(1, hops.rate[x]) for x in links), r

        order.append(min(left, key=far))
        left.remove(order[-1])
    return tuple(order)


def _exchanged(
    order: tuple[int, ...], value: Callable[[tuple[int, ...]], tuple[Fraction, int]], rng: np.random.Generator, deadline: Deadline
) -> tuple[int, ...]:
    """Reversals of a stretch (2-opt) until none helps; the order of trial is random but follows from the seed."""
    best, n = value(order), len(order)
    pairs = [(i, j) for i in range(1, n - 1) for j in range(i + 1, n)]
    improved = True
    while improved and not deadline.past:
        improved = False
        count_work(WORK_PER_HOP_S * n * len(pairs))
        for k in rng.permutation(len(pairs)):
            i, j = pairs[k]
            trial = order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
            if (found := value(trial)) < best:
                order, best, improved = trial, found, True
    return order


def _choose_slices(problem: CollectiveProblem, load: Fraction, rings: int) -> int:
    """One slice round a ring; for chains the square-root rule (at most 16)."""
    if problem.op not in ("broadcast", "reduce"):
        return 1
    transport = problem.transport or Transport()
    overhead = 2 * transport.per_message_s + 2 * transport.per_step_s + max(x.library_latency_s for x in problem.fabric.links)
    size = problem.size_bytes / rings
    wanted = 16 if overhead <= 0 else int(((len(problem.ranks) - 2) * size * float(load) * rings / overhead) ** 0.5)
    wanted = min(16, wanted, int(size // 4096))
    return 1 << max(wanted, 1).bit_length() - 1


# ---- program ---------------------------------------------------------------------------------------------------
class _Builder:
    """Chunks: all operations but broadcast and reduce have blocks in rank order; a block has `slices` chunks for each ring."""

    def __init__(self, problem: CollectiveProblem, options: Ring, rings: list[tuple[int, ...]], slices: int) -> None:
        self.problem, self.order, self.slices = problem, rings[0], slices
        self.n = len(rings[0])
        self.rings = rings
        self.unroll, self.folded = options.unroll, options.folded
        self.spans = slices if options.unroll else 1
        self.repeat = 1 if options.unroll else slices
        self.chain = problem.op in ("broadcast", "reduce")
        blocks = 1 if self.chain else self.n
        self.block = len(self.rings) * self.spans
        self.chunks = blocks * self.block
        elements = -(-problem.size_bytes // problem.element_bytes)
        self.chunk_bytes = -(-elements // (blocks * len(self.rings) * slices)) * problem.element_bytes

    def build(self) -> Program:
        b = ProgramBuilder(ranks=self.n, name=f"ring {self.problem.op}")
        role = "output" if self.problem.op in ("all-gather", "broadcast") else "input"
        stored = 1 if self.folded else self.n
        buffers = [b.buffer(r, chunks=self.chunks, chunk_bytes=self.chunk_bytes, role=role, name=f"data:{r}") for r in range(stored)]
        if self.folded:
            self._require_foldable()
            self._ring(b, buffers * self.n, self.order, 0, [0])
            axis = FoldAxis("ring", self.n, 1, "shift")
            b.fold = Fold((axis,), np.full((1, len(buffers)), self.block, np.int32))
            buffers = list(range(self.n))  # a contract speaks of the expanded form
        else:
            for number, ring in enumerate(self.rings):
                build = self._chain if self.chain else self._ring
                build(b, buffers, ring, number, list(range(self.n)))
        b.contract = contract(self.problem.op, buffers, self.chunks, self.problem.root)
        return b.build()

    def _require_foldable(self) -> None:
        if self.chain or len(self.rings) > 1 or self.order != tuple(range(self.n)):
            raise Unsupported(
                "only a one-way ring in rank order can be folded, and no broadcast or reduce",
                hint="name the ranks in ring order, or leave `folded` off",
                data={"order": [self.problem.ranks[r] for r in self.order], "op": self.problem.op},
            )

    def _at(self, position: int, ring: Sequence[int], number: int, piece: int) -> int:
        """Chunk of the block that belongs to the rank at a ring position."""
        return ring[position % self.n] * self.block + number * self.spans + piece

    def _ring(self, b: ProgramBuilder, buffers: Sequence[int], ring: Sequence[int], number: int, positions: Sequence[int]) -> None:
        n, op = self.n, self.problem.op
        depth = 1 if self.slices == 1 else 2
        if self.folded:  # one stored channel: that from n - 1 to 0 is the image of (0 -> 1)
            channel = [b.channel(0, 1, depth=depth)] * n
        else:
            channel = [b.channel(ring[p], ring[(p + 1) % n], depth=depth) for p in range(n)]
        for p in positions:
            rank = ring[p]
            sender, receiver = b.lane(rank, repeat=self.repeat), b.lane(rank, repeat=self.repeat)
            reduce_steps = n - 1 if op in ("all-reduce", "reduce-scatter") else 0
            gather_steps = n - 1 if op in ("all-reduce", "all-gather") else 0
            lag = -1 if reduce_steps else 0  # where the block sent first stands, relative to the own position
            arrived: dict[int, StepRef] = {}
            sent: dict[int, StepRef] = {}
            for k in range(reduce_steps + gather_steps):
                for piece in range(self.spans):
                    out = self._at(p + lag - k, ring, number, piece)
                    after = [arrived[out]] if out in arrived else []
                    sent[out] = sender.send(channel[p], buffers[rank], out, after=after)
                    into = self._at(p + lag - k - 1, ring, number, piece)
                    take = receiver.recv_add if k < reduce_steps else receiver.recv
                    busy = [sent[into]] if into in sent else []
                    arrived[into] = take(channel[(p - 1) % n], buffers[rank], into, after=busy)

    def _chain(self, b: ProgramBuilder, buffers: Sequence[int], ring: Sequence[int], number: int, positions: Sequence[int]) -> None:
        """Broadcast: the root's data walks round the ring. Reduce: sums walk towards the root, which comes last."""
        start = ring.index(self.problem.root)
        walk = [*ring[start:], *ring[:start]]
        if self.problem.op == "reduce":
            walk.reverse()
        channel = [b.channel(x, y, depth=min(2, self.slices)) for x, y in pairwise(walk)]
        adds = self.problem.op == "reduce"
        for i, rank in enumerate(walk):
            lane, buffer = b.lane(rank, repeat=self.repeat), buffers[rank]
            for piece in range(self.spans):
                at = number * self.spans + piece
                if i == 0:
                    lane.send(channel[0], buffer, at)
                elif i < len(walk) - 1:
                    (lane.recv_add_send if adds else lane.recv_send)(channel[i - 1], channel[i], buffer, at)
                else:
                    (lane.recv_add if adds else lane.recv)(channel[i - 1], buffer, at)
