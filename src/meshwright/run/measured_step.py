"""The measured step of a model function: captured, priced operator by operator, with what its operators may run as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..capture.losses import has_images
from ..capture.resolve import build_model
from ..capture.step import CapturedStep, capture_step_of
from ..decide.memory.step import keep_everything, size_text
from ..errors import CaptureError, MeshwrightError, UnknownName, Unsupported, UsageError
from ..io.each_file import free_bytes
from ..probe.step_costs import StepCosts, costs_file, measure_step
from ..probe.step_in_place import Ratios, in_place, ratios_in_place, ratios_of_ways
from ..step_graph import StepGraph
from .step import step_tensors
from .step_choices import LOSSY, with_variants
from .step_optimizer import optimizer_named, with_optimizer

__all__ = ["CHANNELS_LAST", "LAYOUTS", "MeasuredStep", "implementations_named", "measured_step", "measured_steps", "options_of"]

IMPLEMENTATIONS = ("plain", "exact", "rounding", *LOSSY)
GIVEN, CHANNELS_LAST, FASTEST = "given", "channels-last", "fastest"
LAYOUTS = (GIVEN, CHANNELS_LAST, FASTEST)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A captured step and its graph with measured costs, ended by the optimizer's update; `state_bytes`: the optimizer's, counted as resident.

    `graph` may hold other implementations of operators, and be laid out channels last; `plain` is without them, as PyTorch runs the step as it is
    written.
    """

    step: CapturedStep
    graph: StepGraph
    plain: StepGraph
    batch_size: int
    state_bytes: int
    optimizer: str = "none"
    implementations: str = "plain"

    @property
    def layout(self) -> str:
        return CHANNELS_LAST if self.step.channels_last else GIVEN

    def bytes_by_kind(self) -> dict[str, int]:
        """What lives through the whole step, and the gradients at its end."""
        found = {"optimizer state": self.graph.resident_bytes}
        for s in self.graph.storages:
            if s.kind != "made":
                found[f"{s.kind}s"] = found.get(f"{s.kind}s", 0) + s.size_bytes
        made = {s for r in self.graph.results for s in self.graph.nodes[r].storages if self.graph.storages[s].kind == "made"}
        return {k: v for k, v in found.items() if v} | {"gradients and loss": sum(self.graph.storages[s].size_bytes for s in made)}


def measured_steps(
    model: str, *, layout: str = "", implementations: str = "plain", **options: Any
) -> tuple[MeasuredStep, ...]:
    """The step in every layout that may be chosen, the faster one (everything kept) first; all have the `plain` graph of the step as it is written.

    `layout`: given, channels-last (of images and volumes among the inputs, and of what is computed from them), fastest (both are tried); "": fastest
    where rounding is allowed, for another layout sums in another order. A model that refuses to be laid out so, or has no images, is as given; a note
    says so where that was asked. `options`: of `measured_step`. Raises: as `measured_step`; UnknownName for another layout.
    """
    if layout and layout not in LAYOUTS:
        raise UnknownName(f"there is no layout {layout[:64]!r}", where="--layout", hint=f"there are: {', '.join(LAYOUTS)}")
    layout = layout or (FASTEST if "rounding" in implementations_named(implementations) else GIVEN)
    given = measured_step(model, implementations=implementations, **options)
    if layout == GIVEN:
        return (given,)
    try:
        if not has_images(given.step.source.inputs):
            raise CaptureError("no input is a batch of images or volumes", where=model)
        other = measured_step(model, implementations=implementations, channels_last=True, **options)
    except (CaptureError, Unsupported) as error:
        return (given if layout == FASTEST else noted(given, f"not laid out channels last: {error.message}"),)
    faster = keep_everything(other.plain).time_s < keep_everything(given.plain).time_s
    other = replace(other, plain=given.plain)
    if layout == CHANNELS_LAST:
        return (other,)
    return (other, given) if faster else (given, other)


def noted(measured: MeasuredStep, note: str) -> MeasuredStep:
    graph = measured.graph
    return replace(measured, graph=msgspec.structs.replace(graph, notes=(*graph.notes, note)))


