"""Rooted trees: binomial, k-ary and chain; and how any set of trees becomes a pipelined program.

Cite: E. W. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory, practice, and experience" (Concurrency and
Computation 19(13), 2007), for binomial trees and their scatter and gather; chains and k-ary trees are folklore.
Left open by the paper: the number of pipeline pieces. Our answer: the square-root rule, limited by latency.
Deviations: all-reduce is a reduction to the root and a broadcast from it over the same tree, pipelined.
Invariant: the tree spans all ranks; a parent serves its largest subtree first.
Cost: height ceil(log2 n) (binomial), ceil(log_k) (k-ary), n - 1 (chain); n - 1 messages per piece and direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from ....bound import Bound
from ....cite import Cite
from ....cost import Transport
from ....errors import Disconnected, Unsupported, UsageError
from ....program.builder import ProgramBuilder, StepRef
from ....program.program import Program
from ..bounds.collective import collective_bound
from ..memo import remember, with_chunk_bytes
from ..problem import MIN_PIECE_BYTES, CollectivePlan, CollectiveProblem, CollectiveStrategy, options_of
from ..trees.lower import contract
from .contract import refuse
from .rounds import Area, Move, Order, plan_rounds, require_paths, resolve_order

__all__ = ["CITE", "DEVIATIONS", "RootedTree", "binomial_scatter", "choose_pieces", "plan_trees", "require_pieces", "tree_parents"]

CITE = Cite(
    key="chan2007collective",
    title="Collective communication: theory, practice, and experience",
    authors="E. W. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn",
    year=2007,
    venue="Concurrency and Computation: Practice and Experience 19(13)",
    doi="10.1002/cpe.1206",
)
DEVIATIONS = ("all-reduce climbs and descends the same tree", "pieces by the square-root rule")
OPS = ("broadcast", "reduce", "all-reduce", "scatter", "gather")
MAX_PIECES = 64  # that follow each other down a tree


# ---- shapes ------------------------------------------------------------------------------------------------------------
def tree_parents(n: int, shape: str, arity: int = 2) -> list[int]:
    """Parent of every position; position 0 is the root."""
    if shape == "chain":
        return list(range(-1, n - 1))
    if shape == "k-ary":
        return [(v - 1) // arity if v else -1 for v in range(n)]
    return [v & (v - 1) if v else -1 for v in range(n)]  # binomial: the lowest set bit falls


def binomial_scatter(n: int) -> list[list[Move]]:
    """Position 0 has n blocks, position i gets block i: halves of what is left go to subtrees, the largest first."""
    rounds = []
    for k in reversed(range((n - 1).bit_length())):
        reach = 1 << k
        rounds.append([Move(v, v + reach, tuple(range(v + reach, min(v + 2 * reach, n)))) for v in range(0, n - reach, 2 * reach)])
    return rounds


# ---- trees to programs -------------------------------------------------------------------------------------------------
def require_pieces(pieces: int | None, name: str) -> None:
    if pieces is not None and pieces < 1:
        raise UsageError(f"pieces must be >= 1, got {pieces}", where=name)


def _depths(parents: Sequence[int]) -> list[int]:
    depth = [-1] * len(parents)

    def of(v: int) -> int:
        path = []
        while depth[v] < 0 and parents[v] >= 0:
            path.append(v)
            v = parents[v]
        depth[v] = max(depth[v], 0)
        for below in reversed(path):
            depth[below] = depth[parents[below]] + 1
        return depth[path[0]] if path else depth[v]

    for v in range(len(parents)):
        of(v)
    return depth


def choose_pieces(problem: CollectiveProblem, trees: Sequence[Sequence[int]]) -> int:
    """Square-root rule: filling a pipeline of h hops costs h - 1 pieces' time, every further piece costs one message overhead.

    A piece shorter than the latency of a hop, or than MIN_PIECE_BYTES, gains nothing.
    """
    hops = max(max(_depths(parents)) for parents in trees) * (2 if problem.op == "all-reduce" else 1)
    if hops <= 1:
        return 1
    fabric, load = problem.fabric, dict[int, int]()
    actor = [fabric.actor_of[name] for name in problem.ranks]
    try:
        for parents in trees:
            for v, parent in enumerate(parents):
                if parent >= 0:
                    for link in fabric.route(actor[parent], actor[v]):
                        load[link] = load.get(link, 0) + 1
    except Disconnected as error:
        raise Unsupported(f"a tree needs a path that is missing: {error.message}", hint="use --strategy forestcoll", data=error.data) from None
    time_s = problem.size_bytes / len(trees) * max(count / fabric.links[link].rate_Bps for link, count in load.items())
    transport = problem.transport or Transport()
    wanted = min(MAX_PIECES, problem.size_bytes // len(trees) // MIN_PIECE_BYTES)
    overhead_s = 2 * transport.per_message_s + 2 * transport.per_step_s
    latency_s = max(fabric.links[x].latency_s + fabric.links[x].library_latency_s for x in load)
    for pause_s, power in ((overhead_s, 0.5), (latency_s, 1.0)):
        if pause_s > 0:
            wanted = min(wanted, int(((hops - 1 if power < 1 else 1) * time_s / pause_s) ** power))
    return 1 << max(wanted, 1).bit_length() - 1


def lower_parents(problem: CollectiveProblem, trees: Sequence[Sequence[int]], *, pieces: int, unroll: bool, name: str) -> Program:
    """Tree t (parent per rank) carries the t-th equal part of the message, in `pieces` pieces: sums climb, then results descend.

    Per tree a rank has a lane that climbs and one per child that descends; the first of these also receives.
    """
    n, op, spans = len(problem.ranks), problem.op, pieces if unroll else 1
    elements = -(-problem.size_bytes // problem.element_bytes)
    chunk_bytes = -(-elements // (len(trees) * pieces)) * problem.element_bytes
    b = ProgramBuilder(ranks=n, name=f"{name} {op}")
    role = "output" if op == "broadcast" else "input"
    buffers = [b.buffer(r, chunks=len(trees) * spans, chunk_bytes=chunk_bytes, role=role, name=f"data:{r}") for r in range(n)]
    repeat = 1 if unroll else pieces
    for number, parents in enumerate(trees):
        chunks = range(number * spans, (number + 1) * spans)
        ready: dict[int, list[list[StepRef]]] = {v: [[] for _ in chunks] for v in range(n)}
        if op != "broadcast":
            _climb(b, buffers, parents, chunks, repeat, ready)
        if op != "reduce":
            _descend(b, buffers, parents, chunks, repeat, ready)
    b.contract = contract(op, buffers, len(trees) * spans, problem.root)
    return b.build()


def _children(parents: Sequence[int]) -> list[list[int]]:
    """Children of every rank, the largest subtree first."""
    depth, size = _depths(parents), [1] * len(parents)
    children: list[list[int]] = [[] for _ in parents]
    for v in sorted(range(len(parents)), key=lambda v: -depth[v]):
        if parents[v] >= 0:
            size[parents[v]] += size[v]
            children[parents[v]].append(v)
    return [sorted(below, key=lambda v: (-size[v], v)) for below in children]


def _climb(
    b: ProgramBuilder, buffers: Sequence[int], parents: Sequence[int], chunks: range, repeat: int, ready: dict[int, list[list[StepRef]]]
) -> None:
    depth = min(2, len(chunks) * repeat)
    channel = {v: b.channel(v, parent, depth=depth) for v, parent in enumerate(parents) if parent >= 0}
    for v, below in enumerate(_children(parents)):
        lane, incoming = b.lane(v, repeat=repeat), [channel[c] for c in reversed(below)]  # the largest subtree is ready last
        for i, chunk in enumerate(chunks):
            for entry in incoming[:-1]:
                last = lane.recv_add(entry, buffers[v], chunk)
            if incoming and v in channel:
                last = lane.recv_add_send(incoming[-1], channel[v], buffers[v], chunk)
            elif incoming:
                last = lane.recv_add(incoming[-1], buffers[v], chunk)
            else:
                last = lane.send(channel[v], buffers[v], chunk)
            ready[v][i] = [last]


def _descend(
    b: ProgramBuilder, buffers: Sequence[int], parents: Sequence[int], chunks: range, repeat: int, ready: dict[int, list[list[StepRef]]]
) -> None:
    """A rank's chunk is written only after its own contribution was sent (`ready`)."""
    depth = min(2, len(chunks) * repeat)
    channel = {v: b.channel(parent, v, depth=depth) for v, parent in enumerate(parents) if parent >= 0}
    for v, children in enumerate(_children(parents)):
        below = [channel[c] for c in children]
        if v in channel:
            lane = b.lane(v, repeat=repeat)
            for i, chunk in enumerate(chunks):
                if below:
                    step = lane.recv_send(channel[v], below[0], buffers[v], chunk, after=ready[v][i])
                else:
                    step = lane.recv(channel[v], buffers[v], chunk, after=ready[v][i])
                ready[v][i] = [step]
            below = below[1:]
        if below:  # one lane: the port sends to one child at a time, the largest subtree first
            lane = b.lane(v, repeat=repeat)
            for i, chunk in enumerate(chunks):
                for out in below:
                    lane.send(out, buffers[v], chunk, after=ready[v][i])


