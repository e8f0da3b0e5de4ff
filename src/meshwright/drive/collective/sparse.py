"""The driver for sparse all-reduces: problem -> ranked strategies -> check of every program -> plan with its cycle."""

from __future__ import annotations

from collections.abc import Sequence

from ...check import check_program, check_volume
from ...cost import assumed_cost
from ...decide.collective.sparse import NAMES, SparsePlan, SparseProblem, strategy
from ...decide.collective.sparse.choice import SparseRanked, rank_sparse
from ...errors import CheckFailed
from ...plan.plan import Alternative, Plan
from ...program.hash import program_hash
from ..plans import check_plan, make_plan

__all__ = ["check_sparse", "plan_sparse"]


def plan_sparse(problem: SparseProblem, *, strategies: Sequence[str] = ()) -> tuple[Plan | None, list[SparseRanked]]:
    """Rank strategies (default: all, and the dense ring), check every program of each, and plan with the best; None where dense is best.

    Raises: UnknownName, CheckFailed when a planner is wrong (please report it).
    """
    ranked = rank_sparse(problem, [(name, strategy(name)()) for name in strategies or NAMES])
    for row in ranked:
        if row.plan is not None:
            check_sparse(row.plan, problem)
    best = ranked[0]
    return (None if best.plan is None else _plan(problem, best, best.plan, ranked)), ranked


def check_sparse(plan: SparsePlan, problem: SparseProblem) -> None:
    """Every program delivers every rank's contribution to every region once, and is expected to move no more than the plan says."""
    for name, program in plan.programs.items():
        rounding = problem.entry_bytes * len(program.sizes)  # sizes are whole entries
        findings = (*check_program(program).findings, *check_volume(program, 4 * plan.words + rounding))
        if findings:
            raise CheckFailed(f"{plan.strategy} {name}: {findings[0].message}", where=findings[0].check, data=dict(findings[0].witness))


def _plan(problem: SparseProblem, best: SparseRanked, plan: SparsePlan, ranked: Sequence[SparseRanked]) -> Plan:
    names = {kind: program_hash(program) for kind, program in plan.programs.items()}
    job = {"op": "all-reduce", "ranks": list(problem.ranks), "size_bytes": 4 * problem.elements, "root": 0, "element_bytes": 4}
    decision = {
        "strategy": plan.strategy, "options": dict(plan.options), "notes": {"k": problem.k, "words": plan.words, **plan.notes},
        "why": "least mean time of a step in simulation", "cite": [strategy(plan.strategy).cite.key],
    }  # fmt: skip
    usual = plan.programs[plan.usual]
    made = make_plan(
        "collective", problem.fabric, problem.ranks, usual, job={"collective": job}, cost=problem.cost or assumed_cost(problem.fabric),
        works=plan.works, others=(p for p in plan.programs.values() if p is not usual), table=names if len(names) > 1 else None,
        decisions={"collective:all-reduce": decision}, prediction=best.time_s or 0.0,
        alternatives=(Alternative(what=x.strategy, time_s=x.time_s, why=x.why) for x in ranked if x is not best),
    )  # fmt: skip
    check_plan(made)
    return made
