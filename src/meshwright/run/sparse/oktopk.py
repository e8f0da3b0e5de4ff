"""Ok-Topk: sums by balanced regions, a global threshold, and a balanced gathering of what is above it.

Cite, deviations: `decide.collective.sparse.oktopk`. A step: select locally; (every `region_period` steps) average everybody's proposals for the
regions' boundaries; headers; sums by region; the global threshold and everybody's sizes; blocks of equal length where the largest is `balance`
times the mean; gather. Entries that a rank sent and that are in the result leave its residual.
The global threshold is exact every `period` steps. In between it is guessed, a little low, and sizes are exchanged for `EDGES` thresholds from there
on at once: the one that leaves closest to k entries is taken without another round. Where none of them will do, it is found exactly in the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.entries import clear_chosen, entry_values, move_tail, select_from
from .exchange import gather_blocks, gather_words, global_threshold, greet, sum_regions
from .protocol import AllGather, Message, Post, Protocol, Wait
from .selection import LEAST, MOST, LocalSelection, ThresholdKind, ahead, followed, value_of
from .state import Entries, RankState, StepStats, Update

__all__ = ["OkTopk", "equal_regions", "proposals"]

UNEVEN = 1.25  # the busiest rank over the mean
EDGES, STEP_BITS = 128, 16  # thresholds tried at once: each 2^16 above the last as an integer, 0.4-0.8 % as a number; all of them span a factor of 2


def equal_regions(elements: int, ranks: int) -> NDArray[np.int64]:
    """ranks + 1 boundaries."""
    return np.arange(ranks + 1, dtype=np.int64) * elements // ranks


def proposals(entries: Entries, elements: int, ranks: int) -> NDArray[np.int64]:
    """The ranks - 1 inner boundaries that would give each region as many of this rank's entries."""
    if len(entries) == 0:
        return equal_regions(elements, ranks)[1:-1]
    rows = np.arange(1, ranks, dtype=np.int64) * len(entries) // ranks
    found: NDArray[np.int64] = entries[rows, 0].astype(np.int64)
    return found


