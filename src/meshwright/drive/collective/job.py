"""The driver for a job that is one collective: problem -> ranked schedules -> check -> plan."""

from __future__ import annotations

from collections.abc import Sequence

from ...cost import Cost
from ...decide.collective import CollectiveProblem, CollectiveStrategy, auto, strategy
from ...decide.collective.problem import Ranked, cut_among
from ...kernels.effort import why_with
from ...plan.plan import Alternative, Plan
from ..plans import check_plan, make_plan

__all__ = ["plan_collective"]


def plan_collective(
    problem: CollectiveProblem, *, candidates: Sequence[CollectiveStrategy] | None = None, search: bool = False, each_s: float = float("inf")
) -> tuple[Plan, list[Ranked]]:
    """Plans one collective with the fastest of the candidates (default: all), simulated on the problem's fabric, and checks the plan.

    `search`: the simulator chooses the number of pieces; `each_s`: most seconds of counted work of one candidate.
    Returns the plan and the ranking it comes from, best first.
    Raises: what `decide.collective.auto` raises; CheckFailed when a planner is wrong (please report it).
    """
    ranked = auto(problem, candidates=candidates, search=search, each_s=each_s)
    best = ranked[0]
    assert best.plan is not None and best.time_s is not None, "auto raises when nothing has a plan"
    cost = Cost() if problem.transport is None else Cost(transport=problem.transport)
    job = {
        "op": problem.op, "ranks": list(problem.ranks), "size_bytes": problem.size_bytes, "root": problem.root,
        "element_bytes": problem.element_bytes,
        **({} if problem.shard_bytes is None else {"shard_bytes": list(problem.shard_bytes)}),
        **({"peers": list(problem.peers)} if problem.peers else {}),
        **({"reproducible": problem.reproducible} if problem.reproducible != "run" else {}),
        **({"numbers": list(problem.numbers)} if problem.numbers else {}),
    }  # fmt: skip
    decision = {
        "strategy": best.plan.strategy, "options": dict(best.plan.options), "notes": dict(best.plan.notes),
        **why_with(best.why, cut_among(ranked)), "cite": [strategy(best.plan.strategy).cite.key],
    }  # fmt: skip
    plan = make_plan(
        "collective", problem.fabric, (*problem.ranks, *best.plan.switches), best.plan.program, job={"collective": job}, cost=cost,
        decisions={f"collective:{problem.op}": decision}, bound=best.plan.bound, prediction=best.time_s, seed=problem.seed,
        alternatives=(Alternative(what=other.strategy, time_s=other.time_s, why=other.why) for other in ranked[1:]),
    )  # fmt: skip
    check_plan(plan)
    return plan, ranked
