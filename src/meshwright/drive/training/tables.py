"""Embedding tables of a model to train: placed by the table decision, so that the step's planner spreads them as it spreads experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...cost_models.lookups import LookupCosts, assumed_costs
from ...decide.tables import TableProblem
from ...decide.tables.neuroshard import NeuroShard
from ...errors import MissingExtra, UsageError
from ...fabric.fabric import Fabric
from ...job import Training
from ...plan.plan import Plan
from ..plans import write_plan
from ..tables import plan_tables

__all__ = ["PlacedJob", "place_job_tables", "with_tables"]

# Bytes that a device keeps beside each weight, in weights: the gradient, and the optimizer's state. Others are taken to keep two, as Adam does.
KEPT = {"sgd": 1, "adagrad": 2, "rmsprop": 2, "rprop": 3}


class PlacedJob(NamedTuple):
    """The job of the model with placed tables, the table plan, where it was written, and notes on tables that stay with the other layers."""

    job: Training
    plan: Plan
    path: Path
    notes: list[str]

    @property
    def decision(self) -> dict[str, Any]:
        """The entry of the training plan's decisions."""
        made = self.plan.decisions["tables"]
        keys = ("strategy", "options", "why", "cost_s", "measured_on")
        bound = {} if self.plan.bound is None else {"bound_s": float(self.plan.bound)}
        return {**{k: made[k] for k in keys}, "cite": [made["cite"]], **bound, "parts": len(self.plan.placement), "plan": str(self.path)}


def place_job_tables(job: Training, fabric: Fabric, costs: Sequence[LookupCosts], *, parts: int, path: Path, seed: int = 0) -> PlacedJob:
    """Places the tables of `job.model` on the first `parts` devices, and writes that plan to `path`, which the model's name then holds.

    costs: of the machine's lookups; none: assumed. Raises: UsageError for a model without a function; CaptureError for one without tables;
    Infeasible; MissingExtra without torch."""
    try:
        from ...capture.embedding_tables import placeable_tables
        from ...capture.placed_tables import split_name
    except ImportError as error:
        raise MissingExtra("torch", extra="torch", needed_for="placing a model's tables") from error
    if split_name(job.model)[1] or ":" not in job.model or job.model.startswith("live:"):
        hint = "FILE.py:function; of a live model: meshwright.nn.tables.place_tables(model, PLAN)"
        raise UsageError(f"{job.model} names no function, or has placed tables", where="--tables", hint=hint)
    state = KEPT.get(job.optimizer.partition(":")[0], 3)
    tables, notes = placeable_tables(job.model, batch=job.global_batch, state_bytes=0, seed=job.seed)
    tables = msgspec.structs.replace(tables, state_bytes=state * tables.element_bytes)
    sub = replace(fabric, devices=fabric.devices[:parts], links=tuple(x for x in fabric.links if _inside(x.src, x.dst, fabric, parts)))
    known = costs or (assumed_costs(tables.batch, tables.element_bytes, min(d.memory_bandwidth_Bps for d in sub.devices)),)
    problem = TableProblem(tables=tables, fabric=sub, costs=tuple(known[:1]), kinds=(0,) * parts)
    plan, _, _ = plan_tables(problem, [NeuroShard()], seed=seed)
    write_plan(path, plan)
    return PlacedJob(msgspec.structs.replace(job, model=f"{job.model}@{path}"), plan, path, notes)


def _inside(a: str, b: str, fabric: Fabric, parts: int) -> bool:
    out = {d.name for d in fabric.devices[parts:]}
    return a not in out and b not in out


def with_tables(plan: Plan, placed: PlacedJob) -> Plan:
    """The training plan that says how its tables were placed."""
    decisions: Mapping[str, Any] = {**plan.decisions, "tables": placed.decision}
    return replace(plan, decisions=decisions)
