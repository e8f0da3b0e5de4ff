"""Planning a whole training step: what a strategy is, the strategies by name, and what they share.

A strategy takes a `StepGraph` and a budget (bytes at the peak, everything included; None: the least it can do in memory) and gives a `StepPlan`.
Most only decide what runs when; `finished` adds when results are let go (after their last use), the peak, the time and what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from ...errors import Infeasible
from ...simulate.step_memory import simulate_step
from ...step_graph import StepAction, StepGraph, StepPlan

__all__ = ["STEP_NAMES", "KeepEverything", "StepStrategy", "dropped_at_last_use", "finished", "keep_everything", "size_text"]

Runs = Sequence[tuple[int, int]]  # (node, alternative or -1), in the order they run


class StepStrategy(Protocol):
    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: Infeasible when it finds nothing within the budget; `data["least_bytes"]` is the least peak it knows to reach."""
        ...


def dropped_at_last_use(graph: StepGraph, runs: Runs) -> tuple[StepAction, ...]:
    """The runs as actions that let go of every result right after its last use (by a run that reads it, before it is run anew).

    Results of the step stay. What a run writes over is gone by itself and not dropped.
    """
    made: dict[int, int] = {}  # node -> position of its last run so far
    last: dict[int, dict[int, int]] = {}  # node -> {position of its run: position of the last use of that result}
    over: dict[int, set[int]] = {}
    for i, (n, alternative) in enumerate(runs):
        node = graph.nodes[n]
        way = node if alternative < 0 else node.alternatives[alternative]
        for x in way.inputs:
            if x in made:
                last[x][made[x]] = i
        if alternative >= 0 and node.alternatives[alternative].over >= 0:
            over[i] = {*graph.nodes[node.alternatives[alternative].over].storages}
        made[n] = i
        last.setdefault(n, {})[i] = i
    drops: list[list[int]] = [[] for _ in runs]
    kept = {*graph.results}
    for x, uses in last.items():
        for start, end in uses.items():
            if x in kept and start == made[x]:
                continue
            if end in over and over[end] & {*graph.nodes[x].storages}:
                continue
            drops[end].append(x)
    return tuple(StepAction(node=n, alternative=a, drops=tuple(sorted(d))) for (n, a), d in zip(runs, drops, strict=True))


def finished(graph: StepGraph, runs: Runs, boundary: int, *, strategy: str, options: dict[str, Any] | None = None, **fields: Any) -> StepPlan:
    """The plan of these runs, the first `boundary` of them in the forward pass. `fields`: further fields of `StepPlan`."""
    actions = dropped_at_last_use(graph, runs)
    run = simulate_step(graph, actions, held_before=(boundary,))
    return StepPlan(
        strategy=strategy, options=options or {}, actions=actions, boundary=boundary, saved=run.held[boundary], peak_bytes=run.peak_bytes,
        peak_at=run.peak_at, time_s=run.time_s, **fields,
    )  # fmt: skip


def keep_everything(graph: StepGraph) -> StepPlan:
    """Every node once, in order, nothing computed again: the fastest plan without other implementations, and what the others are compared with.

    Nodes whose results nobody needs (and that change nothing) are left out, so is what only those need.
    """
    wanted = {*graph.results, *(i for i, n in enumerate(graph.nodes) if n.writes)}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in wanted:
            wanted.update(graph.nodes[i].inputs)
    runs = [(i, -1) for i, n in enumerate(graph.nodes) if i in wanted and n.phase != "input"]
    boundary = sum(graph.nodes[i].phase == "forward" for i, _ in runs)
    return finished(graph, runs, boundary, strategy="keep", floor_s=sum(graph.nodes[i].time_s for i, _ in runs), optimal=True)


@dataclass(frozen=True, kw_only=True)
class KeepEverything:
    """Nothing is computed again, whatever the budget."""

    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: Infeasible."""
        plan = keep_everything(graph)
        if budget_bytes is not None and plan.peak_bytes > budget_bytes:
            raise Infeasible(
                f"keeping everything needs {size_text(plan.peak_bytes)}, the budget is {size_text(budget_bytes)}", where=graph.name,
                hint="a strategy that computes again needs less", data={"least_bytes": plan.peak_bytes, "budget_bytes": budget_bytes},
            )  # fmt: skip
        return plan


def size_text(size_bytes: int) -> str:
    return f"{size_bytes:,} B"


def _of(module: str, name: str) -> Callable[..., StepStrategy]:
    """A strategy that is imported when it is first asked for; its module imports this one."""

    def make(**options: Any) -> StepStrategy:
        found: StepStrategy = getattr(import_module(f"{__package__}.{module}"), name)(**options)
        return found

    return make


STEP_NAMES: dict[str, Callable[..., StepStrategy]] = {
    "keep": KeepEverything, "chen": _of("baselines", "Chen"), "revolve": _of("baselines", "Revolve"), "rotor": _of("baselines", "Rotor"),
    "mincut": _of("fusionaware", "MinCut"), "fusionaware": _of("fusionaware", "FusionAware"),
    "monet": _of("monet", "Monet"),
}  # fmt: skip
