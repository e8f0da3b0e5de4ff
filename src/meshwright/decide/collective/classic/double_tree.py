"""Double binary trees: two trees over all ranks, each for half of the message; who is inside one is a leaf of the other.

Cite: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (Parallel Computing 35(12), 2009).
Left open by the paper: where the message is cut. Our answer: pieces by the square-root rule, as for other pipelined trees. The trees are numbered
as in NCCL: with lowest set bit b, the parent of r is (r ^ b) | 2b if that is a rank, else r ^ b; the second tree is the first one
mirrored (n even) or shifted by one (n odd).
Deviations: a broadcast's or reduction's root feeds (is fed by) two trees over the other n - 1 ranks; all-reduce uses both trees over all ranks.
Invariant: every tree spans all ranks; no rank has children in both trees (n odd: only rank 0 does).
Cost: height ceil(log2 n); every rank sends and receives at most the message once per direction; O(n pieces) steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ....cite import Cite
from ..bounds.collective import collective_bound
from ..problem import CollectivePlan, CollectiveProblem, CollectiveStrategy
from .contract import refuse
from .rooted_tree import choose_pieces, plan_trees, require_pieces
from .rounds import Order, resolve_order

__all__ = ["CITE", "DEVIATIONS", "DoubleTree", "binary_parents", "double_parents"]

CITE = Cite(
    key="sanders2009two",
    title="Two-tree algorithms for full bandwidth broadcast, reduction and scan",
    authors="P. Sanders, J. Speck, J. L. Träff",
    year=2009,
    venue="Parallel Computing 35(12)",
    doi="10.1016/j.parco.2009.09.001",
)
DEVIATIONS = ("trees numbered as in NCCL", "a broadcast's root stands outside both trees", "pieces by the square-root rule")
OPS = ("all-reduce", "broadcast", "reduce")


def binary_parents(n: int) -> list[int]:
    """Parent of every position in the first tree, -1 for its root 0."""
    parents = [-1]
    for r in range(1, n):
        low = r & -r
        up = (r ^ low) | (low << 1)
        parents.append(up if up < n else r ^ low)
    return parents


def double_parents(n: int) -> tuple[list[int], list[int]]:
    """Parents in both trees: the second is the first mirrored (n even) or shifted by one (n odd)."""
    first = binary_parents(n)
    second = [-1] * n
    for r, parent in enumerate(first):
        if n % 2:
            second[(r + 1) % n] = -1 if parent < 0 else (parent + 1) % n
        else:
            second[n - 1 - r] = -1 if parent < 0 else n - 1 - parent
    return first, second


def rooted_parents(n: int) -> tuple[list[int], list[int]]:
    """Both trees over positions 1 .. n-1, hung under position 0."""
    return tuple([-1, *(0 if p < 0 else p + 1 for p in parents)] for parents in double_parents(n - 1))  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class DoubleTree(CollectiveStrategy):
    """Options.

    pieces: parts of each tree's half that follow each other; None = chosen from height, latency and message cost.
    order: `near` (ranks of a server or island together, see `nearness`), `servers`, `rank`, or position -> rank; a broadcast's root comes
        first whatever the order.
    unroll: pieces as explicit chunks (repeat 1), or as iterations of repeated lanes.
    """

    name: ClassVar[str] = "double-tree"
    cite: ClassVar[Cite] = CITE
    operations: ClassVar[tuple[str, ...]] = OPS

    pieces: int | None = None
    order: Order = "near"
    unroll: bool = True

    def plan(self, problem: CollectiveProblem, *, rng: np.random.Generator) -> CollectivePlan:
        """All-reduce, broadcast, reduce. Raises: Disconnected, Unsupported, UsageError (options)."""
        bound, n = collective_bound(problem), len(problem.ranks)
        require_pieces(self.pieces, "double-tree")
        if problem.op not in OPS:
            raise refuse(problem, "the double binary tree", OPS)
        order = list(resolve_order(problem, self.order, "double-tree"))
        placed = order
        if problem.op != "all-reduce":
            start = order.index(problem.root)
            placed = order[start:] + order[:start]
        shapes = double_parents(n) if problem.op == "all-reduce" else rooted_parents(n)
        trees = [[placed[p] if p >= 0 else -1 for p in shape] for shape in shapes]
        parents = [[tree[placed.index(r)] for r in range(n)] for tree in trees]
        pieces = self.pieces or choose_pieces(problem, parents)
        chosen = replace(self, pieces=pieces, order=tuple(order))
        return plan_trees(problem, chosen, parents, pieces=pieces, unroll=self.unroll, name=self.name, order=placed, bound=bound)
