"""Pipeline schedules from a problem: all that apply beside each other, or one as a checked plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ...bound import Bound
from ...cost import Transport
from ...decide.collective import CollectiveProblem, Ring
from ...decide.pipeline import STRATEGIES, PipelineProblem, PipelineStrategy, Schedule, strategy
from ...decide.pipeline.bound import any_bound, schedule_bound
from ...decide.pipeline.judge import Judged, judge
from ...decide.pipeline.lower import PlanCollective, fabric_of, price_table
from ...decide.pipeline.offload import CITE as OFFLOAD_CITE
from ...decide.pipeline.offload import fitting
from ...decide.pipeline.orders import kept_peak_bytes, times, weight_bytes
from ...decide.strategies import options_given
from ...errors import Infeasible, TimeLimit, Unsupported, UsageError
from ...io.quantity import show_time
from ...kernels.effort import Budget, Cut, look, why_with
from ...kernels.stages import innermost, stage
from ...plan.plan import Alternative, Plan, Prediction
from ...program.calls import Callee
from ...program.hash import program_hash
from ..collective.callee import bindable
from ..plans import check_plan, make_plan
from .documents import problem_document, problem_of_plan, schedule_document, schedule_of_plan

__all__ = [
    "Comparison", "Row", "Wanted", "compare_pipelines", "default_candidates", "frontier", "make_strategy", "plan_pipeline",
    "plan_schedule", "problem_of_plan", "relowered", "schedule_label", "schedule_of_plan",
]  # fmt: skip

Wanted = tuple[str, Mapping[str, Any]]  # a strategy's name, and those of its options that are not left to it
# Micro-batches of stages over all candidates up to which all are simulated, in which order does not matter; of larger comparisons the most promising
# by the planners' clock are, while they have no more actions than this (and one at least): a simulated and checked action takes some 0.2 ms.
MAX_SIMULATED = 250_000
OPERATIONS = {"gather": "all-gather", "reduce": "reduce-scatter", "all-reduce": "all-reduce"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate: what it is, and how it was judged or why it was refused. `kept_bound`: no orders on its placement that keep no more activations
    than its fullest device does are faster (sought with `effort` only). `estimate`: of a large step's schedule that was not simulated, seconds by the
    planners' clock and bytes on the fullest device by its orders alone."""

    name: str
    strategy: str
    options: Mapping[str, Any]
    judged: Judged | None = None
    why: str = ""
    hint: str = ""
    kept_bound: Bound | None = None
    estimate: tuple[float, int] | None = None

    @property
    def fits(self) -> bool:
        return self.judged is not None and self.judged.over_bytes <= 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows by time, refused ones last. `bound`: of every schedule, whatever its placement. `cut`: the clock ended the comparison."""

    problem: PipelineProblem
    rows: tuple[Row, ...]
    bound: Bound
    cut: Cut | None = None

    @property
    def fitting(self) -> list[Row]:
        return [r for r in self.rows if r.fits]


def default_candidates(problem: PipelineProblem, *, chunks: Sequence[int] = (2,), effort: int = 0) -> list[Wanted]:
    """(strategy, options) of everything worth comparing. `effort`: searched orders too, with so much of exact search."""
    variants = [v for kind in STRATEGIES for v in kind.variants(problem, chunks=chunks, effort=effort)]
    return [(v.name, options_given(v, v.told)) for v in variants]


def make_strategy(name: str, options: Mapping[str, Any]) -> PipelineStrategy:
    """Raises: UnknownName, UsageError for an option that does not exist, StrategyNotLoaded."""
    kind: Any = strategy(name)
    known = {f.name: f.default for f in fields(kind)}
    made = {}
    for key, value in options.items():
        if key not in known:
            raise UsageError(f"{name} has no option {key!r}", where="--option", hint=f"it has: {', '.join(known) or 'none'}")
        made[key] = _as(value, known[key], f"{name}.{key}")
    result: PipelineStrategy = kind(**made)
    return result


def _as(value: Any, default: Any, where: str) -> Any:
    """`value` (a string from the command line, or already typed) as the default's type."""
    kind = type(default)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    text = str(value)
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise UsageError(f"{text!r} is no {kind.__name__}", where=where) from None


