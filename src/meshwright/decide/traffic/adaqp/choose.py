"""One point of each round's frontier: least weighted sum, or least of one quantity within a budget of the other, or the whole curve.

Rounds meet only in two sums, seconds and variance. The weighted sum is separate in them. For a budget: the Lagrangian gives a bound and a start; a
point whose reduced cost exceeds the gap between the two can be in no better choice; what is left is enumerated, round by round, keeping what no
other state dominates. So the answer is exact, unless more than `MAX_STATES` states are left; then it comes with its gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .problem import F64, I64

__all__ = ["Chosen", "best_sum", "curve", "least_within"]

MAX_STATES = 2_000_000  # 100 MB; 60 messages in groups of 100 leave some hundreds
HALVINGS = 100  # of the price of a budget: to the last bit of a float
Stage = tuple[F64, F64]  # what is minimised, and what has a budget, of every point


@dataclass(frozen=True, eq=False)
class Chosen:
    """`points`: one of each stage. `value`, `used`: the two sums. `bound`: no choice within the budget is below."""

    points: tuple[int, ...]
    value: float
    used: float
    bound: float

    @property
    def gap(self) -> float:
        return max(0.0, self.value - self.bound) / abs(self.value) if self.value else 0.0


def best_sum(stages: Sequence[Stage], price: float) -> Chosen:
    """Least sum of first + price · second."""
    points = tuple(int(np.argmin(a + price * b)) for a, b in stages)
    value, used = _sums(stages, points)
    return Chosen(points, value, used, value)


def _sums(stages: Sequence[Stage], points: Sequence[int]) -> tuple[float, float]:
    return (sum(float(s[0][k]) for s, k in zip(stages, points, strict=True)), sum(float(s[1][k]) for s, k in zip(stages, points, strict=True)))


def least_within(stages: Sequence[Stage], budget: float) -> Chosen | None:
    """Least sum of the first with the second's sum at most `budget`; None where no choice is within it."""
    allowed = budget * (1 + 1e-12)  # sums of floats in another order
    if sum(float(b.min()) for _, b in stages) > allowed:
        return None
    start, price, bound = _priced(stages, allowed)
    start = _filled(stages, start, allowed)
    value, used = _sums(stages, start)
    if value <= bound * (1 + 1e-12):
        return Chosen(tuple(start), value, used, min(value, bound))
    found = _enumerated(stages, allowed, price, value - bound)
    if found is None:
        return Chosen(tuple(start), value, used, bound)
    if found:
        start = list(found)
        value, used = _sums(stages, start)
    return Chosen(tuple(start), value, used, value)


def _priced(stages: Sequence[Stage], budget: float) -> tuple[list[int], float, float]:
    """(a choice within the budget, the price at which the Lagrangian bound is highest, that bound)."""
    best = float("-inf"), 0.0
    low, high = 0.0, 0.0
    point = best_sum(stages, 0.0)
    if point.used <= budget:
        return list(point.points), 0.0, point.value
    scale = [(float(a.max() - a.min()), float(b.max() - b.min())) for a, b in stages]
    high = max(1e-300, sum(x for x, _ in scale) / max(sum(y for _, y in scale), 1e-300))
    while (point := best_sum(stages, high)).used > budget:
        high *= 16
        if high > 1e280:
            points = [int(np.lexsort((a, b))[0]) for a, b in stages]
            return points, 0.0, best_sum(stages, 0.0).value
    feasible = list(point.points)
    for _ in range(HALVINGS):
        price = (low + high) / 2
        point = best_sum(stages, price)
        best = max(best, (point.value + price * (point.used - budget), price))
        if point.used <= budget:
            high, feasible = price, list(point.points)
        else:
            low = price
        if high - low <= 1e-15 * high:
            break
    return feasible, best[1], best[0]


