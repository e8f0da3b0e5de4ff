"""Batch normalisation as two nodes, its statistics and its result, so that running the result again does not make the statistics again.

The statistics are most of the operator's time, and a plan holds them anyway: the backward pass reads them, and they are small. Run once, both nodes
together are the plain operator (`run.steps.step` joins them); the result alone is the same kernel on given statistics, with the same bits, as is
measured.
Source: the card of MONeT, sections 3.6 and 3.9 (recomputation uses saved mean and variance). Invariant: every node once takes the plain operators'
time, and as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from torch import fx

from ...graph.step_graph import StepGraph, StepNode, renumbered, replaced_target
from ...run.calibrate.operator_times import call_key
from ...run.steps.norms_apart import APART, BATCH_NORMS, FROM_STATISTICS, normalised
from .costs import Job, StepCosts, call_of, fakes_of, measure_missing
from .variants import MAX_TIME_SHARE

__all__ = ["norms_apart"]


@dataclass(frozen=True)
class _Pair:
    """Numbers of a normalisation and of the views that show its result, mean and inverse deviation."""

    whole: int
    result: int
    mean: int
    deviation: int


def norms_apart(module: fx.GraphModule, graph: StepGraph, costs: StepCosts, *, rounds: int = 3) -> StepGraph:
    """`module`: the joint graph of `graph`, whose nodes may have alternatives. Raises: RunError as `measure_missing`."""
    calls = {n.name: n for n in module.graph.nodes}
    numbers = {n.name: i for i, n in enumerate(graph.nodes)}
    pairs = [p for i in range(graph.boundary) if (p := _pair(graph, calls, i)) is not None]
    keys = {p: f"{FROM_STATISTICS}||{call_key(graph.nodes[p.whole].target, *fakes_of(calls[graph.nodes[p.whole].name]))}" for p in pairs}
    measure_missing(costs, {key: _job(calls[graph.nodes[p.whole].name]) for p, key in keys.items()}, rounds)
    nodes, after = list(graph.nodes), dict[int, int]()
    for p, key in keys.items():
        cost, whole = costs.costs[key], nodes[p.whole]
        if not cost.same_bits or not cost.same_order or cost.time_s > whole.time_s * MAX_TIME_SHARE:
            continue
        (made,) = nodes[p.result].storages
        given = [numbers[x.name] for x in calls[whole.name].args[:3] if isinstance(x, fx.Node)]
        nodes[p.whole] = replace(
            whole, target=replaced_target(whole.target, APART), time_s=whole.time_s - cost.time_s,
            workspace_bytes=whole.workspace_bytes + graph.storages[made].size_bytes,
            storages=tuple(s for s in whole.storages if s != made), makes=tuple(s for s in whole.makes if s != made),
        )  # fmt: skip
        nodes[p.result] = replace(
            nodes[p.result], target=replaced_target(nodes[p.result].target, FROM_STATISTICS), inputs=(*given, p.mean, p.deviation), makes=(made,),
            time_s=cost.time_s, workspace_bytes=cost.workspace_bytes,
        )  # fmt: skip
        after[p.result] = max(p.mean, p.deviation)
    return _reordered(graph, nodes, after) if after else graph


def _pair(graph: StepGraph, calls: dict[str, fx.Node], i: int) -> _Pair | None:
    """Where the operator's results are only looked at one by one, and the statistics before anybody reads the normalised values."""
    n = graph.nodes[i]
    if n.target not in BATCH_NORMS or len(n.makes) < 3 or n.makes != n.storages:
        return None
    args: Any = calls[n.name].args
    training = args[5] if "functional" in n.target else args[3]
    given = [x for x in args[:3] if isinstance(x, fx.Node)]
    readers = [j for j, m in enumerate(graph.nodes) if i in m.inputs or any(i in a.inputs for a in m.alternatives)]
    views = {calls[m.name].args[1]: j for j in readers if (m := graph.nodes[j]).target == "operator.getitem" and m.inputs == (i,)}
    if training is not True or len(views) != len(readers) or not {0, 1, 2} <= views.keys() or len({*given}) != len(given):
        return None
    p = _Pair(i, views[0], views[1], views[2])
    alone = len({s for x in (p.result, p.mean, p.deviation) for s in graph.nodes[x].storages}) == 3 and graph.nodes[p.result].phase == "forward"
    first = min((j for j, m in enumerate(graph.nodes) if p.result in m.inputs or any(p.result in a.inputs for a in m.alternatives)), default=0)
    return p if alone and first > max(p.mean, p.deviation) else None


def _job(call: fx.Node) -> Job:
    def whole() -> Callable[[], Any]:
        run = call_of(call, "cpu")[0]
        return lambda: run()[0]

    def again() -> Callable[[], Any]:
        run, made = call_of(call, "cpu")
        _, mean, deviation, *_ = run()
        x, weight, bias = (made[a] if isinstance(a, fx.Node) else None for a in call.args[:3])
        return lambda: normalised(x, weight, bias, mean, deviation)

    return Job(name=f"{call.name} {FROM_STATISTICS}", ready=again, plain=whole)


def _reordered(graph: StepGraph, nodes: list[StepNode], after: dict[int, int]) -> StepGraph:
    """The nodes with some of them moved to right after another one, and all numbers moved along."""
    order: list[int] = []
    waiting = {x: i for i, x in after.items()}
    for i in range(len(nodes)):
        order += [i] if i not in after else []
        order += [waiting[i]] if i in waiting else []
    number = {old: new for new, old in enumerate(order)}

    return replace(graph, nodes=tuple(renumbered(nodes[i], number.__getitem__) for i in order), results=tuple(number[r] for r in graph.results))
