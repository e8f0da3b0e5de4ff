"""Exact search on counts (see `counts`): orders that are optimal for a placement and a cap, or how far from it they can be.

From the first slots that the linear relaxation allows on, HiGHS is asked whether whole counts fit; no: one slot more is proved; yes: they are orders,
and with exact slots an optimum. Only orders leave: times are simulated again by whoever asks. HiGHS proves each step by branch and bound, which
nobody else can check again; the relaxation's proof can be (`counts_bound`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from ...bound import Bound, Certificate
from ...errors import Infeasible, TimeLimit
from ...kernels.effort import Deadline
from ...kernels.highs import Looks, require_optimal, row_duals, solve, solver, values
from .bound import facts_of, schedule_bound
from .counts import ROUNDING_FACTOR, Grid, Row, grid_of, limits, rows, slot_for
from .orders import times
from .problem import Action, PipelineProblem, Schedule

__all__ = ["Proof", "counts_bound", "exact_search"]

# Classes times slots of one programme: finer slots bound better and take the solver longer, so slots become coarser beyond this.
MAX_VARIABLES = 6_000
# Least sum by which rows must be broken for a proof, in actions: below it stands the solver's tolerance, and rounded multipliers prove nothing.
MIN_VIOLATION = 1e-6
# Counted seconds that linear programs may work per unit of effort: the time in which integer programs look up once (`kernels.highs.Looks`).
WORK_PER_EFFORT_S = 0.1
# Multipliers of a proof are whole numbers of this fraction of 1, so that the proof is exact and the file small.
MULTIPLIER_UNITS = 10**6


@dataclass(frozen=True)
class Proof:
    """The fastest orders known, and `least_s`: no orders within the cap are faster, by the solver's word."""

    schedule: Schedule
    least_s: Fraction
    optimal: bool


def _model(grid: Grid, slots: int, *, whole: bool) -> Any:
    """Whole: counts that fit. Not whole: counts that break the rows by as little as possible, which is the last variable."""
    import highspy

    model = solver()
    n = len(grid.classes) * slots
    ends = [x for i in range(len(grid.classes)) for x in limits(grid, i, slots)]
    model.addVars(n, np.array([low for low, _ in ends], float), np.array([high for _, high in ends], float))
    if whole:
        model.changeColsIntegrality(n, np.arange(n, dtype=np.int32), np.array([highspy.HighsVarType.kInteger] * n))
    else:
        model.addVar(0.0, highspy.kHighsInf)
        model.changeColCost(n, 1.0)
    starts: list[int] = []
    index: list[int] = []
    value: list[float] = []
    most: list[float] = []
    for family, _, terms, right in rows(grid, slots):
        unit = _unit(grid) if family == "memory" else 1
        starts.append(len(index))
        index += [c * slots + t for c, t, _ in terms]
        value += [x / unit for _, _, x in terms]
        # one variable relaxes all rows but "rise", which cost nothing to keep: its least value is 0 exactly where the rows can be met
        if not whole and family != "rise":
            index.append(n)
            value.append(-1.0)
        most.append(right / unit)
    model.addRows(
        len(most), np.full(len(most), -highspy.kHighsInf), np.array(most), len(index), np.array(starts, np.int32), np.array(index, np.int32),
        np.array(value),
    )  # fmt: skip
    return model


def _unit(grid: Grid) -> int:
    return max((c.bytes for c in grid.classes), default=1) or 1


def _crossed(grid: Grid, slots: int) -> bool:
    return any(low > high for i in range(len(grid.classes)) for low, high in limits(grid, i, slots))


def _refutation(grid: Grid, slots: int, deadline: Deadline) -> list[list[Any]] | None:
    """Multipliers of rows (whole numbers) that together contradict the limits of the counts, or None. Raises: TimeLimit."""
    if _crossed(grid, slots):
        return []
    model = _model(grid, slots, whole=False)
    require_optimal(model, what="pipeline bound", deadline=deadline)
    # the duals of the relaxed rows are multipliers by which these contradict each other (Farkas); rounded, they are a proposal, judged exactly below
    if model.getInfo().objective_function_value <= MIN_VIOLATION:
        return None
    found: list[tuple[Row, int]] = []
    for row, dual in zip(rows(grid, slots), row_duals(model), strict=True):
        weight = round(abs(dual) * MULTIPLIER_UNITS)
        if weight:
            found.append((row, weight))
    unit = _unit(grid)
    # a row of memory stands in bytes, the model's in the largest activation
    scaled = [(row, weight if row[0] == "memory" else weight * unit) for row, weight in found]
    return _named(grid, scaled) if _contradict(grid, slots, scaled) else None


def _contradict(grid: Grid, slots: int, weighted: list[tuple[Row, int]]) -> bool:
    """The weighted sum of the rows is above what its right-hand side allows, whatever the counts within their limits."""
    factor: dict[tuple[int, int], int] = {}
    right = 0
    for (_, _, terms, most), weight in weighted:
        right += weight * most
        for c, t, x in terms:
            factor[c, t] = factor.get((c, t), 0) + weight * x
    # the sum's least value takes every count at the limit that makes its term smallest: if even that is too much, no counts fit
    ends = {c: limits(grid, c, slots) for c in {c for c, _ in factor}}
    return sum(x * ends[c][t][0 if x > 0 else 1] for (c, t), x in factor.items()) > right


