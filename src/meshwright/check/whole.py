"""All checks of a program, and of a plan. Each later check runs only on what the earlier ones found sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from ..errors import FormatError, TimeLimit, Unsupported
from ..fabric.fabric import Device, Fabric, Link, Provenance, Switch
from ..plan.plan import Plan, TrainingLayout
from ..plan.shapes import plans_of_shapes
from ..program.calls import inline
from ..program.fold import expand
from ..program.program import Kind, Program
from .bounds.certificate import check_bound
from .folded.fabric import folded_link_time, folded_memory
from .folded.program import check_folded
from .folded.shadow import Shadow, shadow
from .folded.training import prove_folded
from .job import check_bound_is_of_job, check_job
from .kinds import OwnJob, check_own_bound, check_own_steps, own_job
from .pipeline.filled import FillWork
from .pipeline.values import check_pipeline, runs_once, solid
from .pipeline.work import NoWork, PipelineWork, pipeline_work
from .program.deadlock import check_deadlock, find_cycle
from .program.links import busiest_link, check_links, link_time
from .program.memory import WorstMemory, check_memory, worst_order_memory
from .program.order import Order
from .program.races import check_races, turns_needed
from .program.values import check_collective
from .program.wellformed import check_wellformed, witness
from .training.fold_tree import check_folds
from .training.layout import check_layout
from .training.precision import check_precision
from .training.recompute import check_recompute, operands_of
from .training.segment_step import check_segment_steps
from .training.shapes import check_same_state
from .training.step import check_training
from .verdict import Finding, Verdict, guarded

__all__ = ["check_plan", "check_program"]

MAX_EXPANDED_STEPS = 400_000  # executed steps up to which a folded program is checked in its expanded form too


def check_program(
    program: Program, *, programs: Mapping[str, Program] | None = None, layout: TrainingLayout | None = None, work: PipelineWork | None = None,
    fills: Sequence[FillWork] = (), own: OwnJob | None = None,
) -> Verdict:  # fmt: skip
    """Form, deadlock, races and values of a program; with calls, each callee alone and then the whole inlined.

    Args:
        programs: content hash -> program, for the callees (and possibly others, which are not looked at).
        layout: of a training program; without it gradients are not followed.
        work: of a pipeline's step; fills: of the steps of a cycle for which the program stands, the other work they do.
        own: the job of a plan whose kind has one of its own (tasks, tables, exchanges).
    """
    return _checked(program, programs or {}, layout, work, fills, own, [])[0]


def _checked(
    program: Program, table: Mapping[str, Program], layout: TrainingLayout | None, work: PipelineWork | None, fills: Sequence[FillWork],
    own: OwnJob | None, seen: list[Shadow],
) -> tuple[Verdict, Program | None]:  # fmt: skip
    """As `check_program`; and the call-free, unfolded form that was checked, None where there is none: then `seen` gets what representatives see."""
    findings: list[Finding] = []
    notes: list[str] = []
    found = guarded("values", lambda: runs_once(program)) if work is not None and program.fold is None else []
    plain: Program | None = None
    if not found:
        found, plain = _plain(program, table, notes)
    findings += found
    if plain is None and not found:  # folded, and too big to write out
        if len(program.calls):
            return _folded_training(program, table, layout, notes, seen), None
        findings += guarded("fold", lambda: _folded(program, notes))
    if plain is None:
        return Verdict(findings=tuple(findings), notes=tuple(notes)), None
    flat = solid(plain) if work is not None else plain
    findings += guarded("deadlock", lambda: check_deadlock(flat))
    if not findings:
        order: list[Order] = []
        findings += guarded("races", lambda: _with_order(flat, order))
        findings += guarded("wellformed", lambda: _call_order(program)) if len(program.calls) else []
        if not findings and work is not None:
            for fill in fills or (None,):
                findings += guarded("values", lambda fill=fill: check_pipeline(flat, work, order[0], fill))  # type: ignore[misc]
        elif not findings and own is not None:
            findings += guarded("values", lambda: check_own_steps(flat, own, order[0]))
        elif not findings and flat.contracts:
            findings += guarded("values", lambda: check_collective(flat, order[0]))
        elif not findings and layout is not None:
            findings += guarded("values", lambda: check_training(flat, layout, order[0]))
        elif not findings:
            notes.append("values: no contract and no layout, so there is nothing to prove about the results")
    facts: dict[str, Any] = {"steps": len(plain.steps), "lanes": len(plain.lanes), "channels": len(plain.channels)}
    return Verdict(findings=tuple(findings), facts=facts, notes=tuple(notes)), plain


def _with_order(p: Program, keep: list[Order]) -> list[Finding]:
    keep.append(Order(p, iterations=turns_needed(p)))
    return check_races(p, keep[0])


def _plain(program: Program, table: Mapping[str, Program], notes: list[str]) -> tuple[list[Finding], Program | None]:
    """The call-free, unfolded form of a program that is well-formed, or what is wrong with it; neither for a fold too big to write out."""
    # Neither findings nor a program: the caller then proves it folded.
    if program.fold is not None and program.executed_steps > MAX_EXPANDED_STEPS:
        return [], None
    if program.fold is not None:
        unfolded: list[Program] = []
        failed = guarded("fold", lambda: _expand(program, unfolded, notes))
        if failed or not unfolded:
            return failed, None
        program = unfolded[0]
    findings = guarded("wellformed", lambda: check_wellformed(program))
    if findings or not len(program.calls):
        return findings, None if findings else program
    findings = _callees(program, table, notes)
    if findings:
        return findings, None
    try:
        flat = inline(program, table).program
    except (FormatError, Unsupported) as error:
        text = f"the calls cannot be written out: {error}"
        wrong = isinstance(error, FormatError)
        return [Finding(check="wellformed", message=text, witness={"where": error.where}, status="wrong" if wrong else "unknown")], None
    findings = guarded("wellformed", lambda: check_wellformed(flat))
    return findings, None if findings else flat


def _callees(program: Program, table: Mapping[str, Program], notes: list[str]) -> list[Finding]:
    """Every callee alone."""
    findings: list[Finding] = []
    for name in program.calls.names:
        if name not in table:
            text = f"program {name[:16]!r} is called but not given"
            return [Finding(check="wellformed", message=text, witness={"callee": name})]
        verdict = check_program(table[name], programs=table)
        for f in verdict.findings:
            text = f"callee {table[name].name or name[:12]!r}: {f.message}"
            findings.append(Finding(check=f.check, message=text, witness={**f.witness, "callee": name}, status=f.status))
        if not table[name].contracts:
            notes.append(f"callee {name[:12]} states no contract; its effect is checked in the inlined form only")
    return findings


def _folded_training(
    program: Program, table: Mapping[str, Program], layout: TrainingLayout | None, notes: list[str], seen: list[Shadow]
) -> Verdict:
    """A folded program that calls others and is too big to write out: its callees alone, then what its representatives see of it."""
    findings = _callees(program, table, notes)
    if not findings:
        findings = guarded("fold", lambda: _proved(program, table, layout, seen))
    if not findings:
        notes.append("folded: form, deadlock, races and values proved on the representatives, collectives over a folded axis by their contracts")
        if layout is None:
            notes.append("values: no contract and no layout, so there is nothing to prove about the results")
    facts: dict[str, Any] = {"steps": len(program.steps), "lanes": len(program.lanes), "channels": len(program.channels)}
    return Verdict(findings=tuple(findings), facts=facts, notes=tuple(notes))


def _proved(program: Program, table: Mapping[str, Program], layout: TrainingLayout | None, seen: list[Shadow]) -> list[Finding]:
    try:
        proof = prove_folded(program, table, layout)
        seen += [proof.shadow] if proof.shadow is not None else []
        return proof.found
    except (Unsupported, TimeLimit) as error:
        text = f"{program.executed_steps} executed steps are too many to expand (limit {MAX_EXPANDED_STEPS}), and they are not proved folded: {error}"
        return [Finding(check="fold", message=text, status="unknown")]


def _expand(program: Program, out: list[Program], notes: list[str]) -> list[Finding]:
    """The expanded form of a folded program."""
    out.append(expand(program))
    notes.append("folded: checked in its expanded form")
    return []


def _folded(program: Program, notes: list[str]) -> list[Finding]:
    """The proof class by class; where it does not apply, what can be said about the representatives, and `unknown`."""
    try:
        found = check_folded(program)
        notes.append("folded: form, deadlock, races and values proved for one component of every class, the others being its images")
        return found
    except (Unsupported, TimeLimit) as error:
        why = str(error)
    if not find_cycle(program):  # a cycle of the expanded form would be one of the representatives too
        notes.append("folded: the waits among its representatives, calls taken as single steps, have no cycle")
    text = f"{program.executed_steps} executed steps are too many to expand (limit {MAX_EXPANDED_STEPS}): races and values are not proved ({why})"
    return [Finding(check="fold", message=text, status="unknown")]


def _call_order(program: Program) -> list[Finding]:
    """Calls of one member on one communicator must have a defined order, also from different lanes."""
    if program.fold is not None:
        return []
    at = np.flatnonzero(program.steps.kind == Kind.CALL)
    order = Order(program)
    comm, actor = program.calls.comm[program.steps.op[at]], program.lanes.actor[order.lane_of_step[at]]
    by = np.lexsort((at, actor, comm))
    same = (comm[by][1:] == comm[by][:-1]) & (actor[by][1:] == actor[by][:-1])
    first, second = at[by][:-1][same].astype(np.int64), at[by][1:][same].astype(np.int64)
    bad = np.flatnonzero(~order.before(order.node(first, 0), order.node(second, 0)))
    found = []
    for k in bad[:8].tolist():
        one, two = program.describe(int(first[k])), program.describe(int(second[k]))
        text = f"{one} and {two} call on one communicator in no defined order; add an `after`"
        found.append(Finding(check="wellformed", message=text, witness=witness(program, int(second[k]), other_step=int(first[k]))))
    return found


# ---- plans -------------------------------------------------------------------------------------------------------------
def check_plan(plan: Plan, fabric: Fabric | None = None) -> Verdict:
    """Every program of the plan, its layout, memory, links, bound and prediction. `fabric`: by default the plan's own document."""
    if plan.shapes:
        return _of_shapes(plan, fabric)
    findings: list[Finding] = []
    notes: list[str] = []
    facts: dict[str, Any] = {"programs": len(plan.programs)}
    target: list[Fabric] = [fabric] if fabric is not None else []
    if fabric is None:
        findings += guarded("plan", lambda: target.append(_fabric_of(plan)) or [])  # type: ignore[func-returns-value]
    findings += guarded("plan", lambda: _cycle(plan))
    if plan.layout is not None:
        layout = plan.layout
        main = plan.main if plan.cycle and plan.cycle[0].program in plan.programs else None
        findings += guarded("plan", lambda: check_layout(layout, main.ranks if main is not None else None))
        findings += guarded("plan", lambda: check_precision(main, layout) if main is not None and not findings else [])
    if findings:
        return Verdict(findings=tuple(findings), facts=facts)
    called = {name for p in plan.programs.values() for name in p.calls.names}
    work: list[PipelineWork] = []
    findings += guarded("values", lambda: _work(plan, work))
    own: list[OwnJob] = []
    findings += guarded("values", lambda: own_job(plan, target[0], own))
    for name in sorted(set(plan.programs) - called):
        fills: list[FillWork] = []
        findings += guarded("values", lambda name=name, fills=fills: _fills(plan, name, fills))  # type: ignore[misc]
        program, seen = plan.programs[name], list[Shadow]()
        verdict, plain = _checked(program, plan.programs, plan.layout, work[0] if work else None, fills, own[0] if own else None, seen)
        findings += verdict.findings
        notes += verdict.notes
        if verdict.ok:
            findings += guarded("plan", lambda p=program, flat=plain, s=seen: _on_fabric(plan, p, flat, s, target[0], facts))  # type: ignore[misc]
    findings += guarded("plan", lambda: check_job(plan))
    findings += guarded("values", lambda: _recomputation(plan))
    findings += guarded("values", lambda: check_folds(plan))
    findings += guarded("certificate", lambda: _bound(plan, target[0], own))
    findings += guarded("certificate", lambda: check_bound_is_of_job(plan))
    return Verdict(findings=tuple(findings), facts=facts, notes=tuple(notes))


