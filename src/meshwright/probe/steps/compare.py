"""All strategies for one captured step, by budget, beside PyTorch's own partitions and the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...capture.step import CapturedStep
from ...decide.memory import strategies as listed
from ...decide.memory import strategy
from ...decide.memory.auto import auto_plan
from ...decide.memory.fusionaware.frontier import frontier_of
from ...decide.memory.fusionaware.network import MinCut
from ...decide.memory.fusionaware.strategy import DEFAULT_EFFORT, FusionAware
from ...decide.memory.problem import StepStrategy
from ...decide.memory.step import keep_everything
from ...errors import Infeasible, TimeLimit, Unsupported
from ...graph.step_graph import StepGraph, StepPlan
from ...report.memory_curve import CurvePoint, MemoryCurve
from .sac_plans import sac_installed, sac_plans
from .torch_partitions import TORCH_BUDGETS, torch_plans

__all__ = ["budgeted", "budgets_of", "compare_step"]



def budgeted(*, all_of_them: bool = False) -> list[str]:
    """Names of the strategies that plan for a budget: those whose schedules the frontier holds, newest first, or all."""
    kinds = [kind for kind in listed("step") if kind.budgeted]
    return [kind.name for kind in kinds] if all_of_them else [kind.name for kind in reversed(kinds) if kind.in_frontier]


def budgets_of(graph: StepGraph, count: int, *, effort: int = DEFAULT_EFFORT) -> tuple[int, ...]:
    """Evenly from the peak of keeping everything down to the least peak found."""
    entries = frontier_of(graph, effort).entries
    high, low = keep_everything(graph).peak_bytes, entries[-1].peak_bytes
    return tuple(int(high - (high - low) * i / max(count - 1, 1)) for i in range(count))


def compare_step(
    step: CapturedStep, graph: StepGraph, *, strategies: Sequence[str] = (), budgets: Sequence[int] | int = 11, effort: int = DEFAULT_EFFORT,
    torch_budgets: Sequence[float] = TORCH_BUDGETS, joint: Mapping[str, StepGraph] | None = None,
) -> MemoryCurve:  # fmt: skip
    """`graph`: the step graph with times. `strategies`: names, by default `budgeted()`. `budgets`: bytes, or how many of `budgets_of`. `joint`: the
    graph with other implementations of its operators (`probe.steps.choices`), by the name of the curve that the best plans get which choose among
    them. Nothing is run.

    Raises: UnknownName for a strategy; what capture of torch's partitions raises.
    """
    kinds = {name: strategy(name, "step", where="strategies") for name in strategies or budgeted()}
    wanted = budgets_of(graph, budgets, effort=effort) if isinstance(budgets, int) else tuple(budgets)
    plain, frontier = keep_everything(graph), frontier_of(graph, effort)
    plans = {name: [_plan(graph, kind, b, effort) for b in wanted] for name, kind in kinds.items()}
    floors = [max([frontier.floor_s(b), *(p.floor_s for row in plans.values() if (p := row[i]) and p.floor_s)]) for i, b in enumerate(wanted)]
    singles = [p for p in (_plan(graph, MinCut, None, effort),) if p] + list(torch_plans(step, graph=graph, budgets=torch_budgets))
    singles += sac_plans(step, graph=graph) if sac_installed() else ()
    curves = {n: tuple(_point(p) for p in row) for n, row in plans.items()} | {n: _joint(g, wanted) for n, g in (joint or {}).items()}
    peers = []
    for p in singles:
        entry = frontier.within(p.peak_bytes)
        label = f"{p.options['budget']:g}" if p.strategy in ("torch budget", "torch sac_milp") else ""
        ours = CurvePoint(peak_bytes=entry.peak_bytes, time_s=entry.time_s) if entry else None
        peers.append((p.strategy, CurvePoint(peak_bytes=p.peak_bytes, time_s=p.time_s, label=label), ours))
    notes = [] if sac_installed() else ["sac_milp of torch.distributed._tools is not compared: it needs PuLP, which is not installed"]
    notes += [f"{n}: other implementations of operators may take less time than the bound, which is of the plain ones" for n in joint or {}]
    return MemoryCurve(
        model=graph.name, plain_bytes=plain.peak_bytes, plain_s=plain.time_s, budgets=wanted, floors_s=tuple(floors),
        points=curves, peers=tuple(peers), best=FusionAware.name, evidence=graph.evidence,
        notes=tuple(notes),
    )  # fmt: skip


def _plan(graph: StepGraph, kind: type[StepStrategy], budget: int | None, effort: int) -> StepPlan | None:
    made = FusionAware(effort=effort) if kind is FusionAware else kind()
    try:
        return made.plan(graph, budget, rng=np.random.default_rng(0))
    except (Infeasible, TimeLimit, Unsupported):
        return None


def _joint(graph: StepGraph, budgets: Sequence[int]) -> tuple[CurvePoint | None, ...]:
    """A plan within a budget is one within every larger budget too: none of them takes longer than it."""
    found: dict[int, CurvePoint | None] = {}
    best: CurvePoint | None = None
    for budget in sorted({*budgets}):
        try:
            point = _point(auto_plan(graph, budget, rng=np.random.default_rng(0))[0])
        except (Infeasible, TimeLimit):
            point = None
        best = point if best is None or (point is not None and point.time_s < best.time_s) else best
        found[budget] = best
    return tuple(found[b] for b in budgets)


def _point(plan: StepPlan | None) -> CurvePoint | None:
    return None if plan is None else CurvePoint(peak_bytes=plan.peak_bytes, time_s=plan.time_s)
