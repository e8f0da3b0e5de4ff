"""Whether a described transformer fits a device, and what would make it fit: the tightest limit and the nearest single change."""

from __future__ import annotations

import msgspec

from ..errors import Infeasible, MeshwrightError
from .flops import step_flops
from .stage import StageMemory, stage_memory
from .transformer import SplitLayout, Transformer

__all__ = ["Change", "changes", "require_memory", "tightest"]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the layout. `total_bytes`: of the fullest stage then; `hardware_ratio`: operations of a step against before."""

    what: str
    total_bytes: int
    hardware_ratio: float
    devices: int


def tightest(stages: tuple[StageMemory, ...]) -> StageMemory:
    return max(stages, key=lambda s: (s.total_bytes, -s.stage))


def changes(model: Transformer, layout: SplitLayout) -> tuple[Change, ...]:
    """Small changes of the layout, those that need no other devices first, then by operations added, then by memory."""
    edit = msgspec.structs.replace
    options: list[tuple[str, SplitLayout]] = []

    def offer(what: str, **fields: object) -> None:
        try:
            changed = edit(layout, **fields)
            changed.layers_of(model)
        except MeshwrightError:
            return
        options.append((what, changed))

    if layout.tensor > 1 and not layout.sequence_parallel:
        offer("sequence parallelism", sequence_parallel=True)
    if layout.data > 1 and not layout.distributed_optimizer:
        offer("a distributed optimizer", distributed_optimizer=True)
    if layout.recompute == "none" and model.attention == "eager":
        offer("recomputing core attention (selective)", recompute="selective")
        if layout.tensor > 1 and not layout.sequence_parallel:
            offer("sequence parallelism and recomputing core attention", sequence_parallel=True, recompute="selective")
    if layout.recompute not in ("full", "uniform"):
        offer("recomputing every layer (full)", recompute="full", every=1)
    if layout.microbatch_size % 2 == 0:
        half = layout.microbatch_size // 2
        offer(f"micro-batches of {half}", microbatch_size=half, microbatches=2 * layout.microbatches)
    if layout.interleave > 1:
        offer("no interleaving", interleave=1)
    if 2 * layout.tensor <= model.heads:
        if layout.data % 2 == 0:
            offer(f"tensor degree {2 * layout.tensor} instead of data {layout.data}", tensor=2 * layout.tensor, data=layout.data // 2,
                  microbatches=2 * layout.microbatches)  # fmt: skip
        offer(f"tensor degree {2 * layout.tensor}, on twice the devices", tensor=2 * layout.tensor)
    if not layout.stage_layers:
        if layout.data % 2 == 0:
            offer(f"pipeline degree {2 * layout.pipeline} instead of data {layout.data}", pipeline=2 * layout.pipeline, data=layout.data // 2,
                  microbatches=2 * layout.microbatches)  # fmt: skip
        offer(f"pipeline degree {2 * layout.pipeline}, on twice the devices", pipeline=2 * layout.pipeline)
    before = step_flops(model, layout).hardware
    found = [
        Change(
            what=what, total_bytes=tightest(stage_memory(model, changed)).total_bytes,
            hardware_ratio=step_flops(model, changed).hardware / before, devices=changed.ranks,
        )
        for what, changed in options
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda c: (c.devices, c.hardware_ratio, c.total_bytes)))


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.4g} GB"


def require_memory(model: Transformer, layout: SplitLayout, limit_bytes: int) -> None:
    """Raises: Infeasible with the fullest stage and the nearest single change that fits; nothing when it fits."""
    worst = tightest(stage_memory(model, layout))
    if worst.total_bytes <= limit_bytes:
        return
    fitting = [c for c in changes(model, layout) if c.total_bytes <= limit_bytes]
    hint = f"devices with {_gigabytes(worst.total_bytes)}"
    if fitting:
        hint = f"{fitting[0].what}: {_gigabytes(fitting[0].total_bytes)}; or {hint}"
    parts = {"state": worst.state_bytes, "activations": worst.activations_bytes, "recomputed layer": worst.recompute_bytes}
    most = max(parts, key=lambda k: parts[k])
    raise Infeasible(
        f"each rank needs {_gigabytes(worst.total_bytes)} and has {_gigabytes(limit_bytes)}; most of it is {most}, {_gigabytes(parts[most])}",
        where=f"stage {worst.stage}", hint=hint,
        data={
            "stage": worst.stage, "needed_bytes": worst.total_bytes, "limit_bytes": limit_bytes, "parts_bytes": parts,
            "changes": [msgspec.to_builtins(c) for c in fitting],
        },
    )  # fmt: skip
