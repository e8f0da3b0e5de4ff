"""Curves of time over size: one alpha-beta line, and log-log interpolation; each judged on sizes it has not seen.

Protocol of every error stated here: sizes are sorted, every second one is held back (the first and last are kept, so nothing is
extrapolated), both curves are fitted on the rest, and errors are |predicted / measured - 1| on the sizes held back. Fitting the small half and
predicting the large half is a different and much harder protocol; the two must not be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError

__all__ = ["Curve", "FitErrors", "Line", "errors_of", "fit_line", "held_back"]

F64 = NDArray[np.float64]
HUBER_RESIDUAL_SHARE = 0.10  # relative residuals beyond this lose weight, so one odd size does not tilt the line
REWEIGHTINGS = 25  # of the iteratively reweighted line, which has settled long before


@dataclass(frozen=True)
class Line:
    """time_s = alpha_s + beta_s_per_byte * size; both >= 0."""

    alpha_s: float
    beta_s_per_byte: float

    def at(self, sizes: F64) -> F64:
        return np.asarray(self.alpha_s + self.beta_s_per_byte * np.asarray(sizes, np.float64))


@dataclass(frozen=True)
class Curve:
    """Log-log interpolation through points with rising sizes; beyond the ends the outermost segment's slope goes on."""

    sizes: F64
    times_s: F64

    def __post_init__(self) -> None:
        x, y = self.sizes, self.times_s
        if len(x) == 0 or len(x) != len(y) or np.any(np.diff(x) <= 0) or np.any(x <= 0) or np.any(y <= 0) or not np.all(np.isfinite(y)):
            raise FormatError("a curve needs rising positive sizes with positive finite times", hint="remove duplicates and zero rows first")

    def at(self, sizes: F64 | float) -> F64:
        x, lx, ly = np.log(np.asarray(sizes, np.float64)), np.log(self.sizes), np.log(self.times_s)
        if len(lx) == 1:
            return np.full_like(x, self.times_s[0])
        i = np.clip(np.searchsorted(lx, x) - 1, 0, len(lx) - 2)
        slope = (ly[i + 1] - ly[i]) / (lx[i + 1] - lx[i])
        return np.asarray(np.exp(ly[i] + slope * (x - lx[i])))


def fit_line(sizes: F64, times_s: F64) -> Line:
    """Least squares on relative errors with Huber weights (iteratively re-weighted), non-negative.

    Raises: FormatError when there is no point with a positive time.
    """
    x, y = np.asarray(sizes, np.float64), np.asarray(times_s, np.float64)
    if len(x) == 0 or np.any(y <= 0):
        raise FormatError("a line needs points with positive times")
    weight = np.ones_like(x)
    line = Line(0.0, 0.0)
    for _ in range(REWEIGHTINGS):
        before, line = line, _weighted_line(x, y, weight / y**2)
        if before == line:
            break
        residual = np.abs(line.at(x) / y - 1)
        weight = np.minimum(1.0, HUBER_RESIDUAL_SHARE / np.maximum(residual, 1e-12))
    return line


def _weighted_line(x: F64, y: F64, w: F64) -> Line:
    s, sx, sxx = w.sum(), (w * x).sum(), (w * x * x).sum()
    sy, sxy = (w * y).sum(), (w * x * y).sum()
    det = s * sxx - sx * sx
    if det > 1e-12 * s * sxx:
        alpha, beta = (sxx * sy - sx * sxy) / det, (s * sxy - sx * sy) / det
        if alpha >= 0 and beta >= 0:
            return Line(float(alpha), float(beta))
        if beta >= 0 and sxx > 0:  # the best non-negative fit then lies on the edge alpha = 0
            return Line(0.0, float(sxy / sxx))
    return Line(float(sy / s), 0.0)


@dataclass(frozen=True)
class FitErrors:
    """Relative errors on the sizes held back."""

    line_median: float
    line_p95: float
    curve_median: float
    curve_p95: float
    points: int

    def to_json(self) -> dict[str, float | int]:
        return {
            "line_median": self.line_median, "line_p95": self.line_p95, "curve_median": self.curve_median, "curve_p95": self.curve_p95,
            "points": self.points,
        }  # fmt: skip


def errors_of(line: F64, curve: F64) -> FitErrors:
    """Summary of relative errors of both curves on the same points; NaN when there are none."""
    if len(line) == 0:
        return FitErrors(float("nan"), float("nan"), float("nan"), float("nan"), 0)
    return FitErrors(
        float(np.median(line)), float(np.percentile(line, 95)), float(np.median(curve)), float(np.percentile(curve, 95)), len(line)
    )


def held_back(sizes: F64, times_s: F64) -> tuple[F64, F64]:
    """(errors of the line, errors of the curve) on every second inner size; empty below three sizes."""
    x, y = np.asarray(sizes, np.float64), np.asarray(times_s, np.float64)
    test = np.zeros(len(x), bool)
    test[1:-1:2] = True
    if not test.any():
        return np.empty(0), np.empty(0)
    line, curve = fit_line(x[~test], y[~test]), Curve(x[~test], y[~test])
    return np.abs(line.at(x[test]) / y[test] - 1), np.abs(curve.at(x[test]) / y[test] - 1)
