"""What ranks compute in a sparse all-reduce, and where the data of its messages lie. Which messages there are, and when, its program says.

`Exchange` is the base of the methods: the header, sums by region, the gathering of blocks of unlike size, exact thresholds over all ranks. A method
maps the ops of its programs (`decide.collective.sparse`, by `<graph>|<name>`) to functions, and the buffers that messages touch to arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...decide.collective.sparse.phases import HEADER_WORDS, quantiles
from ...errors import MessageDamaged, NotFinite, PlanMismatch, Unsupported
from ...kernels.entries import add_entries, entry_values
from .selection import Selected, value_of
from .state import Entries, RankState, StepStats, Update
from .walk import Place, Words

__all__ = ["CONTROL", "Exchange", "gather_words"]

FIELDS = ("elements", "k", "method", "step", "index bytes", "kind of step")  # which must be equal on all ranks
FIXED = HEADER_WORDS + 1  # words of the header before the counts, of which a vector has one per rank, and what the method proposes
CONTROL = ("headers", "counts", "edges", "histogram0", "histogram1", "histogram2", "sizes", "count")  # buffers that hold no entries
MASS_TOLERANCE = 2.0**-22  # of the sum of magnitudes, per addition in float32


class Exchange(ABC):
    """One rank's part of the steps of one method. `kinds`: of its programs."""

    code = 0  # of the method, in headers
    per = 1  # chunks of a region in its programs, and of a block that is gathered
    kinds: tuple[str, ...] = ("steady", "thresholds")

    def start(self, state: RankState) -> None:
        """Thresholds and regions are found anew."""
        self.state = state

    @abstractmethod
    def kind(self, sparse_step: int) -> str:
        """The program of the cycle for the `sparse_step`-th step after the warm-up."""

    def begin(self, gradient: Any, stats: StepStats) -> None:
        """A step. Afterwards its program is walked, which ends in `result`."""
        self.gradient, self.stats = gradient, stats
        self.running = stats.kind  # the program; `stats.kind` says what the step has become
        self.result: Update | None = None
        self.tables: dict[str, NDArray[Any]] = {}  # rows by rank of what is gathered or, of histograms, parts by rank

    # ---- what a walk asks -----------------------------------------------------------------------------------------------
    def run(self, key: str, reads: tuple[Place, ...]) -> None:
        self.ops()[key](reads)

    def ops(self) -> dict[str, Callable[[tuple[Place, ...]], None]]:
        """Functions of the places that they read."""
        return {
            "local|select": self.select, "exact|select": self.select, "headers|merge": self.agree, "own|accumulate": self.add_own,
            "region|accumulate": self.add_arrived, "block|decode": self.start_gathering, "result|decode": self.finish, "result|merge": self.finish,
        }  # fmt: skip

    def place(self, at: Place) -> Words:
        """The array of a message, empty where there is nothing to send."""
        data = self.control(at) if at.name in CONTROL else self.data(at)
        if not at.receives:
            words = data.nbytes // 4
            if at.name in CONTROL:
                self.stats.control_words += words
            else:
                self.stats.words_sent += words
        elif at.name not in CONTROL:
            self.stats.words_received += data.nbytes // 4
        return data

    def control(self, at: Place) -> Words:
        table = self.tables.get(at.name)
        if table is None:
            return np.zeros(0, np.int64)
        return self.state.room(f"{at.name} of {at.peer}", table.shape[1], table.dtype) if at.adds else table[at.first]

    def data(self, at: Place) -> Words:
        """Of buffers that hold entries, or parts of a vector."""
        low, high = at.first // self.per, (at.first + at.chunks) // self.per
        if at.name == "picked":
            return self.outgoing_entries()[self.first[low] : self.first[high]].reshape(-1)
        if at.name == "arriving":
            return self.room[self.arriving[low] : self.arriving[high]].reshape(-1)
        return self.gathering[self.at[low] : self.at[high]]

    def add(self, into: Place) -> None:
        """What came for a part of a histogram."""
        if into.name in self.tables:
            self.tables[into.name][into.first] += self.control(into)

    def table(self, name: str, row: NDArray[Any]) -> None:
        """This rank's row of what will be gathered."""
        found = self.tables[name] = self.state.room(name, self.state.ranks * len(row), row.dtype).reshape(self.state.ranks, len(row))
        found[self.state.rank] = row

    # ---- selection and headers ------------------------------------------------------------------------------------------
    @abstractmethod
    def picked(self) -> Selected:
        """This rank's selection."""

    def select(self, reads: tuple[Place, ...]) -> None:
        state = self.state
        found = self.picked()
        self.entries = found.entries
        rows, proposed = self.outgoing(found.entries)
        mass = np.array([state.given, state.given_size]).view(np.int64)
        kind = self.kinds.index(self.running)
        fields = [state.elements, state.k, self.code, state.step, 8 if state.wide else 4, kind, state.rank, found.wrong]
        self.table("headers", np.concatenate([np.array(fields, np.int64), mass, rows, proposed]))

    def outgoing(self, entries: Entries) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows for every rank, and what this rank proposes for the regions: zeros where a method has none."""
        rows = np.zeros(self.state.ranks, np.int64)
        rows[self.state.rank] = len(entries)
        return rows, np.zeros(quantiles(self.state.ranks), np.int64)

    def outgoing_entries(self) -> Entries:
        """The selection, in the order of whom it is sent to."""
        return self.entries

    def agree(self, reads: tuple[Place, ...]) -> None:
        """All ranks have all headers: `counts` is what each sends to each, `inner` what each proposes."""
        rows = self.tables["headers"]
        check_headers(self.state, rows)
        self.counts, self.inner = rows[:, FIXED : FIXED + self.state.ranks], rows[:, FIXED + self.state.ranks :]

    # ---- sums by region ---------------------------------------------------------------------------------------------------
    def region(self) -> tuple[int, int]:
        """First place and end of this rank's region."""
        raise self._lacks("regions")

    def places(self, entries: Entries) -> None:  # noqa: B027  what most methods need not do
        """Turn indices into places, where regions are not ranges of indices."""

    def sums_from(self, counts: NDArray[np.int64]) -> None:
        """What each rank sends to each is known."""
        me, n = self.state.rank, self.state.ranks
        self.counts = counts
        self.first = [0, *accumulate(counts[me].tolist())]
        self.arriving = [0, *accumulate(int(counts[(me - i) % n, me]) for i in range(1, n))]
        self.room = self.state.entries("arriving", self.arriving[-1])
        self.stats.words_to_regions = (counts.sum(0) - np.diag(counts)) * self.state.entry_words

    def add_own(self, reads: tuple[Place, ...]) -> None:
        """Sums start from this rank's own entries, in `dense`, whose element 0 is place `base`."""
        self.base, end = self.region()
        self.dense = self.state.room("region", end - self.base, np.float32)
        self.dense[:] = 0
        own = self.outgoing_entries()[self.first[self.state.rank] : self.first[self.state.rank + 1]].copy()
        self.add_entries(own)

    def add_arrived(self, reads: tuple[Place, ...]) -> None:
        (bucket,) = reads
        self.add_entries(self.data(bucket).reshape(-1, 2))

    def add_entries(self, found: Entries) -> None:
        self.places(found)
        row = add_entries(self.dense, self.base, found, entry_values(found))
        if row >= 0:
            me, element = self.state.rank, int(found[row, 0])
            raise MessageDamaged(
                f"an entry for element {element} reached rank {me}, whose region is {self.base}..{self.base + len(self.dense) - 1}",
                where="sparse all-reduce", hint="start again from the last checkpoint", data={"rank": me, "element": element},
            )  # fmt: skip

    def _lacks(self, what: str) -> Unsupported:
        """A program asks for an op that the method has not: it was made for another."""
        return Unsupported(
            f"{type(self).__name__} has no {what}", where="sparse all-reduce", hint="run its own programs", data={"method": self.code}
        )

    # ---- gathering --------------------------------------------------------------------------------------------------------
    def block(self) -> tuple[Words, list[int]]:
        """What this rank brings to the gathering, and the lengths of all ranks' blocks."""
        raise self._lacks("blocks to gather")

    def start_gathering(self, reads: tuple[Place, ...]) -> None:
        """In the order in which blocks come: this rank's first, then those of the ranks above it."""
        own, self.lengths = self.block()
        me, n = self.state.rank, self.state.ranks
        self.at = [0, *accumulate(self.lengths[(me + i) % n] for i in range(n))]
        self.gathering = self.state.room("gathering", self.at[-1], own.dtype)
        self.gathering[: self.at[1]] = own

    def gathered(self) -> Words:
        """All ranks' blocks, by rank."""
        start = self.at[self.state.ranks - self.state.rank] if self.state.rank else 0
        out = self.state.room("gathered", self.at[-1], self.gathering.dtype)
        out[: self.at[-1] - start] = self.gathering[start:]
        out[self.at[-1] - start :] = self.gathering[:start]
        return out

    def finish(self, reads: tuple[Place, ...]) -> None:
        """Sets `result`."""
        raise self._lacks("result of its own")

    def end(self, result: Entries, kth: int) -> None:
        """The step is complete; `kth`: bits of this rank's threshold."""
        state, stats = self.state, self.stats
        state.total = float(entry_values(result).sum(dtype=np.float64))
        state.commit()
        stats.selected, stats.result, stats.local_threshold = len(self.entries), len(result), value_of(kth)
        self.result = Update(elements=state.elements, ranks=state.ranks, entries=result.copy(), stats=stats)


