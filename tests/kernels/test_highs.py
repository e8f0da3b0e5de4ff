"""The solver's one entrance: statuses become typed errors, options are checked, the thread count is the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import Infeasible, TimeLimit, Unsupported, UsageError
from meshwright.kernels.effort import Deadline, cuts
from meshwright.kernels.highs import PIVOT_WORK_S, require_optimal, row_duals, solve, solver, values

INF = highspy.kHighsInf


def program(cost: list[float], rows: list[tuple[float, float, list[float]]], *, upper: float = 10.0, integer: bool = False, **options: object):
    model = solver(**options)
    n = len(cost)
    model.addVars(n, np.zeros(n), np.full(n, upper))
    everyone = np.arange(n, dtype=np.int32)
    model.changeColsCost(n, everyone, np.array(cost, float))
    if integer:
        model.changeColsIntegrality(n, everyone, np.full(n, highspy.HighsVarType.kInteger))
    for low, high, row in rows:
        model.addRow(low, high, n, everyone, np.array(row, float))
    return model


def test_a_linear_program_with_values_and_duals() -> None:
    model = program([1, 1], [(3, INF, [1, 2])])
    assert solve(model, what="toy") == "optimal"
    assert values(model) == [0, 1.5] and row_duals(model) == [0.5]


@settings(max_examples=60, deadline=None)
@given(
    cost=st.lists(st.integers(0, 9), min_size=2, max_size=4),
    data=st.data(),
)
def test_integer_optimum_equals_brute_force(cost: list[int], data: st.DataObject) -> None:
    n = len(cost)
    row = st.tuples(st.integers(0, 6), st.lists(st.integers(-2, 3), min_size=n, max_size=n))
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    best = min(
        (sum(c * x for c, x in zip(cost, point, strict=True)) for point in product(range(4), repeat=n)
         if all(sum(a * x for a, x in zip(r, point, strict=True)) >= low for low, r in rows)),
        default=None,
    )  # fmt: skip
    model = program(list(map(float, cost)), [(float(low), INF, list(map(float, r))) for low, r in rows], upper=3, integer=True, mip_rel_gap=0.0)
    if best is None:
        with pytest.raises(Infeasible, match="toy has no solution"):
            solve(model, what="toy")
    else:
        require_optimal(model, what="toy", deadline=Deadline.after(clock_s=60))
        assert round(model.getInfo().objective_function_value) == best


def test_options_that_highs_refuses_are_usage_errors() -> None:
    for name, value in (("nonsense", 1), ("time_limit", "soon")):
        with pytest.raises(UsageError, match=name):
            solver(**{name: value})
    with pytest.raises(UsageError, match="same for every solver"):
        solver(threads=2)


def test_an_unbounded_program_is_unsupported() -> None:
    for presolve in ("on", "off"):
        model = program([-1, -1], [(0, INF, [1, 1])], upper=INF, presolve=presolve)
        with pytest.raises(Unsupported, match="cannot be solved"):
            solve(model, what="toy")


def hard(**options: object):
    """Weighted knapsack equalities that take branch and bound a while; no heuristic finds a solution at the root."""
    rng = np.random.default_rng(3)
    n = 40
    rows = [rng.integers(10_000, 100_000, n) for _ in range(4)]
    return program([0.0] * n, [(float(sum(r) // 2), float(sum(r) // 2), r.astype(float).tolist()) for r in rows], upper=1, integer=True, **options)


def packing(**options: object):
    """A knapsack with several rows: easy to fill, hard to fill best."""
    rng = np.random.default_rng(5)
    rows = [rng.integers(10_000, 100_000, 40) for _ in range(5)]
    cost = (-rng.integers(10_000, 100_000, 40)).astype(float).tolist()
    return program(cost, [(-INF, float(sum(r) // 2), r.astype(float).tolist()) for r in rows], upper=1, integer=True, **options)


def test_limits_end_in_time_limit_or_a_feasible_solution() -> None:
    before = cuts()
    with pytest.raises(TimeLimit, match="the time limit was reached before toy"):
        solve(program([1], [(1, INF, [1])]), what="toy", deadline=Deadline.after(clock_s=-1))
    with pytest.raises(TimeLimit, match="stopped without a solution"):
        solve(hard(), what="toy", deadline=Deadline.after(clock_s=0.3))
    assert cuts() > before, "the clock ended it, which is told"
    assert solve(packing(mip_max_improving_sols=1), what="toy") == "feasible"
    with pytest.raises(TimeLimit, match="before the optimum was proven"):
        require_optimal(packing(mip_max_improving_sols=1), what="toy")


def test_looks_end_a_search_at_the_same_place_every_time() -> None:
    def ended(looks: int) -> tuple[object, ...]:
        model = hard()
        try:
            said: object = solve(model, what="toy", looks=looks)
        except TimeLimit as error:
            said = error.code
        return said, model.getInfo().mip_node_count, model.getInfo().simplex_iteration_count, model.getInfo().mip_dual_bound

    few, more = ended(20), ended(60)
    assert few == ended(20) and more == ended(60)
    assert few[2] < more[2] and few[0] != "optimal"  # type: ignore[operator]
    with pytest.raises(TimeLimit):
        solve(hard(), what="toy", looks=1)


def test_work_ends_a_program_at_the_same_place_every_time() -> None:
    def ended(work_s: float, make: Callable[[], highspy.Highs]) -> tuple[object, ...]:
        model = make()
        try:
            said: object = solve(model, what="toy", deadline=Deadline.after(work_s))
        except TimeLimit as error:
            said = error.data["solver"]
        return said, model.getInfo().simplex_iteration_count

    def linear() -> highspy.Highs:
        rng = np.random.default_rng(0)
        rows = [(-INF, 5.0, rng.random(60).tolist()) for _ in range(60)]
        return program((-rng.random(60)).tolist(), rows)

    before = cuts()
    few = ended(10.5 * PIVOT_WORK_S * 120, linear)
    assert few == ended(10.5 * PIVOT_WORK_S * 120, linear) == ("Iteration limit reached", 10) and ended(1.0, linear)[0] == "optimal"
    least = ended(1e-9, hard)
    assert least == ended(1e-9, hard) and least[0] in ("Interrupted by user", "feasible") and cuts() == before


class Contradicting:
    """A solver that reports the objective of the best solution and gives back another, until it is cleared (`for_good`: also then)."""

    def __init__(self, model: highspy.Highs, *, for_good: bool) -> None:
        self.model, self.for_good, self.cleared = model, for_good, False

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def clearSolver(self) -> None:
        self.cleared = True
        self.model.clearSolver()

    def getSolution(self) -> highspy.HighsSolution:
        found = self.model.getSolution()
        if self.for_good or not self.cleared:
            found.col_value = [0.0, 3.0]
        return found


def test_a_solution_that_is_not_the_one_reported_is_not_believed() -> None:
    rows = [(3, INF, [1.0, 2.0])]
    once = Contradicting(program([1, 1], rows, integer=True), for_good=False)
    assert solve(once, what="toy") == "optimal" and once.cleared and sum(values(once)) == 2
    with pytest.raises(Unsupported, match="has not the objective it reports") as refused:
        solve(Contradicting(program([1, 1], rows, integer=True), for_good=True), what="toy")
    assert refused.value.data == {"objective": 2.0, "of_solution": 3.0} and refused.value.where == "toy"


def test_an_empty_program_is_optimal() -> None:
    assert solve(solver(), what="nothing") == "optimal"


def test_the_clock_is_per_run_not_per_model() -> None:
    model = program([1, 1], [(3, INF, [1, 2])])
    for _ in range(3):
        assert solve(model, what="toy", deadline=Deadline.after(30, 30)) == "optimal"
        model.addRow(1.0, INF, 1, np.array([0], np.int32), np.array([1.0]))


@pytest.mark.interpreter
def test_the_package_imports_without_the_solver() -> None:
    code = "import sys, meshwright.kernels.highs as h; assert 'highspy' not in sys.modules; h.solver(); assert 'highspy' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
