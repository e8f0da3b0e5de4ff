"""Explains a plan: where time and memory go, what binds, what it rests on, why the others lost, and what would change the answer.

Everything is simulated again from the plan file. What needs other layouts (runners-up, how wrong rates may be, what-if) needs the model's graph:
a file, or the model captured again. Where it is not at hand the explanation says so and leaves that part out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..cost import Cost
from ..drive.plans import works_of
from ..drive.training.changes import WhatIf, what_ifs
from ..drive.training.context import Context, SearchBudget
from ..drive.training.decisions import choose, context_of, refine
from ..drive.training.evaluated import Evaluated, Policy
from ..drive.training.pipeline import schedule_asked
from ..drive.training.recompute import RecomputeWanted
from ..drive.training.wishes import PrecisionWanted
from ..errors import MeshwrightError, UsageError
from ..fabric.fabric import Fabric
from ..graph.graph import OpGraph
from ..job import Training
from ..kernels.effort import Budget, Cut
from ..kernels.stages import stage
from ..ledger.captured import captured_flops
from ..ledger.flops import Causal
from ..plan.context import exchange_of
from ..plan.forward_again import run_again
from ..plan.narrowed import in_precision
from ..plan.plan import Plan
from .assumptions import ERRORS, Assumption, ErrorBars, assumptions_of
from .breakdown import Breakdown, Simulated, breakdown, simulated
from .neighbours import among, neighbours
from .recomputation import RecomputeAdvice, recompute_advice
from .rivals import Crossing, Rival, Scenario, crossings, interval, name_of, rivals_of

__all__ = ["Explanation", "PlanFlops", "error_bars", "explain_plan"]

AGAIN = ("layout", "schedule")  # decisions among layouts that are made again
MAX_RIVALS = 3  # runners-up that are tried at other rates
MAX_OTHERS_WORK_S = 30.0  # counted work of the search for other layouts; README's job counts 4
MAX_WHAT_IFS = 3  # changed fabrics of one explanation
MAX_WHAT_IF_WORK_S = 10.0  # of planning the job on one changed fabric


class PlanFlops(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of a step and the shares of peak. `model` is 0 when the graph was not at hand: then `hardware` is the count of the plan's bound."""

    model: int
    hardware: int
    peak_flops: float  # of all devices together
    step_time_s: float
    measured: bool
    mfu: float
    hfu: float
    causal: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    breakdown: Breakdown
    flops: PlanFlops
    assumptions: tuple[Assumption, ...]
    low_s: float
    high_s: float
    rivals: tuple[Rival, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    recompute: RecomputeAdvice | None = None
    notes: tuple[str, ...] = ()
    cut: Cut | None = None


@dataclass(frozen=True)
class _Others:
    """The layouts beside the chosen one, all under one cost."""

    chosen: Evaluated
    judged: list[Evaluated]
    context: Context


@stage("asking what would change the plan")
def explain_plan(
    plan: Plan, *, graph_path: Path | None = None, quick: bool = False, errors: Mapping[str, float] | None = None,
    step_time_s: float | None = None, causal: Causal = "full", time_limit_s: float = 300.0,
) -> Explanation:  # fmt: skip
    """Args: errors: relative errors by evidence, over `ERRORS`; step_time_s: a measured step, for MFU and HFU; quick: without other layouts.

    Raises: UsageError (not a training plan; a graph of another model), FormatError (a bad graph file).
    """
    budget = Budget(4 * MAX_RIVALS + MAX_WHAT_IFS, time_limit_s=time_limit_s)
    run, notes = simulated(plan), list[str]()
    found = breakdown(run)
    graph = None if quick else _graph(plan, graph_path, notes)
    chosen = _chosen(plan, run, run.cost)
    others = _others(plan, run, chosen, graph, time_limit_s, notes) if graph is not None else None
    bars = error_bars(run, found, errors)
    extra: dict[str, object] = {}
    if others is not None and graph is not None:
        kept, rivals = rivals_of(others.chosen, others.judged, limit=16)
        fitting = [e for e in kept if e.excess_bytes <= 0][:MAX_RIVALS]
        extra["rivals"] = rivals
        extra["crossings"] = crossings(Scenario(run.fabric), others.chosen, fitting, budget)
        if budget.cut:
            notes.append("not all runners-up were tried at other rates: the time limit was reached (--time-limit)")
        again, now_s = _planner(others.context), others.chosen.time_s
        if plan.main.fold is not None:
            again, now_s = among([others.chosen, *kept], notes), Scenario(run.fabric).time_s(others.chosen, "links", 1.0)
        extra["what_ifs"] = what_ifs(run.fabric, now_s, again, budget)
        if plan.layout is not None and not any(s.recompute or s.step is not None for s in plan.layout.segments):
            at = others.context.evaluator.graph_for(plan.layout)
            device = run.fabric.device(plan.placement[0])
            extra["recompute"] = recompute_advice(at, plan.layout, found.stages, run.cost, device)
        if not fitting:
            notes.append("no other layout fits or was simulated: nothing to compare with")
    return Explanation(
        breakdown=found, flops=_flops(plan, run, graph, step_time_s or found.time_s, step_time_s is not None, causal),
        assumptions=bars.assumptions, low_s=bars.low_s, high_s=bars.high_s, notes=tuple(notes), cut=budget.cut, **extra,  # type: ignore[arg-type]
    )  # fmt: skip


def error_bars(run: Simulated, found: Breakdown, errors: Mapping[str, float] | None = None) -> ErrorBars:
    """How far the step of a training plan may be off. `errors`: relative, by evidence, over `ERRORS`."""
    wide = {**ERRORS, **(errors or {})}
    chosen = _chosen(run.plan, run, run.cost)
    compute = sum(wide[kind] * share for kind, share in found.evidence.items() if share > 0)
    low, high = interval(Scenario(run.fabric), chosen, compute=compute, links=wide["links"])
    return ErrorBars(assumptions=assumptions_of(run, wide, chosen.steady), low_s=low, high_s=high)


def _graph(plan: Plan, path: Path | None, notes: list[str]) -> OpGraph | None:
    if path is not None:
        from ..io.model.graph import read_graph

        graph = read_graph(path)
    else:
        try:
            from ..capture.precision import capture_job

            training = msgspec.convert(plan.job["training"], Training)
            graph = capture_job(training)
        except MeshwrightError as error:
            notes.append(f"other layouts were not looked at: the model cannot be captured here ({error.message}); give --graph")
            return None
    if in_precision(graph, PrecisionWanted.of(plan.layout).precision).fingerprint() != plan.job["graph_fingerprint"]:
        if path is not None:
            raise UsageError("is the graph of another model than the plan's", where=str(path), hint="capture the plan's model")
        notes.append("other layouts were not looked at: the model has changed since it was planned")
        return None
    return graph


def _chosen(plan: Plan, run: Simulated, cost: Cost) -> Evaluated:
    from ..decide.layout import Degrees, LayoutCandidate
    from ..simulate import simulate_stored

    layout = plan.layout
    assert layout is not None
    degrees = Degrees(
        layout.data // layout.context, layout.tensor, layout.pipeline, layout.microbatch_size, layout.sequence, layout.context,
        expert=layout.expert, exchange=exchange_of(layout),
    )  # fmt: skip
    schedule = str(plan.decisions.get("pipeline", {}).get("options", {}).get("schedule", ""))
    callees = {name: program for name, program in plan.programs.items() if program is not plan.main}
    works = works_of(plan)
    timeline = run.timeline
    if cost is not run.cost:
        timeline = simulate_stored(run.inlined.program, run.fabric, plan.placement, cost, works=works, record=False)
    return Evaluated(
        candidate=LayoutCandidate(degrees=degrees, layout=layout, schedule=schedule), placement=plan.placement,
        placement_name=str(plan.decisions.get("placement", {}).get("strategy", "")), program=plan.main, callees=callees, works=works,
        timeline=timeline, policy=Policy(str(plan.decisions.get("recompute", {}).get("strategy", "none"))), fabric=run.fabric, cost=cost,
    )  # fmt: skip


def _common_cost(plan: Plan, run: Simulated, notes: list[str]) -> Cost:
    """A cost under which all layouts can be compared: prices of this plan's own steps fit the roofline, which then prices everybody."""
    works = works_of(plan)
    known = {k: p for k, p in run.cost.table.items() if k in works}
    if not known:
        return run.cost
    plain = msgspec.structs.replace(run.cost, table={k: p for k, p in run.cost.table.items() if k not in works})
    device = run.fabric.device(plan.placement[0])
    guessed = sum(plain.roofline(works[k], device).time_s for k in known)
    ratio = sum(p.time_s for p in known.values()) / guessed if guessed else 1.0
    notes.append(f"layouts are compared under a roofline fitted to this plan's {len(known)} priced steps (they take {ratio:.3g} times its time)")
    return msgspec.structs.replace(
        plain, flops_efficiency=plain.flops_efficiency / ratio, memory_efficiency=plain.memory_efficiency / ratio,
        per_call_s=plain.per_call_s * ratio, evidence="interpolated",
    )  # fmt: skip


def _others(plan: Plan, run: Simulated, chosen: Evaluated, graph: OpGraph, limit_s: float, notes: list[str]) -> _Others | None:
    cost = _common_cost(plan, run, notes)
    asked = RecomputeWanted(plan.decisions.get("recompute", {}).get("options", {}).get("policy", "auto"))
    wishes = (asked, PrecisionWanted.of(plan.layout), schedule_asked(plan))
    job = msgspec.convert(plan.job["training"], Training)
    limits = SearchBudget(work_s=MAX_OTHERS_WORK_S, time_limit_s=limit_s)
    context = context_of(job, run.fabric, cost, graph=graph, wishes=wishes, budget=limits)
    try:
        judged = neighbours(context, plan) if plan.main.fold is not None else choose(context, AGAIN).judged
    except MeshwrightError as error:
        notes.append(f"other layouts were not looked at: {error.message}")
        return None
    return _Others(chosen if cost is run.cost else _chosen(plan, run, cost), judged, context)


def _planner(context: Context) -> Callable[[Fabric], tuple[float, str]]:
    def best(fabric: Fabric) -> tuple[float, str]:
        from ..drive.training.no_plan import nothing_fits

        there = context.on(fabric, work_s=MAX_WHAT_IF_WORK_S)
        found = choose(there, AGAIN)
        if found.best is None:
            raise nothing_fits(found.judged, fabric)
        made = refine(there, found, ("collectives",)).winner
        return made.time_s, name_of(made)

    return best


def _flops(plan: Plan, run: Simulated, graph: OpGraph | None, time_s: float, measured: bool, causal: Causal) -> PlanFlops:
    layout = plan.layout
    assert layout is not None
    peak = float(sum(run.fabric.device(d).flops.get(run.cost.dtype, run.cost.default_flops) for d in plan.placement[: layout.ranks]))
    if graph is not None:
        again = [n for s in layout.segments for names in s.computed_again() for n in names]
        again += [n for s in layout.segments if s.key in run_again(layout) for n in s.nodes]
        counted = captured_flops(graph, again).scaled(layout.global_batch, graph.batch_size)
        counted = counted.halved() if causal == "half" else counted
        model, hardware = counted.model, counted.hardware
    else:
        certificate = plan.bound.certificate if plan.bound is not None else None
        hardware = int(certificate.data["flops"]) if certificate is not None and certificate.kind == "roofline" else 0
        for s in layout.segments:  # what runs again, on all ranks that share a segment
            parts = sum(s.shares) / max(s.shares) if s.shares else layout.tensor if s.split else 1
            twice = s.forward.flops if s.key in run_again(layout) else 0
            hardware += round((s.again.flops + twice) * parts) * layout.all_microbatches
        model = 0
    could = time_s * peak
    return PlanFlops(
        model=model, hardware=hardware, peak_flops=peak, step_time_s=time_s, measured=measured, mfu=model / could if could else 0.0,
        hfu=hardware / could if could else 0.0, causal=causal,
    )  # fmt: skip
