"""In which order the micro-batches of a training step run through the pipeline's stages."""

from __future__ import annotations

from .onefoneb import one_f_one_b_order, peak_in_flight

__all__ = ["one_f_one_b_order", "peak_in_flight"]
