"""PyTorch's own choices for a captured step, as step plans: what its partitioners save, run again, and in which order.

They are the peers of `memory compare`: the default partition (everything saved that backward reads), the minimum cut, and `activation_memory_budget`
with any of its knapsack solvers. The partitioners get a copy of the joint graph; common subexpressions are left alone, so that every node of
theirs is one of the step graph's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import fx

from ...capture.step import CapturedStep
from ...capture.torch_private import torch_partition
from ...decide.memory.step import finished
from ...errors import Unsupported
from ...graph.step_graph import StepGraph, StepPlan

__all__ = ["TORCH_BUDGETS", "plan_of_partition", "torch_plans"]

TORCH_BUDGETS = (0.0, 0.2, 0.4, 0.6, 0.8)


def torch_plans(
    step: CapturedStep, *, graph: StepGraph | None = None, budgets: Sequence[float] = TORCH_BUDGETS, solver: str = "dp"
) -> tuple[StepPlan, ...]:
    """Default partition, minimum cut, then one plan per budget (a share, as torch takes it). `graph`: the step graph with times, of the same nodes.

    Raises: Unsupported when torch's graphs hold a node that the step graph lacks.
    """
    step_graph = graph or step.step_graph
    forward_outputs = next((i for i, name in enumerate(step.outputs) if name == "none" or name.startswith("gradient:")), len(step.outputs))
    parameters = [i for i, name in enumerate(step.values) if name.startswith(("param:", "buffer:"))]
    plans = []
    for kind, budget in (("default", 1.0), ("min-cut", 1.0), *(("budget", b) for b in budgets)):
        joint = fx.GraphModule(step.graph_module, copy.deepcopy(step.graph_module.graph))
        forward, backward = torch_partition(joint, kind=kind, budget=budget, solver=solver, forward_outputs=forward_outputs, static_inputs=parameters)
        options = {"budget": budget, "solver": solver} if kind == "budget" else {}
        plans.append(plan_of_partition(step_graph, forward, backward, strategy=f"torch {kind}", options=options))
    return tuple(plans)


def plan_of_partition(
    graph: StepGraph, forward: fx.GraphModule, backward: fx.GraphModule, *, strategy: str, options: dict[str, object] | None = None
) -> StepPlan:
    """Raises: Unsupported for a node that is not in the step graph."""
    number = {n.name: i for i, n in enumerate(graph.nodes)}
    runs = [[n for n in part.graph.nodes if n.op == "call_function"] for part in (forward, backward)]
    for n in (*runs[0], *runs[1]):
        if n.name not in number:
            raise Unsupported(f"torch's partition holds {n.name} ({n.target}), which the captured step lacks", where=graph.name)
    given = {number[n.name] for n in runs[0]} & {*graph.results}  # torch's backward may make items of a batch norm again that the step has given
    again = [number[n.name] for n in runs[1] if number[n.name] not in given]
    first = [number[n.name] for n in runs[0]]
    early = [x for x in first if graph.nodes[x].phase == "backward"]  # views for backward that need no gradient: they are taken when it begins
    first = [x for x in first if graph.nodes[x].phase != "backward"]
    return finished(graph, [(x, -1) for x in (*first, *early, *again)], len(first), strategy=strategy, options=dict(options or {}))
