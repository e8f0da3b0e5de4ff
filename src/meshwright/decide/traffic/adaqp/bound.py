"""How short an epoch can be whose variance is at most that of a plan: by linear duality, whatever the order of its messages.

What a worker sends in an epoch leaves by its own links, so the epoch takes at least its bytes over their rate, and at least any weighted mean of
that over workers. With a price on variance, each row's width is free: time >= sum over rows of min over widths of (share of its worker · bytes /
rate + price · weight / (2^b - 1)^2) - price · variance. Any shares that sum to 1 and any price >= 0 prove a bound; the checker works it out again
(`check.halo`).
Left open: computing. Cost: some hundred passes over the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ....bound import Bound, Certificate
from ....codec.rows import FULL, PARAMETER_BYTES, WIDTHS, noise_factor
from ....plan.halo import HaloStep
from .problem import F64, HaloProblem

__all__ = ["ROUNDING", "epoch_bound"]

ROUNDING = 1e-9  # what a bound gives away for sums of floats; the checker allows for as much
PASSES = 40
HALVINGS = 60
STEP = 0.5


def epoch_bound(problem: HaloProblem, steps: Sequence[HaloStep], variance: float) -> Bound:
    """In seconds, for the groups that a plan states: none of them may be divided."""
    rate = np.array([sum(link.rate_Bps for link in problem.fabric.links if link.src == name) for name in problem.ranks], np.float64)
    share = np.ones(len(rate)) / len(rate)
    groups = [(m.src, s.dim, g.rows, g.weight) for s in steps for m in s.messages for g in m.groups]
    if not groups:
        return _bound(0.0, 0.0, problem.ranks, share, variance)
    src, dim, rows, weight = (np.array(column) for column in zip(*groups, strict=True))
    bits = np.array([*WIDTHS, FULL])
    seconds = rows[:, None] * (dim[:, None] * bits / 8 + np.where(bits < FULL, PARAMETER_BYTES, 0)) / rate[src][:, None]
    noise = weight[:, None] * np.array([noise_factor(int(b)) for b in bits])
    best, price = (-np.inf, 0.0, share), -1.0
    for _ in range(PASSES):
        price, value, pick = _priced(seconds * share[src][:, None], noise, variance, price)
        best = max(best, (value, price, share), key=lambda b: b[0])
        load = np.bincount(src, weights=seconds[np.arange(len(src)), pick], minlength=len(rate))
        share = share * np.exp(STEP * (load / max(load.max(), 1e-300) - 1))
        share /= share.sum()
    return _bound(max(0.0, best[0]), best[1], problem.ranks, best[2], variance)


def _priced(seconds: F64, noise: F64, variance: float, near: float) -> tuple[float, float, NDArray[np.intp]]:
    """(price, bound, widths) at the price that proves most for these shares; `near`: where to look, -1: anywhere."""
    taken = np.arange(len(noise))

    def at(price: float) -> tuple[float, float, NDArray[np.intp]]:
        pick = (seconds + price * noise).argmin(1)
        used = float(noise[taken, pick].sum())
        return float(seconds[taken, pick].sum()) + price * (used - variance), used, pick

    value, used, pick = at(0.0)
    if used <= variance:
        return 0.0, value, pick
    best = 0.0, value, pick
    low, high = (near / 8, near * 8) if near > 0 else (1e-18, 1e18)
    scale = float(seconds.max() / max(noise.max(), 1e-300)) if near <= 0 else 1.0
    low, high = low * scale, high * scale
    for _ in range(HALVINGS if near <= 0 else HALVINGS // 3):
        price = (low * high) ** 0.5
        value, used, pick = at(price)
        best = max(best, (price, value, pick), key=lambda b: b[1])
        low, high = (low, price) if used <= variance else (price, high)
    return best


def _bound(value: float, price: float, ranks: tuple[str, ...], share: F64, variance: float) -> Bound:
    data = {"variance": variance, "price": price, "shares": {name: float(s) for name, s in zip(ranks, share, strict=True)}}
    return Bound(quantity="epoch time", value=str(Fraction(value * (1 - ROUNDING))), unit="s", certificate=Certificate(kind="halo", data=data))
