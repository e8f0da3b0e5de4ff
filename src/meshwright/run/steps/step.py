"""Runs a `StepPlan` on real tensors, action by action.

Arguments are boxed: `run` empties the list it is given, and a result is let go the moment the plan says so, so the measured peak is the plan's.
A node that draws random numbers and runs again later does so with the state it had the first time; the generator is then put back. New values of
buffers (batch-norm statistics) are results of the step, each made once; `CapturedStep.outputs` names them, the caller copies them into place.
Other implementations are looked up in a `Variants`: operators of optional nodes by target, alternatives by (target, name of the alternative).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...capture.step import CapturedStep
from ...capture.torch_private import storage_key
from ...capture.work import tensors_in
from ...check.training.step_memory import check_step_plan
from ...errors import RunError, UnknownName, UsageError
from ...graph.step_graph import StepGraph, StepNode, StepPlan, plain_target, replacement
from .calls_again import generator_state, restore_generator
from .storage_peak import peak_of

__all__ = ["VARIANTS", "StepRunner", "Variants", "measured_peak_bytes", "runner_of", "step_tensors"]


@dataclass
class Variants:
    """Implementations beyond the plain operators.

    `optional[target](*inputs)`: an optional node, given the results of its inputs. `alternatives[target, name](call, *inputs)`: another way of a
    node; `call` is the FX node of the plain one (its constants), inputs are those of the `Alternative`. One that writes over an input returns it.
    `joined[target of a node, target of what shows its first result]`: both at once, where the second runs right after the first; gives both results.
    """

    optional: dict[str, Callable[..., Any]] = field(default_factory=dict)
    alternatives: dict[tuple[str, str], Callable[..., Any]] = field(default_factory=dict)
    joined: dict[tuple[str, str], Callable[..., tuple[Any, Any]]] = field(default_factory=dict)


VARIANTS = Variants()
"""Those of this package; whoever adds alternatives to step graphs registers them here."""

Action = Callable[[list[Any]], Any]


class StepRunner:
    """A plan made ready to run. Raises: UnknownName for an implementation that is not registered; CheckFailed for a wrong plan."""

    def __init__(self, module: fx.GraphModule, graph: StepGraph, plan: StepPlan, *, variants: Variants = VARIANTS) -> None:
        check_step_plan(graph, plan).raise_if_wrong()
        self.module, self.graph, self.plan, self.variants = module, graph, plan, variants
        self.number = {n.name: i for i, n in enumerate(graph.nodes)}
        self.call = {n.name: n for n in module.graph.nodes}
        self.placeholders = [self.number[n.name] for n in module.graph.find_nodes(op="placeholder")]
        self.constants = {self.number[n.name]: _attribute(module, str(n.target)) for n in module.graph.find_nodes(op="get_attr")}
        self.outputs = [None if n is None else self.number[n.name] for n in module.graph.output_node().args[0]]
        self.lying: list[list[int]] = [[] for _ in graph.storages]
        for i, n in enumerate(graph.nodes):
            for s in n.storages:
                self.lying[s].append(i)
        runs: dict[int, int] = {}
        for a in plan.actions:
            runs[a.node] = runs.get(a.node, 0) + 1
        self.replayed = {n for n, times in runs.items() if times > 1 and graph.nodes[n].random}
        made: dict[tuple[int, int], Action] = {}
        for a in plan.actions:
            if (a.node, a.alternative) not in made:
                made[a.node, a.alternative] = self._action(a.node, a.alternative)
        self.actions = [made[a.node, a.alternative] for a in plan.actions]
        self._join()

    def run(self, arguments: list[Any]) -> list[Any]:
        """Results in the order of the graph's outputs (None where it gives none). Empties `arguments`.

        Raises: UsageError for another number of arguments than placeholders; RunError naming the node that failed.
        """
        values = self.values_of(arguments)
        arguments.clear()
        self.run_actions(values, {}, 0, len(self.actions))
        return [None if i is None else values[i] for i in self.outputs]

    def values_of(self, arguments: Sequence[Any]) -> list[Any]:
        """What `run_actions` begins with: one place per node of the graph. Raises: UsageError for another number of arguments than placeholders."""
        if len(arguments) != len(self.placeholders):
            raise UsageError(f"got {len(arguments)} tensors for {len(self.placeholders)} placeholders", where="arguments")
        values: list[Any] = [None] * len(self.graph.nodes)
        for i, x in (*zip(self.placeholders, arguments, strict=True), *self.constants.items()):
            values[i] = x
        return values

    def run_actions(self, values: list[Any], states: dict[int, Any], first: int, end: int) -> None:
        """Runs actions `first` to `end` on `values`, one place per node of the graph. `states`: empty before the first action, the same for all."""
        with torch.no_grad():
            self._run(values, states, first, end)

    def _run(self, values: list[Any], states: dict[int, Any], first: int, end: int) -> None:
        for a, do in zip(self.plan.actions[first:end], self.actions[first:end], strict=True):
            try:
                values[a.node] = self._replayed(a.node, do, values, states) if a.node in self.replayed else do(values)
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
                node = self.graph.nodes[a.node]
                raise RunError(f"{node.target} fails: {type(error).__name__}: {error}", where=node.name, data={"module": node.module}) from error
            if a.alternative >= 0 and self.graph.nodes[a.node].alternatives[a.alternative].over >= 0:
                self._forget_views_of(a.node, self.graph.nodes[a.node].alternatives[a.alternative].over, values)
            for x in a.drops:
                values[x] = None

    def _replayed(self, node: int, do: Action, values: list[Any], states: dict[int, Any]) -> Any:
        """The first run remembers the generator's state, later ones run from it and put the present one back."""
        device = next((str(x.device) for x in tensors_in([values[i] for i in self.graph.nodes[node].inputs])), "cpu")
        if node not in states:
            states[node] = generator_state(device)
            return do(values)
        present = generator_state(device)
        restore_generator(device, states[node])
        try:
            return do(values)
        finally:
            restore_generator(device, present)

    def _forget_views_of(self, node: int, over: int, values: list[Any]) -> None:
        """What was written over is gone: nobody may read it, or hold its storage under another name."""
        own = {storage_key(x) for x in tensors_in(values[node])}
        for s in self.graph.nodes[over].storages:
            for i in self.lying[s]:
                if i != node and any(storage_key(x) in own for x in tensors_in(values[i])):
                    values[i] = None

    def _action(self, number: int, alternative: int) -> Action:
        node = self.graph.nodes[number]
        if alternative >= 0:
            way = node.alternatives[alternative]
            return _bound(self._implementation(node, way.name), self.call.get(node.name), way.inputs)
        if node.name not in self.call:
            plain = self.variants.optional.get(node.target)
            if plain is None:
                raise UnknownName(f"nothing implements {node.target}", where=node.name, hint=_known(self.variants))
            return lambda values: plain(*[values[i] for i in node.inputs])
        if instead := replacement(node.target):
            return _bound(self._implementation(node, instead), self.call[node.name], node.inputs)
        return self._plain(self.call[node.name])

    def _join(self) -> None:
        """Two nodes that are one operator when they run together: the first leaves the second's result in its place."""
        nodes, actions = self.graph.nodes, self.plan.actions
        firsts = {first for first, _ in self.variants.joined}
        for k, a in enumerate(actions):
            if nodes[a.node].target in firsts:
                later = (j for j in range(k + 1, len(actions)) if nodes[actions[j].node].makes or nodes[actions[j].node].inputs != (a.node,))
                j = next(later, -1)
                second = actions[j].node if j >= 0 else a.node
                both = self.variants.joined.get((nodes[a.node].target, nodes[second].target))
                if both is not None and self.call[nodes[second].name].args[0] is self.call[nodes[a.node].name]:
                    self.actions[k] = _leaving(_bound(both, self.call[nodes[a.node].name], nodes[a.node].inputs), second)
                    self.actions[j] = lambda values, second=second: values[second]  # type: ignore[misc]

    def _implementation(self, node: StepNode, name: str) -> Callable[..., Any]:
        target = plain_target(node.target)
        found = self.variants.alternatives.get((target, name))
        if found is None:
            raise UnknownName(f"{target} has no implementation {name!r}", where=node.name, hint=_known(self.variants))
        return found

    def _plain(self, call: fx.Node) -> Action:
        function: Any = call.target
        args, kwargs = call.args, call.kwargs
        if not kwargs and all(not isinstance(a, (tuple, list, dict, slice)) for a in args):  # the common case, without a walk through the arguments
            places = [(k, self.number[a.name]) for k, a in enumerate(args) if isinstance(a, fx.Node)]

            def simple(values: list[Any]) -> Any:
                given = list(args)
                for k, i in places:
                    given[k] = values[i]
                return function(*given)

            return simple

        def nested(values: list[Any]) -> Any:
            given, named = fx.node.map_arg((args, kwargs), lambda n: values[self.number[n.name]])
            return function(*given, **named)

        return nested


