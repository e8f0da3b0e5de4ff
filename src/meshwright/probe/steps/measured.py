"""The measured step of a model function: captured, priced operator by operator, with what its operators may run as."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...capture.losses import has_images
from ...capture.resolve import build_model
from ...capture.step import CapturedStep, capture_step_of
from ...decide.memory.step import keep_everything
from ...errors import CaptureError, UnknownName, Unsupported, UsageError
from ...graph.step_graph import StepGraph
from ...run.steps.step import step_tensors
from .choices import LOSSY
from .costs import StepCosts, costs_file
from .optimizer import optimizer_named, with_optimizer
from .priced import priced_graphs

__all__ = ["CHANNELS_LAST", "LAYOUTS", "MeasuredStep", "implementations_named", "measured_step", "measured_steps"]

IMPLEMENTATIONS = ("plain", "exact", "rounding", *LOSSY, "host")
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
    operators may run as, by commas: plain (nothing else), exact (other ones with the same bits), rounding, bf16, int8, host (those too); of a
    processor's step only. Operators are measured alone and, where the plain step fits easily into the free memory, in a few whole steps, too.

    Raises: UnknownName, UsageError, CaptureError, Unsupported (dynamic shapes, sparse gradients), RunError.
    """
    optimizer_named(optimizer)
    kinds = implementations_named(implementations)
    step = capture_step_of(model, loss=loss, batch_size=batch_size, seed=seed, device=device, channels_last=channels_last)
    kind = "cpu" if device == "fake" else device.partition(":")[0]
    known = StepCosts(costs or costs_file(), device=kind)

    def tensors() -> list[torch.Tensor]:
        source = step.source
        if device == "fake":
            source = build_model(source.name, device="cpu", seed=seed, batch_size=source.batch_size)
        return step_tensors(replace(step, source=source))

    bare, joint = priced_graphs(step, known, kinds=kinds, device=kind, tensors=tensors)
    plain = with_optimizer(step, bare, optimizer, known)
    graph = plain if joint is bare else with_optimizer(step, joint, optimizer, known)
    return MeasuredStep(
        step=step, graph=graph, plain=plain, batch_size=step.source.batch_size, state_bytes=graph.resident_bytes, optimizer=optimizer,
        implementations=implementations,
    )  # fmt: skip


def implementations_named(text: str) -> tuple[str, ...]:
    """Raises: UnknownName; UsageError for plain beside others."""
    kinds = tuple(dict.fromkeys(x.strip() for x in text.split(",")))
    for kind in kinds:
        if kind not in IMPLEMENTATIONS:
            raise UnknownName(f"there is no kind {kind[:64]!r}", where="--implementations", hint=f"there are: {', '.join(IMPLEMENTATIONS)}")
    if "plain" in kinds and len(kinds) > 1:
        raise UsageError("plain means no other implementations", where="--implementations", hint="plain, or the others without it")
    return kinds
