"""`meshwright memory explain`: what is alive at the peak of a training step."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import step_arguments
from .arguments import at_least_one
from .frame import Result

if TYPE_CHECKING:
    from ..graph.step_graph import StepGraph, StepPlan
    from ..simulate.step_memory import AliveStorage

HELP = "the tensors alive at the peak of a training step"
MAX_ROWS = 10  # storages that are listed, the largest first


def arguments(parser: argparse.ArgumentParser) -> None:
    step_arguments.arguments(parser)
    parser.add_argument("--batch", type=at_least_one, help="rows of the inputs (default: the example's)")
    parser.add_argument("--budget", help="explain the plan within this budget (default: keeping everything)")
    parser.add_argument("--strategy", help="auto (default) or a name")


def run(args: argparse.Namespace) -> Result:
    from ..decide.memory.step import keep_everything
    from ..errors import UsageError
    from ..io.quantity import show_size
    from ..probe.steps.fit import budget_bytes, planned_in_any
    from ..simulate.step_memory import alive_at

    if not args.model:
        raise UsageError("needs --model", where="memory explain", hint="--model FILE.py:function")
    steps = step_arguments.measured(args)
    step = steps[0]
    graph, plan = step.plain, keep_everything(step.plain)
    if args.budget is not None:
        step, plan, _ = planned_in_any(steps, budget_bytes(args.budget, plan.peak_bytes), step_arguments.strategy(args), seed=args.seed)
        graph = step.graph
    alive = alive_at(graph, plan.actions, plan.peak_at)
    rows = [_row(graph, plan, a) for a in alive]
    node = graph.nodes[plan.actions[plan.peak_at].node]
    way = plan.actions[plan.peak_at].alternative
    workspace = node.workspace_bytes if way < 0 else node.alternatives[way].workspace_bytes
    fixed = {k: v for k, v in step.bytes_by_kind().items() if k != "gradients and loss"}
    document = {
        "schema": "meshwright.memory.explain", "version": 1, "model": step.graph.name, "batch_size": step.batch_size, "strategy": plan.strategy,
        "peak_bytes": plan.peak_bytes, "at": {"node": node.name, "target": node.target, "module": node.module, "phase": node.phase},
        "always": fixed, "workspace_bytes": workspace, "alive": rows[:MAX_ROWS],
        "alive_bytes": sum(a.size_bytes for a in alive), "alive_count": len(alive),
    }  # fmt: skip
    where = f" of {node.module}" if node.module else ""
    lines = [f"peak {show_size(plan.peak_bytes)} ({plan.strategy}, batch {step.batch_size}): {node.phase} {node.name} ({node.target}){where}"]
    lines.append("  always there: " + ", ".join(f"{k} {show_size(v)}" for k, v in fixed.items()))
    if workspace:
        lines.append(f"  workspace of {node.name}: {show_size(workspace)}")
    lines.append(f"  {len(alive)} tensors of the step, {show_size(sum(a.size_bytes for a in alive))}; the largest:")
    width = max((len(r["module"]) for r in rows[:MAX_ROWS]), default=6)
    lines.append(f"  {'bytes':>12}  {'module':<{width}}  made by, until after")
    for r in rows[:MAX_ROWS]:
        lines.append(f"  {r['size_bytes']:>12,}  {r['module'] or '-':<{width}}  {r['made_by']} ({r['target']}), {r['until']}")
    return Result(document, "\n".join(lines))


def _row(graph: StepGraph, plan: StepPlan, a: AliveStorage) -> dict[str, Any]:
    node = graph.nodes[a.made_by]
    last = graph.nodes[plan.actions[a.until].node].name if a.until < len(plan.actions) else "the end of the step"
    return {
        "size_bytes": a.size_bytes, "made_by": node.name, "target": node.target, "module": node.module, "phase": node.phase, "until": last,
        "recomputed": any(x.node == a.made_by for x in plan.actions[: a.since]),
    }  # fmt: skip
