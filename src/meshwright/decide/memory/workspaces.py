"""A strategy of plain operators on a graph whose nodes may also run with smaller workspaces: which of them do, and where.

Such implementations read the same and write over nothing, so a schedule is one for all of them. As in `monet.searching`: the schedule is searched
with small workspaces, each run gets the fastest implementation that fits, and it is searched again by the times of these.
Invariant: no slower than the strategy's plan with plain operators alone, where that fits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from ...errors import Infeasible
from ...graph.step_graph import StepGraph, StepPlan
from .monet.fixed import fixed
from .monet.slack import hurried, lean, settled
from .problem import StepStrategy
from .step import finished

__all__ = ["plan_with_workspaces", "relaxed"]

# Times the fastest alike that an implementation may take which the search counts on first; any, where those are too large to fit.
MAX_SLOWDOWNS = (1.5, float("inf"))


def plan_with_workspaces(graph: StepGraph, budget_bytes: int | None, strategy: StepStrategy, *, rng: np.random.Generator) -> StepPlan:
    """`graph`: with alternatives of such a kind only. Raises: Infeasible as the strategy, with the least peak that it knows."""
    if not any(n.alternatives for n in graph.nodes):
        return strategy.plan(graph, budget_bytes, rng=rng)
    found: list[StepPlan] = []
    refused: list[Infeasible] = []

    def tried(ways: Mapping[int, int]) -> StepPlan | None:
        one = fixed(graph, ways)
        try:
            plan = strategy.plan(one.graph, budget_bytes, rng=rng)
        except Infeasible as error:
            refused.append(error)
            return None
        runs, boundary = one.runs([a.node for a in plan.actions], plan.boundary)
        made = finished(graph, runs, boundary, strategy=plan.strategy)
        runs = hurried(graph, runs, boundary, made.peak_bytes if budget_bytes is None else budget_bytes, lossy=False)
        made = finished(graph, runs, boundary, strategy=plan.strategy, options=plan.options, budget_bytes=budget_bytes)
        found.append(made)
        return made

    for slower in MAX_SLOWDOWNS:
        first = tried(lean(graph, {}, lossy=False, slower=slower))
        if first is not None:
            if budget_bytes is not None:
                tried(settled(graph, [(a.node, a.alternative) for a in first.actions]))
            break
    tried({})
    if not found:
        raise min(refused, key=lambda e: int(e.data["least_bytes"]))
    return min(found, key=lambda p: (p.peak_bytes, p.time_s) if budget_bytes is None else (p.time_s, p.peak_bytes))


def relaxed(graph: StepGraph) -> StepGraph:
    """Every node at once as fast as its fastest implementation and as small as its smallest: what bounds this graph bounds `graph`."""
    def best(which: str) -> list[float]:
        return [min(getattr(w, which) for w in (n, *n.alternatives)) for n in graph.nodes]

    nodes = (
        replace(n, time_s=t, workspace_bytes=int(b), alternatives=())
        for n, t, b in zip(graph.nodes, best("time_s"), best("workspace_bytes"), strict=True)
    )
    return replace(graph, nodes=tuple(nodes))
