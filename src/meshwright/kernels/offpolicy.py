"""What another policy would have earned, from a log with propensities: importance weighting, its normalised form, and doubly robust.

Cite: Dudik, Langford, Li, "Doubly Robust Policy Evaluation and Learning", ICML 2011; Swaminathan and Joachims, NIPS 2015 (self-normalised).
Intervals are normal, at 95 %, over rows taken as independent; the normalised one by the delta method.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["MIN_PROPENSITY", "Estimate", "off_policy"]

MIN_PROPENSITY = 0.01  # of a row that counts: below it a single row outweighs hundreds
Z_95 = 1.959964  # of a normal distribution, on both sides


class Estimate(NamedTuple):
    name: str
    value: float
    low: float
    high: float


def off_policy(
    reward: NDArray[np.float64], propensity: NDArray[np.float64], target: NDArray[np.float64], model: NDArray[np.float64] | None = None,
    expected: NDArray[np.float64] | None = None,
) -> tuple[Estimate, ...]:  # fmt: skip
    """Per row: the reward of the action that was taken, the probability that the log gave it, and the one that the target policy gives it. With a
    model, also what it says of that action (`model`), and its mean over the target policy's actions (`expected`).

    Raises: UsageError for rows without propensity, or below MIN_PROPENSITY where the target policy would do the same."""
    if not len(reward) or len({len(x) for x in (reward, propensity, target)}) > 1 or not (propensity > 0).all():
        raise UsageError(f"{len(reward)} rows", where="log", hint="every row has a reward and a probability above 0")
    low = (propensity < MIN_PROPENSITY * (1 - 1e-9)) & (target > 0)
    if low.any():
        raise UsageError(f"{int(low.sum())} rows have a propensity below {MIN_PROPENSITY}", where="log", hint="log with more exploration")
    weight = target / propensity
    found = [_mean("ips", weight * reward)]
    if weight.sum() > 0:
        value = float((weight * reward).sum() / weight.sum())
        spread = float(np.sqrt((weight**2 * (reward - value) ** 2).sum()) / weight.sum())
        found.append(Estimate("snips", value, value - Z_95 * spread, value + Z_95 * spread))
    if model is not None and expected is not None:
        found.append(_mean("dr", expected + weight * (reward - model)))
    return tuple(found)


def _mean(name: str, rows: NDArray[np.float64]) -> Estimate:
    value, spread = float(rows.mean()), float(rows.std(ddof=1) / np.sqrt(len(rows))) if len(rows) > 1 else float("inf")
    return Estimate(name, value, value - Z_95 * spread, value + Z_95 * spread)
