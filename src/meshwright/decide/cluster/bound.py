"""The most that the running jobs can reach together: a linear programme over one big server of each kind, and its prices.

Every job mixes the measured points of its profile; the mix is on average no slower than its share; cores, memory and GPUs of all servers of a
kind are one. Speeds are linear between points, so every real allocation is such a mix. The dual prices are the certificate: for any prices >= 0

    speed <= prices · capacities + sum over jobs of GPUs · the most, over kinds and points, of
             speed + floor price · (speed - floor) - prices · point

Cost: one programme of profiles x kinds x points columns, kept while the same profiles run on as many GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ...bound import Bound, Certificate
from ...kernels.highs import require_optimal, row_duals, solver
from .book import Book, Points
from .problem import AllocationProblem

__all__ = ["Group", "Prices", "groups_of", "lp_prices", "price_bound", "upper_bound"]

GB = 1e9  # memory in programmes is in GB: numbers near those of cores
ROUNDING = 1e-8  # what a bound gives away for sums of floats; the checker allows for as much
Group = tuple[int, tuple[str, ...]]  # profile, and the types of GPU that its jobs may have


@dataclass(frozen=True)
class Prices:
    """Per kind: of a GPU, a core and a GB. `floor[group, kind]`: of the floor. `value`: the bound that they prove, before rounding."""

    gpu: tuple[float, ...]
    core: tuple[float, ...]
    gb: tuple[float, ...]
    floor: dict[tuple[Group, int], float]
    value: float


def groups_of(problem: AllocationProblem, jobs: Sequence[int]) -> dict[Group, int]:
    """GPUs that jobs of each profile and choice of types want, in a fixed order."""
    found: dict[Group, int] = {}
    for j in jobs:
        job = problem.queue.jobs[j]
        key = (problem.queue.profile_of[job.profile], job.types)
        found[key] = found.get(key, 0) + job.gpus
    return dict(sorted(found.items()))


def _points(book: Book, profile: int, kind: int) -> Points:
    """Cores, GB and speed of the points that are not beaten by smaller ones."""
    key = (profile, kind)
    if key not in book.points:
        book.points[key] = _found(book, profile, kind)
    return book.points[key]


def _found(book: Book, profile: int, kind: int) -> Points:
    p = book.profiles[profile]
    table = np.array(p.speed)
    less = np.full_like(table, -1.0)
    less[1:] = table[:-1]
    less[:, 1:] = np.maximum(less[:, 1:], table[:, :-1])
    i, k = np.nonzero(table > less)
    return np.array(p.cores)[i], np.array(p.memory_bytes)[k] / GB, p.on(book.kinds[kind].type) * table[i, k]


def capacities(book: Book) -> list[tuple[int, int, float]]:
    """GPUs, cores and GB of all servers of each kind."""
    counts = np.bincount(book.servers.kind, minlength=len(book.kinds)).tolist()
    return [(n * k.gpus, n * k.cores, n * k.memory_bytes / GB) for n, k in zip(counts, book.kinds, strict=True)]


def lp_prices(book: Book, groups: dict[Group, int]) -> Prices:
    """Prices of the programme's optimum, or all 0 for no jobs."""
    kinds, caps = range(len(book.kinds)), capacities(book)
    if not groups:
        zero = (0.0,) * len(caps)
        return Prices(zero, zero, zero, {}, 0.0)
    import highspy

    model = solver()
    infinity = model.getInfinity()
    pairs = [(g, t) for g in groups for t in kinds if not g[1] or book.kinds[t].type in g[1]]
    rows = [(-infinity, float(x)) for cap in caps for x in cap]
    rows += [*((float(n), float(n)) for n in groups.values()), *((0.0, infinity) for _ in pairs)]
    for low, high in rows:
        model.addRow(low, high, 0, [], [])
    base, number = 3 * len(caps), {g: n for n, g in enumerate(groups)}
    for at, (g, t) in enumerate(pairs):
        floor = book.floor(g[0], 1, t)
        for c, m, w in zip(*(x.tolist() for x in _points(book, g[0], t)), strict=True):
            index = [3 * t, 3 * t + 1, 3 * t + 2, base + number[g], base + len(groups) + at]
            model.addCol(w, 0.0, infinity, 5, index, [1.0, c, m, 1.0, w - floor])
    model.changeObjectiveSense(highspy.ObjSense.kMaximize)
    require_optimal(model, what="the bound of an allocation")
    dual = row_duals(model)
    price = [[max(0.0, dual[3 * t + n]) for t in kinds] for n in range(3)]
    floors = {pair: max(0.0, -dual[base + len(groups) + at]) for at, pair in enumerate(pairs)}
    gpu, core, gb = (tuple(x) for x in price)
    return Prices(gpu, core, gb, floors, upper_bound(book, groups, gpu, core, gb, floors))


def upper_bound(book: Book, groups: dict[Group, int], gpu: Any, core: Any, gb: Any, floors: dict[tuple[Group, int], float]) -> float:
    """What any prices >= 0 prove."""
    total = sum(g * a + c * b + m * d for (a, b, d), g, c, m in zip(capacities(book), gpu, core, gb, strict=True))
    for group, wanted in groups.items():
        best = -np.inf
        for t in range(len(book.kinds)):
            if (group, t) in floors:
                c, m, w = _points(book, group[0], t)
                mu = floors[group, t]
                best = max(best, float((w + mu * (w - book.floor(group[0], 1, t)) - gpu[t] - core[t] * c - gb[t] * m).max()))
        total += wanted * best
    return float(total)


def price_bound(book: Book, groups: dict[Group, int], prices: Prices) -> Bound:
    """The bound with its certificate."""
    value = Fraction(prices.value) * (1 + Fraction(ROUNDING))
    data = {
        "kinds": [list(k) for k in book.kinds], "gpu": list(prices.gpu), "core": list(prices.core), "gb": list(prices.gb),
        "floors": [[book.profiles[g[0]].name, list(g[1]), t, mu] for (g, t), mu in prices.floor.items()],
    }  # fmt: skip
    return Bound(quantity="speed", value=f"{value.numerator}/{value.denominator}", unit="GPUs", certificate=Certificate(kind="prices", data=data))
