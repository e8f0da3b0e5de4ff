"""The driver for a job that is one collective: problem -> ranked schedules -> check -> plan."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from . import __version__
from .cost import Cost
from .decide.collective import CITES, CollectiveProblem, CollectiveStrategy, Ranked, auto
from .plan import Alternative, CycleEntry, Plan, Prediction
from .program_hash import program_hash

__all__ = ["plan_collective"]


def plan_collective(
    problem: CollectiveProblem, *, candidates: Sequence[CollectiveStrategy] | None = None, search: bool = False, each_s: float = float("inf")
) -> tuple[Plan, list[Ranked]]:
    """Plans one collective with the fastest of the candidates (default: all), simulated on the problem's fabric, and checks the plan.

    `search`: the simulator chooses the number of pieces; `each_s`: most seconds of one candidate.
    Returns the plan and the ranking it comes from, best first.
    Raises: what `decide.collective.auto` raises; CheckFailed when a planner is wrong (please report it).
    """
    from .drive import check
    from .io.fabric_document import fabric_document

    ranked = auto(problem, candidates=candidates, search=search, each_s=each_s)
    best = ranked[0]
    assert best.plan is not None and best.time_s is not None, "auto raises when nothing has a plan"
    cost = Cost() if problem.transport is None else Cost(transport=problem.transport)
    name = program_hash(best.plan.program)
    job = {
        "op": problem.op, "ranks": list(problem.ranks), "size_bytes": problem.size_bytes, "root": problem.root,
        "element_bytes": problem.element_bytes,
        **({} if problem.shard_bytes is None else {"shard_bytes": list(problem.shard_bytes)}),
        **({"peers": list(problem.peers)} if problem.peers else {}),
    }  # fmt: skip
    decision = {
        "strategy": best.plan.strategy, "options": dict(best.plan.options), "notes": dict(best.plan.notes), "why": best.why,
        "cite": [CITES[best.plan.strategy].key],
    }  # fmt: skip
    plan = Plan(
        kind="collective",
        job={"collective": job, "cost": msgspec.to_builtins(cost), "works": {}},
        target_fabric=fabric_document(problem.fabric),
        placement=(*problem.ranks, *best.plan.switches),
        programs={name: best.plan.program},
        cycle=(CycleEntry(program=name),),
        decisions={f"collective:{problem.op}": decision},
        bound=best.plan.bound,
        prediction=Prediction(target_fabric=problem.fabric.name, time_s=best.time_s),
        alternatives=tuple(Alternative(what=other.strategy, time_s=other.time_s, why=other.why) for other in ranked[1:]),
        seed=problem.seed,
        versions={"meshwright": __version__},
    )
    check(plan)
    return plan, ranked
