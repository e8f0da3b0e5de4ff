"""The same minimum as an integer programme, with a limit on memory: one-hot variables per vertex, one per pair of states and edge.

Source: the intra-operator ILP of Alpa (Zheng et al., OSDI 2022), variables per pair of states instead of per pair of choices.
Invariant: equal to elimination where that is possible and memory does not bind. Solved on one thread by HiGHS (`kernels.highs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....kernels.effort import NEVER, Deadline
from ....kernels.highs import solve, solver, values

__all__ = ["solve_ilp"]

FloatArray = NDArray[np.float64]
Edge = tuple[int, int, FloatArray]


def solve_ilp(
    vertices: Sequence[FloatArray], edges: Sequence[Edge], *, memory: tuple[Sequence[FloatArray], Sequence[FloatArray], float] | None = None,
    deadline: Deadline = NEVER, gap: float = 0.0,
) -> tuple[list[int], bool]:  # fmt: skip
    """(a choice per vertex, whether it is proven best). `memory`: bytes per vertex choice, per edge pair, and the limit.

    Raises: Infeasible (nothing fits), TimeLimit (no solution in time).
    """
    import highspy

    model = solver(mip_rel_gap=gap)
    unit = max((float(v[np.isfinite(v)].max()) for v in vertices if np.isfinite(v).any()), default=1.0) or 1.0
    first: list[int] = []
    count = 0
    limit: list[tuple[int, float]] = []
    for i, costs in enumerate(vertices):
        first.append(count)
        for j, c in enumerate(costs):
            model.addCol(float(c) / unit if np.isfinite(c) else 0.0, 0.0, 1.0 if np.isfinite(c) else 0.0, 0, [], [])
            model.changeColIntegrality(count, highspy.HighsVarType.kInteger)
            if memory is not None and memory[0][i][j]:
                limit.append((count, float(memory[0][i][j])))
            count += 1
        columns = list(range(first[i], count))
        model.addRow(1.0, 1.0, len(columns), columns, [1.0] * len(columns))
    for e, (a, b, table) in enumerate(edges):
        kept = memory[1][e] if memory is not None else np.zeros_like(table)
        count = _edge(model, table / unit, kept, first[a], first[b], count, limit)
    if memory is not None and limit:
        scale = max(memory[2], 1.0)
        model.addRow(-highspy.kHighsInf, memory[2] / scale, len(limit), [i for i, _ in limit], [m / scale for _, m in limit])
    status = solve(model, what="the layout programme", deadline=deadline)
    found = values(model)
    picked = [int(np.argmax(found[first[i] : first[i] + len(costs)])) for i, costs in enumerate(vertices)]
    return picked, status == "optimal"


def _edge(model: object, table: FloatArray, kept: FloatArray, a: int, b: int, count: int, limit: list[tuple[int, float]]) -> int:
    """Variables for pairs of distinct rows and columns of an edge's table; their sums are the choices of either end."""
    both = np.concatenate([table, kept], axis=1)
    _, row_class = np.unique(both, axis=0, return_inverse=True)
    _, column_class = np.unique(np.concatenate([table, kept], axis=0), axis=1, return_inverse=True)
    row_class, column_class = row_class.ravel(), column_class.ravel()
    rows, columns = int(row_class.max()) + 1, int(column_class.max()) + 1
    at = np.full((rows, columns), -1)
    for s in range(rows):
        for t in range(columns):
            i, j = int(np.argmax(row_class == s)), int(np.argmax(column_class == t))
            if np.isfinite(table[i, j]):
                model.addCol(float(table[i, j]), 0.0, 1.0, 0, [], [])  # type: ignore[attr-defined]
                if kept[i, j]:
                    limit.append((count, float(kept[i, j])))
                at[s, t] = count
                count += 1
    for classes, offset, lines in ((row_class, a, at), (column_class, b, at.T)):
        for s, line in enumerate(lines):
            pairs = [int(x) for x in line if x >= 0]
            choices = [offset + int(i) for i in np.flatnonzero(classes == s)]
            model.addRow(0.0, 0.0, len(pairs) + len(choices), pairs + choices, [1.0] * len(pairs) + [-1.0] * len(choices))  # type: ignore[attr-defined]
    return count
