"""A recomputation plan in words: what is kept and computed again per stage, and the strategies side by side."""

from __future__ import annotations

from collections.abc import Mapping

from ..decide.memory.problem import RecomputePlan, RecomputeProblem
from ..explain.numbers import bytes_text, seconds_text
from .columns import columns

__all__ = ["plan_lines", "table_lines"]


def plan_lines(name: str, problem: RecomputeProblem, plan: RecomputePlan) -> list[str]:
    forward_s = sum(o.time_s for o in problem.layer.operators) or 1.0
    lines = [f"{plan.strategy}: layer {name}, {len(problem.layer.operators)} operators, forward {seconds_text(forward_s)}", ""]
    rows = [["policy", "keeps", "holds again", "extra of forward", "computes again"]]
    for i, p in enumerate(plan.policies):
        again = ", ".join(p.recompute[:6]) + (f" and {len(p.recompute) - 6} more" if len(p.recompute) > 6 else "")
        share = f"{100 * p.time_s / forward_s:.1f} %"
        rows.append([str(i), bytes_text(p.kept_bytes), bytes_text(p.workspace_bytes), share, again or "nothing"])
    lines += [*columns(rows), ""]
    rows = [["stage", "layers", "in flight", "may keep", "keeps", "extra a micro-batch", "bound", "layers x micro-batches per policy"]]
    for i, (budget, s) in enumerate(zip(problem.stages, plan.stages, strict=True)):
        counts = ", ".join(f"{n} x policy {k}" for k, n in enumerate(s.counts) if n)
        kept = bytes_text(s.kept_bytes + s.workspace_bytes)
        size = [str(budget.layers), str(budget.in_flight), bytes_text(budget.budget_bytes), kept]
        rows.append([str(i), *size, seconds_text(s.time_s), seconds_text(s.bound_s), counts])
    return [*lines, *columns(rows)]


def table_lines(name: str, problem: RecomputeProblem, plans: Mapping[str, RecomputePlan], refused: Mapping[str, str]) -> list[str]:
    forward_s = sum(o.time_s for o in problem.layer.operators) or 1.0
    rows = [["strategy", "first stage keeps", "extra on the slowest stage", "of forward"]]
    for strategy, plan in sorted(plans.items(), key=lambda x: x[1].slowest_s):
        layers = max((b.layers for b in problem.stages), default=1) or 1
        share = f"{100 * plan.slowest_s / forward_s / layers:.1f} %"
        rows.append([strategy, bytes_text(plan.stages[0].kept_bytes + plan.stages[0].workspace_bytes), seconds_text(plan.slowest_s), share])
    return [f"layer {name}", *columns(rows), *(f"{strategy}: {why}" for strategy, why in refused.items())]
