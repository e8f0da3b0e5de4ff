"""The k-th largest magnitude of all ranks' vectors together, exactly, by three histograms that are added up over the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...decide.collective.sparse.phases import HISTOGRAM_BINS
from ...kernels.entries import LEVELS, descend, histogram
from .state import RankState

__all__ = ["GlobalThreshold"]


class GlobalThreshold:
    """After three times `counts` (to be added up) and `descend`: `low` is the k-th magnitude, and `above` how many lie above it; (1, all) where fewer
    than k are not zero."""

    def __init__(self, bits: NDArray[np.int32], k: int, ranks: int, *, wide: bool) -> None:
        self.k, self.ranks, self.dtype = k, ranks, np.int64 if wide else np.int32
        self.bits = bits[bits != 0]  # a region's sums are mostly zeros, and are read three times
        self.low = self.above = self.level = 0
        self.done = False

    def counts(self, state: RankState) -> NDArray[Any]:
        """This rank's histogram of the level, in equal parts by rank."""
        low, high = LEVELS[self.level]
        bins = HISTOGRAM_BINS[self.level]
        length = -(-bins // self.ranks)
        parts = state.room(f"histogram{self.level}", self.ranks * length, self.dtype)
        parts[:] = 0
        if not self.done:
            histogram(self.bits, low, high, self.low, parts[:bins])
        self.parts = parts
        return parts.reshape(self.ranks, length)

    def descend(self) -> None:
        """`counts` are those of all ranks."""
        low, high = LEVELS[self.level]
        self.level += 1
        if self.done:
            return
        found, higher = descend(self.parts[: HISTOGRAM_BINS[self.level - 1]].astype(np.int64), self.k - self.above)
        self.above += higher
        if found < 0:
            self.low, self.done = 1, True
        else:
            self.low = self.low << (high - low) | found