def _named(grid: Grid, weighted: list[tuple[Row, int]]) -> list[list[Any]]:
    """[family, slot, multiplier, device] or [family, slot, multiplier, copy, kind, stage]."""
    found: list[list[Any]] = []
    for (family, (i, t), _, _), weight in weighted:
        c = grid.classes[i] if family in ("rise", "order") else None
        found.append([family, t, weight, *((c.copy, c.kind, c.stage) if c else (i,))])
    return found


def _grid(facts: Mapping[str, Any], caps: tuple[int, ...], span_s: Fraction, most_variables: int) -> Grid | None:
    classes = len(grid_of(facts, caps, Fraction(1)).classes)
    # at least eight slots: coarser times are cut down too much to say anything
    slot_s = slot_for(facts, most_variables // classes, span_s) if 0 < classes <= most_variables // 8 else None
    return grid_of(facts, caps, slot_s) if slot_s else None


def counts_bound(
    problem: PipelineProblem, schedule: Schedule, *, cap_bytes: tuple[int, ...] = (), effort: int = 100, most_variables: int = MAX_VARIABLES
) -> Bound | None:
    """The relaxation's bound with its certificate; None when the effort was too small for it, or when the simple bounds are no smaller."""
    facts = facts_of(problem, schedule)
    simple, known = schedule_bound(problem, schedule, cap_bytes=cap_bytes), Fraction(times(problem, schedule).makespan_s)
    grid = _grid(facts, cap_bytes, known, most_variables)
    if grid is None:
        return None
    least, proof = _relaxed(grid, simple.exact, known, Deadline.after(effort * WORK_PER_EFFORT_S))
    value = least * grid.slot_s
    if proof is None or value <= simple.exact:
        return None
    data = {**facts, "form": "counts", "slot_s": str(grid.slot_s), "slots": least - 1, "cap_bytes": list(cap_bytes), "multipliers": proof}
    return msgspec.structs.replace(simple, value=str(value), certificate=Certificate(kind="pipeline", data=data))


def _relaxed(grid: Grid, low_s: Fraction, known_s: Fraction, deadline: Deadline) -> tuple[int, list[list[Any]] | None]:
    """Fewest slots that the relaxation allows as far as the effort allows to tell, and the proof that one less is too few."""
    low, high, proof = grid.slots(low_s), grid.slots(known_s), None
    try:
        # bisection is valid: what fits into n slots fits into n + 1
        while low < high:
            middle = (low + high) // 2
            found = _refutation(grid, middle, deadline)
            if found is None:
                high = middle
            else:
                low, proof = middle + 1, found
    except TimeLimit:
        pass
    return low, proof


def exact_search(
    problem: PipelineProblem, schedule: Schedule, *, cap_bytes: tuple[int, ...] = (), effort: int = 300,
    most_variables: int = MAX_VARIABLES,
) -> Proof:  # fmt: skip
    """From the best known `schedule` (which must be within the cap) to better ones, until the optimum or the end of the effort."""
    deadline, looks = Deadline.after(effort * WORK_PER_EFFORT_S), Looks(effort)
    known = Fraction(times(problem, schedule).makespan_s)
    least = schedule_bound(problem, schedule, cap_bytes=cap_bytes).exact
    grid = _grid(facts_of(problem, schedule), cap_bytes, known, most_variables)
    if grid is None or any(a.count > 1 for order in schedule.orders for a in order):
        return Proof(schedule, min(least, known), least >= known)
    slots, _ = _relaxed(grid, least, known, deadline)
    least, best = max(least, slots * grid.slot_s), schedule
    try:
        while least < known * ROUNDING_FACTOR**2:
            model = None if _crossed(grid, slots) else _counted(grid, slots, looks)
            if model is not None:
                # coarse slots are no schedule yet: the decoded orders are timed again, and need not beat the known ones
                best = min((best, _decoded(grid, slots, model, schedule)), key=lambda s: times(problem, s).makespan_s)
                known = Fraction(times(problem, best).makespan_s)
                break
            slots += 1
            least = slots * grid.slot_s
    except TimeLimit:
        pass
    return Proof(best, min(least, known), least >= known * ROUNDING_FACTOR**2)


def _counted(grid: Grid, slots: int, looks: Looks) -> Any | None:
    model = _model(grid, slots, whole=True)
    try:
        solve(model, what="pipeline search", looks=looks)
    except Infeasible:
        return None
    return model


def _decoded(grid: Grid, slots: int, model: Any, base: Schedule) -> Schedule:
    """Orders from counts: the k-th start of a class is its k-th micro-batch; at one slot, what others need first."""
    found = values(model)
    mine = [[m for m, c in enumerate(base.copy_of) if c == copy] for copy in range(base.copies)]
    orders: list[list[tuple[int, int, int, Action]]] = [[] for _ in range(base.devices)]
    for i, c in enumerate(grid.classes):
        before = 0
        rank = "FBIW".index(c.kind)
        for t in range(slots):
            now = round(found[i * slots + t])
            for k in range(before, now):
                orders[c.device].append((t, rank, c.stage if c.kind == "F" else -c.stage, Action(c.kind, c.stage, mine[c.copy][k], c.copy)))  # type: ignore[arg-type]
            before = max(before, now)
        for k in range(before, len(mine[c.copy])):  # what takes no whole slot may begin when the last one ends
            orders[c.device].append((slots, rank, c.stage if c.kind == "F" else -c.stage, Action(c.kind, c.stage, mine[c.copy][k], c.copy)))  # type: ignore[arg-type]
    return replace(base, orders=tuple(tuple(a for _, _, _, a in sorted(rows_, key=lambda r: r[:3])) for rows_ in orders))
