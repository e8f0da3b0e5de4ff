"""What a rank's kernels of a sparse all-reduce cost on this machine: prices of the ops of `decide.collective.sparse`, each timed on lists and vectors
of the sizes that a step has.

Vectors of more than `MAX_ELEMENTS` elements are not made: times are those of one with as dense a selection, in proportion ("interpolated").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from ...cost import Cost, Evidence, Priced
from ...decide.collective.sparse.phases import BUCKET_MESSAGES
from ...kernels import entries as e
from ...kernels.select import kth_magnitude
from ...run.sparse.oktopk import counts_by_edge, proposals
from ...run.sparse.selection import GUESS_SHARE, LocalSelection, largest_entries, scaled
from ...run.sparse.state import Entries, RankState
from ...run.sparse.unions import merge_all

__all__ = ["MAX_ELEMENTS", "priced_here", "sparse_prices"]

MAX_ELEMENTS = 1 << 25  # of a vector that is timed; the times of longer ones are in proportion
REPEATS = 5  # calls that are timed, after one that warms up
AGREED = ("headers", "counts", "edges", "histogram0", "histogram1", "histogram2", "sizes")
UNPRICED = ("block|encode", "kept|select", "part|decode", *(f"{name}|merge" for name in AGREED))  # work on counts, or on what is rarely there

Timed = Callable[[Callable[[], Any]], float]


def median_s(work: Callable[[], Any]) -> float:
    """Seconds of one call, of REPEATS after one that is not counted."""
    work()
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return median(found)


def sparse_prices(elements: int, k: int, ranks: int, *, timed: Timed = median_s) -> dict[str, float]:
    """Seconds by key, of one of `ranks` ranks that selects k of so many elements (at most MAX_ELEMENTS)."""
    rng = np.random.default_rng(0)
    state = RankState(rank=0, ranks=ranks, elements=elements, k=k)
    vector = rng.standard_normal(elements, dtype=np.float32)
    low = max(1, kth_magnitude(vector, k))
    local = LocalSelection("reuse", k)
    local.low = scaled(low, GUESS_SHARE)

    def select() -> None:
        proposals(local.select(state, vector, anew=False).entries, elements, ranks)

    select_s = timed(select)
    exact_s = timed(lambda: local.select(state, vector, anew=True))
    picked = local.select(state, vector, anew=False).entries.copy()
    lists = [_partly_common(picked, elements, rng) for _ in range(ranks)]
    region = np.zeros(-(-elements // ranks), np.float32)
    bits = region.view(np.int32)
    part = picked[picked[:, 0] < len(region)]
    chosen = picked[: -(-len(picked) // ranks)]

    def own() -> None:
        region.fill(0)
        e.add_entries(region, 0, part, e.entry_values(part))

    def choose() -> None:
        room = state.entries("chosen", k + 1)
        counts_by_edge(room, min(len(room), sum(e.select_from(region.view(np.int32), 0, np.int32(low), len(room), room))), low)

    def finish() -> None:
        e.clear_chosen(state.sums, picked, e.entry_values(picked), picked)
        e.entry_values(picked).sum(dtype=np.float64)
        picked.copy()

    def merge() -> None:
        merged = merge_all(state, lists[:2])
        largest_entries(merged, min(k, len(merged)), state.entries("dropped", len(merged)))

    return {
        "local|select": select_s,
        "exact|select": exact_s,
        "own|accumulate": timed(own),
        "region|accumulate": BUCKET_MESSAGES * timed(lambda: e.add_entries(region, 0, part, e.entry_values(part))),
        "global|select": timed(choose),
        "sums|merge": timed(lambda: bits[bits != 0]),
        "block|decode": timed(chosen.copy),
        **dict.fromkeys(UNPRICED, 0.0),
        "result|decode": timed(finish),
        "result|merge": timed(lambda: merge_all(state, lists)),
        "tree|merge": timed(merge),
    }


def _partly_common(picked: Entries, elements: int, rng: np.random.Generator) -> Entries:
    """About as many entries, of which every other one is of `picked`."""
    indices = np.unique(np.concatenate([picked[::2, 0], rng.integers(0, elements, len(picked) // 2)]))
    out = np.empty((len(indices), 2), picked.dtype)
    out[:, 0] = indices
    e.entry_values(out)[:] = 1
    return out


def priced_here(cost: Cost, elements: int, k: int, ranks: int, *, share: float = 1.0) -> Cost:
    """`cost` with this machine's prices; `share`: of a core that a rank may use."""
    sample = min(elements, MAX_ELEMENTS)
    scale = elements / sample / share
    evidence: Evidence = "measured" if sample == elements else "interpolated"
    table = {key: Priced(s * scale, evidence) for key, s in sparse_prices(sample, max(1, k * sample // elements), ranks).items()}
    return cost.with_table(table, source="kernels of sparse all-reduces timed here")
