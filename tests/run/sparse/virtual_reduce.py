"""Sparse all-reduces of many ranks in one thread, and what they must give, from the definition and in plain numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from meshwright.run.sparse.reducer import RankReducer
from meshwright.run.sparse.state import Update
from meshwright.testing.sparse_twin import Sent, run_twin

__all__ = ["all_ranks", "decaying", "expected", "largest", "mean", "step", "whole_numbers"]


def all_ranks(ranks: int, elements: int, **settings: Any) -> list[RankReducer]:
    return [RankReducer(r, ranks, elements, **settings) for r in range(ranks)]


def step(reducers: Sequence[RankReducer], gradients: Sequence[Any], seed: int = 0) -> tuple[list[Update], list[Sent]]:
    return run_twin([partial(r.protocol, g) for r, g in zip(reducers, gradients, strict=True)], seed)


def mean(update: Update) -> Any:
    out = np.full(update.elements, np.nan, np.float32)
    update.scatter(out)
    return out


def decaying(rank: int, elements: int) -> Iterator[Any]:
    """A rank's gradients, one after the other."""
    rng = np.random.default_rng(rank)
    scale = np.exp(-3 * np.linspace(0, 1, elements)).astype(np.float32)
    while True:
        yield scale * rng.standard_normal(elements).astype(np.float32)


def largest(x: Any, k: int) -> Any:
    """Indices of the k largest magnitudes that are not zero, rising; of equal ones the first."""
    order = np.argsort(-np.abs(x.astype(np.float64)), kind="stable")[:k]
    return np.sort(order[x[order] != 0])


def expected(sums: Sequence[Any], k: int, kept: int = 0) -> tuple[Any, Any]:
    """(indices, sums) of Ok-Topk with exact thresholds: the top `kept` (k unless told) of the sum of everybody's top k."""
    total = np.zeros(len(sums[0]), np.float64)
    for x in sums:
        rows = largest(x, k)
        total[rows] += x[rows]
    rows = largest(total, kept or k)
    return rows, total[rows]


def whole_numbers(rng: np.random.Generator, elements: int, kind: str) -> Any:
    """float32 vectors of small whole numbers, whose sums are exact in any order."""
    x = rng.integers(-50, 51, elements)
    if kind == "zeros":
        x[:] = 0
    elif kind == "few":
        x[rng.random(elements) < 0.97] = 0
    elif kind == "ties":
        x = rng.choice([-3, 3], elements)
    elif kind == "front":
        x[elements // 8 + 1 :] = 0
    elif kind == "decay":
        x = np.rint(x * np.linspace(20, 0.1, elements)).astype(int)
    return x.astype(np.float32)
