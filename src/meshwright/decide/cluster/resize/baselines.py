"""Static, threshold, VPA-like, forecast and oracle: what resizes without learning.

Cite: K. Rzadca et al., "Autopilot", EuroSys 2020, and the recommender of Kubernetes' Vertical Pod Autoscaler (decaying histogram, half-life of a
day, 90th percentile, 15 % margin). Left open: thresholds of a step; ours are options. Deviations: all move by the same steps under the same rules;
the threshold may look at what would be left (`left`), which the usual rule does not and which is better. Invariant: certain actions, so their logs
say nothing of other policies. Cost: O(tenants), for `vpa` times the buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ....cite import FOLKLORE, Cite
from ....cluster.resize import Rules, Seen, Tenants
from ....errors import Unsupported, UsageError
from .forecast import Seasonal
from .problem import Policy, Prior, ResizeStrategy, toward

__all__ = ["Forecast", "Oracle", "Static", "Threshold", "Vpa"]

AUTOPILOT = Cite(key="rzadca2020autopilot", title="Autopilot: workload autoscaling at Google", year=2020, venue="EuroSys",
    authors="Krzysztof Rzadca et al.")
DAY_S = 86400.0
BUCKETS, GROWTH, FIRST = 120, 1.05, 0.02  # of the histogram: the upper end of the first, in shares of `most`, and how they grow


@dataclass(frozen=True, kw_only=True)
class Static(ResizeStrategy):
    """Leaves everybody as it is, but for violations. No options."""

    name: ClassVar[str] = "static"
    cite: ClassVar[Cite] = FOLKLORE

    def plan(self, tenants: Tenants, rules: Rules, *, prior: Prior | None = None) -> Policy:
        return _Static()


class _Static:
    def probabilities(self, seen: Seen, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        return toward(seen.before.astype(np.float64), seen, allowed)


@dataclass(frozen=True, kw_only=True)
class Threshold(ResizeStrategy):
    """add: grow above this use of what one has. remove: shrink below this use of it; with `left`, of what would be left."""

    name: ClassVar[str] = "threshold"
    cite: ClassVar[Cite] = FOLKLORE

    add: float = 0.9
    remove: float = 0.4
    left: bool = False

    def plan(self, tenants: Tenants, rules: Rules, *, prior: Prior | None = None) -> Policy:
        """Raises: UsageError."""
        if not 0 < self.remove <= self.add <= 1:
            raise UsageError(f"add {self.add}, remove {self.remove}", where="threshold", hint="0 < remove <= add <= 1")
        return _Threshold(self)


@dataclass
class _Threshold:
    options: Threshold

    def probabilities(self, seen: Seen, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        o = self.options
        base = np.maximum(seen.before - 1, 0.5) if o.left else seen.before
        move = np.where(seen.used > o.add * seen.before, 1, np.where(seen.used < o.remove * base, -1, 0))
        return toward((seen.before + move).astype(np.float64), seen, allowed)


@dataclass(frozen=True, kw_only=True)
class Vpa(ResizeStrategy):
    """percentile of the use, times 1 + margin. half_life_s: after which a window counts half."""

    name: ClassVar[str] = "vpa"
    cite: ClassVar[Cite] = AUTOPILOT

    percentile: float = 0.9
    margin: float = 0.15
    half_life_s: float = DAY_S

    def plan(self, tenants: Tenants, rules: Rules, *, prior: Prior | None = None) -> Policy:
        """Raises: UsageError."""
        if not (0 < self.percentile <= 1 and self.margin >= 0 and self.half_life_s > 0):
            raise UsageError(f"percentile {self.percentile}, margin {self.margin}", where="vpa", hint="0 < percentile <= 1, margin >= 0")
        return _Vpa(options=self, tenants=tenants, counts=np.zeros((len(tenants.names), BUCKETS)))


@dataclass(kw_only=True)
class _Vpa:
    options: Vpa
    tenants: Tenants
    counts: NDArray[np.float64]
    weight: float = 1.0
    peak: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))

    def probabilities(self, seen: Seen, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        most, rows = np.array(self.tenants.most, np.float64), np.arange(len(seen.used))
        share = np.maximum(seen.used / most, FIRST * 1e-3)
        bucket = np.clip(np.ceil(np.log(share / FIRST) / np.log(GROWTH)), 0, BUCKETS - 1).astype(np.int64)
        self.weight *= 2.0 ** (self.tenants.window_s / self.options.half_life_s)
        self.counts[rows, bucket] += self.weight
        if self.weight > 1e100:
            self.counts /= self.weight
            self.weight = 1.0
        reached = np.cumsum(self.counts, 1)
        at = np.argmax(reached >= self.options.percentile * reached[:, -1:] * (1 - 1e-12), 1)
        return toward(np.ceil(FIRST * GROWTH**at * most * (1 + self.options.margin)), seen, allowed)


@dataclass(frozen=True, kw_only=True)
class Forecast(ResizeStrategy):
    """margin: times what is expected of the next window."""

    name: ClassVar[str] = "forecast"
    cite: ClassVar[Cite] = FOLKLORE

    margin: float = 1.2

    def plan(self, tenants: Tenants, rules: Rules, *, prior: Prior | None = None) -> Policy:
        """Raises: UsageError."""
        if not 0 < self.margin < float("inf"):
            raise UsageError(f"margin {self.margin}", where="forecast", hint="above 0")
        return _Forecast(self.margin, Seasonal(season=season_of(tenants)))


@dataclass
class _Forecast:
    margin: float
    seasonal: Seasonal

    def probabilities(self, seen: Seen, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        return toward(np.ceil(self.seasonal.next(seen.used) * self.margin), seen, allowed)


@dataclass(frozen=True, kw_only=True)
class Oracle(ResizeStrategy):
    """Knows the next window's demand. No options."""

    name: ClassVar[str] = "oracle"
    cite: ClassVar[Cite] = FOLKLORE
    ahead: ClassVar[bool] = True

    def plan(self, tenants: Tenants, rules: Rules, *, prior: Prior | None = None) -> Policy:
        return _Oracle()


class _Oracle:
    def probabilities(self, seen: Seen, allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
        if seen.ahead is None:
            raise Unsupported("an oracle needs the next window's demand", hint="it works in simulations only; use linucb")
        return toward(np.ceil(seen.ahead), seen, allowed)


def season_of(tenants: Tenants) -> int:
    """Windows of a day."""
    return max(2, round(DAY_S / tenants.window_s))
