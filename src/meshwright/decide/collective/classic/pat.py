"""PAT, parallel aggregated trees: Bruck's dimensions backwards, so that far ranks exchange little and near ranks much.

Cite: S. Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale" (arXiv 2506.20252; NCCL since 2.23).
Left open by the paper: where partial results live. Our answer: in the user's buffer, so that staging holds only what is being sent or received:
two slots of `aggregate` blocks per direction instead of one per tree level.
Deviations: blocks are kept in place; reduce-scatter adds in place.
Invariant: a rank holds blocks at the same offsets behind it as every other rank at theirs; each offset arrives once.
Cost: with aggregation of A blocks and D = ceil(log2 n), log2 A + 2^(D - log2 A) - 1 messages per rank (log n when A >= n / 2), n - 1 blocks in all.
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

__all__ = ["CITE", "DEVIATIONS", "Pat", "pat_edges", "pat_rounds"]

CITE = Cite(
    key="jeaugey2025pat",
    title="PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
    authors="S. Jeaugey",
    year=2025,
    venue="arXiv 2506.20252",
    url="https://arxiv.org/abs/2506.20252",
)
DEVIATIONS = ("blocks are kept and added in place; staging holds only messages under way",)
OPS = ("all-gather", "reduce-scatter")


def pat_edges(n: int, aggregate: int | None = None) -> list[tuple[int, tuple[int, ...]]]:
    """(distance, offsets sent) of every message of a rank, in order; offset o is the block of rank - o.

    The farthest dimensions run aggregated as long as a message has at most `aggregate` blocks; then the remaining edges of the tree run one
    after another, depth first (what arrived last is passed on first), each for all offsets gathered so far.
    """
    dimensions = (n - 1).bit_length()
    most = 1 << max(dimensions - 1, 0) if aggregate is None else aggregate
    edges, held = list[tuple[int, tuple[int, ...]]](), [0]
    far = dimensions - 1
    while far >= 0 and 1 << (dimensions - 1 - far) < most:
        reach = 1 << far
        sent = tuple(o for o in held if o + reach < n)
        edges.append((reach, sent))
        held += [o + reach for o in sent]
        far -= 1
    groups = tuple(held)

    def walk(base: int, below: int) -> None:
        for d in reversed(range(below)):
            sent = tuple(o + base for o in groups if o + base + (1 << d) < n)
            if sent:
                edges.append((1 << d, sent))
            walk(base + (1 << d), d)

    walk(0, far + 1)
    return edges


def pat_rounds(n: int, aggregate: int | None = None) -> list[list[Move]]:
    """The all-gather: every edge is a round in which each position sends."""
    return [[Move(i, (i + reach) % n, tuple((i - o) % n for o in sent)) for i in range(n)] for reach, sent in pat_edges(n, aggregate)]


@dataclass(frozen=True, kw_only=True)
class Pat(CollectiveStrategy):
    """Options.

    aggregate: most blocks in one message, a power of two; None = as many as log n rounds need.
    staging_bytes: instead of `aggregate`: the largest power of two of blocks that fits one staging slot of this size.
    order: `rank`, `servers` (ranks of a server together), or position -> rank.
    pack: blocks of a message are packed into a staging buffer; False = one message per block.
    unroll: there is no other form.
    """

    name: ClassVar[str] = "pat"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = OPS

    aggregate: int | None = None
    staging_bytes: int | None = None
    order: Order = "rank"
    pack: bool = True
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """All-gather and reduce-scatter. Raises: Disconnected, Unsupported (other operations), UsageError (options)."""
        bound, n = collective_bound(problem), len(problem.ranks)
        if problem.op not in OPS:
            raise refuse(problem, "PAT", OPS)
        aggregate = self._aggregate(problem)
        order = resolve_order(problem, self.order, "pat")
        rounds = pat_rounds(n, aggregate)
        if problem.op == "reduce-scatter":
            rounds = reverse(rounds)
        areas = {"data": Area("output" if problem.op == "all-gather" else "input", n, by_rank=True)}
        chosen = replace(self, aggregate=aggregate, order=order)
        return plan_rounds(problem, chosen, rounds, areas, order=order, pack=self.pack, name=self.name, bound=bound, notes={"aggregate": aggregate})

    def _aggregate(self, problem: CollectiveProblem) -> int:
        full = 1 << max((len(problem.ranks) - 1).bit_length() - 1, 0)
        wanted = self.aggregate
        if wanted is None and self.staging_bytes is not None:
            block = -(-problem.size_bytes // len(problem.ranks))
            if self.staging_bytes < block:
                raise UsageError(f"staging_bytes {self.staging_bytes} holds no block of {block} B", where="pat", hint="give it at least one block")
            wanted = 1 << (self.staging_bytes // block).bit_length() - 1
        if wanted is None:
            return full
        if wanted < 1 or wanted & (wanted - 1):
            raise UsageError(f"aggregate must be a power of two, got {wanted}", where="pat")
        return min(wanted, full)
