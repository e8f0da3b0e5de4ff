"""Exact minimum of a sum of vertex and edge costs, by eliminating one vertex after the other.

On a chain this is the dynamic programme over (layer, output state). On graphs, a vertex is replaced by the minimum over its choices as a function of
its neighbours' choices (node elimination; edges that come to lie side by side are added, edge elimination). Residual networks and
attention reduce to nothing that way; a graph that needs a table beyond `MAX_TABLE` entries is left to other searches.
Cite: AutoDDL asks for a search; the eliminations are Jia et al., "Exploring Hidden Dimensions in Parallelizing CNNs" (ICML 2018).
Invariant: the returned assignment's cost is the minimum over all assignments (infinite entries forbid pairs).
Cost: chains O(L S³) with S choices per vertex; general graphs exponential in the width of the elimination order (least table first).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from ....kernels.effort import look

__all__ = ["MAX_TABLE", "cost_of", "minimise"]

FloatArray = NDArray[np.float64]
MAX_TABLE = 40_000_000  # entries of a table that is made on the way
CHUNK_ENTRIES = 4_000_000  # of a table that are in memory at once

Factor = tuple[tuple[int, ...], FloatArray]


def minimise(
    vertices: Sequence[FloatArray], edges: Sequence[tuple[int, int, FloatArray]]
) -> tuple[float, list[int]] | None:  # fmt: skip
    """(least cost, a choice per vertex), or None where a table would be too large. The cost is infinite if nothing is allowed.

    Raises: TimeLimit when time is up (`kernels.effort`).
    """
    unary = [np.array(v, dtype=float) for v in vertices]
    pairs: dict[tuple[int, int], FloatArray] = {}
    for a, b, costs in edges:
        if a == b:
            unary[a] = unary[a] + np.diagonal(costs)
            continue
        key, table = ((a, b), costs) if a < b else ((b, a), costs.T)
        pairs[key] = pairs[key] + table if key in pairs else table
    factors: list[Factor] = list(pairs.items())
    sizes = [len(v) for v in unary]
    neighbours: dict[int, set[int]] = {v: set() for v in range(len(unary))}
    for scope, _ in factors:
        for v in scope:
            neighbours[v] |= set(scope) - {v}
    order: list[tuple[int, tuple[int, ...], NDArray[np.int32]]] = []
    left = set(neighbours)
    while left:
        v = min(left, key=lambda u: (prod(sizes[w] for w in neighbours[u]) * sizes[u], u))
        look()
        if prod(sizes[w] for w in neighbours[v]) * min(sizes[v], 2) > MAX_TABLE:
            return None
        mine = [f for f in factors if v in f[0]]
        factors = [f for f in factors if v not in f[0]]
        scope = tuple(sorted(neighbours[v]))
        least, chosen = _project(v, scope, unary[v], mine, sizes)
        order.append((v, scope, chosen))
        if len(scope) == 1:
            unary[scope[0]] = unary[scope[0]] + least
        elif scope:
            factors = _merged(factors, scope, least)
        else:
            unary[v] = np.full(1, float(least))
        for w in scope:
            neighbours[w] = (neighbours[w] | set(scope)) - {v, w}
        left.discard(v)
    total = sum(float(unary[v][0]) for v, scope, _ in order if not scope)
    return total, _traced(order, len(sizes))


def _merged(factors: list[Factor], scope: tuple[int, ...], table: FloatArray) -> list[Factor]:
    for i, (other, costs) in enumerate(factors):
        if other == scope:
            return [*factors[:i], (scope, costs + table), *factors[i + 1 :]]
    return [*factors, (scope, table)]


def _project(
    v: int, scope: tuple[int, ...], own: FloatArray, factors: Sequence[Factor], sizes: Sequence[int]
) -> tuple[FloatArray, NDArray[np.int32]]:
    """Minimum over v's choices, and which it is, as tables over `scope`; made in slices of the first neighbour's choices."""
    if not scope:
        return np.array(own.min()), np.array(int(own.argmin()), dtype=np.int32)
    shape = tuple(sizes[w] for w in scope)
    least, chosen = np.empty(shape), np.empty(shape, dtype=np.int32)
    per_row = prod(shape[1:]) * sizes[v]
    rows = max(1, CHUNK_ENTRIES // max(1, per_row))
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        total = np.zeros((stop - start, *shape[1:], sizes[v])) + own
        for members, costs in factors:
            total += _spread(members, costs, v, scope, start, stop)
        chosen[start:stop] = total.argmin(axis=-1)
        least[start:stop] = total.min(axis=-1)
    return least, chosen


def _spread(members: tuple[int, ...], costs: FloatArray, v: int, scope: tuple[int, ...], start: int, stop: int) -> FloatArray:
    """A factor with its axes in the order of (scope, v), dimensions of size 1 where it does not depend."""
    target = (*scope, v)
    ordered = costs.transpose([members.index(w) for w in target if w in members])
    if scope[0] in members:
        ordered = ordered[start:stop]
    shape, axis = [], 0
    for w in target:
        shape.append(ordered.shape[axis] if w in members else 1)
        axis += w in members
    return ordered.reshape(shape)


def _traced(order: Sequence[tuple[int, tuple[int, ...], NDArray[np.int32]]], count: int) -> list[int]:
    picked = [0] * count
    for v, scope, chosen in reversed(order):
        picked[v] = int(chosen[tuple(picked[w] for w in scope)])
    return picked


def cost_of(vertices: Sequence[FloatArray], edges: Sequence[tuple[int, int, FloatArray]], assignment: Sequence[int] | Mapping[int, int]) -> float:
    """The cost of an assignment."""
    return float(
        sum(v[assignment[i]] for i, v in enumerate(vertices)) + sum(costs[assignment[a], assignment[b]] for a, b, costs in edges)
    )
