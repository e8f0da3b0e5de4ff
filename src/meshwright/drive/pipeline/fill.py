"""Deferrable work put into the idle time of a pipeline plan, with the proof that no step gets longer.

The proof: every step of the cycle, with its work, is a program that is checked for form, deadlock and races, and simulated on the same fabric as the
step without the work; its makespan may not be larger. Beside that, a checker that shares nothing with the planner goes through the placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import msgspec
import numpy as np

from ...check.fill import Actions, check_filling
from ...check.verdict import Finding
from ...decide.pipeline import PipelineProblem, Schedule
from ...decide.pipeline.fill import CITE, Filling, fill_bubbles, idle_times
from ...decide.pipeline.fill_program import fill_prices, fill_step
from ...decide.pipeline.judge import Judged, judge
from ...decide.pipeline.lower import fabric_of, lower_schedule, price_table
from ...deferrable import FillWork
from ...errors import CheckFailed, Infeasible, UsageError
from ...plan.plan import CycleEntry, Plan
from ...program.calls import inline
from ...program.hash import program_hash
from ...program.program import Program, Unit
from ...simulate import simulate_program
from .pipelines import collective_planner, problem_of_plan, schedule_of_plan

__all__ = ["Filled", "check_filled", "fill_plan", "require_unfilled"]

# Share of a step by which sums of floats in another order may differ.
ROUNDING = 1e-9
# Shares added to the margin one after the other as long as the work's messages make a step longer.
ADDED_MARGIN_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True, kw_only=True)
class Filled:
    """`programs[k]`: step k of the cycle with its work; `makespans_s[k]`: simulated. `document`: as in the plan."""

    plan: Plan
    judged: Judged
    filling: Filling
    makespans_s: tuple[float, ...]
    margin: float
    memory_bytes: tuple[int, ...]


def require_unfilled(plan: Plan) -> None:
    """Raises: UsageError when the plan's idle time is filled already."""
    if "fill" in plan.job:
        raise UsageError("the plan is filled already", hint="name the plan that `meshwright pipeline plan` wrote, and all work at once")


def fill_plan(
    plan: Plan, make_work: Callable[[PipelineProblem, Schedule], FillWork], *, margin: float = 0.0, most_steps: int = 256
) -> Filled:
    """The plan's schedule with the work in its idle time: a plan whose cycle has one program per step.

    Raises: UsageError (no pipeline plan, filled already, work that cannot be), Infeasible when work fits nowhere, the memory does not hold it, or its
    messages would make a step longer; CheckFailed when a checker refuses the result.
    """
    schedule = schedule_of_plan(plan)
    require_unfilled(plan)
    problem = problem_of_plan(plan)
    judged = judge(problem, schedule, collective_planner(problem))
    schedule = judged.schedule
    flat = inline(judged.program, judged.callees).program
    idle = idle_times(flat, judged.timeline)
    work = make_work(problem, schedule)
    longest = 0.0
    for more in ADDED_MARGIN_SHARES:
        filling = fill_bubbles(problem, idle, work, margin=margin + more, most_steps=most_steps)
        programs, callees, makespans = _steps(problem, schedule, filling)
        longest = max(makespans)
        if longest <= idle.step_s * (1 + ROUNDING):
            return _filled(plan, problem, judged, flat, filling, programs, callees, makespans, margin + more)
    raise Infeasible(
        f"the work's messages make a step last {longest:g} s instead of {idle.step_s:g} s", where="work", hint="smaller messages, or a larger margin",
        data={"step_s": idle.step_s, "filled_s": longest},
    )  # fmt: skip


def check_filled(plan: Plan) -> list[Finding]:
    """Findings about the document of a filled plan: its placements and bound beside the step without the work, simulated again.

    Raises: as `schedule_of_plan`.
    """
    problem = problem_of_plan(plan)
    judged = judge(problem, schedule_of_plan(plan), collective_planner(problem))
    return check_filling(plan.job["fill"], _actions(inline(judged.program, judged.callees).program, judged), judged.time_s)


def _steps(problem: PipelineProblem, schedule: Schedule, filling: Filling) -> tuple[list[Program], dict[str, Program], list[float]]:
    """Every step of the cycle: its program, checked, and its simulated makespan."""
    from ...check import check_program

    fabric = fabric_of(problem)
    names = [d.name for d in fabric.devices]
    cost = fill_prices(filling, price_table(problem, schedule))
    collectives = collective_planner(problem)
    programs, makespans, table = [], [], {}
    known: dict[str, float] = {}
    for step in range(filling.steps):
        program, callees = lower_schedule(problem, schedule, collectives, fill=partial(fill_step, filling=filling, step=step))
        table.update(callees)
        name = program_hash(program)
        if name not in known:
            check_program(program, programs=callees).raise_if_wrong()
            known[name] = simulate_program(program, fabric, names, cost, programs=callees, record=False, memory=False).makespan_s
        programs.append(program)
        makespans.append(known[name])
    return programs, table, makespans