def agreed_regions(proposed: NDArray[np.int64], elements: int) -> NDArray[np.int64]:
    """Boundaries at the mean of all ranks' proposals, rising; a region may be empty."""
    inner = np.sort(proposed.sum(0) // len(proposed)).clip(0, elements)
    return np.concatenate([[0], inner, [elements]]).astype(np.int64)


def counts_by_edge(room: Entries, found: int, low: int) -> NDArray[np.int64]:
    """Entries from each edge to the next, the last one open; all in the last if they have not found room, so that no edge seems to leave few."""
    if found > len(room):
        return np.bincount([EDGES - 1], [found], EDGES).astype(np.int64)
    magnitudes = np.abs(np.ascontiguousarray(entry_values(room[:found]))).view(np.int32)
    return np.bincount(np.minimum((magnitudes - low) >> STEP_BITS, EDGES - 1), minlength=EDGES).astype(np.int64)


@dataclass(kw_only=True)
class OkTopk:
    """Options as `decide.collective.sparse.OkTopk`; the rest is state that lives as long as the reducer."""

    code = 1
    period: int = 32
    region_period: int = 64
    balance: float = 4.0
    threshold: ThresholdKind = "reuse"

    def start(self, state: RankState) -> None:
        self.local = LocalSelection(self.threshold, state.k)
        self.low = self.kth = 0  # the global threshold to try next, and the last step's k-th magnitude
        self.regions = equal_regions(state.elements, state.ranks)
        self.agreed = False  # whether the regions are anybody's proposals

    def kind(self, sparse_step: int) -> str:
        """The program of the cycle for the `sparse_step`-th step after the warm-up."""
        parts = []
        if sparse_step % self.period == 0 or not self.low:
            parts.append("thresholds")
        if sparse_step % self.region_period == 0 or not self.agreed:
            parts.append("regions")
        return "+".join(parts) or "steady"

    def step(self, state: RankState, gradient: Any, stats: StepStats) -> Protocol[Update]:
        anew = "thresholds" in stats.kind
        picked = self.local.select(state, gradient, anew=anew)
        entries = picked.entries
        rows = np.diff(np.searchsorted(entries[:, 0], self.regions))
        proposed = proposals(entries, state.elements, state.ranks)
        counts, inner = yield from greet(state, self.code, picked.wrong, rows, stats, proposed)
        regions = self.regions
        if "regions" in stats.kind or self._uneven(state, counts):
            stats.kind = "thresholds+regions" if anew else "regions"
            regions = agreed_regions(inner, state.elements)
            rows = np.diff(np.searchsorted(entries[:, 0], regions))
            stats.control_words += 2 * len(rows) * (state.ranks - 1)
            counts = yield AllGather("counts", rows)
        base, end = int(regions[state.rank]), int(regions[state.rank + 1])
        dense = state.room("region", end - base, np.float32)
        yield from sum_regions(state, entries, counts, dense, base, stats)
        chosen, kth, sizes = yield from self._choose(state, dense, base, anew, stats)
        block, lengths = chosen, sizes.tolist()
        if self._lopsided(state, counts, sizes):
            block, lengths = yield from self._blocks(state, chosen, sizes, stats)
        result = (yield from gather_blocks(state, block.reshape(-1), [2 * x for x in lengths], stats)).reshape(-1, 2)
        own = entry_values(entries)
        state.given, state.given_size = clear_chosen(state.sums, entries, own, result)
        state.total = float(entry_values(result).sum(dtype=np.float64))
        self.local.commit()
        self.low, self.kth = ahead(self.kth, kth), kth
        self.regions, self.agreed = agreed_regions(inner, state.elements), True  # of this step's proposals, which all ranks have: no round
        state.commit()
        stats.selected, stats.result = len(entries), len(result)
        stats.local_threshold, stats.global_threshold = value_of(self.local.kth), value_of(kth)
        return Update(elements=state.elements, ranks=state.ranks, entries=result.copy(), stats=stats)

    def _uneven(self, state: RankState, counts: NDArray[np.int64]) -> bool:
        """Somebody would receive more than half of the promised volume, and new regions would change that: the other half is for the gathering."""
        received = (counts.sum(0) - np.diag(counts)) * state.entry_words
        return bool(2 * received.max() > state.limit_words and received.max() > UNEVEN * received.mean())

    def _lopsided(self, state: RankState, counts: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
        """One rank has far more of the result than the mean, or would miss the promised volume by it."""
        if state.ranks == 1:
            return False
        sent, received = gather_words(sizes)
        own = np.diag(counts)
        busiest = max(int((sent + counts.sum(1) - own).max()), int((received + counts.sum(0) - own).max()))
        return bool(int(sizes.max()) * state.ranks > self.balance * int(sizes.sum()) or busiest * state.entry_words > state.limit_words)

    def _choose(
        self, state: RankState, dense: NDArray[np.float32], base: int, anew: bool, stats: StepStats
    ) -> Protocol[tuple[Entries, int, NDArray[np.int64]]]:
        """Entries of this rank's region above the global threshold, the k-th magnitude, and how many every rank has."""
        limit = int(MOST * state.k)
        bits, room = dense.view(np.int32), state.entries("chosen", limit + 1)
        if not anew:
            found = sum(select_from(bits, base, np.int32(self.low), len(room), room))
            stats.control_words += 2 * EDGES * (state.ranks - 1)
            steps: NDArray[np.int64] = yield AllGather("edges", counts_by_edge(room, found, self.low))
            sizes = steps[:, ::-1].cumsum(1)[:, ::-1]  # [rank, edge]
            totals = sizes.sum(0)
            edge = int(np.abs(totals - state.k).argmin())
            if LEAST * state.k <= totals[edge] <= limit or (self.low == 1 and totals[0] <= limit):
                low = self.low + (edge << STEP_BITS)
                kept, _ = move_tail(room[:found], low - 1, 0, state.entries("dropped", found)) if edge else (found, 0)
                return room[:kept], followed(low, int(totals[edge]), state.k), sizes[:, edge]
        low, above = yield from global_threshold(state, bits, state.k, stats)
        ties = max(0, state.k - above)
        found = select_from(bits, base, np.int32(low), ties, room)
        stats.control_words += 4 * (state.ranks - 1)
        rows: NDArray[np.int64] = yield AllGather("sizes", np.array(found, np.int64))
        shares = np.clip(ties - np.concatenate([[0], np.cumsum(rows[:-1, 1])]), 0, rows[:, 1])  # equal ones, rank by rank until there are k
        stored = found[0] + min(found[1], ties)
        kept, _ = move_tail(room[:stored], low, int(shares[state.rank]), state.entries("dropped", stored))
        return room[:kept], low, rows[:, 0] + shares

    def _blocks(self, state: RankState, chosen: Entries, sizes: NDArray[np.int64], stats: StepStats) -> Protocol[tuple[Entries, list[int]]]:
        """Equal blocks of all entries in order: the one that this rank brings to the gathering, and everybody's lengths."""
        total = int(sizes.sum())
        stats.balanced = True
        size = -(-total // state.ranks)
        edges = [min(total, i * size) for i in range(state.ranks + 1)]
        starts = [0, *accumulate(sizes.tolist())]
        me = state.rank
        room = state.entries("balanced", edges[me + 1] - edges[me])
        sends, receives = [], []
        for i in range(1, state.ranks):
            to, source = (me + i) % state.ranks, (me - i) % state.ranks
            low, high = max(starts[me], edges[to]), min(starts[me + 1], edges[to + 1])
            if low < high:
                sends.append(Message(to, chosen[low - starts[me] : high - starts[me]].reshape(-1)))
            low, high = max(starts[source], edges[me]), min(starts[source + 1], edges[me + 1])
            if low < high:
                receives.append(Message(source, room[low - edges[me] : high - edges[me]].reshape(-1)))
        ticket = yield Post("balance", tuple(sends), tuple(receives))
        low, high = max(starts[me], edges[me]), min(starts[me + 1], edges[me + 1])
        if low < high:
            room[low - edges[me] : high - edges[me]] = chosen[low - starts[me] : high - starts[me]]
        yield Wait(ticket)
        stats.words_sent += sum(m.data.nbytes for m in sends) // 4
        stats.words_received += sum(m.data.nbytes for m in receives) // 4
        return room, [b - a for a, b in pairwise(edges)]
