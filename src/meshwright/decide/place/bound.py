"""How short a schedule can be: the longest path over the cheapest devices and links, and the work over the rates of all devices together.

Path: `f(i, k)`, the earliest end of task i if it runs on device k, is its seconds there plus the largest over its parents of the least over devices
of `f(parent, l)` and the message from l to k, without the bytes that a full bucket of its route lets through at once. Every schedule ends no earlier
than the least `f` of each task. Load: with weights on the devices that sum to 1, the makespan is at least the sum over tasks of the least weighted
seconds (linear duality); the best weights are those of the linear programme that spreads every kind of work over the devices. Both are the checker's
to work out again (`check.placement`).
Cost: O(edges · devices²) and one programme of devices x kinds rows.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from ...bound import Bound, Certificate
from ...kernels.highs import require_optimal, solver, values
from .problem import PlaceProblem, rate_of

__all__ = ["load_weights", "longest_path_s", "place_bound"]

ROUNDING = 1e-9  # what a bound gives away for sums of floats; the checker allows for as much


def longest_path_s(problem: PlaceProblem) -> float:
    """The path bound, in seconds."""
    a = problem.arrays
    ends = np.empty_like(a.dur)
    for i in problem.graph.order:
        ready = np.zeros(a.dur.shape[1])
        for e in range(a.ptr[i], a.ptr[i + 1]):
            arrives = ends[a.parent[e]][:, None] + a.delay + np.maximum(a.size[e] - problem.bursts, 0) * a.per_byte
            np.maximum(ready, arrives.min(0), out=ready)
        ends[i] = ready + a.dur[i]
    return float(ends.min(1).max())


def load_weights(problem: PlaceProblem) -> dict[str, float]:
    """Weights of devices, summing to 1, that make the load bound largest."""
    work: dict[str, float] = {}
    for task in problem.graph.tasks:
        work[task.kind] = work.get(task.kind, 0.0) + task.work
    devices = problem.fabric.devices
    total = sum(work.values()) or 1.0
    model = solver()
    infinity = model.getInfinity()
    for _ in devices:
        model.addVar(0.0, 1.0)
    model.addRow(1.0, 1.0, len(devices), list(range(len(devices))), [1.0] * len(devices))
    fastest = max(rate_of(d, kind) for d in devices for kind in work)
    for column, (kind, amount) in enumerate(work.items(), start=len(devices)):
        # Least weighted seconds of this kind's work, in units of all work at the fastest rate.
        model.addVar(0.0, infinity)
        model.changeColCost(column, 1.0)
        for k, device in enumerate(devices):
            if rate := rate_of(device, kind):
                model.addRow(0.0, infinity, 2, [k, column], [amount / total * (fastest / rate), -1.0])
    model.changeObjectiveSense(_maximise())
    require_optimal(model, what="the load bound of a placement")
    found = [max(0.0, x) for x in values(model)[: len(devices)]]
    return {d.name: x / sum(found) for d, x in zip(devices, found, strict=True)}


def _maximise() -> Any:
    import highspy

    return highspy.ObjSense.kMaximize


def place_bound(problem: PlaceProblem) -> Bound:
    """The better of both bounds."""
    path_s = longest_path_s(problem)
    weights = load_weights(problem)
    y = np.array([weights[d.name] for d in problem.fabric.devices])
    with np.errstate(invalid="ignore"):
        load_s = float(np.where(np.isfinite(problem.arrays.dur), problem.arrays.dur * y, np.inf).min(1).sum())
    data = {"form": "load", "weights": weights} if load_s > path_s else {"form": "path"}
    value = Fraction(max(load_s, path_s)) * (1 - Fraction(ROUNDING))
    certificate = Certificate(kind="placement", data=data)
    return Bound(quantity="placement time", value=f"{value.numerator}/{value.denominator}", unit="s", certificate=certificate)
