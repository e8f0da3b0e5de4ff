"""Sums with the same bits whatever the fabric: the fold of a fixed binary tree over numbered contributions, at the volume of a ring.

Cite: D. De Sensi, S. Di Girolamo, S. Ashkboos, S. Li, T. Hoefler, "Flare: Flexible In-Network Allreduce" (SC'21, arXiv 2106.15565), section on
reproducibility: aggregation by a tree over child indices does not depend on the order of arrival.
Left open by the paper: the fold without a switch. Our answer: every owner of a part of the message receives the others' parts unmerged, adds them up
as the tree says, and sends the sum on; or in levels, for ranks that are far apart.
Deviations: the tree is over contributions numbered by the job, not over a switch's ports; an odd last node moves up unchanged.
Invariant: ranks are mixed-radix numbers, all radices but the last powers of two, so ranks that agree above a digit are an aligned block of
contributions: a node of the tree. Level k exchanges among ranks that differ in digit k only: each has the sum over a block of the level before, and
the fold of these is the sum over a block of this one. (n,) is one level; (2, 2, ..) is recursive halving, nearest partners first.
Cost: sum of (radix - 1) messages per rank, level and piece; 2 (n - 1) / n of the message per rank, as a ring; scratch for a few pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import ClassVar, Self

import numpy as np

from ....cite import Cite
from ....errors import Unsupported, UsageError
from ....program.program import REPRODUCIBLE_SUMS
from ..bounds.collective import collective_bound
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy, Use, require_operation
from ..program_time import simulated_time_s
from .hierarchical import overlapped
from .rounds import Area, Move, Rounds, plan_rounds

__all__ = ["CITE", "DEVIATIONS", "FoldTree"]

CITE = Cite(
    key="desensi2021flare",
    title="Flare: Flexible In-Network Allreduce",
    authors="D. De Sensi, S. Di Girolamo, S. Ashkboos, S. Li, T. Hoefler",
    year=2021,
    venue="SC",
    doi="10.1145/3458817.3476178",
)
DEVIATIONS = ("on hosts, without a switch", "contributions are numbered by the job, not by ports", "levels of exchanges")
PIECE_BYTES = 1 << 18  # of a rank's part in one piece: smaller ones cost more messages than they overlap (8 ranks at 50 Mbit/s over gloo)
MAX_PIECES = 16  # that are chosen without being asked for
MAX_PIECES_AT_WORK = 3  # pieces that have scratch of their own: one arrives, one is added up, one waits
MAX_TRIED_MESSAGES = 20_000  # of a program that is made only to see whether it is faster


@dataclass(frozen=True, kw_only=True)
class FoldTree(CollectiveStrategy):
    """Options.

    radices: ranks that exchange at each level, from the nearest numbers up, with product n, all but the last powers of two; None = the fastest in
        simulation of (n,), of halving, and of the servers' size first.
    pieces: parts of the message in flight; None = chosen.
    unroll: there is no other form.
    """

    name: ClassVar[str] = "fold-tree"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = REPRODUCIBLE_SUMS

    radices: tuple[int, ...] | None = None
    pieces: int | None = None
    unroll: bool = True

    @classmethod
    def variants(cls, problem: CollectiveProblem, use: Use = "alone") -> tuple[Self, ...]:
        """Only where its bits are asked for: others' sums are as fast and need no scratch."""
        return (cls(),) if problem.reproducible == "tree" and use in ("alone", "inlined") else ()

    def sums_by_tree(self, problem: CollectiveProblem) -> bool:
        return problem.op in self.operations

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """All-reduce, reduce-scatter, reduce. Raises: Disconnected, Unsupported (other operations, uneven shards, no path), UsageError (options)."""
        bound, n = collective_bound(problem), len(problem.ranks)
        require_operation(problem, self.name, self.operations)
        if self.radices is not None and (prod(self.radices) != n or any(r < 2 for r in self.radices) or any(r & (r - 1) for r in self.radices[:-1])):
            text = f"radices must have the product {n}, all but the last powers of two, got {self.radices}"
            raise UsageError(text, where=self.name)
        if self.pieces is not None and self.pieces < 1:
            raise UsageError(f"pieces must be >= 1, got {self.pieces}", where=self.name)
        block_bytes = problem.size_bytes // n
        pieces = self.pieces or max(1, min(MAX_PIECES, block_bytes // PIECE_BYTES))
        pieces = max(1, min(pieces, block_bytes // problem.element_bytes))
        order = [0] * n
        for rank, number in enumerate(problem.numbers or range(n)):
            order[number] = rank

        def made(radices: Sequence[int]) -> CollectivePlan:
            rounds, areas = _Fold(problem, tuple(radices), pieces, order).rounds()
            chosen = replace(self, radices=tuple(radices), pieces=pieces)
            return plan_rounds(problem, chosen, rounds, areas, order=range(n), pack=False, name=self.name, bound=bound)

        if self.radices is not None:
            return made(self.radices)
        found, refused = list[tuple[float, CollectivePlan]](), list[Unsupported]()
        for radices in _worth_trying(problem, pieces):
            try:
                plan = made(radices)
            except Unsupported as error:  # no path between some of those that exchange
                refused.append(error)
                continue
            found.append((simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.transport), plan))
        if not found:
            raise refused[0]
        return min(found, key=lambda x: x[0])[1]


def _worth_trying(problem: CollectiveProblem, pieces: int) -> list[tuple[int, ...]]:
    """One level, halving, and first inside the servers where these are aligned blocks of equal size."""
    n, found = len(problem.ranks), list[tuple[int, ...]]()
    twos = (n & -n).bit_length() - 1
    rest = n >> twos
    halving = (2,) * twos + ((rest,) if rest > 1 else ())
    by_number = sorted(range(n), key=lambda r: problem.numbers[r] if problem.numbers else r)
    servers = [len(list(run)) for _, run in groupby(problem.fabric.device(problem.ranks[r]).group for r in by_number)]
    own = servers[0]
    if len(set(servers)) == 1 and 1 < own < n and not own & (own - 1):
        found.append((own, n // own))
    wide = 2 * n * (n - 1) * pieces <= MAX_TRIED_MESSAGES
    found += [radices for radices in ((n,), halving) if wide or radices != (n,) or len(halving) < 2]
    return list(dict.fromkeys(found))


class _Fold:
    """The rounds of one plan. Positions are contributions' numbers, `order[position]` the rank."""

    def __init__(self, problem: CollectiveProblem, radices: tuple[int, ...], pieces: int, order: Sequence[int]) -> None:
        self.op, self.n, self.radices, self.pieces, self.order = problem.op, len(order), radices, pieces, order
        self.root = problem.root
        self.weight = [prod(radices[:k]) for k in range(len(radices))]
        self.at_work = min(pieces, MAX_PIECES_AT_WORK)

    def digit(self, position: int, level: int) -> int:
        return position // self.weight[level] % self.radices[level]

    def block(self, position: int, piece: int) -> int:
        """The block that a position ends up with the sum of. Of an all-reduce they are numbered so that what is exchanged lies together."""
        if self.op == "reduce-scatter":
            return self.order[position] * self.pieces + piece
        label, size = 0, self.n
        for level, radix in enumerate(self.radices):
            size //= radix
            label += self.digit(position, level) * size
        return piece * self.n + label

    def parts(self, position: int, level: int, piece: int) -> list[tuple[int, ...]]:
        """The blocks that a position has before a level, by who is to have them after it."""
        below = self.weight[level]
        owners = sorted((o for o in range(self.n) if o % below == position % below), key=lambda o: self.block(o, piece))
        return [tuple(self.block(o, piece) for o in owners if self.digit(o, level) == d) for d in range(self.radices[level])]

    def rounds(self) -> tuple[Rounds, dict[str, Area]]:
        held = max(prod(self.radices[k:]) for k in range(len(self.radices)))  # blocks that one piece's messages fill, at the first level
        areas = {"data": Area("input", self.n * self.pieces), "work": Area("scratch", self.at_work * held)}
        return overlapped([self.piece(p, (p % self.at_work) * held) for p in range(self.pieces)]), areas

    def piece(self, piece: int, first: int) -> list[list[Move]]:
        """One piece; `first`: of its scratch."""
        out: list[list[Move]] = []
        parts = [[self.parts(x, level, piece) for x in range(self.n)] for level in range(len(self.radices))]
        stream = 0
        for level, radix in enumerate(self.radices):
            out.append([])
            for shift in range(1, radix):  # everyone serves another at a time, so that nobody is everyone's at once
                for x in range(self.n):
                    mine = self.digit(x, level)
                    to = (mine + shift) % radix
                    blocks = parts[level][x][to]
                    slots = tuple(range(first + mine * len(blocks), first + (mine + 1) * len(blocks)))
                    out[-1].append(self.move(x, self.partner(x, level, to), blocks, slots, "data", "work", stream))
            out.append([m for x in range(self.n) for m in self.folds(x, level, parts[level][x], first, stream)])
            stream += 1
        if self.op == "reduce":
            top = self.order.index(self.root)
            out.append([self.move(x, top, (b := (self.block(x, piece),)), b, "data", "data", stream) for x in range(self.n) if x != top])
        for level in reversed(range(len(self.radices))) if self.op == "all-reduce" else ():
            out.append([])
            for shift in range(1, self.radices[level]):
                for x in range(self.n):
                    blocks = parts[level][x][self.digit(x, level)]
                    to = self.partner(x, level, (self.digit(x, level) + shift) % self.radices[level])
                    out[-1].append(self.move(x, to, blocks, blocks, "data", "data", stream))
            stream += 1
        return out

    def partner(self, position: int, level: int, digit: int) -> int:
        return position + (digit - self.digit(position, level)) * self.weight[level]

    def move(self, x: int, y: int, blocks: tuple[int, ...], into: tuple[int, ...], source: str, target: str, stream: int) -> Move:
        return Move(self.order[x], self.order[y], blocks, into, add=False, source=source, target=target, stream=stream)

    def folds(self, x: int, level: int, parts: Sequence[tuple[int, ...]], first: int, stream: int) -> list[Move]:
        """The additions of one position at one level, in tree order: its own sum lies in `data`, the others' in `work`, and the result in `data`."""
        own, rank = self.digit(x, level), self.order[x]
        size = len(parts[own])
        nodes = [("data", parts[d]) if d == own else ("work", tuple(range(first + d * size, first + (d + 1) * size))) for d in range(len(parts))]
        out: list[Move] = []
        while len(nodes) > 1:
            merged = []
            for left, right in zip(nodes[::2], nodes[1::2], strict=False):
                into, other = (right, left) if right[0] == "data" else (left, right)
                out.append(Move(rank, rank, other[1], into[1], add=True, source=other[0], target=into[0], stream=stream))
                merged.append(into)
            nodes = merged + nodes[len(merged) * 2 :]
        return out
