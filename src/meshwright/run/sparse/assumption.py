"""Assumption 1 of Ok-Topk, measured: how far the top k of the mean is from the top k of the mean of everybody's top k."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.entries import sum_squares
from ...kernels.select import top_k
from .protocol import AllReduce, Protocol
from .state import RankState

__all__ = ["measured_xi", "top"]


def top(x: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """`x` with all but its k largest magnitudes set to zero (of equal ones, the first stay)."""
    rows = top_k(x, k)
    out = np.zeros_like(x)
    out[rows] = x[rows]
    return out


def measured_xi(state: RankState, gradient: Any) -> Protocol[float]:
    """The xi of Assumption 1: |Topk(mean a) - Topk(mean Topk(a))| / |mean g|, with a = residual + gradient; inf where only the divisor is 0."""
    sums = state.residual + gradient
    selected, mean = top(sums, state.k), np.array(gradient)
    for part in (sums, selected, mean):
        yield AllReduce("xi", part)
        part /= np.float32(state.ranks)
    apart = sum_squares(top(sums, state.k), top(selected, state.k)) ** 0.5
    size = sum_squares(mean, np.zeros_like(mean)) ** 0.5
    return apart / size if size else float("inf") if apart else 0.0
