"""What is expected of a machine's lifetime, at every age: mean seconds left, and the share that lives so long, in rows that machines point at.

Ages are 0, 60 s, and two points to a doubling from there on, up to 91 days. A mean of what is left follows from a survival curve S:
E[T - u | T > u] is the integral of S from u on, over S(u).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["AGES_S", "FINE_S", "FIRST_S", "Forecast", "curves"]

FIRST_S = 60.0
POINTS = 36
AGES_S: NDArray[np.float64] = np.concatenate([[0.0], FIRST_S * 2.0 ** (np.arange(POINTS - 1) / 2)])
FINE_S: NDArray[np.float64] = np.concatenate([[0.0], np.geomspace(1.0, float(AGES_S[-1]), 200)])  # at which survival curves are told
GONE = 1e-9  # share that lives, below which the mean left is that of the age before


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """`row`: of each machine. `left_s`, `alive` [rows, ages]. `end_s`: the truth, for the forecast that knows it."""

    name: str
    row: NDArray[np.int32]
    left_s: NDArray[np.float64]
    alive: NDArray[np.float64]
    end_s: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.end_s is None and (self.left_s.shape[1:] != AGES_S.shape or self.alive.shape != self.left_s.shape):
            raise UsageError(f"{self.left_s.shape} means for {len(AGES_S)} ages", where=f"forecast {self.name[:64]}")
        if self.end_s is None and not (np.isfinite(self.left_s).all() and (self.left_s >= 0).all() and np.isfinite(self.alive).all()):
            raise UsageError("means are finite and at least 0", where=f"forecast {self.name[:64]}")
        if len(self.row) and (self.row.min() < 0 or self.row.max() >= len(self.left_s)):
            raise UsageError("a machine points at a row that does not exist", where=f"forecast {self.name[:64]}")


def curves(alive: NDArray[np.float64], tail_s: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`left_s` and `alive` at the ages, of survival curves [rows, FINE_S] whose survivors at the last age live `tail_s` more in the mean."""
    pieces = (alive[:, 1:] + alive[:, :-1]) / 2 * np.diff(FINE_S)
    rest = alive[:, -1:] * tail_s[:, None]
    area = np.concatenate([np.cumsum(pieces[:, ::-1], 1)[:, ::-1] + rest, rest], 1)
    at = np.clip(np.searchsorted(FINE_S, AGES_S, "right") - 1, 0, len(FINE_S) - 2)
    part = np.clip((AGES_S - FINE_S[at]) / (FINE_S[at + 1] - FINE_S[at]), 0, 1)
    share = alive[:, at] * (1 - part) + alive[:, at + 1] * part
    beyond = area[:, at + 1] + (share + alive[:, at + 1]) / 2 * (1 - part) * (FINE_S[at + 1] - FINE_S[at])
    left = beyond / np.maximum(share, 1e-300)
    gone = share < GONE
    last = np.maximum.accumulate(np.where(gone, 0, np.arange(len(AGES_S))[None, :]), 1)  # the last age at which someone lives
    return np.take_along_axis(left, last, 1), share
