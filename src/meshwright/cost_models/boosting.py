"""Boosted regression trees with a robust loss, for what a formula leaves over.

Friedman (2001), "Greedy function approximation: a gradient boosting machine": trees of equal depth fitted one after another to what is left, each
counted at `LEARNING_RATE`. Features are cut into at most MAX_BINS quantiles (histograms, as LightGBM does), splits use first and second sums as
XGBoost does (Chen and Guestrin 2016, with lambda = LEAF_PENALTY). The loss is Cauchy's by re-weighting, so a disturbed row hardly counts and the
fit follows the densest values, not the mean. Every tree sees a random share of the rows from a fixed seed: equal rows give equal trees.
Cost: O(trees * depth * rows * features).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ..errors import FormatError

__all__ = ["BoostedTrees", "fit_trees"]

F64 = NDArray[np.float64]
MAX_BINS = 64  # quantiles that a feature is cut into: thresholds fit into a byte
LEARNING_RATE = 0.07  # share of its own fit at which each tree counts
LEAF_PENALTY = 1.0  # XGBoost's lambda: added to the weight of a leaf, so that a small one moves little
ROWS_SHARE = 0.7  # of the rows, drawn anew for each tree
MIN_LEAF_WEIGHT = 10.0  # weight of the rows that a leaf keeps at least
RESIDUAL_SCALE = 0.05  # log residuals beyond this (5 %) lose weight


@dataclass(frozen=True)
class BoostedTrees:
    """`edges[f]` cut feature f. Nodes of a tree lie in heap order: children of a are 2a+1 (bin <= threshold) and 2a+2; feature -1 ends early."""

    start: float
    edges: tuple[F64, ...]
    features: NDArray[np.int16]
    thresholds: NDArray[np.uint8]
    values: NDArray[np.float32]

    def at(self, x: F64) -> F64:
        """Values for rows of features."""
        if x.ndim != 2 or x.shape[1] != len(self.edges):
            raise FormatError(f"rows of {len(self.edges)} features are needed", where=f"shape {x.shape}", hint="make them as for the fit")
        return np.asarray(self.start + _sum(_coded(x, self.edges), self.features, self.thresholds, self.values))


def fit_trees(x: F64, y: F64, *, trees: int = 300, depth: int = 7, seed: int = 0) -> BoostedTrees:
    """Of rows of features and finite values. Raises: FormatError for no rows, unequal lengths or values that are not finite."""
    if len(y) == 0 or x.ndim != 2 or len(x) != len(y) or not (np.all(np.isfinite(x)) and np.all(np.isfinite(y))):
        raise FormatError("trees need rows of finite features, one finite value each")
    edges = tuple(np.unique(np.quantile(column, np.linspace(0, 1, MAX_BINS)[1:-1])) for column in x.T)
    coded, rng = _coded(x, edges), np.random.default_rng(seed)
    start = float(np.median(y))
    predicted, grown = np.full(len(y), start), []
    for _ in range(trees):
        left = y - predicted
        # Cauchy's loss by re-weighting: its gradient is weight x residual, its curvature taken as the weight.
        weight = 1 / (1 + (left / RESIDUAL_SCALE) ** 2)
        rows = rng.random(len(y)) < ROWS_SHARE
        tree = _grow(coded[rows], (weight * left)[rows], weight[rows], depth, MIN_LEAF_WEIGHT, LEAF_PENALTY)
        tree = tree[0], tree[1], (LEARNING_RATE * tree[2]).astype(np.float32)
        grown.append(tree)
        predicted += _sum(coded, *(part[None] for part in tree))
    features, thresholds, values = (np.stack([t[i] for t in grown]) for i in range(3))
    return BoostedTrees(start, edges, features, thresholds, values)


def _coded(x: F64, edges: tuple[F64, ...]) -> NDArray[np.uint8]:
    columns = [np.searchsorted(e, column, side="right").astype(np.uint8) for column, e in zip(x.T, edges, strict=True)]
    return np.ascontiguousarray(np.stack(columns, 1))


@njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[untyped-decorator]
def _best_split(sums: Any, least: float, shrink: float) -> tuple[int, int]:
    """(feature, bin) whose split of one node's sums (feature x bin x 2) gains most; (-1, 0) for none."""
    g, h = sums[0, :, 0].sum(), sums[0, :, 1].sum()
    best, feature, threshold = 1e-9, -1, 0
    for f in range(sums.shape[0]):
        gl, hl = 0.0, 0.0
        for b in range(sums.shape[1] - 1):
            gl += sums[f, b, 0]
            hl += sums[f, b, 1]
            if hl < least or h - hl < least:
                continue
            # Each side's best value takes off g^2 / (h + lambda) / 2; the gain is what both take off beyond the undivided node (factor left
            # out).
            gain = gl * gl / (hl + shrink) + (g - gl) ** 2 / (h - hl + shrink) - g * g / (h + shrink)
            if gain > best:
                best, feature, threshold = gain, f, b
    return feature, threshold


@njit(cache=True, no_cfunc_wrapper=True)  # type: ignore[untyped-decorator]
def _grow(coded: Any, gradient: Any, weight: Any, depth: int, least: float, shrink: float) -> tuple[Any, Any, Any]:
    """One tree, level by level: (feature, threshold, value) by node."""
    rows, count = coded.shape
    nodes = 2 ** (depth + 1) - 1
    features, thresholds, values = np.full(nodes, -1, np.int16), np.zeros(nodes, np.uint8), np.zeros(nodes)
    at = np.zeros(rows, np.int64)
    for level in range(depth):
        first = 2**level - 1
        sums = np.zeros((2**level, count, MAX_BINS, 2))
        for i in range(rows):
            if at[i] >= first:
                for f in range(count):
                    sums[at[i] - first, f, coded[i, f], 0] += gradient[i]
                    sums[at[i] - first, f, coded[i, f], 1] += weight[i]
        for a in range(2**level):
            features[first + a], thresholds[first + a] = _best_split(sums[a], least, shrink)
        for i in range(rows):
            a = at[i]
            if a >= first and features[a] >= 0:
                # Rows that end early stay at their node, which is above this level, and are skipped.
                at[i] = 2 * a + (2 if coded[i, features[a]] > thresholds[a] else 1)
    total, weights = np.zeros(nodes), np.zeros(nodes)
    for i in range(rows):
        total[at[i]] += gradient[i]
        weights[at[i]] += weight[i]
    for a in range(nodes):
        values[a] = total[a] / (weights[a] + shrink)
    return features, thresholds, values


@njit(cache=True, no_cfunc_wrapper=True)  # type: ignore[untyped-decorator]
def _sum(coded: Any, features: Any, thresholds: Any, values: Any) -> Any:
    out = np.zeros(coded.shape[0])
    for i in range(coded.shape[0]):
        for t in range(features.shape[0]):
            a = 0
            while features[t, a] >= 0:
                a = 2 * a + (2 if coded[i, features[t, a]] > thresholds[t, a] else 1)
            out[i] += values[t, a]
    return out
