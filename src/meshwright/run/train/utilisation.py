"""How much of what the devices could compute a step's mathematics is: MFU, model FLOPs over step time times peak.

Model FLOPs are those of the captured graph, forward and backward, of all samples of a step. What is computed again for memory's sake is left out;
what a fused attention kernel computes again in its own backward is not. The peak is what the plan's fabric states of its devices, in the precision
that the plan is priced in, of as much of a processor as a device is. A device without one has no MFU, nor has a run on other devices than the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...drive.plans import cost_of
from ...io.fabric.document import fabric_from_document
from ...io.quantity import show_flops
from ...plan.plan import Plan, TrainingLayout

__all__ = ["Utilisation", "model_flops", "utilisation_of"]


@dataclass(frozen=True)
class Utilisation:
    """`model_flops`: of a step; `peak_flops`: operations per second of all devices together; `source`: in words, where the peak comes from."""

    model_flops: int
    peak_flops: float
    source: str

    def mfu(self, step_s: float) -> float:
        return self.model_flops / (step_s * self.peak_flops) if step_s > 0 else 0.0


def model_flops(layout: TrainingLayout) -> int:
    """Of a step: every segment's work once for each sample, whatever ranks share it."""
    total = 0.0
    for s in layout.segments:
        parts = sum(s.shares) / max(s.shares) if s.shares else layout.tensor if s.split else 1
        total += (s.forward.flops + s.backward.flops) * parts
    return round(total) * layout.all_microbatches


def utilisation_of(plan: Plan, device: str) -> Utilisation | None:
    """None where the plan's devices state no peak, or are not of the kind that runs (`device`: "cpu" or "cuda")."""
    assert plan.layout is not None
    if not plan.target_fabric:
        return None
    fabric, precision = fabric_from_document(plan.target_fabric, where="plan.target_fabric"), cost_of(plan).dtype
    devices = [fabric.device(name) for name in plan.placement[: plan.layout.ranks]]
    flops = model_flops(plan.layout)
    if not flops or any(precision not in d.flops or (d.kind == "cpu") != (device == "cpu") for d in devices):
        return None
    peaks = [d.flops[precision] * (d.cpu_share or 1.0) for d in devices]
    each = " or ".join(show_flops(x) for x in sorted(set(peaks)))
    return Utilisation(flops, sum(peaks), f"{len(devices)} x {each} in {precision}, as fabric {fabric.name!r} states")
