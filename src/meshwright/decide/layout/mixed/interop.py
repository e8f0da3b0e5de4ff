"""Stages of unlike size by dynamic programming over layers and devices.

Cite: Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022, section 5:
t* = min over t_max of F(0, K, D; t_max) + (B - 1) t_max,
F(s, k, d; t_max) = min over stages [k..i] on n devices with t <= t_max of t + F(s-1, i+1, d - n).
Left open: what a stage costs on a submesh. Our answer: the layer table at the submesh's tensor degree; data-parallel replicas are outside of
the programme (one pipeline is planned, `data` copies of it run). Deviation: memory counts the micro-batches in flight at that distance from the end.
Close values of t_max are skipped (epsilon), and larger ones than can win with the least sum that there is. Cost: O(stages · layers² · devices ·
degrees) per t_max.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....cite import Cite

__all__ = ["CITE", "inter_operator"]

CITE = Cite(
    key="zheng2022alpa",
    title="Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning",
    year=2022,
    venue="OSDI '22, arXiv:2201.12023",
)
F64 = NDArray[np.float64]
# Values of t_max closer than this, as a share of it, are tried once: Alpa's epsilon, here relative to the value.
MIN_T_MAX_STEP_SHARE = 1e-2


def inter_operator(
    cost_s: F64, fits: Sequence[NDArray[np.bool_]], degrees: Sequence[int], devices: int, microbatches: int, *, epsilon: float = MIN_T_MAX_STEP_SHARE
) -> tuple[float, list[tuple[int, int]]] | None:
    """(seconds, [(blocks, degree) per stage]) of the best pipeline over all blocks on exactly `devices` devices; None if there is none.

    `cost_s[n, i, j]`: seconds of blocks i..j-1 on degrees[n] devices; `fits[s-1][n, i, j]`: whether they fit when s stages are left, this
    one included (its length is the most stages).
    """
    blocks = cost_s.shape[1] - 1
    values = np.unique(cost_s[np.isfinite(cost_s)])
    least = _stages(cost_s, fits, degrees, devices)  # the least sum, however slow its slowest stage
    if least is None:
        return None
    least_s = sum(_spans(cost_s, least, degrees))
    best: tuple[float, list[tuple[int, int]]] | None = None
    tried = -np.inf
    longest = max(cost_s[:, i, i + 1].min() for i in range(blocks))
    for t_max in values:
        if t_max < longest or t_max <= tried * (1 + epsilon):
            continue
        # values rise, and what has no stage as slow as this was found before: from here on nothing is faster than the best pipeline
        if best is not None and least_s + (microbatches - 1) * t_max >= best[0]:
            break
        tried = float(t_max * (1 + epsilon)) if epsilon else float(t_max)
        found = _stages(np.where(cost_s <= tried, cost_s, np.inf), fits, degrees, devices)
        if found is None:
            continue
        spans = _spans(cost_s, found, degrees)
        # by the slowest stage there is, which may be faster than t_max allowed
        total = sum(spans) + (microbatches - 1) * max(spans)
        if best is None or total < best[0]:
            best = (total, found)
        tried = float(t_max)
    return best


def _spans(cost_s: F64, stages: Sequence[tuple[int, int]], degrees: Sequence[int]) -> list[float]:
    """Seconds of every stage."""
    spans, at = [], 0
    for count, degree in stages:
        spans.append(float(cost_s[list(degrees).index(degree), at, at + count]))
        at += count
    return spans


def _stages(cost_s: F64, fits: Sequence[NDArray[np.bool_]], degrees: Sequence[int], devices: int) -> list[tuple[int, int]] | None:
    """The stages with the least sum. State: least seconds for blocks k.. on d devices with s stages."""
    blocks = cost_s.shape[1] - 1
    layer = np.full((blocks + 1, devices + 1), np.inf)
    layer[blocks, 0] = 0.0
    history: list[tuple[F64, NDArray[np.int64], NDArray[np.int64]]] = []
    answer: tuple[float, int] | None = None
    for s in range(1, len(fits) + 1):
        fresh = np.full_like(layer, np.inf)
        ends, used = np.zeros(layer.shape, dtype=np.int64), np.zeros(layer.shape, dtype=np.int64)
        for n, degree in enumerate(degrees):
            if degree > devices:
                continue
            priced = np.where(fits[s - 1][n], cost_s[n], np.inf)  # [i, j]
            total = priced[:, :, None] + layer[None, :, : devices + 1 - degree]
            end = total.argmin(axis=1)
            value = np.take_along_axis(total, end[:, None, :], axis=1)[:, 0, :]
            better = value < fresh[:, degree:]
            fresh[:, degree:] = np.where(better, value, fresh[:, degree:])
            ends[:, degree:] = np.where(better, end, ends[:, degree:])
            used[:, degree:] = np.where(better, n, used[:, degree:])
        history.append((fresh, ends, used))
        layer = fresh
        if np.isfinite(fresh[0, devices]) and (answer is None or fresh[0, devices] < answer[0]):
            answer = (float(fresh[0, devices]), s)
    if answer is None:
        return None
    found, k, left = [], 0, devices
    for s in range(answer[1], 0, -1):
        _, ends, used = history[s - 1]
        end, n = int(ends[k, left]), int(used[k, left])
        found.append((end - k, degrees[n]))
        k, left = end, left - degrees[n]
    return found
