"""All-reduces whose result is the union of what ranks selected: TopkA, TopkDSA with its switch to dense blocks, and hashed regions (Zen).

Everything that a rank selects is in the result, so all of it leaves the residual.
Cite, deviations: `decide.collective.sparse.{topka, topkdsa, zen}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import Unsupported
from ...kernels.entries import clear_all, entry_values, merge_entries, rehash, scatter_hashed, select_from
from .exchange import gather_blocks, greet, sum_regions
from .oktopk import equal_regions
from .protocol import AllGather, Protocol
from .selection import LocalSelection, Selected, ThresholdKind, value_of
from .state import Entries, RankState, StepStats, Update

__all__ = ["TopkA", "TopkDsa", "Zen"]


@dataclass(kw_only=True)
class _Union:
    """Selection as in Ok-Topk, so that exchanges are compared and not thresholds."""

    period: int = 32
    threshold: ThresholdKind = "reuse"

    def start(self, state: RankState) -> None:
        self.local = LocalSelection(self.threshold, state.k)

    def kind(self, sparse_step: int) -> str:
        return "thresholds" if sparse_step % self.period == 0 or not self.local.low else "steady"

    def select(self, state: RankState, gradient: Any, stats: StepStats) -> Selected:
        return self.local.select(state, gradient, anew=stats.kind == "thresholds")

    def finish(self, state: RankState, sent: Entries, result: Entries, stats: StepStats) -> Update:
        state.given, state.given_size = clear_all(state.sums, sent, entry_values(sent))
        state.total = float(entry_values(result).sum(dtype=np.float64))
        self.local.commit()
        state.commit()
        stats.selected, stats.result, stats.local_threshold = len(sent), len(result), value_of(self.local.kth)
        return Update(elements=state.elements, ranks=state.ranks, entries=result.copy(), stats=stats)


@dataclass(kw_only=True)
class TopkA(_Union):
    """Every rank gathers every rank's selection and adds them up."""

    code = 2

    def step(self, state: RankState, gradient: Any, stats: StepStats) -> Protocol[Update]:
        picked = self.select(state, gradient, stats)
        rows = np.zeros(state.ranks, np.int64)
        rows[state.rank] = len(picked.entries)
        counts, _ = yield from greet(state, self.code, picked.wrong, rows, stats)
        sizes = np.diag(counts).tolist()
        gathered = (yield from gather_blocks(state, picked.entries.reshape(-1), [2 * x for x in sizes], stats)).reshape(-1, 2)
        at = [0, *accumulate(sizes)]
        parts = [gathered[a:b] for a, b in pairwise(at)]
        return self.finish(state, picked.entries, merge_all(state, parts), stats)


def merge_all(state: RankState, parts: list[Entries]) -> Entries:
    """The sum of lists of rising index, merged in pairs: the same order, so the same bits, on every rank."""
    level = 0
    while len(parts) > 1:
        room, start, merged = state.entries(f"merged{level % 2}", sum(map(len, parts))), 0, []
        for a, b in zip(parts[::2], parts[1::2], strict=False):
            out = room[start : start + len(a) + len(b)]
            length = merge_entries(a, entry_values(a), b, entry_values(b), out, entry_values(out))
            merged.append(out[:length])
            start += len(out)
        if len(parts) % 2:
            last = room[start : start + len(parts[-1])]
            last[:] = parts[-1]
            merged.append(last)
        parts, level = merged, level + 1
    return parts[0]


@dataclass(kw_only=True)
class TopkDsa(_Union):
    """Sums by equal regions; a region is gathered as entries, or as it is where that is shorter (SparCML's switch)."""

    code = 3

    def step(self, state: RankState, gradient: Any, stats: StepStats) -> Protocol[Update]:
        picked = self.select(state, gradient, stats)
        regions = equal_regions(state.elements, state.ranks)
        rows = np.diff(np.searchsorted(picked.entries[:, 0], regions))
        counts, _ = yield from greet(state, self.code, picked.wrong, rows, stats)
        base, end = int(regions[state.rank]), int(regions[state.rank + 1])
        dense = state.room("region", end - base, np.float32)
        yield from sum_regions(state, picked.entries, counts, dense, base, stats)
        bits = dense.view(np.int32)
        wide = state.entry_words
        room = state.entries("chosen", len(dense) // wide + 1)
        above, equal = select_from(bits, base, np.int32(1), len(room), room)
        found = above + equal
        own = room[:found].reshape(-1).view(np.int32) if found * wide <= len(dense) else bits
        stats.control_words += 2 * (state.ranks - 1)
        lengths: NDArray[np.int64] = yield AllGather("sizes", np.array([found], np.int64))
        sizes = np.minimum(lengths[:, 0] * wide, np.diff(regions)).tolist()
        gathered = yield from gather_blocks(state, own, sizes, stats)
        at, parts = 0, []
        for rank, size in enumerate(sizes):
            block = gathered[at : at + size]
            at += size
            if int(lengths[rank, 0]) * wide <= int(regions[rank + 1] - regions[rank]):
                parts.append(block.view(np.int64 if state.wide else np.int32).reshape(-1, 2))
                continue
            listed = state.entries(f"listed{rank}", int(lengths[rank, 0]))
            select_from(block, int(regions[rank]), np.int32(1), len(listed), listed)
            parts.append(listed)
        return self.finish(state, picked.entries, np.concatenate(parts), stats)


@dataclass(kw_only=True)
class Zen(_Union):
    """Sums by hashed regions: balanced for any pattern that the hash does not know, without agreeing on boundaries."""

    code = 4

    def start(self, state: RankState) -> None:
        super().start(state)
        n = state.elements
        if n >= 1 << 31:
            raise Unsupported(f"hashed regions of {n} elements", where="zen", hint="use oktopk beyond 2^31 elements")
        self.length = -(-n // state.ranks)
        self.factor = hash_factor(n)
        self.back = pow(self.factor, -1, n) if n > 1 else 0

    def step(self, state: RankState, gradient: Any, stats: StepStats) -> Protocol[Update]:
        picked = self.select(state, gradient, stats)
        n, length = state.elements, self.length
        grouped = state.entries("grouped", len(picked.entries))
        starts = np.zeros(state.ranks + 1, np.int64)
        scatter_hashed(picked.entries, self.factor, 0, n, length, starts, grouped)
        counts, _ = yield from greet(state, self.code, picked.wrong, np.diff(starts), stats)
        base = state.rank * length
        dense = state.room("region", max(0, min(n, base + length) - base), np.float32)

        def places(entries: Entries) -> None:
            rehash(entries, self.factor, 0, n)

        yield from sum_regions(state, grouped, counts, dense, base, stats, places)
        room = state.entries("chosen", min(len(dense), int(counts[:, state.rank].sum())))
        above, equal = select_from(dense.view(np.int32), base, np.int32(1), len(room), room)
        own = room[: above + equal]
        rehash(own, self.back, 0, n)
        stats.control_words += 2 * (state.ranks - 1)
        lengths: NDArray[np.int64] = yield AllGather("sizes", np.array([len(own)], np.int64))
        result = yield from gather_blocks(state, own.reshape(-1), (2 * lengths[:, 0]).tolist(), stats)
        return self.finish(state, picked.entries, result.reshape(-1, 2), stats)


def hash_factor(n: int) -> int:
    """Near n divided by the golden ratio, and without a common divisor with n: i -> factor · i mod n spreads any range evenly."""
    factor = max(1, round(n * 0.6180339887498949))
    while np.gcd(factor, n) != 1:
        factor += 1
    return factor
