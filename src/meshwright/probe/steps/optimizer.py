"""The optimizer's update as the last node of a step graph: its temporaries count in the peak, and plans with it can be run and measured.

The update reads every gradient, so it comes after everything that reads parameters; it makes nothing that lasts (its state is resident). torch's
default implementations on a processor go from parameter to parameter, so its workspace is that of the parameter that needs most. Each distinct shape
is run alone, a second time with its state there, and kept in the file of costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from ...capture.step import CapturedStep
from ...errors import UnknownName, Unsupported
from ...graph.step_graph import StepGraph, StepNode, StepStorage
from ...run.steps.step import VARIANTS, Variants
from ...run.steps.storage_peak import peak_of
from .costs import StepCost, StepCosts

__all__ = ["OPTIMIZERS", "Optimizer", "optimizer_named", "trained_parameters", "updating", "with_optimizer"]


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: tensors of a parameter's size that it keeps for each; `make`: torch's optimizer of these parameters, None for no update at all."""

    state: int
    make: Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer] | None


OPTIMIZERS = {
    "none": Optimizer(state=0, make=None),
    "sgd": Optimizer(state=0, make=lambda p: torch.optim.SGD(p, lr=1e-3)),
    "momentum": Optimizer(state=1, make=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
    "adam": Optimizer(state=2, make=lambda p: torch.optim.Adam(p, lr=1e-3)),
}


def optimizer_named(name: str) -> Optimizer:
    """Raises: UnknownName."""
    if name not in OPTIMIZERS:
        raise UnknownName(f"there is no optimizer {name[:64]!r}", where="--optimizer", hint=f"there are: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def trained_parameters(step: CapturedStep) -> list[str]:
    """Names of the parameters that get a gradient, in the order of the gradients."""
    return [o.partition(":")[2] for o in step.outputs if o.startswith("gradient:")]


def _gradients(step: CapturedStep) -> list[str]:
    """Nodes of the gradients of `trained_parameters`; two parameters may share one."""
    output = dict(zip(step.outputs, step.graph_module.graph.output_node().args[0], strict=True))
    return [output[f"gradient:{p}"].name for p in trained_parameters(step)]


def with_optimizer(step: CapturedStep, graph: StepGraph, name: str, costs: StepCosts) -> StepGraph:
    """`graph` ended by the update of optimizer `name`, with measured time and workspace; its state is resident.

    Raises: UnknownName for an optimizer; Unsupported on a GPU, whose optimizers work on all parameters at once.
    """
    optimizer = optimizer_named(name)
    call = dict(zip(step.values, step.graph_module.graph.find_nodes(op="placeholder"), strict=True))
    fakes = [call[f"param:{p}"].meta["val"] for p in trained_parameters(step)]
    state = optimizer.state * sum(x.untyped_storage().nbytes() for x in fakes)
    graph = msgspec.structs.replace(graph, resident_bytes=graph.resident_bytes + state)
    if optimizer.make is None or not fakes:
        return graph
    if costs.environment["device"] != "cpu":
        raise Unsupported("the optimizer's temporaries are measured on processors only", where=f"--optimizer {name}", hint="--optimizer none")
    number = {n.name: i for i, n in enumerate(graph.nodes)}
    reads = [number[x] for x in _gradients(step)] + [number[call[f"param:{p}"].name] for p in trained_parameters(step)]
    found = [_measured(optimizer, name, tuple(x.shape), x.dtype, costs) for x in fakes]
    costs.save()
    update = StepNode(
        name="optimizer", target=f"optimizer.{name}", phase="backward", inputs=tuple(dict.fromkeys(reads)), storages=(len(graph.storages),),
        makes=(len(graph.storages),), time_s=sum(c.time_s for c in found), workspace_bytes=max(c.workspace_bytes for c in found),
    )  # fmt: skip
    return msgspec.structs.replace(
        graph, nodes=(*graph.nodes, update), storages=(*graph.storages, StepStorage(size_bytes=0, owner=update.name)),
        results=(*graph.results, len(graph.nodes)),
    )  # fmt: skip


def _measured(optimizer: Optimizer, name: str, shape: tuple[int, ...], dtype: torch.dtype, costs: StepCosts) -> StepCost:
    key = f"optimizer.{name} {list(shape)} {dtype}"
    if key not in costs.costs:
        assert optimizer.make is not None
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        update = optimizer.make([parameter])
        update.step()
        workspace = peak_of(lambda: _step(update), [])
        start = time.thread_time()
        _step(update)
        costs.costs[key] = StepCost(time.thread_time() - start, workspace)
    return costs.costs[key]


def _step(update: torch.optim.Optimizer) -> None:
    update.step()


def updating(step: CapturedStep, name: str) -> Variants:
    """What runs the update of a real captured step: it changes the module's parameters and keeps its state between runs."""
    optimizer, known = optimizer_named(name), dict(step.source.module.named_parameters(remove_duplicate=False))
    parameters = [known[p] for p in trained_parameters(step)]
    update = optimizer.make(parameters) if optimizer.make is not None and parameters else None

    place = {x: i for i, x in enumerate(dict.fromkeys(_gradients(step)))}
    own = [place[x] for x in _gradients(step)]

    def run(*reads: Any) -> None:
        assert update is not None
        for p, i in zip(parameters, own, strict=True):
            p.grad = reads[i]
        try:
            update.step()
        finally:
            update.zero_grad(set_to_none=True)

    return replace(VARIANTS, optional={**VARIANTS.optional, f"optimizer.{name}": run})
