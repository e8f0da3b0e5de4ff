"""The graph of a captured step with what its operators take here: measured alone, and in whole steps where these fit easily into the free memory.

The one place where a step is priced for planning: what `memory plan` and `memory compare` show and what the benchmarks record are the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import msgspec
import torch

from ...capture.step import CapturedStep
from ...decide.memory.step import keep_everything, size_text
from ...errors import MeshwrightError, Unsupported
from ...graph.step_graph import StepGraph
from ...io.own_limits import free_bytes
from ...run.steps.step import step_tensors
from .choices import LOSSY, with_variants
from .costs import StepCosts, measure_step
from .host_copies import CopyRates, measured_rates
from .in_place import Ratios, in_place, ratios_in_place, ratios_of_ways

__all__ = ["priced_graphs"]

Tensors = Callable[[], Sequence[torch.Tensor]]


def priced_graphs(
    step: CapturedStep, costs: StepCosts, *, kinds: Sequence[str] = ("plain",), device: str = "cpu", tensors: Tensors | None = None
) -> tuple[StepGraph, StepGraph]:
    """The step's graph as PyTorch runs it, and with the other implementations that `kinds` allow (the same graph for "plain").

    `kinds`: plain, or some of exact, rounding, bf16, int8, of processors only, and host: results may wait in the host's memory.
    `tensors`: what the step's placeholders get when a whole step is run (default: the model's own); asked at most once. Where a plain step takes more
    than half of the free memory, or does not run, times are those of operators alone, and a note of both graphs says so. What is measured is kept in
    `costs`. Raises: as `measure_step`.
    """
    alone = measure_step(step.graph_module, step.step_graph, costs=costs, device=device)
    joint, ratios, why_not = None, Ratios(), ""
    if device == "cpu":
        if "plain" not in kinds:
            joint = with_variants(
                step, alone, costs=costs, rounding="rounding" in kinds, lossy=[k for k in kinds if k in LOSSY], offload=_rates(kinds, device)
            )  # fmt: skip
        ratios, why_not = _ratios(step, alone, joint, costs, cache(tensors or partial(step_tensors, step)))

    elif "host" in kinds:
        joint = with_variants(step, alone, offload=_rates(kinds, device), offload_only=True)

    def finished(graph: StepGraph) -> StepGraph:
        graph = in_place(graph, step.graph_module, ratios) if ratios.plain else graph
        return msgspec.structs.replace(graph, notes=(*graph.notes, why_not)) if why_not else graph

    plain = finished(alone)
    return plain, plain if joint is None else finished(joint)


def _rates(kinds: Sequence[str], device: str) -> CopyRates | None:
    return measured_rates(device) if "host" in kinds else None


def _ratios(step: CapturedStep, alone: StepGraph, joint: StepGraph | None, costs: StepCosts, tensors: Tensors) -> tuple[Ratios, str]:
    """What `ratios_in_place` and `ratios_of_ways` give, or why they were not asked."""

    def real() -> Sequence[torch.Tensor]:
        found = tensors()
        if any(isinstance(x, torch._subclasses.FakeTensor) or x.device.type != "cpu" for x in found):
            raise Unsupported("forward makes tensors whose values are not known here")
        return found

    need, free = keep_everything(alone).peak_bytes, free_bytes()
    if 2 * need > free:
        return Ratios(), f"operators were timed alone: a whole step takes {size_text(need)}, {size_text(free)} are free"
    try:
        ratios = ratios_in_place(step.graph_module, alone, real, costs)
        return (ratios if joint is None else ratios_of_ways(step.graph_module, joint, real, costs, ratios)), ""
    except MeshwrightError as error:
        return Ratios(), f"operators were timed alone: a whole step does not run here: {error.message}"
