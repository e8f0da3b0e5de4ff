"""What measured lookups of a job's own tables teach: how far the costs are wrong of each table, and of this hour's machine altogether.

Costs come from points of many sets, and err by some percent on each: that is as much as good plans differ by. Each measured device is one equation:
factor times (its costs, a share of what each of its tables costs alone, and the same for each piece, which says what cuts cost). Ridge regression on
relative errors: tables that were seen in few sets keep to their costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .problem import F64, Learned, Piece, TablePlan, TableProblem

__all__ = ["learned"]

NOISE, PRIOR = 0.03, 0.1  # relative: of one measurement, and of a table's costs or of all pieces of a device


def learned(problem: TableProblem, plans: Sequence[TablePlan], compute_s: Sequence[Sequence[float]]) -> Learned:
    """From measured seconds [plans][devices]. The problem has learned nothing yet."""
    said, alone, taken, many = list[F64](), list[F64](), list[F64](), list[F64]()
    for plan, measured in zip(plans, compute_s, strict=True):
        pieces = [Piece(problem.tables.number_of[s.table], s.rows, s.columns) for s in plan.shards]
        on, embedded = np.array([problem.fabric.actor_of[s.device] for s in plan.shards]), problem.embed(pieces)
        each = problem.compute_s(np.moveaxis(embedded, 0, 1))  # [n, D]
        of_table = np.zeros((problem.devices, len(problem.tables.tables)))
        np.add.at(of_table, (on, np.array([p.table for p in pieces])), each[np.arange(len(on)), on])
        said.append(problem.compute_s(problem.sums(pieces, on)[0]))
        alone.append(of_table)
        taken.append(np.asarray(measured))
        many.append(np.bincount(on, minlength=problem.devices).astype(float))
    y, base, shares, pieces_of = (np.concatenate(x) for x in (taken, said, alone, many))
    keep = (y > 0) & (base > 0)
    if not keep.any():
        return Learned(factor=1.0, of_table=(0.0,) * shares.shape[1])
    usual_s = float(base[keep].sum() / pieces_of[keep].sum())  # of a piece
    left = np.column_stack([base, usual_s * pieces_of, shares])[keep] / y[keep, None]
    ridge = np.diag([0.0, *[NOISE / PRIOR] * (1 + shares.shape[1])])
    found = np.linalg.lstsq(np.concatenate([left, ridge]), np.concatenate([np.ones(len(left)), np.zeros(len(ridge))]), rcond=None)[0]
    factor = max(float(found[0]), 1e-3)
    return Learned(factor=factor, of_table=tuple((found[2:] / factor).tolist()), each_s=float(found[1]) * usual_s / factor)
