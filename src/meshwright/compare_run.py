"""Joins a run with its prediction: reads the run folder, simulates the plan's own program on the fabric that the run had, compares."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .cost import Cost
from .drive import works_of
from .evidence import evidence_of_timeline
from .plan import Plan
from .program import Kind, Part, Program
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
    cpu_s = _processor_seconds(program, cost)
    return compare(plan, inlined, predicted, measured, evidence=evidence_of_timeline(predicted, program, cost), cpu_s=cpu_s), inlined


def _processor_seconds(program: Program, cost: Cost) -> list[float]:
    """Processor time of one step per rank: what compute steps were measured to use, and the ends of messages."""
    steps, transport = program.steps, cost.transport
    known = [cost.table.get(program.ops.key(op)) for op in range(len(program.ops))]
    of_op = np.array([p.cpu_s if p is not None else 0.0 for p in known] + [0.0])
    time_s = np.where(steps.kind == Kind.COMPUTE, of_op[steps.op], 0.0)
    ends = ((steps.parts & Part.RECV) > 0).astype(np.int64) + ((steps.parts & Part.SEND) > 0)
    time_s = time_s + ends * (transport.cpu_per_message_s + program.message_bytes() * transport.cpu_per_byte_s)
    actor = program.lanes.actor[program.lane_of_step()]
    return [float(x) for x in np.bincount(actor, weights=time_s, minlength=program.ranks)[: program.ranks]]
