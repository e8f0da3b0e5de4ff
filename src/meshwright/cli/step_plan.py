"""`meshwright memory plan --model`: the whole training step of a model in a budget, or the largest batch."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .frame import Result
from .pictures import drawn
from .step_arguments import measured, strategy

if TYPE_CHECKING:
    from ..graph.step_graph import StepGraph, StepPlan
    from ..probe.steps.measured import MeasuredStep

__all__ = ["run"]


def run(args: argparse.Namespace) -> Result:
    from ..check.training.step_memory import check_step_plan
    from ..decide.memory.step import keep_everything
    from ..errors import CaptureError, UsageError
    from ..io.atomic import write_bytes
    from ..probe.steps.fit import budget_bytes, largest_batch, planned_in_any

    if args.max_batch:
        if args.budget is None:
            raise UsageError("needs --budget", where="--max-batch", hint="give the bytes of the device, e.g. --budget 12GiB")
        budget = budget_bytes(args.budget, 0)
        if not budget:
            raise UsageError(
                "must be bytes with --max-batch: a share would be of a peak that depends on the batch",
                where="--budget", hint="e.g. 12GiB",
            )  # fmt: skip
        best = largest_batch(lambda b: measured(args, batch=b), budget, strategy(args), seed=args.seed)
        step, plan, others = best.measured, best.plan, dict[str, str]()
        lines = [f"largest batch: {best.batch_size}" + (f" (one more does not fit, proved: {best.why})" if best.proved else f" ({best.why})")]
        said = {name: getattr(best, name) for name in ("proved", "scope", "why", "refuted", "tried")}
        more: dict[str, Any] = {"max_batch": best.batch_size, **said}
    else:
        try:
            steps = measured(args)
        except CaptureError as error:
            return _whole_modules(args, error)
        full = keep_everything(steps[0].plain)
        limit = None if args.budget is None else budget_bytes(args.budget, full.peak_bytes)
        step, plan, others = planned_in_any(steps, limit, strategy(args), seed=args.seed)
        lines, more = [], {"more": [], "less": []}
        if limit is not None and plan.time_s > full.time_s:
            from ..decide.memory.auto import offers

            more = dict(zip(("more", "less"), ([asdict(o) for o in side] for side in offers(step.graph, plan)), strict=True))
    verdict = check_step_plan(step.graph, plan)
    verdict.raise_if_wrong()
    full = keep_everything(step.plain)
    document = _document(step, plan, full, others) | more | {"check": verdict.to_json()["status"]}
    lines += [*_lines(step, plan, full, others), *(line for side in ("more", "less") for line in _offered(side, more.get(side, []), full))]
    if args.measure:
        document["measured_peak_bytes"] = _measure(args, step, plan)
        share = document["measured_peak_bytes"] / plan.peak_bytes - 1
        lines.append(f"measured peak: {document['measured_peak_bytes']:,} B, {100 * share:+.2f} % of the prediction")
    if args.out:
        import msgspec

        write_bytes(args.out, msgspec.json.encode(document | {"plan": plan, "graph": step.graph}))
        lines.append(f"wrote {args.out}")
    result = Result(document, "\n".join(lines))
    if args.svg is None:
        return result
    from ..io.atomic import write_text
    from ..report.step_memory_svg import step_memory_svg

    write_text(args.svg, step_memory_svg(step.graph, plan))
    return drawn(result, args.svg)


def _document(step: MeasuredStep, plan: StepPlan, full: StepPlan, others: dict[str, str]) -> dict[str, Any]:
    from ..decide.memory.step import least_bound_bytes

    nodes = step.graph.nodes
    again = [nodes[n].name for n in _again(plan)]
    return {
        "schema": "meshwright.memory.step", "version": 1, "model": step.graph.name, "batch_size": step.batch_size, "layout": step.layout,
        "strategy": plan.strategy, "budget_bytes": plan.budget_bytes, "peak_bytes": plan.peak_bytes,
        "bound_bytes": plan.least_bytes or least_bound_bytes(step.graph), "time_s": plan.time_s, "floor_s": plan.floor_s,
        "optimal": plan.optimal, "keep_peak_bytes": full.peak_bytes, "keep_time_s": full.time_s,
        "bytes_by_kind": step.bytes_by_kind(), "recomputed": again, "implementations": _implementations(step.graph, plan),
        "saved": [nodes[n].name for n in plan.saved], "others": others,
        "evidence": step.graph.evidence, "notes": [*step.graph.notes, *plan.notes],
    }  # fmt: skip


def _again(plan: StepPlan) -> list[int]:
    seen, again = set[int](), list[int]()
    for a in plan.actions:
        if a.node in seen:
            again.append(a.node)
        seen.add(a.node)
    return again


def _implementations(graph: StepGraph, plan: StepPlan) -> dict[str, int]:
    """How often an operator runs by something other than its plain implementation, by kind, most often first."""
    from ..graph.step_graph import replacement
    from ..run.steps.norms_apart import APART

    found: dict[str, int] = {}
    for a in plan.actions:
        n = graph.nodes[a.node]
        name = n.alternatives[a.alternative].name if a.alternative >= 0 else replacement(n.target)
        kind = name.rpartition(":")[0].partition(":")[0] or name
        if kind and kind != APART:  # the other half of "from statistics"
            kind = kind.removeprefix("meshwright.").translate(str.maketrans("", "", "0123456789")).replace("  ", " ").strip()
            found[kind] = found.get(kind, 0) + 1
    return dict(sorted(found.items(), key=lambda i: (-i[1], i[0])))


def _lines(step: MeasuredStep, plan: StepPlan, full: StepPlan, others: dict[str, str]) -> list[str]:
    from ..decide.memory.step import least_bound_bytes
    from ..io.quantity import show_size

    fixed = ", ".join(f"{k} {show_size(v)}" for k, v in step.bytes_by_kind().items())
    again = [n for n in _again(plan) if step.graph.nodes[n].makes]
    extra = 100 * (plan.time_s / full.time_s - 1) if full.time_s else 0.0
    share = 100 * plan.peak_bytes / full.peak_bytes
    lines = [
        f"{step.graph.name}, batch {step.batch_size}: {plan.strategy}",
        f"  peak {show_size(plan.peak_bytes)}, {share:.1f} % of the {show_size(full.peak_bytes)} that keeping everything takes",
        f"  always there: {fixed}",
        f"  time {plan.time_s * 1e3:.4g} ms, {extra:+.1f} % ({len(again)} operators computed again)",
    ]
    if ways := _implementations(step.graph, plan):
        lines.append("  other implementations: " + ", ".join(f"{kind} {count}" for kind, count in ways.items()))
    if step.step.channels_last:
        lines.append("  images channels last, and what is computed from them")
    if plan.budget_bytes is not None:
        lines.insert(1, f"  budget {show_size(plan.budget_bytes)}")
    # What floors and proofs speak of: a loss that is made after backward can need less.
    ordered = ", operators in the graph's order, results before backward" if plan.floor_s or plan.least_bytes else ""
    if plan.floor_s:
        above = 100 * (plan.time_s / plan.floor_s - 1)
        far = "proved the fastest" if plan.optimal else f"at most {above:.1f} % above the fastest there can be"
        lines.append(f"  {far} within the budget{ordered}")
    if plan.least_bytes:
        lines.append(f"  no plan needs less than {show_size(plan.least_bytes)}{ordered}")
    else:
        lines.append(f"  no plan needs less than {show_size(least_bound_bytes(step.graph))}")
    lines += [f"  {name}: {said}" for name, said in others.items()]
    return lines + [f"  note: {note}" for note in (*step.graph.notes, *plan.notes)]


def _offered(side: str, found: list[dict[str, Any]], full: StepPlan) -> list[str]:
    """What other budgets give, one line."""
    from ..io.quantity import show_size

    said = [f"{show_size(o['peak_bytes'])} {100 * (o['time_s'] / full.time_s - 1):+.1f} %" for o in found]
    return [f"  with {side}: {', '.join(said)}"] if said else []


def _measure(args: argparse.Namespace, step: MeasuredStep, plan: StepPlan) -> int:
    """Built and run for real, once to warm up and once watched."""
    from ..capture.step import capture_step_of
    from ..probe.steps.optimizer import updating
    from ..run.steps.step import measured_peak_bytes, runner_of, step_tensors

    real = capture_step_of(args.model, loss=args.loss, batch_size=step.batch_size, seed=args.seed, device="cpu",
                           channels_last=step.step.channels_last)  # fmt: skip
    runner, tensors = runner_of(real, plan, graph=step.graph, variants=updating(real, step.optimizer)), step_tensors(real)
    runner.run([*tensors])
    return measured_peak_bytes(runner, tensors)


def _whole_modules(args: argparse.Namespace, error: Any) -> Result:
    """What export refuses is planned by whole modules: which of them to run under a checkpoint."""
    from ..probe.steps.module_checkpoints import plan_modules

    options: dict[str, Any] = {"loss": args.loss, "batch_size": args.batch, "budget": args.budget, "seed": args.seed, "optimizer": args.optimizer}
    document, said = plan_modules(args.model, refusal=error.message, **options)
    return Result(document, said if args.svg is None else f"{said}\n  nothing drawn: the step's operators are not known")
