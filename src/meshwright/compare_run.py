"""Joins a run with its prediction: reads the run folder, simulates the plan's own program on the fabric that the run had, compares."""

from __future__ import annotations

from pathlib import Path

from .drive import works_of
from .evidence import evidence_of_timeline
from .plan import Plan
from .program import Kind
from .program_calls import InlinedProgram, inline
from .report.compare import Comparison, compare
from .run.read import read_run
from .simulate import simulate_program

__all__ = ["compare_run"]


def compare_run(plan: Plan, folder: Path) -> tuple[Comparison, InlinedProgram]:
    """The comparison, and the inlined program whose step ids both timelines carry.

    Raises: UsageError (no run there, or one of another plan), FormatError (broken files).
    """
    inlined = inline(plan.main, plan.programs)
    program = inlined.program
    _, measured, fabric, cost = read_run(folder, program)
    placement = tuple(d.name for d in fabric.devices[: program.ranks])
    predicted = simulate_program(program, fabric, placement, cost, works=works_of(plan))
    cpu_s = [0.0] * program.ranks
    actor = program.lanes.actor[program.lane_of_step()]
    for step in range(len(program.steps)):
        if program.steps.kind[step] == Kind.COMPUTE:
            known = cost.table.get(program.ops.key(int(program.steps.op[step])))
            cpu_s[int(actor[step])] += known.cpu_s if known is not None else 0.0
    return compare(plan, inlined, predicted, measured, evidence=evidence_of_timeline(predicted, program, cost), cpu_s=cpu_s), inlined
