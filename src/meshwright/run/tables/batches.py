"""Batches of lookups whose rows are met as often as a table's histogram says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...graph.embeddings import BINS, Table, uniform_histogram

__all__ = ["indices_of"]


def indices_of(table: Table, batch: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(indices, offsets) of a batch whose rows are met as often as the table's histogram says; a fractional pooling is met in the mean."""
    lengths = np.full(batch, int(table.pooling)) + (rng.random(batch) < table.pooling % 1)
    total = int(lengths.sum())
    shares = np.array(table.histogram or uniform_histogram(table.rows, total))
    counts: list[NDArray[np.int64]] = []
    if total and shares.sum() > 0:
        low = np.array([1, *(2**i // 2 + 1 for i in range(1, BINS))])
        high = np.array([1 << i for i in range(BINS)])
        mean = (low + high) / 2
        rows = int(min(table.rows, max(1, round(total / float(shares @ mean / shares.sum())))))
        bins = rng.choice(BINS, size=rows, p=shares / shares.sum())
        counts = [rng.integers(low[bins], high[bins] + 1)]
    drawn = np.concatenate(counts) if counts else np.zeros(0, np.int64)
    ids = rng.permutation(table.rows)[: len(drawn)] if table.rows <= 1 << 24 else rng.integers(table.rows, size=len(drawn))
    looked = np.repeat(ids, drawn)
    rng.shuffle(looked)
    looked = np.resize(looked, total) if len(looked) else np.zeros(total, np.int64)
    return looked.astype(np.int64), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
