"""Robust non-linear least squares on relative errors, for models of a few positive numbers.

Levenberg-Marquardt on the logarithms of the parameters, residual log(model / measured), Cauchy loss by re-weighting: a row that is far off (another
kernel, a disturbed run) hardly counts, so the fit follows the median, not the mean. Deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError

__all__ = ["fit_positive"]

F64 = NDArray[np.float64]
ERROR_SCALE = 0.05  # relative errors beyond this lose weight
MAX_LOG_STEP = 4.0  # parameters stay within exp(+-MAX_LOG_STEP) of their start
MAX_ROUNDS = 80  # steps of Levenberg-Marquardt from one start
DIFFERENCE = 1e-5  # step of the difference quotients, in logarithms of parameters


def fit_positive(model: Callable[[F64], F64], measured_s: F64, starts: Sequence[Sequence[float]], *, scale: float = ERROR_SCALE) -> F64:
    """Parameters (positive) that minimise sum log(1 + (log(model/measured) / scale)^2), from the best of `starts`.

    Raises: FormatError when there are no rows, or none of the starts gives finite positive times.
    """
    y = np.asarray(measured_s, np.float64)
    if len(y) == 0 or not np.all(np.isfinite(y) & (y > 0)):
        raise FormatError("a fit needs rows with positive finite times")
    target = np.log(y)
    best: tuple[float, F64] | None = None
    for start in starts:
        found = _descend(model, target, np.log(np.asarray(start, np.float64)), scale)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        raise FormatError("the model gives no finite time from any start", hint="the table holds sizes that the model does not know")
    return np.asarray(np.exp(best[1]))


def _descend(model: Callable[[F64], F64], target: F64, start: F64, scale: float) -> tuple[float, F64] | None:
    def residuals(theta: F64) -> F64:
        with np.errstate(all="ignore"):
            return np.asarray(np.log(model(np.exp(theta))) - target)

    def loss(r: F64) -> float:
        # A start or step at which the model has no value loses against every other.
        return float(np.log1p((r / scale) ** 2).sum()) if np.all(np.isfinite(r)) else float("inf")

    low, high = start - MAX_LOG_STEP, start + MAX_LOG_STEP
    theta, r = start.copy(), residuals(start)
    now, damping = loss(r), 1e-3
    if not np.isfinite(now):
        return None
    for _ in range(MAX_ROUNDS):
        # Re-weighted least squares: with these weights the normal equations have the gradient of the Cauchy loss.
        weight = 1 / (1 + (r / scale) ** 2)
        jacobian = np.stack([(residuals(theta + DIFFERENCE * unit) - r) / DIFFERENCE for unit in np.eye(len(theta))], 1)
        if not np.all(np.isfinite(jacobian)):
            break
        normal, gradient = jacobian.T @ (weight[:, None] * jacobian), jacobian.T @ (weight * r)
        before = now
        # More damping until a step helps; a step that does not after 12 tries ends the search.
        for _ in range(12):
            # Marquardt: damping scales with each parameter's own curvature, so units do not matter; 1e-9 keeps the matrix regular.
            scaled = normal + damping * np.diag(np.diag(normal) + 1e-9)
            trial = np.clip(theta - np.linalg.solve(scaled, gradient), low, high)
            r_trial = residuals(trial)
            if loss(r_trial) < now:
                theta, r, now, damping = trial, r_trial, loss(r_trial), max(damping / 4, 1e-9)
                break
            damping *= 4
        if before - now < 1e-7 * before:
            break
    return now, theta
