"""Ok-Topk: sums by balanced regions, a global threshold, and a balanced gathering of what is above it.

Cite, deviations, programs: `decide.collective.sparse.oktopk`. A step: select locally; headers; (every `region_period` steps, or where regions
have become uneven) cut regions at quantiles of all selections together; sums by region; the global threshold and everybody's sizes; blocks of
equal length where the largest is `balance` times the mean; gather. Entries that a rank sent and that are in the result leave its residual.
The global threshold is exact every `period` steps. In between it is guessed, a little low, and sizes are exchanged for `EDGE_THRESHOLDS` of them
from there on at once: the one that leaves closest to k entries is taken without another round. Where none of them will do, it is found exactly
in the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...decide.collective.sparse.oktopk import OkTopk as Planned
from ...decide.collective.sparse.phases import EDGE_THRESHOLDS, quantiles
from ...kernels.entries import clear_chosen, entry_values, move_tail, select_from
from .exchange import Exchange, gather_words
from .selection import MAX_KEPT_SHARE, MIN_FOUND_SHARE, LocalSelection, Selected, ThresholdKind, ahead, followed, value_of
from .state import Entries, RankState, StepStats
from .threshold import GlobalThreshold
from .walk import Place, Words

__all__ = ["OkTopk", "equal_regions", "proposals"]

# Of what the busiest rank receives over the mean, before regions are cut anew in the same step: where the promised volume is at stake, and else
# where that many words more than the mean take longer than the round that it costs (0.3 ms at 100 Mbit/s, as in benchmarks/oktopk.py).
MAX_IMBALANCE_FACTOR, MAX_WASTE_FACTOR, MIN_WASTE_WORDS = 1.25, 1.05, 1024
STEP_BITS = 16  # of the thresholds tried at once each is 2^16 above the last as an integer, 0.4-0.8 % as a number; all of them span a factor of 2


def equal_regions(elements: int, ranks: int) -> NDArray[np.int64]:
    """ranks + 1 boundaries."""
    return np.arange(ranks + 1, dtype=np.int64) * elements // ranks


def proposals(entries: Entries, elements: int, ranks: int) -> NDArray[np.int64]:
    """Places below which a Q-th, two Q-ths, ... all of this rank's entries lie, Q = `quantiles(ranks)`."""
    count = quantiles(ranks)
    if len(entries) == 0:
        return np.arange(1, count + 1, dtype=np.int64) * elements // count
    rows = np.arange(1, count + 1, dtype=np.int64) * len(entries) // count - 1
    found: NDArray[np.int64] = entries[np.maximum(rows, 0), 0].astype(np.int64) + 1
    return found


def agreed_regions(proposed: NDArray[np.int64], selected: NDArray[np.int64], elements: int) -> NDArray[np.int64]:
    """Boundaries between which as many entries of all ranks together lie, as far as their quantiles tell: whole numbers, so all ranks find the same.

    `proposed[r]`: rank r's `proposals`, of which each stands for as many of its `selected[r]` entries. A region may be empty.
    """
    ranks, count = proposed.shape
    places, weights = proposed.reshape(-1), np.repeat(selected, count)
    order = np.argsort(places, kind="stable")
    below = np.cumsum(weights[order])
    # a region ends at the first place below which its share lies; all quantities are times `count` and times `ranks`
    rows = np.searchsorted(below * ranks, np.arange(1, ranks, dtype=np.int64) * below[-1])
    inner = places[order][np.minimum(rows, len(places) - 1)].clip(0, elements)
    return np.concatenate([[0], inner, [elements]]).astype(np.int64)


def counts_by_edge(room: Entries, found: int, low: int) -> NDArray[np.int64]:
    """Entries from each edge to the next, the last one open; all in the last if they have not found room, so that no edge seems to leave few."""
    if found > len(room):
        return np.bincount([EDGE_THRESHOLDS - 1], [found], EDGE_THRESHOLDS).astype(np.int64)
    magnitudes = np.abs(np.ascontiguousarray(entry_values(room[:found]))).view(np.int32)
    return np.bincount(np.minimum((magnitudes - low) >> STEP_BITS, EDGE_THRESHOLDS - 1), minlength=EDGE_THRESHOLDS).astype(np.int64)