def _of_shapes(plan: Plan, fabric: Fabric | None) -> Verdict:
    """Each shape's plan as every plan, and that all of them keep one state."""
    plans = plans_of_shapes(plan)
    verdicts = [check_plan(p, fabric) for p in plans]
    findings = [f for v in verdicts for f in v.findings] or guarded("plan", lambda: check_same_state(plans))
    notes = dict.fromkeys(n for v in verdicts for n in v.notes)
    return Verdict(findings=tuple(findings), facts={**verdicts[0].facts, "programs": len(plan.programs)}, notes=tuple(notes))


def _work(plan: Plan, keep: list[PipelineWork]) -> list[Finding]:
    """What the steps of a pipeline plan compute; a plan that does not say is not proved."""
    if plan.kind != "pipeline" and "schedule" not in plan.job:
        return []
    try:
        keep.append(pipeline_work(plan))
    except NoWork as error:
        return [Finding(check="values", message=str(error), witness={"field": "job.schedule"})]
    return []


def _fills(plan: Plan, program: str, keep: list[FillWork]) -> list[Finding]:
    """Of each step of the cycle for which the program stands, the work put into its idle time."""
    document = plan.job.get("fill")
    try:
        if document is not None:
            keep += [FillWork(document, k) for k, entry in enumerate(plan.cycle) if entry.program == program]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        text = f"job.fill, the work in idle time, lacks or mangles {error}"
        return [Finding(check="values", message=text, witness={"field": "job.fill"})]
    return []


