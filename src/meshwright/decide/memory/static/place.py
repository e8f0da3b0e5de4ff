"""Placing blocks one after another at the best free place: compiled, for many thousands of storages.

A block is one storage or a run of storages back to back. For every storage of the block and every placed storage that may be alive with it, the
block's start must stay out of one open interval; what is left over is searched for the lowest place, or the one that leaves least room.
Cite: CITE in `__init__` (its solver: footprints of blocked intervals). Deviation: open intervals with every element's own size, where the original
takes closed ones with the first element's.
Cost: O(conflicts · log conflicts).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....arena import ArenaProblem, Rows
from ....kernels.compile import allocating, helper

__all__ = ["Blocks", "blocks_of", "place"]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """`members[b]`: storages of block b in order; `inner[t]`: where storage t begins in its block."""

    members: Rows
    inner: I64
    size_bytes: I64
    block_of: I32


def blocks_of(problem: ArenaProblem, size_bytes: I64) -> Blocks:
    """Runs, then single storages. Sizes are aligned, so that members are aligned where their block is."""
    storages = len(size_bytes)
    in_runs = {t for run in problem.runs for t in run}
    lists = [list(run) for run in problem.runs if run] + [[t] for t in range(storages) if t not in in_runs]
    inner, block_of = np.zeros(storages, np.int64), np.zeros(storages, np.int32)
    total = np.zeros(len(lists), np.int64)
    for b, members in enumerate(lists):
        for t in members:
            inner[t], block_of[t] = total[b], b
            total[b] += size_bytes[t]
    starts = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(x) for x in lists], out=starts[1:])
    return Blocks(Rows(starts, np.array([t for x in lists for t in x], np.int32)), inner, total, block_of)


@helper
def _free_start(low, high, count, best_fit):  # type: ignore[no-untyped-def]
    """Where a block may start, given `count` forbidden open intervals; 0 is the lowest place."""
    order = np.argsort(low[:count])
    at, chosen, least = np.int64(0), np.int64(-1), np.int64(2**62)
    for i in range(count):
        k = order[i]
        # Starts in [at, low[k]] are free: between what ends at `at` and what begins where the block would end.
        if low[k] >= at:
            if not best_fit:
                return at
            if low[k] - at < least:
                least, chosen = low[k] - at, at
        at = max(at, high[k])
    return chosen if chosen >= 0 else at


@allocating
def place(order, first, member_starts, members, inner, size, conflict_starts, conflict_items, block_of, best_fit, offset):  # type: ignore[no-untyped-def]
    """Places the blocks order[first:] on top of those before, whose offsets are there; into `offset`. Returns the height of all."""
    for k in range(first, len(order)):
        for i in range(member_starts[order[k]], member_starts[order[k] + 1]):
            offset[members[i]] = -1
    height = np.int64(0)
    for t in range(len(offset)):
        if offset[t] >= 0:
            height = max(height, offset[t] + size[t])
    low, high = np.empty(1024, np.int64), np.empty(1024, np.int64)
    for k in range(first, len(order)):
        b = order[k]
        count = 0
        for i in range(member_starts[b], member_starts[b + 1]):
            t = members[i]
            for j in range(conflict_starts[t], conflict_starts[t + 1]):
                other = conflict_items[j]
                if offset[other] < 0 or block_of[other] == b:
                    continue
                if count == len(low):
                    low, high = np.concatenate((low, np.empty_like(low))), np.concatenate((high, np.empty_like(high)))
                # the block's starts at which its storage t would overlap the other: an open interval
                low[count] = offset[other] - inner[t] - size[t]
                high[count] = offset[other] + size[other] - inner[t]
                count += 1
        start = _free_start(low, high, count, best_fit)
        for i in range(member_starts[b], member_starts[b + 1]):
            t = members[i]
            offset[t] = start + inner[t]
            height = max(height, offset[t] + size[t])
    return height