def plan_trees(
    problem: CollectiveProblem, strategy: Any, trees: Sequence[Sequence[int]], *, pieces: int, unroll: bool, name: str, order: Sequence[int],
    bound: Bound,
) -> CollectivePlan:  # fmt: skip
    """The plan of trees given as parents per rank. Raises: Unsupported when an edge has no path."""
    key = ("trees", name, problem.op, problem.ranks, problem.root, pieces, unroll, tuple(map(tuple, trees)))
    elements = -(-problem.size_bytes // problem.element_bytes)
    chunk_bytes = -(-elements // (len(trees) * pieces)) * problem.element_bytes
    program = remember(problem.fabric, key, lambda: lower_parents(problem, trees, pieces=pieces, unroll=unroll, name=name))
    program = with_chunk_bytes(program, chunk_bytes)
    require_paths(problem, program, name)
    notes = {"height": max(max(_depths(p)) for p in trees), "pieces": pieces, "order": [problem.ranks[r] for r in order]}
    return CollectivePlan(program=program, bound=bound, strategy=name, options=options_of(strategy), notes=notes)


@dataclass(frozen=True, kw_only=True)
class RootedTree(CollectiveStrategy):
    """Options.

    shape: `binomial`, `k-ary` (with `arity`) or `chain`. Scatter and gather are binomial.
    pieces: parts of the message that follow each other down the tree; None = chosen; 1 for scatter and gather.
    order: `near` (ranks of a server or island together, see `nearness`), `servers`, `rank`, or position -> rank; turned so that the root comes first.
    unroll: pieces as explicit chunks (repeat 1), or as iterations of repeated lanes.
    """

    name: ClassVar[str] = "rooted-tree"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = OPS

    shape: Literal["binomial", "k-ary", "chain"] = "binomial"
    arity: int = 2
    pieces: int | None = None
    order: Order = "near"
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Broadcast, reduce, all-reduce; scatter and gather (binomial). Raises: Disconnected, Unsupported, UsageError (options)."""
        bound, n = collective_bound(problem), len(problem.ranks)
        require_pieces(self.pieces, "rooted-tree")
        if self.shape not in ("binomial", "k-ary", "chain") or self.arity < 1:
            raise UsageError(f"shape must be binomial, k-ary or chain and arity >= 1, got {self.shape}, {self.arity}", where="rooted-tree")
        if problem.op not in OPS:
            raise refuse(problem, "a rooted tree", OPS)
        order = list(resolve_order(problem, self.order, "rooted-tree"))
        start = order.index(problem.root if problem.op != "all-reduce" else order[0])
        placed = order[start:] + order[:start]
        if problem.op in ("scatter", "gather"):
            return self._blocks(problem, order, placed, bound)
        shape = tree_parents(n, self.shape, self.arity)
        parents = [placed[shape[at]] if shape[at] >= 0 else -1 for at in (placed.index(r) for r in range(n))]
        pieces = self.pieces or choose_pieces(problem, [parents])
        chosen = replace(self, pieces=pieces, order=tuple(order))
        return plan_trees(problem, chosen, [parents], pieces=pieces, unroll=self.unroll, name=self.name, order=placed, bound=bound)

    def _blocks(self, problem: CollectiveProblem, order: list[int], placed: list[int], bound: Bound) -> CollectivePlan:
        if self.shape != "binomial" or (self.pieces or 1) > 1:
            raise Unsupported(f"{problem.op} has only the binomial tree, in one piece", hint="use shape='binomial', or --strategy direct")
        rounds = binomial_scatter(len(placed))
        if problem.op == "gather":
            rounds = [[replace(m, src=m.dst, dst=m.src) for m in step] for step in reversed(rounds)]
        areas = {"data": Area("input" if problem.op == "scatter" else "output", len(placed), by_rank=True)}
        chosen = replace(self, pieces=1, order=tuple(order))
        return plan_rounds(problem, chosen, rounds, areas, order=placed, pack=True, name=self.name, bound=bound)
