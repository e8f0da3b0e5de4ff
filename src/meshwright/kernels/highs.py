"""The one place where linear and mixed-integer programs meet a solver: HiGHS, on one thread, silent, with typed failures.

    lp = solver()                          # a highspy.Highs
    lp.addVars(2, lower, upper)            # build it with highspy's own calls
    status = solve(lp, what="routing", deadline=monotonic() + 5)   # "optimal" | "feasible"

HiGHS keeps one thread pool per process: a second solver with another thread count does not run at all. So the count is set here
and nowhere else. One thread also makes equal inputs give equal answers. Answers are floats: a caller that claims anything
exactly must verify it in rationals. A solution whose costs are not the objective that the solver reports is not believed: some
releases (1.16.0) give back the solution that an integer program began at, as the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Literal

from ..errors import Infeasible, TimeLimit, Unsupported, UsageError
from .effort import count_work

__all__ = ["Status", "require_optimal", "row_duals", "solve", "solver", "values"]

Status = Literal["optimal", "feasible"]
FIXED = {"output_flag": False, "threads": 1}
PIVOT_S = 2e-8  # work of a step of the simplex method per row and column
AGREES = 1e-6  # relative: a solution's costs, summed here, and the objective as reported
STOPPED = ("kTimeLimit", "kIterationLimit", "kSolutionLimit", "kInterrupt", "kHighsInterrupt", "kObjectiveBound", "kObjectiveTarget", "kMemoryLimit")


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


def solve(model: Any, *, what: str, deadline: float = float("inf"), looks: int | None = None) -> Status:
    """Run the solver until `deadline` (monotonic seconds), an integer program until it has looked up so many times whether to go on: between nodes
    and between steps of its heuristics, the same on every machine.

    Returns: "optimal", or "feasible" when it stopped at a limit with a solution whose constraints hold (integer programs).
    Raises: Infeasible when no solution exists; TimeLimit when it stopped without one; Unsupported when the program is unbounded, the
    solver gives up, or contradicts itself. `what` names the program in messages.
    """
    status = _solve(model, what, deadline, looks)
    if not _agrees(model):
        model.clearSolver()  # also of the solution to begin with, which is what it gave back
        status = _solve(model, what, deadline, looks)
        if not _agrees(model):
            said = {"objective": float(model.getInfo().objective_function_value), "of_solution": _cost(model)}
            hint = "another release of highspy may be right"
            raise Unsupported(f"{what} cannot be solved: HiGHS's solution has not the objective it reports", where=what, hint=hint, data=said)
    return status


def _cost(model: Any) -> float:
    lp = model.getLp()
    return float(lp.offset_) + sum(float(c) * float(x) for c, x in zip(lp.col_cost_, model.getSolution().col_value, strict=True))


def _agrees(model: Any) -> bool:
    reported = float(model.getInfo().objective_function_value)
    return abs(_cost(model) - reported) <= AGREES * max(1.0, abs(reported))


def _solve(model: Any, what: str, deadline: float, looks: int | None) -> Status:
    import highspy

    left_s = deadline - monotonic()
    if left_s <= 0:
        raise TimeLimit(f"time is up before {what} was solved", where=what, hint="raise the time limit")
    if left_s != float("inf"):
        # HiGHS counts its clock over all runs of one model
        model.setOptionValue("time_limit", float(model.getRunTime()) + left_s)
    with _at_most(model, looks):
        outcome = model.run()
    count_work(PIVOT_S * model.getInfo().simplex_iteration_count * (model.getNumRow() + model.getNumCol()))
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
    if status in [getattr(kind, name) for name in STOPPED]:
        if model.getInfo().primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible):
            return "feasible"
        raise TimeLimit(f"{what}: the solver stopped without a solution", where=what, hint="raise the time limit", data=said)
    raise Unsupported(f"{what} cannot be solved: HiGHS says {text!r}", where=what, hint="please report the problem", data=said)


@contextmanager
def _at_most(model: Any, looks: int | None) -> Iterator[None]:
    """Interrupts the model's branch and bound where it looks up for the last time."""
    if looks is None:
        yield
        return
    left = looks

    def look(event: Any) -> None:
        nonlocal left
        left -= 1
        event.interrupt(left <= 0)

    model.cbMipInterrupt += look
    try:
        yield
    finally:
        model.cbMipInterrupt -= look


def _is_unbounded(model: Any, status: Any) -> bool:
    """Presolve cannot always tell "unbounded" from "infeasible"; without an objective only the second remains."""
    import highspy

    if status != highspy.HighsModelStatus.kUnboundedOrInfeasible:
        return False
    model.setOptionValue("presolve", "off")
    model.run()
    model.setOptionValue("presolve", "choose")
    return bool(model.getModelStatus() == highspy.HighsModelStatus.kUnbounded)


def require_optimal(model: Any, *, what: str, deadline: float = float("inf")) -> None:
    """`solve`, and TimeLimit also when the solution found is not proven optimal."""
    if solve(model, what=what, deadline=deadline) != "optimal":
        raise TimeLimit(f"{what}: stopped before the optimum was proven", where=what, hint="raise the time limit")


def values(model: Any) -> list[float]:
    """The variables' values in the last solution, in the order in which they were added."""
    return list(model.getSolution().col_value)


def row_duals(model: Any) -> list[float]:
    """Dual value of every row of a linear program: change of the objective per unit of its right-hand side."""
    return list(model.getSolution().row_dual)
