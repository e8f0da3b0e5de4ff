"""Kinds of plans whose steps are proved against a job of their own: tasks on devices, embedding tables, exchanges of graph training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..bound import Bound
from ..errors import MeshwrightError
from ..fabric.fabric import Fabric
from ..plan.plan import Plan
from ..program.program import Program
from .halo import check_halo, check_halo_bound, halo_job
from .placement import check_placement_bound, check_tasks, placed_tasks
from .program.order import Order
from .tables import check_table_bound, check_tables, sharded_tables
from .verdict import Finding

__all__ = ["OwnJob", "check_own_bound", "check_own_steps", "own_job"]


class _Kind(NamedTuple):
    """Field: where the plan says the job. job: read from plan and fabric; steps, bound: proofs."""

    field: str
    job: Callable[[Plan, Fabric], Any]
    steps: Callable[[Program, Any, Order], list[Finding]]
    bound: Callable[[Bound, Any, Plan, Fabric], list[Finding]]


KINDS = {
    "placement": _Kind("job.tasks", placed_tasks, check_tasks, lambda bound, job, plan, fabric: check_placement_bound(bound, job, fabric)),
    "tables": _Kind("job.tables", sharded_tables, check_tables, lambda bound, job, plan, fabric: check_table_bound(bound, job, fabric)),
    "halo": _Kind(
        "job.halo", lambda plan, fabric: halo_job(plan), check_halo,
        lambda bound, job, plan, fabric: check_halo_bound(bound, job, plan.placement, fabric),
    ),
}


class OwnJob(NamedTuple):
    """What the steps of a plan must do. kind: of the plan, and of its bound's certificate."""

    kind: str
    job: Any


def own_job(plan: Plan, fabric: Fabric, keep: list[OwnJob]) -> list[Finding]:
    """Adds the job of a plan of these kinds; a plan that does not say it is not proved."""
    if plan.kind not in KINDS:
        return []
    kind = KINDS[plan.kind]
    try:
        keep.append(OwnJob(plan.kind, kind.job(plan, fabric)))
    except (KeyError, TypeError, ValueError, MeshwrightError) as error:
        text = f"{kind.field}, what is to be done, lacks or mangles {error}"
        return [Finding(check="values", message=text, witness={"field": kind.field})]
    return []


def check_own_steps(program: Program, own: OwnJob, order: Order) -> list[Finding]:
    return KINDS[own.kind].steps(program, own.job, order)


def check_own_bound(bound: Bound, own: OwnJob, plan: Plan, fabric: Fabric) -> list[Finding]:
    return KINDS[own.kind].bound(bound, own.job, plan, fabric)