def _bound(function: Callable[..., Any], call: fx.Node | None, inputs: tuple[int, ...]) -> Action:
    return lambda values: function(call, *[values[i] for i in inputs])


def _leaving(both: Callable[[list[Any]], tuple[Any, Any]], second: int) -> Action:
    def run(values: list[Any]) -> Any:
        first, values[second] = both(values)
        return first

    return run


def _known(variants: Variants) -> str:
    names = [*variants.optional, *(f"{t} {n}" for t, n in variants.alternatives)]
    return f"there are: {', '.join(names[:12])}" if names else "none is registered"


def _attribute(module: fx.GraphModule, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def runner_of(step: CapturedStep, plan: StepPlan, *, graph: StepGraph | None = None, variants: Variants = VARIANTS) -> StepRunner:
    """A runner of `plan`; `graph`: the step graph that it was made for, where nodes or alternatives were added to the captured one."""
    return StepRunner(step.graph_module, graph or step.step_graph, plan, variants=variants)


def step_tensors(step: CapturedStep, inputs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """The tensors that the placeholders want, from the captured module (which must be real): a list to be handed to `run`."""
    module = step.source.module
    named: Mapping[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False)), **step.constants,
    }  # fmt: skip
    given = step.source.inputs if inputs is None else tuple(inputs)
    found = []
    for value in step.values:
        kind, _, rest = value.partition(":")
        if kind == "input":
            found.append(given[int(rest)])
        elif kind == "tangent":
            found.append(torch.ones((), device=given[0].device, dtype=_loss_dtype(step)))
        else:
            found.append(named[rest].detach())
    return found


def _loss_dtype(step: CapturedStep) -> torch.dtype:
    loss = step.graph_module.graph.output_node().args[0][step.outputs.index("loss")]
    dtype: torch.dtype = loss.meta["val"].dtype
    return dtype


def measured_peak_bytes(runner: StepRunner, tensors: Sequence[torch.Tensor]) -> int:
    """Peak of the allocator's own events over one run, what exists before and the graph's `resident_bytes` included: to compare with the plan's."""
    given = [*tensors]

    def work() -> None:
        runner.run([*given])

    return peak_of(work, given) + runner.graph.resident_bytes