def check_headers(state: RankState, rows: NDArray[np.int64]) -> None:
    """Refuse, on all ranks alike, what cannot be right.

    Raises: PlanMismatch (ranks that differ in what they reduce), NotFinite, MessageDamaged (mass was lost in the last step).
    """
    for column, name in enumerate(FIELDS):
        differ = np.flatnonzero(rows[:, column] != rows[0, column])
        if len(differ):
            text = ", ".join(f"rank {r} has {int(rows[r, column])}" for r in differ[:8])
            raise PlanMismatch(
                f"ranks differ in {name}: rank 0 has {int(rows[0, column])}, {text}", where=f"sparse all-reduce, step {state.step}",
                hint="give every rank the same size, k, method and number of steps", data={"field": name, "ranks": differ.tolist()},
            )  # fmt: skip
    bad = np.flatnonzero(rows[:, 7] >= 0)
    if len(bad):
        at = int(rows[bad[0], 7])
        raise NotFinite(
            f"the gradient (with its residual) of rank {', '.join(map(str, bad[:8]))} is not finite, at element {at} of rank {bad[0]}",
            where=f"sparse all-reduce, step {state.step}", hint="nothing was sent, residuals are as before: skip the step or lower the loss scale",
            data={"ranks": bad.tolist(), "element": at},
        )  # fmt: skip
    given, size = rows[:, 8].view(np.float64).sum(), rows[:, 9].view(np.float64).sum()
    if abs(given - state.total) > MASS_TOLERANCE * state.ranks * size:
        raise MessageDamaged(
            f"ranks gave {given:.9g} in step {state.step - 1}, its result sums up to {state.total:.9g}", where="sparse all-reduce",
            hint="a message was damaged on the way: start again from the last checkpoint", data={"given": float(given), "result": state.total},
        )  # fmt: skip


def gather_words(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Words that every rank sends and receives in `gather_blocks` of blocks of so many words."""
    n = len(sizes)
    sent, at = np.zeros(n, np.int64), np.concatenate([[0], np.cumsum(np.concatenate([sizes, sizes]))])
    have = 1
    while have < n:
        more = min(have, n - have)
        sent += at[more : more + n] - at[:n]
        have += more
    return sent, sizes.sum() - sizes
