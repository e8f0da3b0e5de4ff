"""From timed sizes to cost curves: a Theil-Sen line where it explains the times, else from size to size by the nearest times that never fall."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...traffic import Curve

__all__ = ["fit_curve"]

MAX_LINE_ERROR_SHARE = 0.10  # of a time, by which a line that is kept may miss it ...
MAX_LINE_ERROR_S = 20e-6  # ... or by this, where it is more: what timing resolves


def fit_curve(
    sizes: Sequence[int], times_s: Sequence[float], weights: Sequence[float] | None = None, tolerance: float = MAX_LINE_ERROR_SHARE
) -> Curve:  # fmt: skip
    """Theil-Sen (Theil 1950, Sen 1968): the median of all pairwise slopes, then the median offset; both at least 0.

    Where some time is further off than `tolerance` the curve goes from point to point instead; `r2` is the line's also then. Sizes may repeat:
    their median counts. Points that fall are replaced by their mean (isotonic regression); `weights`: how often each size occurs, so that the sum
    over all stays.
    Raises: UsageError without points, or for times that are negative or not finite.
    """
    x, y = np.asarray(sizes, np.float64), np.asarray(times_s, np.float64)
    if not len(x) or len(x) != len(y) or not np.all(np.isfinite(y)) or np.any(y < 0):
        raise UsageError(f"{len(x)} sizes with {len(y)} times, which must be finite and not negative", where="curve")
    knots = np.unique(x)
    medians = np.array([np.median(y[x == k]) for k in knots])
    if len(knots) == 1:
        return Curve(sizes=(int(knots[0]),), times_ns=(int(medians[0] * 1e9),))
    rise, run = np.subtract.outer(medians, medians), np.subtract.outer(knots, knots)
    slope = max(0.0, float(np.median(rise[run > 0] / run[run > 0])))
    offset = max(0.0, float(np.median(medians - slope * knots)))
    line = offset + slope * knots
    spread = float(((medians - medians.mean()) ** 2).sum())
    r2 = 1.0 - float(((medians - line) ** 2).sum()) / spread if spread > 0 else 1.0
    if np.all(np.abs(line - medians) <= np.maximum(tolerance * medians, MAX_LINE_ERROR_S)):
        return Curve(sizes=(0, int(knots[-1])), times_ns=(int(offset * 1e9), int(line[-1] * 1e9)), r2=r2)
    held = np.ones(len(x)) if weights is None else np.asarray(weights, np.float64)
    rising = _rising(medians, np.array([held[x == k].sum() for k in knots]))
    return Curve(sizes=tuple(int(k) for k in knots), times_ns=tuple(int(t * 1e9) for t in rising), r2=r2)


def _rising(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest values that never fall, by weighted least squares: neighbours that fall are pooled until none do."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, w, n), (b, v, m) = pools[-2], pools.pop()
            pools[-1] = ((a * w + b * v) / (w + v), w + v, n + m)
    return np.repeat([p[0] for p in pools], [p[2] for p in pools])
