"""Coordinate descent over assignments, as AutoDDL searches, with pair moves.

Cite: AutoDDL, section on search: start from an assignment, sweep the layers in random order, give each its best choice with the others fixed,
stop when a sweep changes nothing; restart. Left open by the paper: that two neighbours may have to change together. Our answer: when single moves
are done, every edge's two ends are tried together. Starts: given assignments (templates) and random ones.
Invariant: the cost never rises; the result is a local minimum of single and pair moves.
Cost: a sweep O(vertices · choices · degree), pairs O(edges · choices²).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....kernels.effort import time_is_up
from .eliminate import cost_of

__all__ = ["descend"]

FloatArray = NDArray[np.float64]
Edge = tuple[int, int, FloatArray]
FORBIDDEN_S = 1e6  # stands for infinity, so that random starts can be compared
MIN_IMPROVEMENT_S = 1e-12  # less is rounding, and descent would go in circles


def descend(
    vertices: Sequence[FloatArray], edges: Sequence[Edge], starts: Sequence[Sequence[int]], *, rng: np.random.Generator, restarts: int = 20,
    pairs: bool = True,
) -> tuple[float, list[int]]:  # fmt: skip
    """The best of the local minima reached from `starts` and `restarts` random assignments; when time is up (`kernels.effort`), the best so far."""
    unary = [np.minimum(v, FORBIDDEN_S) for v in vertices]
    tables = [(a, b, np.minimum(t, FORBIDDEN_S)) for a, b, t in edges]
    touching: list[list[int]] = [[] for _ in unary]
    for e, (a, b, _) in enumerate(tables):
        touching[a].append(e)
        if a != b:
            touching[b].append(e)
    best: tuple[float, list[int]] | None = None
    todo = [list(s) for s in starts] + [None] * restarts
    for start in todo:
        if best is not None and time_is_up():
            break
        at = start if start is not None else [int(rng.integers(len(v))) for v in unary]
        _settle(unary, tables, touching, at, rng, pairs)
        cost = cost_of(unary, tables, at)
        if best is None or cost < best[0]:
            best = (cost, at)
    assert best is not None
    return cost_of(vertices, edges, best[1]), best[1]


def _settle(
    unary: Sequence[FloatArray], tables: Sequence[Edge], touching: Sequence[Sequence[int]], at: list[int], rng: np.random.Generator, pairs: bool
) -> None:
    while True:
        changed = True
        while changed and not time_is_up():
            changed = False
            for v in rng.permutation(len(unary)):
                costs = _around(unary, tables, touching, at, int(v))
                better = int(costs.argmin())
                if costs[better] < costs[at[v]] - MIN_IMPROVEMENT_S:
                    at[v], changed = better, True
        if not pairs or not _pair_moves(unary, tables, touching, at, rng):
            return


def _around(
    unary: Sequence[FloatArray], tables: Sequence[Edge], touching: Sequence[Sequence[int]], at: Sequence[int], v: int, *, without: int = -1
) -> FloatArray:
    """Cost of every choice of v, the others fixed; edges to `without` are left out."""
    costs = unary[v].copy()
    for e in touching[v]:
        a, b, table = tables[e]
        other = b if a == v else a
        if other != without:
            costs += table[:, at[b]] if a == v else table[at[a], :]
    return costs


def _pair_moves(
    unary: Sequence[FloatArray], tables: Sequence[Edge], touching: Sequence[Sequence[int]], at: list[int], rng: np.random.Generator
) -> bool:
    changed = False
    for e in rng.permutation(len(tables)):
        if time_is_up():
            break
        a, b, _ = tables[int(e)]
        if a == b:
            continue
        both = _around(unary, tables, touching, at, a, without=b)[:, None] + _around(unary, tables, touching, at, b, without=a)[None, :]
        for other in touching[a]:
            u, w, table = tables[other]
            if {u, w} == {a, b}:
                both = both + (table if u == a else table.T)
        i, j = divmod(int(both.argmin()), both.shape[1])
        if both[i, j] < both[at[a], at[b]] - MIN_IMPROVEMENT_S:
            at[a], at[b], changed = i, j, True
    return changed
