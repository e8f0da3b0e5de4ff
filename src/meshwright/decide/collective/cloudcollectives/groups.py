"""Locality groups, inferred from what messages cost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["infer_groups"]

F64 = NDArray[np.float64]


def infer_groups(cost: F64, *, gap: float = 1.5) -> tuple[int, ...]:
    """Locality groups by average linkage: clusters are joined nearest first, and the joining stops before the largest jump in distance.

    A jump by less than `gap` times means one group. Groups are numbered in order of their first endpoint.
    """
    n = len(cost)
    distance = np.maximum(cost, cost.T).astype(np.float64)
    np.fill_diagonal(distance, np.inf)
    label, size, alive = np.arange(n), np.ones(n), np.ones(n, bool)
    heights: list[float] = []
    states = [label.copy()]
    for _ in range(n - 1):
        a, b = divmod(int(distance.argmin()), n)
        heights.append(float(distance[a, b]))
        merged = (distance[a] * size[a] + distance[b] * size[b]) / (size[a] + size[b])
        merged[[a, b]] = np.inf
        distance[a], distance[:, a] = merged, merged
        distance[b], distance[:, b] = np.inf, np.inf
        distance[:, ~alive] = np.inf
        size[a] += size[b]
        alive[b] = False
        label = np.where(label == b, a, label)
        states.append(label.copy())
    # Joining distances never fall with average linkage; the largest jump lies between distances inside groups and between them.
    jumps = [high / low if low > 0 else np.inf if high > 0 else 1.0 for low, high in pairwise(heights)]
    if not jumps or max(jumps) < gap:
        return (0,) * n
    chosen = states[int(np.argmax(jumps)) + 1]
    number: dict[int, int] = {}
    return tuple(number.setdefault(int(x), len(number)) for x in chosen)