def _recomputation(plan: Plan) -> list[Finding]:
    outline = plan.job.get("graph_outline")
    if plan.layout is None:
        return []
    return check_recompute(plan.layout, operands_of(map(str, outline)) if outline else None) + check_segment_steps(plan.layout)


def _fabric_of(plan: Plan) -> Fabric:
    doc = plan.target_fabric
    kinds = {"devices": Device, "switches": Switch, "links": Link, "provenance": Provenance}
    parts = {field: tuple(msgspec.convert(list(doc.get(field, ())), list[kind])) for field, kind in kinds.items()}  # type: ignore[valid-type]
    return Fabric(name=str(doc["name"]), **parts)


def _cycle(plan: Plan) -> list[Finding]:
    found = []
    named = [(e.program, e.when) for e in plan.cycle] + [(x, e.when) for e in plan.cycle for x in e.table.values()]
    for program, when in named:
        if program not in plan.programs:
            found.append(Finding(check="plan", message=f"the cycle's program for {when!r} is not in the plan", witness={"program": program}))
    if not plan.cycle:
        found.append(Finding(check="plan", message="the plan runs no program", witness={}))
    return found


def _on_fabric(plan: Plan, program: Program, flat: Program | None, seen: list[Shadow], fabric: Fabric, facts: dict[str, Any]) -> list[Finding]:
    """Links and memory of a sound program where the plan puts it. `flat`: its call-free, unfolded form; None: it is too big to write out."""
    claimed = plan.prediction.time_s if plan.prediction is not None and program is plan.main else None
    if flat is None:
        return _folded_on_fabric(plan, program, seen, fabric, claimed, facts)
    found = guarded("links", lambda: check_links(flat, fabric, plan.placement, claimed))
    if found:
        return found
    time, _ = link_time(flat, fabric, plan.placement)
    if time:
        link = max(time, key=lambda x: time[x])
        facts["busiest_link"] = f"{fabric.links[link].src} > {fabric.links[link].dst}"
        facts["busiest_link_s"] = str(time[link])
    worst = worst_order_memory(flat)
    facts |= _memory_facts(worst, flat.ranks)
    return found + guarded("memory", lambda: check_memory(flat, worst, fabric, plan.placement))


