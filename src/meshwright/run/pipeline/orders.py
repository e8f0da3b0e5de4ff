"""The order in which every rank walks through a pipeline plan's program."""

from __future__ import annotations

import numpy as np

from ...cost import Cost, Priced
from ...decide.pipeline.lower import fabric_of, price_table
from ...decide.pipeline.problem import PipelineProblem, Schedule
from ...plan.plan import Plan
from ...program.calls import inline
from ...program.program import Kind, Program
from ...program.tables import I32
from ...simulate import simulate_program
from ...timeline import Timeline
from ..executor.lanes import fuse_lanes
from .times import fill_seconds

__all__ = ["meetings", "pipeline_orders"]


def pipeline_orders(plan: Plan, problem: PipelineProblem, schedule: Schedule, cost: Cost | None = None) -> tuple[list[I32], Timeline]:
    """Every rank's walk through the plan's inlined program, and its simulation on the problem's own connections."""
    program = inline(plan.main, plan.programs).program
    fabric = fabric_of(problem)
    prices = cost or price_table(problem, schedule)
    if filled := {key: Priced(seconds) for key, seconds in fill_seconds(plan).items()}:
        prices = Cost(name=prices.name, table={**prices.table, **filled}, source=prices.source)
    timeline = simulate_program(program, fabric, [d.name for d in fabric.devices], prices)
    start, end = np.zeros(len(program.steps)), np.zeros(len(program.steps))
    known = timeline.spans.step >= 0
    start[timeline.spans.step[known]], end[timeline.spans.step[known]] = timeline.spans.start_s[known], timeline.spans.end_s[known]
    return fuse_lanes(program, start, end, late_receives=True, together=meetings(program)), timeline


def meetings(program: Program) -> list[list[int]]:
    """The steps of every sum over the ranks that hold a stage, one on each."""
    found: dict[str, list[int]] = {}
    for step in np.flatnonzero(program.steps.kind == Kind.COMPUTE).tolist():
        op = int(program.steps.op[step])
        if program.ops.name[op] == "sync" and program.ops.graph[op].startswith("fill:"):
            found.setdefault(program.ops.graph[op], []).append(step)
    return list(found.values())
