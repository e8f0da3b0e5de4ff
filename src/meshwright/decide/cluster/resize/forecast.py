"""Forecast of the next window's use: the last use, times how much the same time of yesterday grew."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Seasonal"]

HALF_WINDOWS = 12  # an hour on either side: yesterday's noise and bursts are averaged away
MOST_SEASON = 20_000  # windows of a day that are kept; with shorter windows there is no yesterday
MOST_SLOPE = 1.25  # of one window to the next; a wave of a day moves by 1 %


@dataclass(kw_only=True)
class Seasonal:
    """`season`: windows of a day. Until a day and an hour have been seen, and with windows below 4.32 s, the next window is expected to
    be like the last."""

    season: int
    _kept: NDArray[np.float64] | None = None
    _seen: int = 0
    _span: NDArray[np.int64] = field(default_factory=lambda: np.arange(-HALF_WINDOWS, HALF_WINDOWS + 1))

    def next(self, used: NDArray[np.float64]) -> NDArray[np.float64]:
        """Adds a window's use; what the next one's is expected to be."""
        if self.season > MOST_SEASON:
            return used
        half = min(HALF_WINDOWS, (self.season - 1) // 2)
        size = self.season + 2 * half + 2
        if self._kept is None:
            self._kept = np.zeros((size, len(used)))
        now = self._seen
        self._kept[now % size] = used
        self._seen += 1
        then = now - self.season
        if then < half:
            return used
        span = self._span[HALF_WINDOWS - half : HALF_WINDOWS + half + 1]
        before, after = (self._kept[(t + span) % size].sum(0) for t in (then, then + 1))
        return np.asarray(used * np.clip(after / np.maximum(before, 1e-12), 1 / MOST_SLOPE, MOST_SLOPE))