def _filled(
    plan: Plan, problem: PipelineProblem, judged: Judged, flat: Program, filling: Filling, programs: list[Program], callees: dict[str, Program],
    makespans: list[float], margin: float,
) -> Filled:  # fmt: skip
    ranks = problem.devices * problem.data
    base = [judged.memory_bytes[r // problem.data] for r in range(ranks)]
    resident = list(filling.work.resident_bytes) or [0] * ranks
    memory = tuple(b + r + k for b, r, k in zip(base, resident, filling.kept_bytes, strict=True))
    caps = [problem.memory_cap_bytes[r // problem.data] for r in range(ranks)] if problem.memory_cap_bytes else []
    _require_memory(memory, caps)
    document = {
        "steps": filling.steps, "step_s": filling.idle.step_s, "makespans_s": makespans, "margin": margin, "order": filling.order,
        "items": msgspec.to_builtins(filling.work.items), "placements": [asdict(p) for p in filling.placements],
        "base_bytes": base, "resident_bytes": resident, "kept_bytes": list(filling.kept_bytes), "memory_bytes": list(memory), "cap_bytes": caps,
        "exposed_s": list(filling.work.exposed_s) or [0.0] * ranks, "busy_s": list(filling.idle.busy_s),
        "used_before": filling.used(filled=False), "used_after": filling.used(filled=True), "bound": msgspec.to_builtins(filling.bound),
    }  # fmt: skip
    found = check_filling(document, _actions(flat, judged), judged.time_s)
    if found:
        raise CheckFailed(found[0].message, where="fill", data=dict(found[0].witness))
    hashes = [program_hash(p) for p in programs]
    cost = fill_prices(filling, price_table(problem, judged.schedule))
    made = replace(
        plan, job={**plan.job, "cost": msgspec.to_builtins(cost), "fill": document},
        programs={**dict(zip(hashes, programs, strict=True)), **callees},
        cycle=tuple(CycleEntry(program=h, when=f"step % {filling.steps} == {k}" if filling.steps > 1 else "every") for k, h in enumerate(hashes)),
        decisions={**plan.decisions, "fill": {
            "strategy": "pipefisher", "options": {"margin": margin}, "why": f"{len(filling.work.items)} items in {filling.steps} steps",
            "cite": [CITE.key],
        }},
    )  # fmt: skip
    from ..plans import check_plan

    check_plan(made)
    return Filled(plan=made, judged=judged, filling=filling, makespans_s=tuple(makespans), margin=margin, memory_bytes=memory)


def _require_memory(memory: tuple[int, ...], caps: list[int]) -> None:
    for rank, (needed, cap) in enumerate(zip(memory, caps, strict=False)):
        if cap and needed > cap:
            raise Infeasible(
                f"rank {rank} would hold up to {needed} bytes with the work, {cap} are there", where="memory_cap_bytes",
                hint="keep less per item, take a schedule that needs less memory, or raise the cap",
                data={"limit": "memory", "rank": rank, "needed_bytes": needed, "available_bytes": cap},
            )  # fmt: skip


def _actions(program: Program, judged: Judged) -> Actions:
    """Per rank, (action, start, end) of the step without the work, from its simulation."""
    spans = judged.timeline.spans
    when = {s: (a, b) for s, a, b in zip(spans.step.tolist(), spans.start_s.tolist(), spans.end_s.tolist(), strict=True)}
    rows = []
    for rank in range(program.ranks):
        lane = int(np.flatnonzero((program.lanes.actor == rank) & (program.lanes.unit == int(Unit.COMPUTE)))[0])
        own = []
        for step in range(int(program.lanes.start[lane]), int(program.lanes.end[lane])):
            op = int(program.steps.op[step])
            first, _, last = program.ops.module[op].partition("-")
            numbers = range(int(first), int(last) + 1) if last else [int(program.ops.microbatch[op])]
            for n, m in enumerate(numbers):  # micro-batches that run together share one span
                start, end = when[step]
                own.append((f"{int(program.ops.stage[op])}{program.ops.name[op]}{m}", start if n == 0 else end, end))
        rows.append(own)
    return rows
