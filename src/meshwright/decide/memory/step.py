"""Nothing is computed again: the plan of a step that keeps everything; and what all strategies for whole steps share.

A strategy takes a `StepGraph` and a budget (bytes at the peak, everything included; None: the least it can do in memory) and gives a `StepPlan`.
Most only decide what runs when; `finished` adds when results are let go (after their last use), the peak, the time and what is saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import numpy as np

from ...cite import FOLKLORE, Cite
from ...errors import Infeasible
from ...graph.step_graph import StepAction, StepGraph, StepPlan
from ...simulate.step_memory import simulate_step
from .problem import StepStrategy

__all__ = [
    "KeepEverything", "dropped_at_last_use", "finished", "keep_everything", "least_bound_bytes", "nothing_fits", "runs_once", "size_text",
]  # fmt: skip

Runs = Sequence[tuple[int, int]]  # (node, alternative or -1), in the order they run


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
    run = simulate_step(graph, actions, held_before=(boundary,), boundary=boundary)
    return StepPlan(
        strategy=strategy, options=options or {}, actions=actions, boundary=boundary, saved=run.held[boundary], peak_bytes=run.peak_bytes,
        peak_at=run.peak_at, time_s=run.time_s, **fields,
    )  # fmt: skip


def runs_once(graph: StepGraph, ways: Mapping[int, int] = MappingProxyType({})) -> tuple[Runs, int]:
    """Every node that the results need, or that changes something, once and in order, and how many of them the forward pass runs.

    `ways`: alternatives of nodes that do not run plainly.
    """
    def inputs(i: int) -> tuple[int, ...]:
        return graph.nodes[i].inputs if i not in ways else graph.nodes[i].alternatives[ways[i]].inputs

    wanted = {*graph.results, *(i for i, n in enumerate(graph.nodes) if n.writes)}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in wanted:
            wanted.update(inputs(i))
    runs = [(i, ways.get(i, -1)) for i, n in enumerate(graph.nodes) if i in wanted and n.phase != "input"]
    return runs, sum(graph.nodes[i].phase == "forward" for i, _ in runs)


def keep_everything(graph: StepGraph) -> StepPlan:
    """Every node once, in order, nothing computed again: the fastest plan without other implementations, and what the others are compared with.

    Nodes whose results nobody needs (and that change nothing) are left out, so is what only those need.
    """
    runs, boundary = runs_once(graph)
    plain = not any(n.alternatives for n in graph.nodes)  # else another implementation may be faster, or make a node needless
    floor = sum(graph.nodes[i].time_s for i, _ in runs) if plain else None
    return finished(graph, runs, boundary, strategy="keep", floor_s=floor, optimal=plain)


@dataclass(frozen=True, kw_only=True)
class KeepEverything(StepStrategy):
    """Nothing is computed again, whatever the budget."""

    name: ClassVar[str] = "keep"
    cite: ClassVar[Cite] = FOLKLORE
    budgeted: ClassVar[bool] = False

    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: Infeasible."""
        plan = keep_everything(graph)
        if budget_bytes is not None and plan.peak_bytes > budget_bytes:
            raise Infeasible(
                f"keeping everything needs {size_text(plan.peak_bytes)}, the budget is {size_text(budget_bytes)}", where=graph.name,
                hint="a strategy that computes again needs less", data={"least_bytes": plan.peak_bytes, "budget_bytes": budget_bytes},
            )  # fmt: skip
        return msgspec.structs.replace(plan, budget_bytes=budget_bytes)


def least_bound_bytes(graph: StepGraph) -> int:
    """A peak that no plan of this graph is below: what must exist beside what always does while one node runs, or at the end.

    For every node that the results need however they are made: its operands' and its own storages and its workspace, the least over its
    implementations. At the end: the storages of all results. Weak, but it holds for every strategy; alternatives may spare operands, so nodes that
    only some implementations read are not counted as needed.
    """
    def own(nodes: Iterable[int]) -> int:
        return sum(graph.storages[s].size_bytes for s in {s for x in nodes for s in graph.nodes[x].storages} if graph.storages[s].kind == "made")

    fixed, needed = graph.fixed_bytes(), {*graph.results, *(i for i, n in enumerate(graph.nodes) if n.writes)}
    most = own(graph.results)
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        if i not in needed or node.phase == "input":
            continue
        ways = [(node.inputs, node.workspace_bytes, -1), *((a.inputs, a.workspace_bytes, a.over) for a in node.alternatives)]
        needed |= set[int].intersection(*({*inputs} for inputs, _, _ in ways))
        most = max(most, min(own(inputs) + workspace if over >= 0 else own((*inputs, i)) + workspace for inputs, workspace, over in ways))
    return fixed + most


def nothing_fits(graph: StepGraph, budget_bytes: int | None, *, least_bytes: int | None, proved: bool, said: Mapping[str, str]) -> Infeasible:
    """The error for a budget that no strategy keeps. `least_bytes`: the least peak that any is known to reach; `said`: what each said."""
    bound = least_bound_bytes(graph)
    reached = f"; the least that a strategy reaches is {size_text(least_bytes)}" if least_bytes is not None else ""
    return Infeasible(
        f"nothing fits in {size_text(budget_bytes or 0)}: no plan at all needs less than {size_text(bound)}{reached}", where=graph.name,
        data={
            "least_bytes": least_bytes, "bound_bytes": bound, "budget_bytes": budget_bytes, "proved": proved or bound > (budget_bytes or 0),
            "strategies": dict(said),
        },
    )  # fmt: skip


def size_text(size_bytes: int) -> str:
    return f"{size_bytes:,} B"