def _filled(stages: Sequence[Stage], points: list[int], budget: float) -> list[int]:
    """What is left of the budget goes to the change that gains most, as long as there is one."""
    points = list(points)
    left = budget - _sums(stages, points)[1]
    while True:
        best = 0.0, -1, -1
        for s, (a, b) in enumerate(stages):
            fits = b <= b[points[s]] + left
            k = int(np.argmin(np.where(fits, a, np.inf)))
            if fits[k] and a[points[s]] - a[k] > best[0]:
                best = float(a[points[s]] - a[k]), s, k
        if best[1] < 0:
            return points
        left -= float(stages[best[1]][1][best[2]] - stages[best[1]][1][points[best[1]]])
        points[best[1]] = best[2]


def _enumerated(stages: Sequence[Stage], budget: float, price: float, gap: float) -> tuple[int, ...] | None:
    """The least choice whose reduced costs sum to at most the gap; () for none, None for too many states."""
    reduced = [(a + price * b) - (a + price * b).min() for a, b in stages]
    gap *= 1 + 1e-9
    kept = [np.flatnonzero(r <= gap) for r in reduced]
    least_b = np.array([float(b[k].min()) if len(k) else 0.0 for (_, b), k in zip(stages, kept, strict=True)])
    later = np.concatenate([np.cumsum(least_b[::-1])[::-1][1:], [0.0]])
    value, used, spent = np.zeros(1), np.zeros(1), np.zeros(1)
    steps: list[tuple[I64, I64]] = []
    for s, (a, b) in enumerate(stages):
        k = kept[s]
        if len(value) * len(k) > MAX_STATES:
            return None
        v, u, r = ((x[:, None] + y[k]).ravel() for x, y in ((value, a), (used, b), (spent, reduced[s])))
        ok = np.flatnonzero((r <= gap) & (u + later[s] <= budget))
        by = ok[np.lexsort((u[ok], v[ok]))]
        low = np.minimum.accumulate(u[by]) if len(by) else u[by]
        by = by[np.concatenate([[True], u[by][1:] < low[:-1]])] if len(by) else by
        if not len(by):
            return ()
        steps.append((by // len(k), k[by % len(k)]))
        value, used, spent = v[by], u[by], r[by]
    at, points = 0, list[int]()  # states are by rising value, and all of them within the budget
    for before, taken in reversed(steps):
        points.append(int(taken[at]))
        at = int(before[at])
    return tuple(reversed(points))


def curve(stages: Sequence[Stage]) -> tuple[list[Chosen], bool]:
    """Every choice that no other one dominates, by rising first sum; and whether these are all. Where they are more than can be kept: those that are
    best for some price."""
    value, used = np.zeros(1), np.zeros(1)
    steps: list[tuple[I64, I64]] = []
    for a, b in stages:
        if len(value) * len(a) > MAX_STATES:
            return _supported(stages), False
        v, u = (value[:, None] + a).ravel(), (used[:, None] + b).ravel()
        by = np.lexsort((u, v))
        by = by[np.concatenate([[True], u[by][1:] < np.minimum.accumulate(u[by])[:-1]])]
        steps.append((by // len(a), by % len(a)))
        value, used = v[by], u[by]
    found = []
    for end in range(len(value)):
        at, points = end, list[int]()
        for before, taken in reversed(steps):
            points.append(int(taken[at]))
            at = int(before[at])
        found.append(Chosen(tuple(reversed(points)), float(value[end]), float(used[end]), float(value[end])))
    return found, True


def _supported(stages: Sequence[Stage]) -> list[Chosen]:
    """Corners of the lower convex hull, by halving between neighbours."""
    left = best_sum(stages, 0.0)
    ends = [int(np.lexsort((a, b))[0]) for a, b in stages]
    value, used = _sums(stages, ends)
    found, open_ = [left], [(left, Chosen(tuple(ends), value, used, value))]
    while open_:
        a, b = open_.pop()
        if a.used <= b.used or b.value <= a.value:
            continue
        price = (b.value - a.value) / (a.used - b.used)
        middle = best_sum(stages, price)
        if middle.value + price * middle.used < (a.value + price * a.used) * (1 - 1e-12):
            open_ += [(middle, b), (a, middle)]
        else:
            found.append(b)
    return sorted(found, key=lambda c: c.value)
