"""Embedding tables on fabrics: strategies tried, the cheapest by the measured costs as a checked plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from ..bound import Bound
from ..decide.strategies import options_given
from ..decide.tables import STRATEGIES, TablePlan, TableProblem, TableStrategy, table_bound
from ..decide.tables.lower import lower_tables, price_table
from ..decide.tables.problem import Piece
from ..errors import FormatError, Infeasible, Unsupported
from ..graph.embeddings import Shard, Tables
from ..io.quantity import show_time
from ..kernels.effort import Budget, why_with
from ..kernels.stages import innermost, stage
from ..plan.plan import Alternative, Plan
from ..simulate import simulate_program
from .plans import check_plan, make_plan
from .table_finals import Measure, Measured, Tried, finals

__all__ = ["Measured", "Tried", "compare_tables", "plan_tables", "shards_of", "tables_of"]


@stage("table plans")
def compare_tables(
    problem: TableProblem, candidates: Sequence[TableStrategy] | None = None, *, seed: int = 0, measure: Measure | None = None, finalists: int = 3,
    budget: Budget | None = None,
) -> tuple[list[Tried], Bound]:  # fmt: skip
    """All candidates (default: every strategy), finalists that were measured first, refused ones last; and the bound.

    `measure`: of so many `finalists`, no two alike; the cheapest in measurement wins (`table_finals`). `budget`: of so many; what ends it leaves the
    candidates so far."""
    found: list[Tried] = []
    listed = [kind() for kind in STRATEGIES] if candidates is None else list(candidates)
    budget, here = budget or Budget(len(listed)), innermost()
    for each in listed:
        if not budget.spend():
            break
        try:
            with budget.net():
                found.append(Tried(strategy=each, plan=each.plan(problem, rng=np.random.default_rng(seed))))
        except (Unsupported, Infeasible) as refused:
            found.append(Tried(strategy=each, refused=refused))
            continue
        best = min(found, key=lambda t: t.time_s)
        here.best = f"{best.strategy.name}, {show_time(best.time_s)}"
    ranked = sorted(found, key=lambda t: t.time_s)
    if measure is not None:
        done = finals(problem, ranked, measure, finalists, seed=seed)
        shown = {t.plan.shards for t in done if t.plan is not None}
        ranked = [*done, *(t for t in ranked if t.plan is None or t.plan.shards not in shown)]
    return ranked, table_bound(problem)


def plan_tables(
    problem: TableProblem, candidates: Sequence[TableStrategy] | None = None, *, seed: int = 0, measure: Measure | None = None, finalists: int = 3,
    budget: Budget | None = None,
) -> tuple[Plan, list[Tried], Bound]:  # fmt: skip
    """The cheapest as a checked plan, all that were tried, and the bound. `budget`: as in `compare_tables`.

    Raises: CheckFailed; where all refuse, the first one's refusal (Unsupported, Infeasible)."""
    budget = budget or Budget(len(STRATEGIES if candidates is None else candidates))
    ranked, bound = compare_tables(problem, candidates, seed=seed, measure=measure, finalists=finalists, budget=budget)
    best = ranked[0]
    if best.plan is None:
        assert best.refused is not None
        raise best.refused
    names = [d.name for d in problem.fabric.devices]
    floor = {n: _floor(problem, k) for n, k in zip(names, problem.kind_of.tolist(), strict=True)}
    measured = None if best.measured is None else dict(zip(names, best.measured.compute_s, strict=True))
    prices = price_table(problem, best.plan, measured)
    kept = measured is None or _above(problem, best.plan, measured)
    program = lower_tables(problem, best.plan)
    time_s = simulate_program(program, problem.fabric, tuple(names), prices, record=False, memory=False).makespan_s
    decision: dict[str, Any] = {
        "strategy": best.strategy.name, "options": options_given(best.strategy, [f.name for f in fields(best.strategy)]),  # type: ignore[arg-type]
        **why_with(_why(best, ranked), budget.cut), "cite": best.strategy.cite.key, "cost_s": best.plan.cost_s,
        "measured_s": best.measured.total_s if best.measured else None, "moved_bytes": best.plan.moved_bytes,
        "measured_on": dict(problem.costs[0].machine),
    }  # fmt: skip
    if not kept:
        floor = dict.fromkeys(names, (0.0, 0.0, 0.0))
    job = {"tables": msgspec.to_builtins(problem.tables), "shards": msgspec.to_builtins(best.plan.shards), "floor": floor}
    plan = make_plan(
        "tables", problem.fabric, tuple(names), program, job=job, cost=prices, decisions={"tables": decision}, bound=bound if kept else None,
        prediction=time_s, seed=seed,
        alternatives=(Alternative(what=t.strategy.name, time_s=t.time_s if t.plan else None, why=t.why) for t in ranked[1:]),
    )  # fmt: skip
    check_plan(plan)
    return plan, ranked, bound


def _above(problem: TableProblem, plan: TablePlan, measured: Mapping[str, float]) -> bool:
    """Whether all measured lookups are above the floor: a bound speaks of such costs, and a plan whose lookups were luckier states none."""
    pieces = [Piece(problem.tables.number_of[s.table], s.rows, s.columns) for s in plan.shards]
    sums, _ = problem.sums(pieces, np.array([problem.fabric.actor_of[s.device] for s in plan.shards]))
    return all(measured[d.name] >= sums[k, -1] for k, d in enumerate(problem.fabric.devices))


def _floor(problem: TableProblem, kind: int) -> tuple[float, float, float]:
    c = problem.costs[kind]
    return c.floor[0], c.floor[1], c.overhead_s


def _why(best: Tried, ranked: Sequence[Tried]) -> str:
    others = [t for t in ranked[1:] if t.plan is not None]
    how = "measured" if best.measured is not None else "by its costs"
    beside = f", {others[0].strategy.name} {others[0].time_s / best.time_s:.3f} times as long" if others and best.time_s else ""
    return f"the cheapest {how}{beside}"


def tables_of(plan: Plan) -> Tables:
    """Raises: FormatError for a plan of something else."""
    if plan.kind != "tables":
        raise FormatError(f"is a plan of kind {plan.kind!r}", where="kind", hint="make one with `meshwright tables plan`")
    try:
        return msgspec.convert(plan.job["tables"], Tables)
    except (KeyError, msgspec.ValidationError) as error:
        raise FormatError(f"lacks or mangles its tables: {error}", where="job.tables", hint="make the plan again") from None


def shards_of(plan: Plan) -> tuple[Shard, ...]:
    """Raises: FormatError for a plan of something else; CheckFailed where shards do not tile their tables."""
    tables_of(plan)
    try:
        shards = tuple(msgspec.convert(list(plan.job["shards"]), list[Shard]))
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise FormatError(f"lacks or mangles its shards: {error}", where="job.shards", hint="make the plan again") from None
    return shards
