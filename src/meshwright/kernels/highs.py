"""The one place where linear and mixed-integer programs meet a solver: HiGHS, on one thread, silent, with typed failures.

    lp = solver()                          # a highspy.Highs
    lp.addVars(2, lower, upper)            # build it with highspy's own calls
    status = solve(lp, what="routing", deadline=Deadline.after(work_s=5))   # "optimal" | "feasible"

A solver is stopped by what it has done, never by its clock, unless the user's time is up: a linear program by steps of the simplex method, an integer
program by how often it looks up. Both are the same on every machine.

HiGHS keeps one thread pool per process: a second solver with another thread count does not run at all. So the count is set here
and nowhere else. One thread also makes equal inputs give equal answers. Answers are floats: a caller that claims anything
exactly must verify it in rationals. A solution whose costs are not the objective that the solver reports is not believed: some
releases (1.16.0) give back the solution that an integer program began at, as the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from ..errors import Infeasible, TimeLimit, Unsupported, UsageError
from .effort import NEVER, Deadline, clock_cut, count_work, time_is_up

__all__ = ["SCALE", "Looks", "Status", "affords", "require_optimal", "row_duals", "solve", "solver", "values"]

Status = Literal["optimal", "feasible"]
FIXED = {"output_flag": False, "threads": 1}
PIVOT_WORK_S = 2e-8  # work of a step of the simplex method per row and column: about the seconds of a quiet core
LOOK_WORK_S = 1e-5  # work of an integer program between two looks, per nonzero of its rows: 3e-6 to 3e-5 on routing, layouts and pipelines
MIN_LOOKS = 20  # looks of an integer program, however little work is left for it: its first solutions
ROWS_PER_LOOK = 1600  # rows of an integer program of which a look of `Looks` is one; work between looks grows as their square
MAX_PIVOTS = (1 << 31) - 1  # steps of the simplex method, as HiGHS counts them: no limit
SCALE = 1e4  # about the size that callers scale seconds and bytes to: far above the solver's tolerances (1e-6), far below what it takes for infinite
OBJECTIVE_TOLERANCE = 1e-6  # relative difference between a solution's costs, summed here, and the objective as reported
STOPPED = ("kTimeLimit", "kIterationLimit", "kSolutionLimit", "kInterrupt", "kHighsInterrupt", "kObjectiveBound", "kObjectiveTarget", "kMemoryLimit")


@dataclass
class Looks:
    """How often integer programs may look up together: `left` times at 1,600 rows, where a look comes every 0.1 s or so, at fewer rows more often."""

    left: float

    def price(self, model: Any) -> float:
        return float((model.getNumRow() / ROWS_PER_LOOK) ** 2)


def solver(**options: Any) -> Any:
    """An empty `highspy.Highs`, silent, one thread. `options` are HiGHS's own, e.g. `mip_rel_gap=0.0`, `random_seed=1`.

    Raises: UsageError for an option or value that HiGHS refuses, or that is fixed here.
    """
    import highspy

    model = highspy.Highs()
    for name, value in FIXED.items():
        model.setOptionValue(name, value)
    for name, value in options.items():
        if name in FIXED:
            raise UsageError(f"HiGHS option {name!r} is the same for every solver of a process", hint="leave it out")
        if model.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise UsageError(f"HiGHS refuses option {name} = {value!r}", hint="see the options of HiGHS for names and types")
    return model


def solve(model: Any, *, what: str, deadline: Deadline = NEVER, looks: Looks | int | None = None, pivots: int = MAX_PIVOTS) -> Status:
    """Run the solver until `deadline`, a linear program for so many `pivots` (steps of the simplex method), an integer program until it has looked up
    so many times whether to go on: between nodes and between steps of its heuristics.

    Returns: "optimal", or "feasible" when it stopped at a limit with a solution whose constraints hold (integer programs).
    Raises: Infeasible when no solution exists; TimeLimit when it stopped without one; Unsupported when the program is unbounded, the
    solver gives up, or contradicts itself. `what` names the program in messages.
    """
    status = _solve(model, what, deadline, looks, pivots)
    if not _agrees(model):
        model.clearSolver()  # also of the solution to begin with, which is what it gave back
        status = _solve(model, what, deadline, looks, pivots)
        if not _agrees(model):
            said = {"objective": float(model.getInfo().objective_function_value), "of_solution": _cost(model)}
            hint = "another release of highspy may be right"
            raise Unsupported(f"{what} cannot be solved: HiGHS's solution has not the objective it reports", where=what, hint=hint, data=said)
    return status


def affords(model: Any, deadline: Deadline) -> bool:
    """Whether the work that is left suffices for the least that an integer program does: its first `MIN_LOOKS` looks."""
    return deadline.work_left_s >= MIN_LOOKS * LOOK_WORK_S * float(model.getNumNz())


def _cost(model: Any) -> float:
    lp = model.getLp()
    return float(lp.offset_) + sum(float(c) * float(x) for c, x in zip(lp.col_cost_, model.getSolution().col_value, strict=True))


def _agrees(model: Any) -> bool:
    reported = float(model.getInfo().objective_function_value)
    return abs(_cost(model) - reported) <= OBJECTIVE_TOLERANCE * max(1.0, abs(reported))


def _solve(model: Any, what: str, deadline: Deadline, looks: Looks | int | None, pivots: int) -> Status:
    import highspy

    if deadline.past or (isinstance(looks, Looks) and looks.left <= 0):
        raise TimeLimit(f"the time limit was reached before {what} was solved", where=what, hint="raise the time limit")
    if (left_s := deadline.clock_left_s) != float("inf"):
        # HiGHS counts its clock over all runs of one model
        model.setOptionValue("time_limit", float(model.getRunTime()) + max(left_s, 0.0))
    if (work_s := deadline.work_left_s) != float("inf"):
        if len(model.getLp().integrality_):
            most = max(MIN_LOOKS, int(work_s / (LOOK_WORK_S * max(1, model.getNumNz()))))
            looks = most if looks is None else looks if isinstance(looks, Looks) else min(looks, most)
        else:
            pivots = min(pivots, max(1, int(work_s / (PIVOT_WORK_S * max(1, model.getNumRow() + model.getNumCol())))))
    model.setOptionValue("simplex_iteration_limit", pivots)
    with _at_most(model, looks):
        outcome = model.run()
    count_work(PIVOT_WORK_S * model.getInfo().simplex_iteration_count * (model.getNumRow() + model.getNumCol()))
    status = model.getModelStatus()
    kind = highspy.HighsModelStatus
    if outcome != highspy.HighsStatus.kError and status == kind.kOptimal:
        return "optimal"
    if status == kind.kModelEmpty:
        return "optimal"
    text = model.modelStatusToString(status)
    said = {"solver": text}
    if status in (kind.kInfeasible, kind.kUnboundedOrInfeasible) and not _is_unbounded(model, status):
        raise Infeasible(f"{what} has no solution", where=what, hint="its constraints contradict each other", data=said)
    if status == kind.kTimeLimit:
        clock_cut()
    if status in [getattr(kind, name) for name in STOPPED]:
        if model.getInfo().primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible):
            return "feasible"
        raise TimeLimit(f"{what}: the solver stopped without a solution", where=what, hint="raise the time limit", data=said)
    raise Unsupported(f"{what} cannot be solved: HiGHS says {text!r}", where=what, hint="please report the problem", data=said)


@contextmanager
def _at_most(model: Any, looks: Looks | int | None) -> Iterator[None]:
    """Interrupts the model's branch and bound where it looks up for the last time."""
    if looks is None:
        yield
        return
    left = ceil(looks.left / looks.price(model)) if isinstance(looks, Looks) else looks
    begun = left

    def look(event: Any) -> None:
        nonlocal left
        left -= 1
        event.interrupt(left <= 0 or time_is_up())

    model.cbMipInterrupt += look
    try:
        yield
    finally:
        model.cbMipInterrupt -= look
        if isinstance(looks, Looks):
            looks.left -= (begun - left) * looks.price(model)


def _is_unbounded(model: Any, status: Any) -> bool:
    """Presolve cannot always tell "unbounded" from "infeasible"; without an objective only the second remains."""
    import highspy

    if status != highspy.HighsModelStatus.kUnboundedOrInfeasible:
        return False
    model.setOptionValue("presolve", "off")
    model.run()
    model.setOptionValue("presolve", "choose")
    return bool(model.getModelStatus() == highspy.HighsModelStatus.kUnbounded)


def require_optimal(model: Any, *, what: str, deadline: Deadline = NEVER, pivots: int = MAX_PIVOTS) -> None:
    """`solve`, and TimeLimit also when the solution found is not proven optimal."""
    if solve(model, what=what, deadline=deadline, pivots=pivots) != "optimal":
        raise TimeLimit(f"{what}: stopped before the optimum was proven", where=what, hint="raise the time limit")


def values(model: Any) -> list[float]:
    """The variables' values in the last solution, in the order in which they were added."""
    return list(model.getSolution().col_value)


def row_duals(model: Any) -> list[float]:
    """Dual value of every row of a linear program: change of the objective per unit of its right-hand side."""
    return list(model.getSolution().row_dual)
