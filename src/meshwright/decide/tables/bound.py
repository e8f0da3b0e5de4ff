"""How fast an iteration can be by its costs' floors: lookups and columns cost some device at least so much, wherever they are.

With weights on the devices that sum to 1, the slowest device takes at least the weighted mean of all. Elements looked up, columns, and tables each
cost at least the least weighted floor of a device (`LookupCosts.floor`, and a column's bytes over the links of its device, out and back). A cut in
columns keeps both sums, a cut in rows keeps the first and makes the second larger: so the bound holds for every plan, split or not. The best weights
are those of a linear programme of one row per device and term: linear duality. Where links are token buckets, a full bucket is taken off each
exchange; where buckets hold more than exchanges need, lookups alone say more, so both sums are tried.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from ...bound import Bound, Certificate
from ...kernels.highs import require_optimal, solver, values
from .problem import F64, TableProblem

__all__ = ["floors", "table_bound"]

ROUNDING = 1e-9  # what a bound gives away for sums of floats; the checker allows for as much


def floors(problem: TableProblem, *, exchanges: bool = True) -> tuple[F64, F64]:
    """Seconds [D, terms] that an element looked up, a column, and a table cost at least; and how many there are, [terms]."""
    tables, batch = problem.tables.tables, problem.tables.batch
    own_out, own_in, _, _ = problem.per_column_s
    of = [problem.costs[k] for k in problem.kind_of]
    each = np.array([[c.floor[0], c.floor[1] * batch, c.overhead_s] for c in of])
    each[:, 1] += (own_out + own_in) * exchanges
    many = np.array([sum(t.pooling * t.dim for t in tables) * batch, sum(t.dim for t in tables), len(tables)], np.float64)
    return each, many


def table_bound(problem: TableProblem) -> Bound:
    """The bound with the best weights."""
    value, y = _best_weights(*floors(problem), problem.ahead_s[0] + problem.ahead_s[1])
    if any(x.burst_bytes for x in problem.fabric.links):
        value, y = max((value, y), _best_weights(*floors(problem, exchanges=False), np.zeros(problem.devices)), key=lambda found: found[0])
    exact = Fraction(value) * (1 - Fraction(ROUNDING))
    weights = {d.name: float(w) for d, w in zip(problem.fabric.devices, y, strict=True)}
    return Bound(
        quantity="tables iteration time", value=f"{exact.numerator}/{exact.denominator}", unit="s",
        certificate=Certificate(kind="tables", data={"form": "load", "weights": weights}),
    )  # fmt: skip


def _best_weights(each: F64, many: F64, ahead_s: F64) -> tuple[float, F64]:
    """The largest weighted mean of the devices' least times, and its weights. `ahead_s`: what each device is given off at most, [D]."""
    scale = max(float((each.max(0) * many).sum()), 1e-300)
    model = solver()
    infinity = model.getInfinity()
    devices = range(len(each))
    for k in devices:
        model.addVar(0.0, 1.0)
        model.changeColCost(k, -float(ahead_s[k]) / scale)
    model.addRow(1.0, 1.0, len(each), list(devices), [1.0] * len(each))
    for term in range(len(many)):
        column = len(each) + term
        model.addVar(0.0, infinity)
        model.changeColCost(column, 1.0)
        for k in devices:
            model.addRow(0.0, infinity, 2, [k, column], [float(each[k, term] * many[term] / scale), -1.0])
    import highspy

    model.changeObjectiveSense(highspy.ObjSense.kMaximize)
    require_optimal(model, what="the bound of a table plan")
    found = np.maximum(values(model)[: len(each)], 0.0)
    y = found / found.sum()
    return float(((each * y[:, None]).min(0) * many).sum() - (y * ahead_s).sum()), y