def _memory_facts(worst: WorstMemory, ranks: int) -> dict[str, Any]:
    return {"memory_worst_bytes": worst.needed_bytes[:ranks], "memory_worst_exact": all(worst.exact[:ranks])}


def _folded_on_fabric(
    plan: Plan, program: Program, seen: list[Shadow], fabric: Fabric, claimed: float | None, facts: dict[str, Any]
) -> list[Finding]:
    """The same of a folded program that is too big to write out."""

    def links() -> list[Finding]:
        time, found = folded_link_time(program, plan.programs, fabric, plan.placement)
        return found + busiest_link(time, fabric, claimed)

    def memory() -> list[Finding]:
        made = seen[0] if seen else shadow(program, plan.programs)
        worst = folded_memory(made)
        facts.update(_memory_facts(worst, made.program.ranks))
        return check_memory(made.program, worst, fabric, plan.placement)

    # Memory is looked at where work is done between collectives; of a collective alone the contract says what every rank holds.
    return guarded("links", links) + (guarded("memory", memory) if len(program.calls) else [])


def _bound(plan: Plan, fabric: Fabric, own: Sequence[OwnJob]) -> list[Finding]:
    if plan.bound is None:
        return []
    if own and plan.bound.certificate.kind == own[0].kind:
        found = check_own_bound(plan.bound, own[0], plan, fabric)
    else:
        found = check_bound(plan.bound, fabric, layout=plan.layout)
    p = plan.prediction
    if p is not None and plan.bound.unit == "s" and Fraction(p.time_s) < plan.bound.exact * (1 - Fraction(1, 10**9)):
        text = f"the prediction {p.time_s:.6g} s is below the bound {float(plan.bound):.6g} s"
        found.append(Finding(check="plan", message=text, witness={"time_s": p.time_s, "bound": plan.bound.value}))
    return found

