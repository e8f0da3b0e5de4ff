"""How likely a violation is at an allocation: ridge regression on the ratio of allocation to forecast.

The ratio is spread over knots by hat functions, once for tenants whose use was as expected of late and once for the others. One model serves all
tenants and all actions, since an action only changes the ratio.

What a window tells: whether each allocation up to the one that was tried would have been enough. That is known of all of them, whatever the limit
cut off, so the model learns from allocations that were not chosen, without bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....cluster.resize import Rules, Seen, Tenants
from ....errors import UsageError
from .baselines import season_of
from .forecast import Seasonal
from .problem import STEPS, Prior

__all__ = ["Regression", "Watched"]

# Ratios of allocation to forecast. Below 1 a violation is sure; the noise of five-minute windows ends by 1.2, bursts by 1.8 (synthetic_demand).
KNOTS = (0.8, 0.9, 0.95, 1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 2.0, 2.4, 3.0)
CAUTIOUS = 1.3  # ratio from which nothing is feared before anything is learned; below it the fear grows to 1 at 1
SURPRISE = 0.15  # of the forecast: a use further off than this is not as expected
SURPRISED_WINDOWS = 6  # so long a tenant counts as one of the others
LOOK_BACK = 3  # allocations at and below the tried one that a window is read for


class Regression:
    """Sums of a ridge regression with weight 1 towards caution, rows with two weights that are not 0."""

    def __init__(self, prior: Prior | None = None, weight: float = 0.0) -> None:
        knots = np.array(KNOTS)
        self.size = 2 * len(knots)
        fear = np.tile(np.clip((CAUTIOUS - knots) / (CAUTIOUS - 1), 0, 1), 2)
        self.squares, self.products, self.rows = np.zeros((self.size, self.size)), np.zeros(self.size), 0.0
        self._squares, self._products = np.eye(self.size), fear
        if prior is not None:
            if prior.knots != KNOTS or np.shape(prior.squares) != self.squares.shape or np.shape(prior.products) != self.products.shape:
                raise UsageError("the prior has other knots", where="prior", hint="learn it again with this version")
            self._squares, self._products = self._squares + weight * np.array(prior.squares), fear + weight * np.array(prior.products)
        self.fit()

    def add(self, at: NDArray[np.int64], part: NDArray[np.float64], target: NDArray[np.float64]) -> None:
        """Rows: (1 - part) at knot `at`, part at the next one."""
        first, size = 1 - part, self.size
        for left, right, value in ((at, at, first * first), (at, at + 1, first * part), (at + 1, at, first * part), (at + 1, at + 1, part * part)):
            self.squares += np.bincount(left * size + right, value, size * size).reshape(size, size)
        self.products += np.bincount(at, first * target, size) + np.bincount(at + 1, part * target, size)
        self.rows += len(at)

    def fit(self) -> None:
        self.inverse = np.linalg.inv(self._squares + self.squares)
        self.weights = self.inverse @ (self._products + self.products)

    def at(self, at: NDArray[np.int64], part: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean, and how unsure it is (1 / sqrt of the rows that speak for it)."""
        w, v, first = self.weights, self.inverse, 1 - part
        mean = first * w[at] + part * w[at + 1]
        square = first**2 * v[at, at] + 2 * first * part * v[at, at + 1] + part**2 * v[at + 1, at + 1]
        return mean, np.sqrt(np.maximum(square, 0))

    def prior(self) -> Prior:
        """Without what it began with."""
        return Prior(knots=KNOTS, squares=tuple(map(tuple, self.squares.tolist())), products=tuple(self.products.tolist()), rows=self.rows)


@dataclass(frozen=True)
class Rows:
    """[tenants, ...]: first knot and the next one's part."""

    at: NDArray[np.int64]
    part: NDArray[np.float64]


class Watched:
    """Forecasts and what became of them: turns windows into rows of the regression."""

    def __init__(self, tenants: Tenants, rules: Rules) -> None:
        n = len(tenants.names)
        self.rules = rules
        self.critical = np.array(tenants.critical or (False,) * n)
        self.seasonal = Seasonal(season=season_of(tenants))
        self.expected: NDArray[np.float64] | None = None
        self.surprised = np.zeros(n, np.int64)

    def outcome(self, seen: Seen) -> tuple[Rows, NDArray[np.float64]] | None:
        """Of the window that ended: rows of allocations up to the tried one, and whether each would have been violated. None for the first."""
        if self.expected is None:
            return None
        tried = seen.before[:, None] - np.arange(LOOK_BACK)
        violated = seen.violated[:, None] | (seen.used[:, None] > tried)
        keep = tried >= 1
        rows = self.rows(tried.astype(np.float64))
        return Rows(rows.at[keep], rows.part[keep]), violated[keep].astype(np.float64)

    def forecast(self, seen: Seen) -> None:
        """Note the window that ended, expect the next one."""
        if self.expected is not None:
            off = np.abs(seen.used - self.expected) > SURPRISE * self.expected
            self.surprised = np.where(off | seen.violated, SURPRISED_WINDOWS, np.maximum(self.surprised - 1, 0))
        self.expected = np.maximum(self.seasonal.next(seen.used), 1e-3)

    def rows(self, steps: NDArray[np.float64]) -> Rows:
        """Of allocations [tenants, k] in the window that is expected."""
        assert self.expected is not None
        knots = np.array(KNOTS)
        ratio = np.clip(steps / self.expected[:, None], knots[0], knots[-1])
        at = np.clip(np.searchsorted(knots, ratio, "right") - 1, 0, len(knots) - 2)
        part = (ratio - knots[at]) / (knots[at + 1] - knots[at])
        return Rows(at + len(knots) * (self.surprised > 0)[:, None], part)

    def actions(self, seen: Seen) -> Rows:
        return self.rows((seen.before[:, None] + STEPS).astype(np.float64))
