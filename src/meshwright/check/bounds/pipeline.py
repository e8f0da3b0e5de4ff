"""The time that a pipeline's work must take, worked out again from the figures a certificate states, as a longest path.

A graph of the steps that one device (or one micro-batch) cannot avoid, in exact rationals: `seconds[kind][copy][stage]` of F and B, or F, I, W when
split; `up_s[copy][s]`, `down_s[copy][s]` of a message between stages s and s+1. Raises ValueError where the figures do not fit together.
idle: what one device computes and idles, see `Pipeline.idle`: until its first B or I it has forwards of what it can keep, after its last F, and after
its last B or I, it has what is left to do of what it can keep, while a micro-batch still has that part of its way to go.
busy (as plans of earlier versions say it): on one device nothing starts before the shortest way to one of its stages, all its work (without the W's
if `weights` is false) is one after the other, and after its last B or I the stages below must still run theirs (and the first its W); after a last W
nothing must.
entry: the forwards of one stage and copy are one after the other, and the last micro-batch has the rest of its way to go.
memory: activation_bytes[s] x (F's start to the end of the backward, at best) summed over a device's work, over its cap; then as busy.
counts: weighted rows that no step of `slots` slots can satisfy; see `pipeline_counts`.
any: work_s of every micro-batch over the sum of speeds, or path_s over the largest speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from .pipeline_counts import counted_time
from .pipeline_ways import Pipeline, time_of

__all__ = ["pipeline_time"]


def pipeline_time(data: Mapping[str, Any]) -> Fraction:
    """Seconds that the certificate proves."""
    if data["form"] == "any":
        speeds = [_positive(x) for x in data["speeds"]]
        return max(int(data["microbatches"]) * time_of(data["work_s"]) / sum(speeds), time_of(data["path_s"]) / max(speeds))
    pipeline = Pipeline(data)
    if data["form"] == "entry":
        return pipeline.entry(int(data["copy"]), int(data["stage"]))
    if data["form"] == "busy":
        return pipeline.busy(int(data["device"]), weights=bool(data["weights"]))
    if data["form"] == "idle":
        return pipeline.idle(int(data["device"]), int(data["cap_bytes"]))
    if data["form"] == "memory":
        return pipeline.memory(int(data["device"]), int(data["cap_bytes"]))
    if data["form"] == "counts":
        return counted_time(pipeline, data)
    raise ValueError(f"no form {data['form']!r}")


def _positive(text: Any) -> Fraction:
    value = time_of(text)
    if not value:
        raise ValueError("a speed of 0")
    return value
