"""The driver for several collectives at once: independent plans, the joint plan, the simulator's choice between them, check, plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...cost import Cost
from ...decide.collective import STRATEGIES, CollectivePlan, CollectiveProblem, CollectiveStrategy, auto, default_candidates, strategy
from ...decide.collective.groups.problem import GroupsPlan, GroupsProblem
from ...decide.collective.groups.strategy import Groups, groups_bound, independent
from ...decide.collective.joint.demand import PACKED
from ...decide.collective.problem import Use
from ...decide.collective.program_time import simulated_time_s
from ...errors import MeshwrightError, TimeLimit, Unsupported
from ...kernels.effort import Budget, Cut, Deadline, why_with
from ...plan.plan import Alternative, Plan
from ..plans import check_plan, make_plan

__all__ = ["RankedGroups", "plan_groups"]

# How each group is planned alone. Programs run side by side only with equal numbers of iterations, so one form is tried for all groups.
FORMS: tuple[tuple[str, Use], ...] = (("independent, unrolled", "beside"), ("independent, in iterations", "beside, in iterations"))


@dataclass(frozen=True, kw_only=True)
class RankedGroups:
    """One way to run all groups, its predicted time, or why there is none."""

    name: str  # "joint groups" | "independent ..."
    plan: GroupsPlan | None
    time_s: float | None
    why: str


def plan_groups(
    groups: Sequence[CollectiveProblem], *, joint: Groups | None = None, time_limit_s: float = float("inf"), effort_s: float | None = None,
    seed: int = 0,
) -> tuple[Plan, list[RankedGroups]]:
    """Plans collectives that start together on one fabric; the fastest of the joint plan and the independent plans in simulation.

    Returns the plan (one program with a contract per group; rank i runs on the i-th device used, in fabric order) and the ranking, best first.
    Raises: UsageError, Infeasible (a group is not connected), Unsupported (nothing can run them), TimeLimit; CheckFailed when a planner is
    wrong (please report it).
    """
    problem = GroupsProblem(groups=tuple(groups), time_limit_s=time_limit_s, effort_s=effort_s, seed=seed)
    ranked, cut = _ranked(problem, joint or Groups())
    plan = _plan_of(problem, ranked, cut)
    check_plan(plan)
    return plan, ranked


def _ranked(problem: GroupsProblem, joint: Groups) -> tuple[list[RankedGroups], Cut | None]:
    deadline, budget = problem.deadline(), Budget(3, time_limit_s=problem.time_limit_s)
    tried: list[RankedGroups] = []
    failed: list[MeshwrightError] = []
    explicit: Sequence[CollectivePlan] = ()
    for name, use in FORMS:
        budget.spend()
        try:
            with budget.net():
                plans = [_alone(group, use, deadline) for group in problem.groups]
            explicit = explicit or plans
            tried.append(_timed(problem, name, independent(problem, plans)))
        except (Unsupported, TimeLimit) as error:
            failed.append(error)
            tried.append(RankedGroups(name=name, plan=None, time_s=None, why=str(error)))
    budget.spend()
    try:
        left = replace(problem, time_limit_s=max(deadline.clock_left_s, 1e-3), effort_s=max(deadline.work_left_s, 1e-3))
        with budget.net():
            found = joint.plan(left, rng=np.random.default_rng(problem.seed), alone=explicit)
        tried.append(_timed(problem, "joint groups", found))
    except (Unsupported, TimeLimit) as error:
        failed.append(error)
        tried.append(RankedGroups(name="joint groups", plan=None, time_s=None, why=str(error)))
    if all(entry.plan is None for entry in tried):
        raise budget.cut.error("no group of collectives has a plan") if budget.cut else failed[-1]
    ordered = sorted(tried, key=lambda e: (e.time_s is None, e.time_s or 0.0))
    best = ordered[0].time_s or 0.0
    ranked = [replace(e, why=_why(e, best, place)) if e.plan is not None else e for place, e in enumerate(ordered)]
    return ranked, budget.cut


def _why(entry: RankedGroups, best: float, place: int) -> str:
    if place == 0 or entry.time_s is None or not best:
        return "fastest in simulation"
    return f"{100 * (entry.time_s / best - 1):.1f} % slower than the fastest"


def _alone(group: CollectiveProblem, use: Use, deadline: Deadline) -> CollectivePlan:
    if deadline.past:
        raise TimeLimit("the time limit was reached before every group was planned alone", hint="raise the time limit")
    own: list[CollectiveStrategy] = [variant for kind in STRATEGIES for variant in kind.variants(group, use)]
    listed = own if group.op in PACKED else default_candidates(group)
    best = auto(replace(group, time_limit_s=max(deadline.clock_left_s, 1e-3), effort_s=max(deadline.work_left_s, 1e-3)), candidates=listed)[0].plan
    assert best is not None, "auto raises when nothing has a plan"
    return best


def _timed(problem: GroupsProblem, name: str, plan: GroupsPlan) -> RankedGroups:
    time_s = simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.groups[0].transport)
    return RankedGroups(name=name, plan=plan, time_s=time_s, why="")


def _plan_of(problem: GroupsProblem, ranked: Sequence[RankedGroups], cut: Cut | None) -> Plan:
    best = ranked[0]
    assert best.plan is not None and best.time_s is not None, "the first has a plan"
    bound = best.plan.bound or next((e.plan.bound for e in ranked if e.plan is not None and e.plan.bound is not None), None)
    transport = problem.groups[0].transport
    cost = Cost() if transport is None else Cost(transport=transport)
    decisions: dict[str, Any] = {}
    for i, (group, planner) in enumerate(zip(problem.groups, best.plan.strategies, strict=True)):
        cite = Groups.cite if planner == Groups.name else strategy(planner).cite
        decisions[f"collective:{i} {group.op}"] = {
            "strategy": planner, "options": dict(best.plan.options), "notes": dict(best.plan.notes),
            **why_with(f"{best.name}: {best.why}", cut), "cite": [cite.key],
        }  # fmt: skip
    return make_plan(
        "collective", problem.fabric, problem.ranks, best.plan.program, job={"collectives": [_job(group) for group in problem.groups]}, cost=cost,
        decisions=decisions, bound=bound or groups_bound(problem), prediction=best.time_s, seed=problem.seed,
        alternatives=(Alternative(what=e.name, time_s=e.time_s, why=e.why) for e in ranked[1:]),
    )  # fmt: skip


def _job(group: CollectiveProblem) -> dict[str, Any]:
    job: dict[str, Any] = {"op": group.op, "ranks": list(group.ranks), "size_bytes": group.size_bytes, "root": group.root}
    job["element_bytes"] = group.element_bytes
    if group.shard_bytes is not None:
        job["shard_bytes"] = list(group.shard_bytes)
    if group.peers:
        job["peers"] = list(group.peers)
    return job
