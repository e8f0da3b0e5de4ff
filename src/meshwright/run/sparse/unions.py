"""All-reduces whose result is the union of what ranks selected: TopkA, TopkDSA with its switch to dense blocks, and hashed regions (Zen).

Everything that a rank selects is in the result, so all of it leaves the residual.
Cite, deviations, programs: `decide.collective.sparse.{topka, topkdsa, zen}`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ...errors import Unsupported
from ...kernels.entries import clear_all, entry_values, merge_entries, rehash, scatter_hashed, select_from
from .exchange import Exchange
from .oktopk import equal_regions
from .selection import LocalSelection, Selected, ThresholdKind
from .state import Entries, RankState
from .walk import Place, Words

__all__ = ["TopkA", "TopkDsa", "Union", "Zen", "hash_factor", "merge_all"]


@dataclass(kw_only=True)
class Union(Exchange):
    """Selection as in Ok-Topk, so that exchanges are compared and not thresholds."""

    period: int = 32
    threshold: ThresholdKind = "reuse"

    def start(self, state: RankState) -> None:
        super().start(state)
        self.local = LocalSelection(self.threshold, state.k)

    def kind(self, sparse_step: int) -> str:
        return "thresholds" if sparse_step % self.period == 0 or not self.local.low else "steady"

    def picked(self) -> Selected:
        return self.local.select(self.state, self.gradient, anew=self.running == "thresholds")

    def give(self) -> None:
        """Everything selected leaves the residual."""
        self.state.given, self.state.given_size = clear_all(self.state.sums, self.entries, entry_values(self.entries))

    def end_with(self, result: Entries) -> None:
        self.local.commit()
        self.end(result, self.local.kth)

    def finish(self, reads: tuple[Place, ...]) -> None:
        self.give()
        self.end_with(self.united())

    def united(self) -> Entries:
        """The result, of what was gathered."""
        return self.gathered().reshape(-1, 2)


@dataclass(kw_only=True)
class TopkA(Union):
    """Every rank gathers every rank's selection and adds them up."""

    code = 2

    def block(self) -> tuple[Words, list[int]]:
        self.rows = np.diag(self.counts).tolist()
        return self.entries.reshape(-1), [2 * rows for rows in self.rows]

    def united(self) -> Entries:
        gathered = self.gathered().reshape(-1, 2)
        return merge_all(self.state, [gathered[a:b] for a, b in pairwise([0, *accumulate(self.rows)])])


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
class _Summed(Union):
    """Sums by regions that need no agreement, of which all are gathered."""

    def ops(self) -> dict[str, Callable[[tuple[Place, ...]], None]]:
        return super().ops() | {"global|select": self.choose, "sizes|merge": self.agree_sizes}

    def agree(self, reads: tuple[Place, ...]) -> None:
        super().agree(reads)
        self.sums_from(self.counts)

    @abstractmethod
    def most(self) -> int:
        """Room for entries of this rank's sums."""

    def choose(self, reads: tuple[Place, ...]) -> None:
        """All sums that are not zero."""
        room = self.state.entries("chosen", self.most())
        above, equal = select_from(self.dense.view(np.int32), self.base, np.int32(1), len(room), room)
        self.chosen, self.found = room, above + equal
        self.table("sizes", np.array([self.found], np.int64))

    def agree_sizes(self, reads: tuple[Place, ...]) -> None:
        self.rows: NDArray[np.int64] = self.tables["sizes"][:, 0]


@dataclass(kw_only=True)
class TopkDsa(_Summed):
    """Sums by equal regions; a region is gathered as entries, or as it is where that is shorter (SparCML's switch)."""

    code = 3

    def start(self, state: RankState) -> None:
        super().start(state)
        self.regions = equal_regions(state.elements, state.ranks)

    def outgoing(self, entries: Entries) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.diff(np.searchsorted(entries[:, 0], self.regions)), super().outgoing(entries)[1]

    def region(self) -> tuple[int, int]:
        return int(self.regions[self.state.rank]), int(self.regions[self.state.rank + 1])

    def most(self) -> int:
        return len(self.dense) // self.state.entry_words + 1

    def block(self) -> tuple[Words, list[int]]:
        wide = self.state.entry_words
        own = self.chosen[: self.found].reshape(-1).view(np.int32) if self.found * wide <= len(self.dense) else self.dense.view(np.int32)
        return own, np.minimum(self.rows * wide, np.diff(self.regions)).tolist()

    def united(self) -> Entries:
        state, gathered = self.state, self.gathered()
        at, parts = 0, []
        for rank, (size, rows) in enumerate(zip(self.lengths, self.rows.tolist(), strict=True)):
            block = gathered[at : at + size]
            at += size
            if rows * state.entry_words <= int(self.regions[rank + 1] - self.regions[rank]):
                parts.append(block.view(np.int64 if state.wide else np.int32).reshape(-1, 2))
                continue
            listed = state.entries(f"listed{rank}", rows)
            select_from(block, int(self.regions[rank]), np.int32(1), len(listed), listed)
            parts.append(listed)
        return np.concatenate(parts)


@dataclass(kw_only=True)
class Zen(_Summed):
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

    def outgoing(self, entries: Entries) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Entries are sent in the order of their owners; those of the selection stay."""
        self.grouped = self.state.entries("grouped", len(entries))
        starts = np.zeros(self.state.ranks + 1, np.int64)
        scatter_hashed(entries, self.factor, 0, self.state.elements, self.length, starts, self.grouped)
        return np.diff(starts), super().outgoing(entries)[1]

    def outgoing_entries(self) -> Entries:
        return self.grouped

    def region(self) -> tuple[int, int]:
        base = self.state.rank * self.length
        return base, base + max(0, min(self.state.elements, base + self.length) - base)

    def places(self, entries: Entries) -> None:
        rehash(entries, self.factor, 0, self.state.elements)

    def most(self) -> int:
        return min(len(self.dense), int(self.counts[:, self.state.rank].sum()))

    def block(self) -> tuple[Words, list[int]]:
        own = self.chosen[: self.found]
        rehash(own, self.back, 0, self.state.elements)
        return own.reshape(-1), (2 * self.rows).tolist()


def hash_factor(n: int) -> int:
    """Near n divided by the golden ratio, and without a common divisor with n: i -> factor · i mod n spreads any range evenly."""
    factor = max(1, round(n * 0.6180339887498949))
    while np.gcd(factor, n) != 1:
        factor += 1
    return factor
