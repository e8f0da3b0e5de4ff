"""Bruck's algorithms: ceil(log n) rounds for any n, at distances 1, 2, 4, ...

Cite: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing
systems" (IEEE TPDS 8(11), 1997).
Left open by the paper: reductions. Our answer: the all-gather backwards with sums is the reduce-scatter, both together an all-reduce that
needs no folding when n is no power of two.
Deviations: blocks are addressed where they belong, so that the all-gather needs no rotation; a range that wraps round is two messages (or packed).
Invariant: before the round of weight w, a rank holds the blocks of its w successors (all-gather); in the all-to-all, block i of a rank has
i's lower digits behind it.
Cost: ceil(log_r n) rounds of r - 1 messages; (n - 1) / n of the message per rank (all-gather, reduce-scatter), about half of it per round
(all-to-all, radix 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ....cite import Cite
from ....errors import UsageError
from ..bounds.collective import collective_bound
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy
from .contract import refuse
from .rounds import Area, Move, Order, plan_rounds, resolve_order, reverse

__all__ = ["CITE", "DEVIATIONS", "Bruck", "all_gather_rounds", "all_to_all_rounds"]

CITE = Cite(
    key="bruck1997efficient",
    title="Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems",
    authors="J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby",
    year=1997,
    venue="IEEE Transactions on Parallel and Distributed Systems 8(11)",
    doi="10.1109/71.642949",
)
DEVIATIONS = ("no rotation: blocks are addressed where they belong", "reduce-scatter and all-reduce by running the all-gather backwards")
OPS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def all_gather_rounds(n: int, radix: int = 2) -> list[list[Move]]:
    """Round of weight w: every position sends the blocks of [i, i + min(w, n - v w)) to i - v w, for v = 1 .. radix - 1."""
    rounds, w = list[list[Move]](), 1
    while w < n:
        step = []
        for v in range(1, radix):
            count = min(w, n - v * w)
            if count > 0:
                step += [Move(i, (i - v * w) % n, tuple((i + k) % n for k in range(count)), stream=v) for i in range(n)]
        rounds.append(step)
        w *= radix
    return rounds


def all_to_all_rounds(n: int, radix: int = 2) -> list[list[Move]]:
    """Blocks are turned so that block i is for position + i, travel the digits of i one by one, and are put where they belong."""
    ahead = [[(i + k) % n for k in range(n)] for i in range(n)]
    rounds = [[Move(i, i, tuple(ahead[i][1:]), tuple(range(1, n)), source="input", target="work") for i in range(n)]]
    rounds[0] += [Move(i, i, (i,), source="input", target="output") for i in range(n)]
    w = 1
    while w < n:
        step = []
        for v in range(1, radix):
            digit = tuple(k for k in range(n) if k // w % radix == v)
            if digit:
                step += [Move(i, (i + v * w) % n, digit, source="work", target="work", stream=v) for i in range(n)]
        rounds.append(step)
        w *= radix
    rounds.append([Move(i, i, tuple(range(1, n)), tuple((i - k) % n for k in range(1, n)), source="work", target="output") for i in range(n)])
    return rounds


@dataclass(frozen=True, kw_only=True)
class Bruck(CollectiveStrategy):
    """Options.

    radix: r - 1 messages per round in ceil(log_r n) rounds; with r = n one round of direct messages.
    order: `rank`, `servers` (ranks of a server together), or position -> rank.
    pack: scattered blocks become one message through a staging buffer; None = for all-to-all only.
    unroll: there is no other form.
    """

    name: ClassVar[str] = "bruck"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = OPS

    radix: int = 2
    order: Order = "rank"
    pack: bool | None = None
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """Raises: Disconnected, Unsupported (other operations), UsageError (radix, order)."""
        bound, n, op = collective_bound(problem), len(problem.ranks), problem.op
        if self.radix < 2:
            raise UsageError(f"radix must be >= 2, got {self.radix}", where="bruck")
        if op not in OPS:
            raise refuse(problem, "Bruck's algorithm", OPS)
        order = resolve_order(problem, self.order, "bruck")
        pack = op == "all-to-all" if self.pack is None else self.pack
        if op == "all-to-all":
            rounds = all_to_all_rounds(n, self.radix)
            areas = {"input": Area("input", n, True), "output": Area("output", n, True), "work": Area("scratch", n)}
        else:
            gather = all_gather_rounds(n, self.radix)
            halves = {"all-gather": [gather], "reduce-scatter": [reverse(gather)], "all-reduce": [reverse(gather), gather]}
            rounds = [step for half in halves[op] for step in half]
            areas = {"data": Area("output" if op == "all-gather" else "input", n, by_rank=op != "all-reduce")}
        chosen = replace(self, order=order, pack=pack)
        return plan_rounds(problem, chosen, rounds, areas, order=order, pack=pack, name=self.name, bound=bound)
