"""Pieces one after the other, the costliest first, each to the device that it makes least slow: many lists and limits in one go.

Cite: NeuroShard, MLSys 2023, section 3.3 (inner search). A grid value c limits a device's columns to c times the mean: it trades even lookups against
even exchanges. Ties go to the device with less in its memory.
Cost: O(n) evaluations of [B, D, K] sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .problem import F64, I64, Phases, Piece, TableProblem

__all__ = ["Greedy", "greedy"]


class Greedy(NamedTuple):
    """`on` [B, n]; `phases` of the plans; `left_bytes` [B]: of pieces that no device takes (they are put nowhere, -1)."""

    on: I64
    phases: Phases
    left_bytes: F64


def greedy(problem: TableProblem, lists: Sequence[Sequence[Piece]], limits: Sequence[float]) -> Greedy:
    """Every list (of equally many pieces) under every limit, list by list: B = lists x limits rows."""
    kinds: dict[tuple[int, int, int], int] = {}
    unique: list[Piece] = []
    for piece in (p for pieces in lists for p in pieces):
        if piece.kind not in kinds:
            kinds[piece.kind] = len(unique)
            unique.append(piece)
    embedded, size = problem.embed(unique), problem.bytes_of(unique)
    width = np.array([p.kind[2] for p in unique], np.float64)
    alone = problem.compute_s(np.moveaxis(embedded, 0, 1)).mean(1)
    which = np.repeat(np.array([[kinds[p.kind] for p in pieces] for pieces in lists]), len(limits), 0)
    most = np.tile(np.array(limits), len(lists)) * width[which].sum(1) / problem.devices
    rows, (b, n), d = np.arange(len(which)), which.shape, problem.devices
    order = np.argsort(-alone[which], 1, kind="stable")
    on = np.full((b, n), -1, np.int64)
    sums, columns, held, left = np.zeros((b, d, embedded.shape[2])), np.zeros((b, d)), np.zeros((b, d)), np.zeros(b)
    for at in order.T:
        piece = which[rows, at]
        with_it = sums + np.moveaxis(embedded[:, piece], 0, 1)
        cost = problem.compute_s(with_it)
        fits = (held + size[piece, None] <= problem.memory) & (columns + width[piece, None] <= most[:, None] * (1 + 1e-9))
        cost = np.where(fits, cost, np.inf)
        best = np.where(cost <= cost.min(1, keepdims=True), held, np.inf).argmin(1)
        placed = fits.any(1)
        left += np.where(placed, 0.0, size[piece])
        on[rows, at] = np.where(placed, best, -1)
        r = rows[placed]
        sums[r, best[r]] = with_it[r, best[r]]
        columns[r, best[r]] += width[piece[r]]
        held[r, best[r]] += size[piece[r]]
    return Greedy(on, problem.phases(sums, columns), left)
