"""Lowering a finished arena: what reaches its top is placed earlier, ahead of something that it lies on, and all that follows is placed again.

Left open by the placement heuristics: their order is fixed beforehand, so the one storage that finds no room pays for all. Our answer: a walk over
orders. A step that does not raise the arena is kept, now and then one that does; only what comes after the first storage moved is placed again.
Invariant: the result is never higher than the start. The walk depends on the seed alone: its length is counted in conflicts looked at, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ....arena import Rows
from .place import Blocks, place

__all__ = ["improve"]

I64 = NDArray[np.int64]
# Share of steps that may raise the arena, so that the walk leaves places where no single step lowers it.
UPHILL_SHARE = 0.02
# Visits that a step counts for at least: its part outside the kernel, which small problems consist of.
MIN_STEP_VISITS = 50_000
# Steps without a lower arena that end the walk.
MAX_STALE_STEPS = 1000


def improve(
    order: I64, best_fit: bool, blocks: Blocks, conflicts: Rows, size_bytes: I64, bound_bytes: int, visits: int, rng: np.random.Generator,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[int, I64]:  # fmt: skip
    """(height, offsets) after about `visits` conflicts looked at, or at the bound, or when `stop` says so."""
    fixed = (blocks.members.starts, blocks.members.items, blocks.inner, size_bytes, conflicts.starts, conflicts.items, blocks.block_of)
    n, k = len(size_bytes), len(order)
    offset = np.full(n, -1, np.int64)
    height = int(place(order, 0, *fixed, best_fit, offset))
    best, best_offset = height, offset.copy()
    degree = np.diff(conflicts.starts)
    work = np.add.reduceat(degree[blocks.members.items], blocks.members.starts[:-1]) if k else np.zeros(0, np.int64)
    stale = 0
    while visits > 0 and best > bound_bytes and stale < MAX_STALE_STEPS and not stop():
        stale += 1
        position = np.empty(k, np.int64)
        position[order] = np.arange(k)
        key = position.astype(np.float64)
        for b in np.unique(blocks.block_of[np.flatnonzero(offset + size_bytes >= height)]).tolist():
            # what it may lie on: blocks in conflict with it that were placed before. Half a place ahead of one of them keeps all other orders.
            under = np.concatenate([blocks.block_of[conflicts[t]] for t in blocks.members[b]])
            earlier = under[key[under] < key[b]]
            if len(earlier):
                key[b] = key[earlier[rng.integers(len(earlier))]] - 0.5
        moved = np.argsort(key, kind="stable")
        changed = np.flatnonzero(moved != order)
        if not len(changed):
            break  # what is on top was placed first: it lies on nothing
        first = int(changed[0])
        trial = offset.copy()
        after = int(place(moved, first, *fixed, best_fit, trial))
        visits -= max(int(work[moved[first:]].sum()) + n, MIN_STEP_VISITS)
        if after <= height or rng.random() < UPHILL_SHARE:
            order, height, offset = moved, after, trial
        if after < best:
            best, best_offset, stale = after, trial.copy(), 0
    return best, best_offset
