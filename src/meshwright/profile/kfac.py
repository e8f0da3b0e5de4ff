"""Measured times and bytes of a transformer block with K-FAC, and what fits into a pipeline's bubbles by PipeFisher's closed form.

Cite: Osawa, Li, Hoefler, "PipeFisher", MLSys 2023 (its performance model, `scripts/plot_perf_model.py` of kazukiosawa/pipe-fisher).
One block per stage, as many micro-batches as stages. Seconds and bytes; the published files have milliseconds and megabytes (10^6).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

__all__ = ["KFACCapacity", "KFACRow", "capacity"]


@dataclass(frozen=True, kw_only=True)
class KFACRow:
    """Of one stage. curvature_s: of a micro-batch, both factors. inverse_s, precondition_s: once. error_peak_bytes: of output gradients at once,
    error_bytes: kept of them per micro-batch; factor_bytes: both factors, the inverses take as much again."""

    batch: int
    forward_s: float
    backward_s: float
    curvature_s: float
    inverse_s: float
    precondition_s: float
    weight_bytes: float
    activation_bytes: float
    error_peak_bytes: float
    error_bytes: float
    factor_bytes: float


@dataclass(frozen=True, kw_only=True)
class KFACCapacity:
    """pipe_s: the step without preconditioning; bubble_s: idle in it, per device; refresh_steps: steps whose bubbles hold the work of one refresh."""

    pipe_s: float
    bubble_s: float
    work_s: float
    refresh_steps: int
    step_s: float
    memory_bytes: float


def capacity(row: KFACRow, depth: int, *, both_ways: bool = False, recompute: bool = False) -> KFACCapacity:
    """GPipe or 1F1B of `depth` stages, or Chimera (`both_ways`). `recompute`: forwards again before backwards, one micro-batch's activations kept."""
    backward_s = row.backward_s + (row.forward_s if recompute else 0.0)
    forwards, backwards = (depth, 2 * depth - 2) if both_ways else (2 * depth - 1, 2 * depth - 1)
    pipe_s = forwards * row.forward_s + backwards * backward_s
    bubble_s = pipe_s - depth * (row.forward_s + backward_s)
    work_s = depth * row.curvature_s + row.inverse_s
    memory = row.activation_bytes * (1 if recompute else depth) + row.error_peak_bytes + depth * row.error_bytes + 2 * row.factor_bytes
    return KFACCapacity(
        pipe_s=pipe_s, bubble_s=bubble_s, work_s=work_s, refresh_steps=max(1, ceil(work_s / bubble_s)) if bubble_s > 0 else 0,
        step_s=pipe_s + row.precondition_s, memory_bytes=memory + (4 if both_ways else 2) * row.weight_bytes,
    )  # fmt: skip