@stage("schedules")
def compare_pipelines(
    problem: PipelineProblem, candidates: Sequence[Wanted] | None = None, *, chunks: Sequence[int] = (2,), seed: int = 0,
    time_limit_s: float = 120.0, effort: int = 0, checks: bool = True,
) -> Comparison:  # fmt: skip
    """Judge every candidate; each program is checked for form, races and deadlock. Candidates left at the time limit are named, not judged.

    Without `checks` nothing is: for whoever checks the one plan that comes of it, which a large step's 38 candidates would keep waiting for minutes.

    Without `candidates`: every strategy's variants, for so many `chunks` where there is a choice.
    With `effort` searched orders are one more candidate, and both their exact search and the tighter bound of every row may take so much.
    """
    collectives = collective_planner(problem)
    rows, fastest_s = list[Row](), float("inf")
    listed = candidates if candidates is not None else default_candidates(problem, chunks=chunks, effort=effort)
    budget = Budget(len(listed) * (2 if effort else 1), time_limit_s=time_limit_s)
    large = len(listed) * problem.devices * problem.microbatches > MAX_SIMULATED
    planned: list[tuple[Row, Schedule]] = []
    for name, options in listed:
        row = Row(name=schedule_label(name, options), strategy=name, options=options)
        if not budget.spend():
            rows.append(_late(row, budget))
            continue
        here = innermost()
        here.what = f"schedule {row.name}"
        try:
            with budget.net():
                schedule = make_strategy(name, options).plan(problem, rng=np.random.default_rng(seed))
                if large:
                    planned.append((replace(row, estimate=_estimate(problem, schedule)), schedule))
                    continue
                rows.append(_judged(problem, row, schedule, collectives, checks))
                rows += _in_host_memory(problem, rows[-1], collectives, checks)
            judged = rows[-1].judged
            if rows[-1].fits and judged is not None and judged.time_s < fastest_s:
                fastest_s, here.best = judged.time_s, f"{row.name}, {show_time(judged.time_s)}"
        except TimeLimit:
            if budget.cut is None:
                raise
            rows.append(_late(row, budget))
        except (Unsupported, Infeasible) as refused:
            rows.append(replace(row, why=refused.message, hint=refused.hint))
    rows += _most_promising(problem, planned, collectives, checks, budget)
    if effort:
        rows = [_bounded(problem, r, effort, budget) for r in rows]
    rows.sort(key=_place)
    return Comparison(problem=problem, rows=tuple(rows), bound=any_bound(problem), cut=budget.cut)


def _place(row: Row) -> tuple[int, float, int]:
    """Simulated rows by time, then those that are only estimated, then refused ones."""
    if row.judged is not None:
        return 0, row.judged.time_s, max(row.judged.memory_bytes)
    return (1, *row.estimate) if row.estimate is not None else (2, 0.0, 0)


def _judged(problem: PipelineProblem, row: Row, schedule: Schedule, collectives: PlanCollective, checks: bool) -> Row:
    judged = judge(problem, schedule, collectives)
    return replace(row, options=schedule.options, judged=_checked(judged) if checks else judged)


def _estimate(problem: PipelineProblem, schedule: Schedule) -> tuple[float, int]:
    kept = kept_peak_bytes(problem, schedule)
    return times(problem, schedule).makespan_s, max(k + weight_bytes(problem, schedule, d) for d, k in enumerate(kept))


def _most_promising(
    problem: PipelineProblem, planned: list[tuple[Row, Schedule]], collectives: PlanCollective, checks: bool, budget: Budget
) -> list[Row]:
    """The fastest by the planners' clock that fit by their orders are simulated, until one is found that fits and the work is spent."""
    rows: list[Row] = []
    cap, spent = max(problem.memory_cap_bytes, default=0), 0
    for row, schedule in sorted(planned, key=lambda x: (bool(cap) and x[0].estimate[1] > cap, x[0].estimate)):  # type: ignore[index]
        actions = sum(map(len, schedule.orders))
        if any(r.fits for r in rows) and spent + actions > MAX_SIMULATED:
            rows.append(replace(row, why="not simulated: large, and others promise more", hint="name it with --strategy"))
            continue
        spent += actions
        try:
            with budget.net():
                rows.append(_judged(problem, row, schedule, collectives, checks))
                rows += _in_host_memory(problem, rows[-1], collectives, checks)
        except TimeLimit:
            if budget.cut is None:
                raise
            rows.append(_late(row, budget))
    return rows


def _late(row: Row, budget: Budget) -> Row:
    return replace(row, why="not judged: interrupted") if budget.interrupted else replace(row, why="not judged: the time limit", hint="raise it")


