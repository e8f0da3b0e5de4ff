"""What a predictor may know: machines that had come by a time, of high priority, with what is seen of their lives until then."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....cluster.vms import VmTrace

__all__ = ["MAX_TAIL_S", "observed"]

MAX_TAIL_S = 3.2e7  # a year: mean of what survivors at the last age still live


def observed(trace: VmTrace, at_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """What is known at a time: age at which a machine was first seen, age at its end or now, whether it ended, and which machines these are (those
    that came before, of high priority)."""
    there = (trace.arrival_s < at_s) & ~trace.low & (trace.end_s > trace.since_s)
    entry_s = np.maximum(trace.since_s - trace.arrival_s, 0.0)[there]
    age_s = (np.minimum(trace.end_s, at_s) - trace.arrival_s)[there]
    return entry_s, age_s, (trace.end_s <= at_s)[there], there
