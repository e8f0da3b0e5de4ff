"""Joins a run with its prediction: reads the run folder, simulates the plan's own program on the fabric that the run had, compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..cost import Cost
from ..drive.plans import works_of
from ..errors import UsageError
from ..evidence import evidence_of_timeline
from ..fabric.fabric import Fabric
from ..plan.plan import Plan
from ..program.calls import InlinedProgram, inline
from ..program.program import Kind, Part, Program
from ..report.compare import Comparison, compare
from ..run.launch.run_folder import RecordedRun, read_run
from ..run.recording.link_times import with_link_times
from ..run.recording.recording import numbers
from ..simulate import simulate_program
from ..simulate.network import unpinned
from ..timeline import Timeline
from ..trace.measured import Measured

__all__ = ["compare_run", "predicted_run", "require_costs"]


def compare_run(plan: Plan, folder: Path) -> tuple[Comparison, InlinedProgram]:
    """The comparison, and the inlined program whose step ids both timelines carry; the prediction and the typical step with their messages on links.

    Raises: UsageError (no run there, one of another plan, or one of several ranks without calibration), FormatError (broken files).
    """
    inlined = inline(plan.main, plan.programs)
    program = unpinned(inlined.program)  # the run's fabric is a shape of its own
    run = read_run(folder, plan)
    document, cost = run.document, run.cost
    if len(run.fabric.devices) < program.ranks:  # uncalibrated runs know the machine as one device
        require_costs(run, folder)
    measured = Measured(
        steps=[t for t, profiled in zip(run.steps, run.profiled, strict=True) if not profiled],
        step_s=document.step_s, losses=numbers(document.losses), memory_peak_bytes=document.memory_peak_bytes,
        rss_peak_bytes=document.rss_peak_bytes, cpu_s=document.process_cpu_s, run_fabric=run.fabric.name,
        pacing=str(document.pacing.get("mode", "none")), others_share=float(document.machine_use.get("others", 0.0)), notes=document.notes,
    )  # fmt: skip
    predicted = predicted_run(plan, program, run)
    cpu_s = _processor_seconds(program, cost, run.fabric, _placement(program, run))
    found = compare(plan, inlined, predicted, measured, evidence=evidence_of_timeline(predicted, program, cost), cpu_s=cpu_s)
    typical = found.typical_step()
    steps = [with_link_times(t, program, run.fabric, _placement(program, run)) if t is typical else t for t in measured.steps]
    return replace(found, measured=replace(measured, steps=steps)), inlined


def require_costs(run: RecordedRun, folder: Path) -> None:
    """Raises: UsageError for a run without calibration."""
    if run.document.calibration is None:
        text = "the run measured no costs, so there is no prediction for its machine"
        raise UsageError(text, where=str(folder), hint="run it without --no-calibration")


def predicted_run(plan: Plan, program: Program, run: RecordedRun) -> Timeline:
    """The plan's inlined program, simulated on the fabric that the run had with the costs that it measured."""
    placement = _placement(program, run)
    return simulate_program(unpinned(program), run.fabric, placement, run.cost, works=works_of(plan), staging=True, transfers=True)


def _placement(program: Program, run: RecordedRun) -> tuple[str, ...]:
    return tuple(d.name for d in run.fabric.devices[: program.ranks])


def _processor_seconds(program: Program, cost: Cost, fabric: Fabric, placement: Sequence[str]) -> list[float]:
    """Processor time of one step per rank: its begin, what compute steps were measured to use, the ends of messages, and the executor's own work."""
    steps, transport = program.steps, cost.transport
    known = [cost.table.get(program.ops.key(op)) for op in range(len(program.ops))]
    of_op = np.array([p.cpu_s if p is not None else 0.0 for p in known] + [0.0])
    time_s = np.where(steps.kind == Kind.COMPUTE, of_op[steps.op], 0.0)
    ends = ((steps.parts & Part.RECV) > 0).astype(np.int64) + ((steps.parts & Part.SEND) > 0)
    time_s = time_s + ends * (transport.cpu_per_message_s + program.message_bytes() * transport.cpu_per_byte_s)
    actor = program.lanes.actor[program.lane_of_step()]
    devices = [fabric.device(placement[r]) for r in range(program.ranks)]
    share = np.array([(d.cpu_period_s > 0 and d.cpu_share) or 1.0 for d in devices])
    time_s = time_s + transport.per_step_s * np.minimum(share, cost.table_share or 1.0)[actor]
    found = np.bincount(actor, weights=time_s, minlength=program.ranks)[: program.ranks]
    if thread := cost.thread:
        summed = [op for op in range(len(program.ops)) if program.ops.key(op) in thread.waits_in]
        waits = np.isin(np.arange(program.ranks), actor[(steps.kind == Kind.COMPUTE) & np.isin(steps.op, summed)])
        found = found + thread.begin_s + thread.sum_cpu_s * waits
    return [float(x) for x in found]
