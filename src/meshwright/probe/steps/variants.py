"""Seconds and inner workspaces of other implementations, measured here beside the plain ones, and which of them are worth offering.

Every extra node and alternative of a step graph is run alone on tensors of its shapes, as plain operators are (`step_costs`, whose file keeps these
too). One that reads the same is exact where its results have the plain operator's bits on the same random operands. Of several that read the
same, those that are beaten in time and in workspace by another are left out. What is at least as good as the plain operator in both takes its place:
that node's target is then "images 8|aten.convolution.default", and its plain cost is that implementation's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import msgspec
import torch
from torch import fx

from ...capture.work import tensors_in
from ...graph.step_graph import Alternative, StepGraph, StepNode, replaced_target
from ...run.calibrate.operator_times import call_key
from ...run.steps.pieces import POOL, POOL_BACKWARD, pool, pool_geometry, pool_gradient
from ...run.steps.step import VARIANTS
from .costs import Job, StepCost, StepCosts, call_of, fakes_of, measure_missing, real_tensor

__all__ = ["MAX_TIME_SHARE", "measure_variants", "pools_by_offsets"]

VARIANT_ROUNDS = 3  # timings of an implementation
MAX_TIME_SHARE = 0.97  # of the plain operator's time, to count as faster: by more than the noise of measuring


def measure_variants(module: fx.GraphModule, graph: StepGraph, costs: StepCosts, *, rounding: bool, rounds: int = VARIANT_ROUNDS) -> StepGraph:
    """`graph`: with alternatives, registered (`probe.steps.choices`); `module`: its joint graph. `rounding`: implementations that are exact up to
    rounding stay. What nothing implements here keeps its estimate.

    Raises: RunError when one fails on tensors of its shapes, naming it.
    """
    tried = _Tried(module, graph)
    measure_missing(costs, dict(tried.jobs()), rounds)
    nodes = []
    for i, n in enumerate(graph.nodes):
        if n.optional and n.target in VARIANTS.optional:
            cost = costs.costs.get(tried.extra_key(i))
            n = n if cost is None else msgspec.structs.replace(n, time_s=cost.time_s, workspace_bytes=cost.workspace_bytes)
        elif n.alternatives:
            found = [(a, costs.costs.get(tried.key(i, a))) for a in n.alternatives]
            n = _chosen(n, [_priced(n, a, cost) for a, cost in found if cost is None or cost.same_order], rounding)
        nodes.append(n)
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def _priced(n: StepNode, a: Alternative, cost: StepCost | None) -> Alternative:
    if cost is None:
        return a
    exact = cost.same_bits if a.inputs == n.inputs else a.lossless
    return msgspec.structs.replace(a, time_s=cost.time_s, workspace_bytes=cost.workspace_bytes, lossless=exact)


def _chosen(n: StepNode, ways: list[Alternative], rounding: bool) -> StepNode:
    kept: list[Alternative] = []
    best: Alternative | None = None
    for a in ways:
        alike = a.inputs == n.inputs
        if alike and not a.lossless and not rounding:
            continue
        if alike and a.over < 0 and a.lossless and a.workspace_bytes <= n.workspace_bytes and a.time_s <= n.time_s * MAX_TIME_SHARE:
            best = a if best is None or a.time_s < best.time_s else best
        kept.append(a)
    if best is not None:
        n = msgspec.structs.replace(n, target=replaced_target(n.target, best.name), time_s=best.time_s, workspace_bytes=best.workspace_bytes)
    return msgspec.structs.replace(n, alternatives=tuple(a for a in kept if a is not best and not _beaten(a, n, kept)))


def _beaten(a: Alternative, n: StepNode, others: list[Alternative]) -> bool:
    """Another one, or the plain operator, reads the same, is as exact, takes no longer and needs no more room."""

    def no_worse(b: Alternative | StepNode, exact: bool, over: int) -> bool:
        alike = b.inputs == a.inputs and over == a.over and (exact or not a.lossless)
        return alike and b.time_s <= a.time_s and b.workspace_bytes <= a.workspace_bytes

    first = {id(b): k for k, b in enumerate(others)}
    better = (b for b in others if b is not a and no_worse(b, b.lossless, b.over))
    return no_worse(n, True, -1) or any((b.time_s, b.workspace_bytes) != (a.time_s, a.workspace_bytes) or first[id(b)] < first[id(a)] for b in better)


@dataclass(frozen=True)
class _Tried:
    module: fx.GraphModule
    graph: StepGraph

    @cached_property
    def calls(self) -> Mapping[str, fx.Node]:
        return {n.name: n for n in self.module.graph.nodes}

    def jobs(self) -> list[tuple[str, Job]]:
        found = []
        for i, n in enumerate(self.graph.nodes):
            if n.optional and n.target in VARIANTS.optional:
                found.append((self.extra_key(i), Job(name=n.name, ready=partial(self._extra, i))))
            for a in n.alternatives:
                run = VARIANTS.alternatives.get((n.target, a.name))
                if run is not None:
                    plain = partial(self._plain, i) if a.inputs == n.inputs else None
                    fakes = None if plain else self.calls[n.name].meta["val"]
                    found.append((self.key(i, a), Job(name=f"{n.name} by {a.name}", ready=partial(self._way, i, a, run), plain=plain, fakes=fakes)))
        return found

    def key(self, i: int, a: Alternative) -> str:
        n = self.graph.nodes[i]
        others = "" if a.inputs == n.inputs else ", ".join(self._operand_key(x) for x in a.inputs)
        return f"{a.name}|{others}|{call_key(n.target, *fakes_of(self.calls[n.name]))}"

    def extra_key(self, i: int) -> str:
        n = self.graph.nodes[i]
        return f"{n.target}({', '.join(self._operand_key(x) for x in n.inputs)})"

    def _operand_key(self, x: int) -> str:
        n = self.graph.nodes[x]
        return self.extra_key(x) if n.name not in self.calls else call_key("", (self.calls[n.name].meta.get("val"),), {})

    def _plain(self, i: int) -> Callable[[], Any]:
        return call_of(self.calls[self.graph.nodes[i].name], "cpu")[0]

    def _way(self, i: int, a: Alternative, run: Callable[..., Any]) -> Callable[[], Any]:
        n = self.graph.nodes[i]
        call = self.calls[n.name]
        if a.inputs == n.inputs:
            made = call_of(call, "cpu")[1]  # in the order in which the plain call's are made: the same random numbers
            given = [made[x] for x in call.all_input_nodes]
        else:
            given = [self._operand(x) for x in a.inputs]
        return lambda: run(call, *given)

    def _extra(self, i: int) -> Callable[[], Any]:
        n = self.graph.nodes[i]
        given = [self._operand(x) for x in n.inputs]
        return lambda: VARIANTS.optional[n.target](*given)

    def _operand(self, x: int) -> Any:
        """Places in windows and masks are what the operators that make them give; weights are not near 0."""
        n = self.graph.nodes[x]
        if n.name not in self.calls:
            return self._extra(x)()
        call = self.calls[n.name]
        value = call.meta.get("val")
        whole = n.phase != "input" and any(not t.dtype.is_floating_point for t in tensors_in(value))
        if whole and all(self.graph.storages[s].kind == "made" for s in n.storages):
            while call.target is not None and str(call.target) == "aten.detach.default":
                call = call.all_input_nodes[0]
            if "getitem" in str(call.target):
                source, at = call.args[0], call.args[1]
                return call_of(source, "cpu")[0]()[at]
            return call_of(call, "cpu")[0]()
        found = real_tensor(value, call, "cpu")
        return found.abs_().add_(0.5) if n.phase == "input" and isinstance(found, torch.Tensor) and found.is_floating_point() else found


def pools_by_offsets(module: fx.GraphModule, graph: StepGraph, costs: StepCosts, *, rounds: int = VARIANT_ROUNDS) -> StepGraph:
    """Max poolings that note places in four bits take the place of plain ones, where both passes together are no slower so.

    The places are then a sixteenth as large, and the gradient does not read the pooling's input. Only where nothing else reads the places.
    """
    tried = _Tried(module, graph)
    pairs = [pair for i, n in enumerate(graph.nodes) if n.target == POOL_BACKWARD and (pair := _pooling(tried, i)) is not None]
    measure_missing(costs, {key: job for i, j in pairs for key, job in _pool_jobs(tried, i, j)}, rounds)
    nodes, storages = list(graph.nodes), list(graph.storages)
    for i, j in pairs:
        forward, backward = nodes[i], nodes[j]
        found = [costs.costs[key] for key, _ in _pool_jobs(tried, i, j)]
        if sum(c.time_s for c in found) > forward.time_s + backward.time_s or not all(c.same_order for c in found):
            continue
        places = backward.inputs[2]
        for n, cost, inputs in ((i, found[0], forward.inputs), (j, found[1], (backward.inputs[0], places))):
            target = replaced_target(nodes[n].target, "offsets")
            nodes[n] = msgspec.structs.replace(nodes[n], target=target, time_s=cost.time_s, workspace_bytes=cost.workspace_bytes, inputs=inputs)
        (s,) = nodes[places].storages
        count = tried.calls[nodes[places].name].meta["val"].numel()
        storages[s] = msgspec.structs.replace(storages[s], size_bytes=-(-count // 2))
    return msgspec.structs.replace(graph, nodes=tuple(nodes), storages=tuple(storages))


def _pooling(tried: _Tried, backward: int) -> tuple[int, int] | None:
    """(the pooling, its gradient), where only the latter reads the places and a place fits into four bits."""
    graph, n = tried.graph, tried.graph.nodes[backward]
    if len(n.inputs) != 3:
        return None
    places = n.inputs[2]
    readers = [j for j, m in enumerate(graph.nodes) if places in m.inputs]
    source = graph.nodes[places].inputs[0] if graph.nodes[places].inputs else -1
    if readers != [backward] or places in graph.results or source < 0 or graph.nodes[source].target != POOL:
        return None
    geometry = pool_geometry(tried.calls[graph.nodes[source].name])
    floats = tried.calls[n.name].meta["val"].dtype in (torch.float32, torch.float64)
    return (source, backward) if geometry[0] * geometry[1] <= 16 and floats and len(graph.nodes[source].makes) == 2 else None


def _pool_jobs(tried: _Tried, forward: int, backward: int) -> tuple[tuple[str, Job], tuple[str, Job]]:
    calls = [tried.calls[tried.graph.nodes[i].name] for i in (forward, backward)]

    def there() -> Callable[[], Any]:
        (x,) = call_of(calls[0], "cpu")[1].values()
        return lambda: pool(calls[0], x)

    def back() -> Callable[[], Any]:
        gradient = call_of(calls[1], "cpu")[1][calls[1].args[0]]
        packed = there()()[1]
        return lambda: pool_gradient(calls[1], gradient, packed)

    keys = [f"offsets||{call_key(str(c.target), *fakes_of(c))}" for c in calls]
    fakes = calls[0].meta["val"][:1], calls[1].meta["val"]
    return (keys[0], Job(name=calls[0].name, ready=there, fakes=fakes[0])), (keys[1], Job(name=calls[1].name, ready=back, fakes=fakes[1]))
