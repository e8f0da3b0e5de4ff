"""The driver for several collectives at once: independent plans, the joint plan, the simulator's choice between them, check, plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from . import __version__
from .cost import Cost
from .decide.collective import CITES, CollectivePlan, CollectiveProblem, CollectiveStrategy, ForestColl, Joint, Ring, auto, default_candidates
from .decide.collective.groups.problem import GroupsPlan, GroupsProblem
from .decide.collective.groups.strategy import Groups, groups_bound, independent
from .decide.collective.joint.demand import PACKED
from .decide.collective.value import simulated_time_s
from .errors import MeshwrightError, TimeLimit, Unsupported
from .kernels.effort import Deadline
from .plan import Alternative, CycleEntry, Plan, Prediction
from .program_hash import program_hash

__all__ = ["RankedGroups", "plan_groups"]

# What each group is planned with alone. Programs run side by side only with equal numbers of iterations, so the sets are tried as wholes.
REPEATED: tuple[CollectiveStrategy, ...] = (ForestColl(unroll=False, pieces=128, fold=False), Joint(unroll=False, pieces=128))
EXPLICIT: tuple[CollectiveStrategy, ...] = (Ring(), Ring(bidirectional=True), ForestColl(unroll=True, fold=False), Joint(unroll=True))


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
    from .drive import check

    problem = GroupsProblem(groups=tuple(groups), time_limit_s=time_limit_s, effort_s=effort_s, seed=seed)
    ranked = _ranked(problem, joint or Groups())
    plan = _plan_of(problem, ranked)
    check(plan)
    return plan, ranked


def _ranked(problem: GroupsProblem, joint: Groups) -> list[RankedGroups]:
    deadline = problem.deadline()
    tried: list[RankedGroups] = []
    failed: list[MeshwrightError] = []
    explicit: Sequence[CollectivePlan] = ()
    for name, candidates in (("independent, unrolled", EXPLICIT), ("independent, in iterations", REPEATED)):
        try:
            plans = [_alone(group, candidates, deadline) for group in problem.groups]
            explicit = explicit or plans
            tried.append(_timed(problem, name, independent(problem, plans)))
        except (Unsupported, TimeLimit) as error:
            failed.append(error)
            tried.append(RankedGroups(name=name, plan=None, time_s=None, why=str(error)))
    try:
        left = replace(problem, time_limit_s=max(deadline.clock_left_s, 1e-3), effort_s=max(deadline.work_left_s, 1e-3))
        tried.append(_timed(problem, "joint groups", joint.plan(left, rng=np.random.default_rng(problem.seed), alone=explicit)))
    except (Unsupported, TimeLimit) as error:
        failed.append(error)
        tried.append(RankedGroups(name="joint groups", plan=None, time_s=None, why=str(error)))
    if all(entry.plan is None for entry in tried):
        raise failed[-1]
    ordered = sorted(tried, key=lambda e: (e.time_s is None, e.time_s or 0.0))
    best = ordered[0].time_s or 0.0
    return [replace(e, why=_why(e, best, place)) if e.plan is not None else e for place, e in enumerate(ordered)]


def _why(entry: RankedGroups, best: float, place: int) -> str:
    if place == 0 or entry.time_s is None or not best:
        return "fastest in simulation"
    return f"{100 * (entry.time_s / best - 1):.1f} % slower than the fastest"


def _alone(group: CollectiveProblem, candidates: Sequence[CollectiveStrategy], deadline: Deadline) -> CollectivePlan:
    if deadline.past:
        raise TimeLimit("time is up before every group was planned alone", hint="raise the time limit")
    listed = list(candidates) if group.op in PACKED else [*default_candidates()]
    best = auto(replace(group, time_limit_s=max(deadline.clock_left_s, 1e-3), effort_s=max(deadline.work_left_s, 1e-3)), candidates=listed)[0].plan
    assert best is not None, "auto raises when nothing has a plan"
    return best


def _timed(problem: GroupsProblem, name: str, plan: GroupsPlan) -> RankedGroups:
    time_s = simulated_time_s(plan.program, problem.fabric, problem.ranks, problem.groups[0].transport)
    return RankedGroups(name=name, plan=plan, time_s=time_s, why="")


def _plan_of(problem: GroupsProblem, ranked: Sequence[RankedGroups]) -> Plan:
    from .io.fabric_document import fabric_document

    best = ranked[0]
    assert best.plan is not None and best.time_s is not None, "the first has a plan"
    bound = best.plan.bound or next((e.plan.bound for e in ranked if e.plan is not None and e.plan.bound is not None), None)
    transport = problem.groups[0].transport
    cost = Cost() if transport is None else Cost(transport=transport)
    name = program_hash(best.plan.program)
    decisions: dict[str, Any] = {}
    for i, (group, strategy) in enumerate(zip(problem.groups, best.plan.strategies, strict=True)):
        cite = CITES["joint" if strategy == "groups" else strategy].key
        decisions[f"collective:{i} {group.op}"] = {
            "strategy": strategy, "options": dict(best.plan.options), "notes": dict(best.plan.notes),
            "why": f"{best.name}: {best.why}", "cite": [cite],
        }  # fmt: skip
    return Plan(
        kind="collective",
        job={"collectives": [_job(group) for group in problem.groups], "cost": msgspec.to_builtins(cost), "works": {}},
        target_fabric=fabric_document(problem.fabric),
        placement=problem.ranks,
        programs={name: best.plan.program},
        cycle=(CycleEntry(program=name),),
        decisions=decisions,
        bound=bound or groups_bound(problem),
        prediction=Prediction(target_fabric=problem.fabric.name, time_s=best.time_s),
        alternatives=tuple(Alternative(what=e.name, time_s=e.time_s, why=e.why) for e in ranked[1:]),
        seed=problem.seed,
        versions={"meshwright": __version__},
    )


def _job(group: CollectiveProblem) -> dict[str, Any]:
    job: dict[str, Any] = {"op": group.op, "ranks": list(group.ranks), "size_bytes": group.size_bytes, "root": group.root}
    job["element_bytes"] = group.element_bytes
    if group.shard_bytes is not None:
        job["shard_bytes"] = list(group.shard_bytes)
    if group.peers:
        job["peers"] = list(group.peers)
    return job
