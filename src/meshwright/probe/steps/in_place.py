"""How much longer operators take in their step than alone, measured in whole steps that keep everything.

Alone, an operator's operands are colder or warmer than the step's, which its neighbours have just made or left long ago. Every action of the plain
step is timed in its place, and what takes long gets the ratio to its time alone. Other implementations are timed in steps that use them wherever a
step that keeps everything can, in turns where an operator has several; what none of these steps runs takes its operator's ratio. Needs the memory of
the plain step. A call costs the runner some microseconds, which views show; these are taken off. Source of the idea: `measure`, which does the same
for forward graphs.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from ...decide.memory.step import finished, keep_everything, runs_once
from ...graph.step_graph import StepGraph, StepNode, StepPlan, replacement
from ...kernels.garbage import kept_memory
from ...run.calibrate.operators import quiet_single_thread
from ...run.steps.norms_apart import APART, FROM_STATISTICS
from ...run.steps.step import StepRunner
from .costs import StepCost, StepCosts, keys_of

__all__ = ["EVIDENCE", "Ratios", "in_place", "ratios_in_place", "ratios_of_ways"]

MAX_ROUNDS = 7  # in each of which every step runs once, so that a disturbance hits all
MAX_ROUNDS_S = 20.0  # of all rounds together: with long steps fewer are made, but not fewer than MIN_ROUNDS
MIN_ROUNDS = 2  # however long the steps
MAX_STEP_KINDS = 8  # steps in which other implementations are timed, each with others of them
MAX_MEASURED_S = 120.0  # that MIN_ROUNDS of those steps and one to warm up may take: else fewer steps are timed
MIN_OPERATOR_S = 5e-5  # that an operator takes alone: shorter ones keep their time, as timing within a step does not resolve them
RATIO_LIMITS = (0.5, 2.0)  # of a time within a step over the time alone: beyond, something else was measured
EVIDENCE = ", times as in whole steps"
PLAIN = ""  # the name of a node's own implementation, which may have taken the plain one's place

Tensors = Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """Time in place over time alone: of plain operators by node, of other implementations by (node, implementation)."""

    plain: Mapping[str, float] = field(default_factory=dict)
    ways: Mapping[tuple[str, str], float] = field(default_factory=dict)


def ratios_in_place(module: fx.GraphModule, graph: StepGraph, tensors: Tensors, costs: StepCosts, *, rounds: int = MAX_ROUNDS) -> Ratios:
    """`graph`: the measured step graph of `module`, without other implementations; `tensors` gives what its placeholders want, if it is asked: ratios
    are kept in `costs`, for this graph. Raises: RunError when the step fails, naming the node.
    """
    keys = keys_of(module, graph)
    long = {name: key for name, key in keys.items() if costs.costs[key].time_s >= MIN_OPERATOR_S}
    prefix = _prefix(keys)
    if any(f"{prefix}|{key}" not in costs.costs for key in long.values()):
        found = _timed(module, graph, tensors(), [keep_everything(graph)], lambda n, _: long.get(n.name, ""), rounds)
        _keep(costs, prefix, found)
    ratios = {key: _limited(costs.costs[f"{prefix}|{key}"].time_s / costs.costs[key].time_s) for key in {*long.values()}}
    return Ratios(plain={name: ratios[key] for name, key in long.items()})


def ratios_of_ways(
    module: fx.GraphModule, graph: StepGraph, tensors: Tensors, costs: StepCosts, plain: Ratios, *, rounds: int = MAX_ROUNDS
) -> Ratios:
    """`plain` and those of the other implementations of `graph`, whose times are as measured alone. Raises: as `ratios_in_place`."""
    keys = keys_of(module, graph)
    prefix = _prefix(keys)
    alone: dict[tuple[str, str], float] = {}
    for n in graph.nodes:
        if n.name in plain.plain:
            own = [(PLAIN, n.time_s)] if replacement(n.target) not in ("", APART, FROM_STATISTICS) else []
            alone |= {(n.name, way): t for way, t in (*own, *((a.name, a.time_s) for a in n.alternatives)) if t >= MIN_OPERATOR_S}

    def key(n: StepNode, alternative: int) -> str:
        way = n.alternatives[alternative].name if alternative >= 0 else PLAIN
        return f"by {way}|{keys[n.name]}" if (n.name, way) in alone else ""

    plans = _plans_with_ways(graph)
    while len(plans) > 1 and (MIN_ROUNDS + 1) * sum(p.time_s for p in plans) > MAX_MEASURED_S:
        plans.pop()
    number = {n.name: i for i, n in enumerate(graph.nodes)}
    run = {key(graph.nodes[a.node], a.alternative) for plan in plans for a in plan.actions} - {""}
    if any(f"{prefix}|{k}" not in costs.costs for k in run):
        _keep(costs, prefix, _timed(module, graph, tensors(), plans, key, rounds))
    ways = {}
    for (name, way), time_s in alone.items():
        n = graph.nodes[number[name]]
        known = costs.costs.get(f"{prefix}|by {way}|{keys[n.name]}")
        if known is not None:
            ways[name, way] = _limited(known.time_s / time_s)
    return Ratios(plain=plain.plain, ways=ways)


def _prefix(keys: Mapping[str, str]) -> str:
    return "in place|" + hashlib.sha256("\n".join(keys.values()).encode()).hexdigest()[:16]


def _keep(costs: StepCosts, prefix: str, found: Mapping[str, float]) -> None:
    """What is known stays: plans of one step with more and with fewer implementations are priced alike."""
    for key, time_s in found.items():
        costs.costs.setdefault(f"{prefix}|{key}", StepCost(time_s, 0))
    costs.save()


def _limited(ratio: float) -> float:
    return min(max(ratio, RATIO_LIMITS[0]), RATIO_LIMITS[1])


def _plans_with_ways(graph: StepGraph) -> list[StepPlan]:
    """Steps that keep everything and run nodes by other implementations: first by those that write over something, where nobody misses it."""
    ways = [sorted(range(len(n.alternatives)), key=lambda k, n=n: n.alternatives[k].over < 0) for n in graph.nodes]  # type: ignore[misc]
    steps = min(MAX_STEP_KINDS, max(map(len, ways), default=0))
    return [_plan(graph, {i: mine[k] for i, mine in enumerate(ways) if k < len(mine)}) for k in range(steps)]


def _plan(graph: StepGraph, chosen: dict[int, int]) -> StepPlan:
    """Nodes run by what is chosen for them, plainly where that would write over what somebody reads later."""
    ways = {i: graph.nodes[i].alternatives[k] for i, k in chosen.items()}
    last = {s: len(graph.nodes) for r in graph.results for s in graph.nodes[r].storages}
    for i in range(len(graph.nodes) - 1, -1, -1):
        over = ways[i].over if i in ways else -1
        if over >= 0 and any(last.get(s, i) > i for s in graph.nodes[over].storages):
            del ways[i]
        for x in (ways.get(i) or graph.nodes[i]).inputs:
            for s in graph.nodes[x].storages:
                last.setdefault(s, i)
    runs, boundary = runs_once(graph, {i: chosen[i] for i in ways})
    return finished(graph, runs, boundary, strategy="keep")


def _timed(
    module: fx.GraphModule, graph: StepGraph, tensors: Sequence[torch.Tensor], plans: Sequence[StepPlan], key: Callable[[StepNode, int], str],
    rounds: int,
) -> dict[str, float]:  # fmt: skip
    """Median seconds by key; an empty key is not asked for."""
    runners = [StepRunner(module, graph, plan) for plan in plans]
    rounds = max(MIN_ROUNDS, min(rounds, int(MAX_ROUNDS_S / max(sum(p.time_s for p in plans), 1e-9))))
    times: dict[str, list[float]] = defaultdict(list)
    bare: list[float] = []
    kept = torch.get_rng_state()
    try:
        with quiet_single_thread(), kept_memory():
            for r in range(rounds + 1):
                for runner in runners:
                    for node, alternative, seconds in _one_step(runner, tensors):
                        if r and (which := key(node, alternative)):
                            times[which].append(seconds)
                        elif r and not node.makes and not node.writes and not replacement(node.target):
                            bare.append(seconds)
    finally:
        torch.set_rng_state(kept)
    overhead = statistics.median(bare) if bare else 0.0
    return {which: max(0.0, statistics.median(found) - overhead) for which, found in times.items()}


def _one_step(runner: StepRunner, tensors: Sequence[torch.Tensor]) -> list[tuple[StepNode, int, float]]:
    values = runner.values_of(tensors)
    states: dict[int, Any] = {}
    found = []
    for k, a in enumerate(runner.plan.actions):
        start = time.thread_time()
        runner.run_actions(values, states, k, k + 1)
        found.append((runner.graph.nodes[a.node], a.alternative, time.thread_time() - start))
    return found


def in_place(graph: StepGraph, module: fx.GraphModule, ratios: Ratios) -> StepGraph:
    """`graph`, with or without other implementations, with the times that its operators take in their places."""
    calls = {n.name: n for n in module.graph.nodes}
    nodes = []
    for n in graph.nodes:
        ratio = ratios.plain.get(n.name, 0.0) or ratios.plain.get(_source(calls.get(n.name)), 1.0)
        own = ratios.ways.get((n.name, PLAIN), ratio)
        ways = tuple(replace(a, time_s=a.time_s * ratios.ways.get((n.name, a.name), ratio)) for a in n.alternatives)
        nodes.append(replace(n, time_s=n.time_s * own, alternatives=ways))
    return replace(graph, nodes=tuple(nodes), evidence=graph.evidence + EVIDENCE)


def _source(call: fx.Node | None) -> str:
    """Of what shows one result of a call: the call. Half of a normalisation in two runs there."""
    first = call.args[0] if call is not None and call.op == "call_function" and call.args else None
    return first.name if isinstance(first, fx.Node) and "getitem" in str(call.target) else ""  # type: ignore[union-attr]