@dataclass(kw_only=True)
class OkTopk(Exchange):
    """Options as `decide.collective.sparse.OkTopk`; the rest is state that lives as long as the reducer."""

    code = 1
    kinds = Planned.kinds
    period: int = 32
    region_period: int = 64
    balance: float = 4.0
    threshold: ThresholdKind = "reuse"

    def start(self, state: RankState) -> None:
        super().start(state)
        self.local = LocalSelection(self.threshold, state.k)
        self.low = self.kth = 0  # the global threshold to try next, and the last step's k-th magnitude
        self.regions = equal_regions(state.elements, state.ranks)
        self.agreed = False  # whether the regions are anybody's proposals
        self.per = state.ranks

    def kind(self, sparse_step: int) -> str:
        parts = []
        if sparse_step % self.period == 0 or not self.low:
            parts.append("thresholds")
        if sparse_step % self.region_period == 0 or not self.agreed:
            parts.append("regions")
        return "+".join(parts) or "steady"

    def begin(self, gradient: Any, stats: StepStats) -> None:
        super().begin(gradient, stats)
        self.exact = "thresholds" in stats.kind
        self.limit = int(MAX_KEPT_SHARE * self.state.k)
        self.exactly: GlobalThreshold | None = None  # while it is being found
        self.parts: tuple[list[int], list[int]] | None = None  # where regions' results and equal blocks begin, where these are gathered

    def ops(self) -> dict[str, Callable[[tuple[Place, ...]], None]]:
        more: dict[str, Callable[[tuple[Place, ...]], None]] = {
            "counts|merge": self.agree_regions, "global|select": self.choose, "edges|merge": self.take_edge,
            "kept|select": self.choose_again, "sums|merge": self.find_exactly, "sizes|merge": self.agree_sizes, "block|encode": self.encode_block,
        }  # fmt: skip
        return super().ops() | more | {f"histogram{level}|merge": self.descend for level in range(3)} | {"part|decode": self.part_added}

    def picked(self) -> Selected:
        return self.local.select(self.state, self.gradient, anew=self.exact)

    def outgoing(self, entries: Entries) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.diff(np.searchsorted(entries[:, 0], self.regions)), proposals(entries, self.state.elements, self.state.ranks)

    # ---- regions --------------------------------------------------------------------------------------------------------
    def agree(self, reads: tuple[Place, ...]) -> None:
        super().agree(reads)
        self.bounds = self.regions
        if "regions" in self.running or self._uneven():
            self.stats.kind = "thresholds+regions" if self.exact else "regions"
            self.bounds = agreed_regions(self.inner, self.counts.sum(1), self.state.elements)
            self.table("counts", np.diff(np.searchsorted(self.entries[:, 0], self.bounds)))

    def agree_regions(self, reads: tuple[Place, ...]) -> None:
        self.sums_from(self.tables.get("counts", self.counts))

    def _uneven(self) -> bool:
        """Somebody would receive more than half of the promised volume (the other half is for the gathering), or 5 % and a round's worth more than
        the mean."""
        received = (self.counts.sum(0) - np.diag(self.counts)) * self.state.entry_words
        most, mean = received.max(), received.mean()
        promise = 2 * most > self.state.limit_words and most > MAX_IMBALANCE_FACTOR * mean
        return bool(promise or (most > MAX_WASTE_FACTOR * mean and most - mean >= MIN_WASTE_WORDS))

    def region(self) -> tuple[int, int]:
        return int(self.bounds[self.state.rank]), int(self.bounds[self.state.rank + 1])

    # ---- the global threshold -------------------------------------------------------------------------------------------
    def choose(self, reads: tuple[Place, ...]) -> None:
        """Entries of this rank's region above the threshold: a guess, or exact."""
        if self.exact:
            self.choose_exactly()
            return
        room = self.state.entries("chosen", self.limit + 1)
        self.found = sum(select_from(self.dense.view(np.int32), self.base, np.int32(self.low), len(room), room))
        self.chosen = room
        self.table("edges", counts_by_edge(room, self.found, self.low))

    def take_edge(self, reads: tuple[Place, ...]) -> None:
        """The threshold that leaves closest to k; if none of them will do, it is found exactly."""
        state = self.state
        sizes = self.tables["edges"][:, ::-1].cumsum(1)[:, ::-1]  # [rank, edge]
        totals = sizes.sum(0)
        edge = int(np.abs(totals - state.k).argmin())
        if not (MIN_FOUND_SHARE * state.k <= totals[edge] <= self.limit or (self.low == 1 and totals[0] <= self.limit)):
            self.find_exactly()
            return
        low = self.low + (edge << STEP_BITS)
        room = self.chosen[: self.found]
        kept, _ = move_tail(room, low - 1, 0, state.entries("dropped", self.found)) if edge else (self.found, 0)
        self.chosen, self.now, self.sizes = room[:kept], followed(low, int(totals[edge]), state.k), sizes[:, edge]

    def find_exactly(self, reads: tuple[Place, ...] = ()) -> None:
        self.exactly = GlobalThreshold(self.dense.view(np.int32), self.state.k, self.state.ranks, wide=self.state.wide)
        self.tables["histogram0"] = self.exactly.counts(self.state)

    def part_added(self, reads: tuple[Place, ...]) -> None:
        """This rank's part of a histogram is that of all ranks."""

    def descend(self, reads: tuple[Place, ...]) -> None:
        if self.exactly is not None:
            self.exactly.descend()
            if self.exactly.level < 3:
                self.tables[f"histogram{self.exactly.level}"] = self.exactly.counts(self.state)

    def choose_again(self, reads: tuple[Place, ...]) -> None:
        if self.exactly is not None:
            self.choose_exactly()

    def choose_exactly(self) -> None:
        assert self.exactly is not None
        self.now = self.exactly.low
        self.ties = max(0, self.state.k - self.exactly.above)
        self.chosen = self.state.entries("chosen", self.limit + 1)
        found = select_from(self.dense.view(np.int32), self.base, np.int32(self.now), self.ties, self.chosen)
        self.found = found[0] + min(found[1], self.ties)
        self.table("sizes", np.array(found, np.int64))

    def agree_sizes(self, reads: tuple[Place, ...]) -> None:
        """How many entries each rank has, of equal ones rank by rank until there are k; and whether they are gathered in equal blocks."""
        state = self.state
        rows = self.tables.get("sizes")
        if rows is not None:
            shares = np.clip(self.ties - np.concatenate([[0], np.cumsum(rows[:-1, 1])]), 0, rows[:, 1])
            room = self.chosen[: self.found]
            kept, _ = move_tail(room, self.now, int(shares[state.rank]), state.entries("dropped", self.found))
            self.chosen, self.sizes = room[:kept], rows[:, 0] + shares
        if self._lopsided():
            self.stats.balanced = True
            total = int(self.sizes.sum())
            size = -(-total // state.ranks)
            edges = [min(total, i * size) for i in range(state.ranks + 1)]
            self.parts = [0, *accumulate(self.sizes.tolist())], edges
            self.balanced = state.entries("balanced", edges[state.rank + 1] - edges[state.rank])

    def _lopsided(self) -> bool:
        """One rank has far more of the result than the mean, or would miss the promised volume by it."""
        state, counts, sizes = self.state, self.counts, self.sizes
        if state.ranks == 1:
            return False
        sent, received = gather_words(sizes)
        own = np.diag(counts)
        busiest = max(int((sent + counts.sum(1) - own).max()), int((received + counts.sum(0) - own).max()))
        return bool(int(sizes.max()) * state.ranks > self.balance * int(sizes.sum()) or busiest * state.entry_words > state.limit_words)

    # ---- equal blocks ---------------------------------------------------------------------------------------------------
    def data(self, at: Place) -> Words:
        if at.name in ("chosen", "kept"):
            return self._part(self.state.rank, at.first)
        if at.name == "block":
            return self._part(at.first, self.state.rank)
        return super().data(at)

    def _part(self, region: int, block: int) -> Words:
        """What lies both in a rank's result and in a rank's block: of this rank's result, or else of its block."""
        if self.parts is None:
            return self.chosen[:0].reshape(-1)
        starts, edges = self.parts
        low, high = max(starts[region], edges[block]), min(starts[region + 1], edges[block + 1])
        if low >= high:
            return self.chosen[:0].reshape(-1)
        if region == self.state.rank:
            return self.chosen[low - starts[region] : high - starts[region]].reshape(-1)
        return self.balanced[low - edges[block] : high - edges[block]].reshape(-1)

    def encode_block(self, reads: tuple[Place, ...]) -> None:
        """What this rank keeps for its own block."""
        if self.parts is not None:
            me = self.state.rank
            starts, edges = self.parts
            own = self._part(me, me).reshape(-1, 2)
            first = max(starts[me], edges[me]) - edges[me]
            self.balanced[first : first + len(own)] = own

    def block(self) -> tuple[Words, list[int]]:
        if self.parts is None:
            return self.chosen.reshape(-1), (2 * self.sizes).tolist()
        return self.balanced.reshape(-1), [2 * (b - a) for a, b in pairwise(self.parts[1])]

    # ---- the end --------------------------------------------------------------------------------------------------------
    def finish(self, reads: tuple[Place, ...]) -> None:
        state, result = self.state, self.gathered().reshape(-1, 2)
        state.given, state.given_size = clear_chosen(state.sums, self.entries, entry_values(self.entries), result)
        self.local.commit()
        self.low, self.kth = ahead(self.kth, self.now), self.now
        # of this step's proposals, which all ranks have: no round
        self.regions, self.agreed = agreed_regions(self.inner, self.counts.sum(1), state.elements), True
        self.stats.global_threshold = value_of(self.now)
        self.end(result, self.local.kth)