def measured_step(
    model: str, *, loss: str = "cross-entropy", batch_size: int | None = None, optimizer: str = "none", costs: Path | None = None, seed: int = 0,
    device: str = "fake", implementations: str = "plain", channels_last: bool = False,
) -> MeasuredStep:  # fmt: skip
    """Captures and measures the step of a model function; `costs`: file of measured costs (default: the user's cache). `implementations`: what
    operators may run as, by commas: plain (nothing else), exact (other ones with the same bits), rounding, bf16, int8 (those too); of a
    processor's step only. Operators are measured alone and, where the plain step fits easily into the free memory, in a few whole steps, too.

    Raises: UnknownName, UsageError, CaptureError, Unsupported (dynamic shapes, sparse gradients), RunError.
    """
    optimizer_named(optimizer)
    kinds = implementations_named(implementations)
    step = capture_step_of(model, loss=loss, batch_size=batch_size, seed=seed, device=device, channels_last=channels_last)
    kind = "cpu" if device == "fake" else device.partition(":")[0]
    known = StepCosts(costs or costs_file(), device=kind)
    alone = measure_step(step.graph_module, step.step_graph, costs=known, device=kind)
    joint = with_variants(step, alone, costs=known, **options_of(kinds)) if "plain" not in kinds and kind == "cpu" else None
    ratios, why_not = _ratios(step, alone, joint, known, seed, device) if kind == "cpu" else (Ratios(), "")

    def finished(graph: StepGraph) -> StepGraph:
        graph = in_place(graph, step.graph_module, ratios) if ratios.plain else graph
        graph = msgspec.structs.replace(graph, notes=(*graph.notes, why_not)) if why_not else graph
        return with_optimizer(step, graph, optimizer, known)

    plain = finished(alone)
    graph = plain if joint is None else finished(joint)
    return MeasuredStep(
        step=step, graph=graph, plain=plain, batch_size=step.source.batch_size, state_bytes=graph.resident_bytes, optimizer=optimizer,
        implementations=implementations,
    )  # fmt: skip


def _ratios(
    step: CapturedStep, graph: StepGraph, joint: StepGraph | None, costs: StepCosts, seed: int, device: str
) -> tuple[Ratios, str]:
    """What `ratios_in_place` and `ratios_of_ways` give, or why they were not asked."""

    @cache
    def tensors() -> list[torch.Tensor]:
        source = step.source
        if device == "fake":
            source = build_model(source.name, device="cpu", seed=seed, batch_size=source.batch_size)
        found = step_tensors(replace(step, source=source))
        if any(isinstance(x, torch._subclasses.FakeTensor) or x.device.type != "cpu" for x in found):
            raise Unsupported("forward makes tensors whose values are not known here")
        return found

    need, free = keep_everything(graph).peak_bytes, free_bytes()
    if 2 * need > free:
        return Ratios(), f"operators were timed alone: a whole step takes {size_text(need)}, {size_text(free)} are free"
    try:
        ratios = ratios_in_place(step.graph_module, graph, tensors, costs)
        return (ratios if joint is None else ratios_of_ways(step.graph_module, joint, tensors, costs, ratios)), ""
    except MeshwrightError as error:
        return Ratios(), f"operators were timed alone: a whole step does not run here: {error.message}"


def implementations_named(text: str) -> tuple[str, ...]:
    """Raises: UnknownName; UsageError for plain beside others."""
    kinds = tuple(dict.fromkeys(x.strip() for x in text.split(",")))
    for kind in kinds:
        if kind not in IMPLEMENTATIONS:
            raise UnknownName(f"there is no kind {kind[:64]!r}", where="--implementations", hint=f"there are: {', '.join(IMPLEMENTATIONS)}")
    if "plain" in kinds and len(kinds) > 1:
        raise UsageError("plain means no other implementations", where="--implementations", hint="plain, or the others without it")
    return kinds


def options_of(kinds: Sequence[str]) -> dict[str, Any]:
    """What `with_variants` is to offer."""
    return {"rounding": "rounding" in kinds, "lossy": [k for k in kinds if k in LOSSY]}