def _in_host_memory(problem: PipelineProblem, row: Row, collectives: PlanCollective, checks: bool = True) -> list[Row]:
    """Of a row that does not fit: the same schedule with activations in the host's memory, where it fits so."""
    if row.judged is None or row.fits:
        return []
    judged = fitting(problem, row.judged.schedule, collectives)
    return [] if judged is None else [replace(row, name=f"{row.name} offload", judged=_checked(judged) if checks else judged)]


def schedule_label(name: str, options: Mapping[str, Any]) -> str:
    """`chimera pipes=2 split` from the options that are given."""
    said = [k if v is True else f"{k}={v}" for k, v in options.items() if v is not False and not (k == "pipes" and v == 1 and len(options) == 1)]
    return " ".join([name, *(s.removeprefix("mode=") for s in said)])


def _checked(judged: Judged) -> Judged:
    from ...check import check_program

    check_program(judged.program, programs=judged.callees).raise_if_wrong()
    look()  # where time was up the check may not have decided
    return judged


def _bounded(problem: PipelineProblem, row: Row, effort: int, budget: Budget) -> Row:
    """`row` with the bound for schedules that keep no more activations than it does."""
    from ...decide.pipeline.exact import counts_bound
    j = row.judged
    if j is None:
        return row
    caps = (max(kept_peak_bytes(problem, j.schedule)),) * problem.devices
    tight = None
    if budget.spend():
        with budget.net():
            tight = counts_bound(problem, j.schedule, cap_bytes=caps, effort=effort)
    return replace(row, kept_bound=tight or schedule_bound(problem, j.schedule, cap_bytes=caps))


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Fitting rows that no other beats in both time and memory of the fullest device, fastest first."""
    best: list[Row] = []
    least = float("inf")
    for row in sorted((r for r in rows if r.fits), key=lambda r: (r.judged.time_s, max(r.judged.memory_bytes))):  # type: ignore[union-attr]
        assert row.judged is not None
        memory = max(row.judged.memory_bytes)
        if memory < least:
            best.append(row)
            least = memory
    return best


# ---- collectives -------------------------------------------------------------------------------------------------------
def collective_planner(problem: PipelineProblem) -> PlanCollective:
    """Rings over the problem's own connections, one per kind, group and size."""
    fabric = fabric_of(problem)
    known: dict[tuple[str, tuple[int, ...], int], Callee] = {}

    def plan(kind: str, ranks: tuple[int, ...], size_bytes: int) -> Callee:
        size = -(-max(size_bytes, 4) // 4) * 4
        if (kind, ranks, size) not in known:
            names = tuple(fabric.devices[r].name for r in ranks)
            wanted = CollectiveProblem(fabric=fabric, op=OPERATIONS[kind], ranks=names, size_bytes=size, transport=Transport())
            program = Ring().plan(wanted, rng=np.random.default_rng(0)).program
            known[kind, ranks, size] = bindable(program_hash(program), program)
        return known[kind, ranks, size]

    return plan


# ---- plans -------------------------------------------------------------------------------------------------------------
def plan_pipeline(
    problem: PipelineProblem, strategy: str = "auto", options: Mapping[str, Any] | None = None, *, seed: int = 0, time_limit_s: float = 120.0
) -> Plan:
    """The named schedule, or the fastest that fits; checked. Raises: as `make_strategy`; Infeasible when it does not fit, naming what does."""
    if strategy == "auto":
        if options:
            raise UsageError("options belong to one schedule", where="--option", hint="name it with --strategy")
        found = compare_pipelines(problem, seed=seed, time_limit_s=time_limit_s, checks=False)
        if not found.fitting:
            raise found.cut.error("no schedule fits so far") if found.cut else nothing_fits(found)
        chosen = found.fitting[0]
    else:
        budget = Budget(1, time_limit_s=time_limit_s)
        try:
            with budget.net():
                schedule = make_strategy(strategy, options or {}).plan(problem, rng=np.random.default_rng(seed))
                judged = judge(problem, schedule, collective_planner(problem))
        except TimeLimit as error:
            raise budget.cut.error(f"{strategy} has no orders so far") if budget.cut else error from None
        chosen = Row(name=schedule_label(strategy, options or {}), strategy=strategy, options=judged.schedule.options, judged=judged)
        chosen = (_in_host_memory(problem, chosen, collective_planner(problem), checks=False) or [chosen])[0]
        found = Comparison(problem=problem, rows=(chosen,), bound=any_bound(problem), cut=budget.cut)
        if not chosen.fits:
            raise nothing_fits(compare_pipelines(problem, seed=seed, time_limit_s=time_limit_s, checks=False), chosen)
    plan = _plan(problem, chosen, found, seed)
    check_plan(plan)
    return plan


def nothing_fits(found: Comparison, wanted: Row | None = None) -> Infeasible:
    """What was asked for does not fit, and what does; or nothing does, and what needs least."""
    judged = [r for r in found.rows if r.judged is not None]
    fitting = [r.name for r in found.fitting]
    row = wanted or min(judged, key=lambda r: r.judged.over_bytes)  # type: ignore[union-attr]
    assert row.judged is not None
    needs = row.judged.memory_bytes
    worst = max(range(len(needs)), key=lambda d: needs[d] - found.problem.memory_cap_bytes[d])
    limit = found.problem.memory_cap_bytes[worst]
    what = f"{row.name} needs" if wanted else f"no schedule fits: the one that needs least, {row.name}, needs"
    return Infeasible(
        f"{what} {needs[worst]} bytes on device {worst}, {limit} are there", where="memory_cap_bytes",
        hint=f"these fit, fastest first: {', '.join(fitting[:8])}" if fitting else "raise the cap, use smaller micro-batches or more stages",
        data={"limit": "memory", "device": worst, "needed_bytes": needs[worst], "available_bytes": limit, "fit": fitting},
    )  # fmt: skip


def _plan(problem: PipelineProblem, chosen: Row, found: Comparison, seed: int) -> Plan:
    j = chosen.judged
    assert j is not None
    fabric = fabric_of(problem)
    # the program also holds messages and posted receives, which the cap on weights and activations is not about
    fabric = replace(fabric, devices=tuple(replace(d, memory_bytes=0) for d in fabric.devices))
    decision = {
        "strategy": chosen.strategy, "options": dict(j.schedule.options), **why_with(_why(found, chosen), found.cut), "notes": list(j.schedule.notes),
        "cite": [strategy(chosen.strategy).cite.key],
    }  # fmt: skip
    decisions: dict[str, Any] = {"pipeline": decision}
    if any(j.schedule.offloads):
        why = "the schedule would not fit in memory otherwise"
        decisions["offload"] = {"strategy": "pipeoffload", "options": {}, "why": why, "cite": [OFFLOAD_CITE.key]}
    return make_plan(
        "pipeline", fabric, tuple(d.name for d in fabric.devices), j.program, others=j.callees.values(),
        job={"problem": problem_document(problem), "schedule": schedule_document(j.schedule)}, cost=price_table(problem, j.schedule),
        decisions=decisions, bound=j.bound,
        prediction=Prediction(target_fabric=fabric.name, time_s=j.time_s, memory_peak_bytes=tuple(j.timeline.memory_peak_bytes)),
        alternatives=(_alternative(r) for r in found.rows if r is not chosen), seed=seed,
    )  # fmt: skip


def _alternative(row: Row) -> Alternative:
    if row.judged is None:
        return Alternative(what=row.name, why=row.why, **({"time_s": row.estimate[0]} if row.estimate else {}))  # type: ignore[arg-type]
    why = "" if row.fits else f"needs {row.judged.over_bytes} bytes more than the cap"
    return Alternative(what=row.name, time_s=row.judged.time_s, memory_peak_bytes=max(row.judged.memory_bytes), why=why)


def _why(found: Comparison, chosen: Row) -> str:
    return "asked for" if len(found.rows) == 1 else f"fastest of {len(found.fitting)} schedules that fit, {len(found.rows)} tried"


def plan_schedule(problem: PipelineProblem, schedule: Schedule, strategy: str, options: Mapping[str, Any] | None = None, *, seed: int = 0) -> Plan:
    """A plan of a given schedule, whoever made it; `strategy` says whose family it is of. Raises: as `judge`; Infeasible when it does not fit."""
    judged = _checked(judge(problem, schedule, collective_planner(problem)))
    row = Row(name=schedule_label(strategy, options or {}), strategy=strategy, options=options or {}, judged=judged)
    if not row.fits:
        raise nothing_fits(compare_pipelines(problem, seed=seed, checks=False), row)
    return _plan(problem, row, Comparison(problem=problem, rows=(row,), bound=any_bound(problem)), seed)


def relowered(plan: Plan, problem: PipelineProblem) -> Plan:
    """The plan's schedule for another problem (measured times, other sizes), lowered, simulated and checked anew. Raises: as `plan_schedule`."""
    chosen = plan.decisions["pipeline"]
    return replace(plan_schedule(problem, schedule_of_plan(plan), chosen["strategy"], chosen["options"], seed=plan.seed), decisions=plan.decisions)
