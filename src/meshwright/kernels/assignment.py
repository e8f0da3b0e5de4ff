"""The assignment problem: each row to a column of its own, least total cost, with the dual solution that proves it.

Successive shortest augmenting paths with potentials (Kuhn 1955, Munkres 1957; this form Jonker and Volgenant 1987), in exact integers.
Invariant: at the end u[i] + v[j] <= cost[i, j] everywhere, with equality on assigned pairs and v[j] = 0 on free columns (v <= 0), so the sum of
all u and v, which no assignment can be below, equals the cost. Cost: O(rows² · columns), the innermost loop in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["Assignment", "assign"]

_UNREACHED = np.iinfo(np.int64).max // 4  # above every distance, and far enough from the largest int64 that one more may be added


@dataclass(frozen=True)
class Assignment:
    """`column[i]` of row i, the cost, and the dual values of rows and columns."""

    column: tuple[int, ...]
    cost: int
    u: NDArray[np.int64]
    v: NDArray[np.int64]

    def proves(self, cost: NDArray[np.int64]) -> bool:
        """Whether the dual values show that no assignment costs less."""
        feasible = bool(np.all(self.u[:, None] + self.v[None, :] <= cost)) and bool(np.all(self.v <= 0))
        return feasible and int(self.u.sum() + self.v.sum()) == self.cost == int(sum(cost[i, j] for i, j in enumerate(self.column)))


def assign(cost: NDArray[np.int64]) -> Assignment:
    """The cheapest assignment of rows to columns. Raises: UsageError for more rows than columns, or costs beyond 2^60."""
    rows, columns = cost.shape
    if rows > columns:
        raise UsageError(f"{rows} rows cannot each have one of {columns} columns")
    if cost.size and int(np.abs(cost).max()) >= 1 << 60:
        raise UsageError("costs must be below 2^60")
    u, v = np.zeros(rows + 1, np.int64), np.zeros(columns + 1, np.int64)
    owner = np.full(columns + 1, rows, np.int64)  # row of every column; column `columns` is where a path starts, row `rows` is nobody
    for row in range(rows):
        owner[columns] = row
        at, shortest, before = columns, np.full(columns, _UNREACHED, np.int64), np.full(columns, columns, np.int64)
        used = np.zeros(columns + 1, bool)
        # Dijkstra over columns in reduced costs, which are >= 0 by the invariant, until one is free.
        while owner[at] != rows:
            used[at] = True
            current = owner[at]
            reduced = cost[current] - u[current] - v[:columns]
            better = ~used[:columns] & (reduced < shortest)
            shortest[better], before[better] = reduced[better], at
            # Used columns are lifted above the unreached ones, so they never win.
            nearest = int(np.where(used[:columns], _UNREACHED + 1, shortest).argmin())
            delta = shortest[nearest]
            # Potentials move with the distance, so edges of the tree stay tight and all others stay >= 0.
            u[owner[used]] += delta
            v[used] -= delta
            shortest[~used[:columns]] -= delta
            at = nearest
        # Each column of the path takes the row of the one before it; the first gets the new row.
        while at != columns:
            owner[at] = owner[before[at]]
            at = int(before[at])
    found = np.zeros(rows, np.int64)
    for j in range(columns):
        if owner[j] != rows:
            found[owner[j]] = j
    return Assignment(tuple(int(j) for j in found), int(sum(cost[i, j] for i, j in enumerate(found))), u[:rows], v[:columns])
