"""Floating-point operations of a training step of a described transformer, MFU and HFU.

Cite: Korthikanti et al., MLSys 2023 (arXiv 2205.05198), appendix A; a multiply-add counts as two, backward as twice forward.
Model operations: what the mathematics needs. Hardware operations: with what is computed again. MFU and HFU divide them by
step time · devices · peak rate.
Two ways to count the hardware operations of selective recomputation:
- `executed`: the scores and their product with V are computed once more, 4·s²·h per layer and sample;
- `paper`: its equation, 72·B·L·s·h²(1 + s/3h + v/12hL), which adds 12·s²·h, as if attention's backward ran twice as well. The
  paper's printed HFU follows this one.
Causal masks: `full` counts s² scores (the paper), `half` those below the diagonal only (Megatron's later code).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import UsageError
from .transformer import SplitLayout, Transformer

__all__ = ["StepFlops", "Utilisation", "step_flops", "utilisation"]

Causal = Literal["full", "half"]


class StepFlops(msgspec.Struct, frozen=True, kw_only=True):
    """Of one step, over all devices. `hardware_paper` differs from `hardware` for selective recomputation only."""

    model: int
    hardware: int
    hardware_paper: int
    causal: str
    attention_share: float  # of the model operations


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the devices' peak."""

    mfu: float
    hfu: float
    hfu_paper: float
    model_flops_per_device_s: float


def layer_forward(model: Transformer, causal: Causal) -> tuple[int, int]:
    """(matrix products with weights, core attention) of one layer and sample."""
    s, h, d = model.sequence, model.hidden, model.width
    heads = model.heads * d
    products = 3 if model.gated else 2
    weights = 2 * s * h * (heads + 2 * model.key_heads * d) + 2 * s * heads * h + products * 2 * s * h * model.inner
    core = 4 * s * s * heads
    return weights, core // 2 if causal == "half" else core


def step_flops(model: Transformer, layout: SplitLayout, *, causal: Causal = "full") -> StepFlops:
    weights, core = layer_forward(model, causal)
    samples = layout.global_batch
    logits = 2 * model.sequence * model.hidden * model.vocabulary
    whole = 3 * samples * (model.layers * (weights + core) + logits)
    again = again_paper = 0
    if layout.recompute == "selective":
        again, again_paper = model.layers * core, 3 * model.layers * core
    elif layout.recompute in ("full", "uniform"):
        again = again_paper = model.layers * (weights + core)
    elif layout.recompute == "block":
        redone = sum(min(layout.every, n) for n in layout.layers_of(model))
        again = again_paper = redone * (weights + core)
    if model.attention == "flash":  # the fused kernel computes the scores again in its backward, whatever else is recomputed
        again, again_paper = again + model.layers * core // 2, again_paper + model.layers * core // 2
    return StepFlops(
        model=whole, hardware=whole + samples * again, hardware_paper=whole + samples * again_paper, causal=causal,
        attention_share=3 * samples * model.layers * core / whole,
    )  # fmt: skip


def utilisation(flops: StepFlops, *, step_time_s: float, devices: int, peak_flops: float) -> Utilisation:
    """Raises: UsageError for a time, count or rate that is not positive."""
    if not step_time_s > 0 or devices < 1 or not peak_flops > 0:
        raise UsageError(f"a step of {step_time_s} s on {devices} devices of {peak_flops} operations/s has no utilisation", where="utilisation")
    could = step_time_s * devices * peak_flops
    return Utilisation(
        mfu=flops.model / could, hfu=flops.hardware / could, hfu_paper=flops.hardware_paper / could,
        model_flops_per_device_s=flops.model / step_time_s / devices,
    )  # fmt: skip
