"""Storages that share one block of memory: who writes and reads them on which stream, and the offsets they got.

Operators run on streams, in order on each; `after` adds orderings across streams (events). A storage's bytes are its own from the start of the first
operator that writes it to the end of the last that reads it; two storages may share bytes if one is surely finished with before the other begins, in
every interleaving that the streams and events allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError

__all__ = ["ArenaPlan", "ArenaProblem", "Rows", "intervals_problem", "rows"]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
MAX_SIZE_BYTES = 1 << 60  # of all storages together, so that no offset overflows


@dataclass(frozen=True)
class Rows:
    """Lists of numbers, one after another: row i is `items[starts[i]:starts[i + 1]]`."""

    starts: I64
    items: I32

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> I32:
        return self.items[self.starts[i] : self.starts[i + 1]]


def rows(lists: Sequence[Sequence[int]]) -> Rows:
    starts = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(x) for x in lists], out=starts[1:])
    return Rows(starts, np.fromiter((i for x in lists for i in x), np.int32, int(starts[-1])))


@dataclass(frozen=True, kw_only=True)
class ArenaProblem:
    """`stream[op]`, operators in an order in which they could run; `after[op]`: earlier operators that it waits for, besides the one before it on
    its stream. `sources[t]`: operators that write storage t (several where operators write in place), `consumers[t]`: that read it.

    `from_start`, `to_end`: storages that hold something before the first operator, or are still wanted after the last. `runs`: storages that must lie
    back to back, in this order. `clock`: when each operator starts, in any unit, if known: how long lifetimes are, for searches that go by it.
    Raises: UsageError that names the operator or storage.
    """

    stream: I32
    after: Rows
    size_bytes: I64
    sources: Rows
    consumers: Rows
    alignment_bytes: int = 1
    from_start: frozenset[int] = frozenset()
    to_end: frozenset[int] = frozenset()
    runs: tuple[tuple[int, ...], ...] = ()
    names: tuple[str, ...] = ()
    clock: I64 = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        ops, storages = len(self.stream), len(self.size_bytes)
        if self.alignment_bytes < 1:
            raise UsageError(f"must be at least 1, got {self.alignment_bytes}", where="alignment_bytes")
        if ops and int(self.stream.min()) < 0:
            raise UsageError("streams are numbered from 0", where=f"operator {int(self.stream.argmin())}")
        if not len(self.after) == ops or not len(self.sources) == len(self.consumers) == storages:
            raise UsageError("one row per operator in `after`, one per storage in `sources` and `consumers`", where="arena problem")
        if storages and (int(self.size_bytes.min()) < 0 or int(self.size_bytes.max()) > MAX_SIZE_BYTES // storages):
            wrong = int(self.size_bytes.argmin() if self.size_bytes.min() < 0 else self.size_bytes.argmax())
            raise UsageError(f"cannot place {int(self.size_bytes[wrong])} bytes", where=self.name(wrong))
        if len(self.clock) not in (0, ops):
            raise UsageError(f"has {len(self.clock)} times for {ops} operators", where="clock")
        own = np.repeat(np.arange(ops), np.diff(self.after.starts))
        late = np.flatnonzero((self.after.items >= own) | (self.after.items < 0))
        if len(late):
            raise UsageError(
                f"waits for operator {int(self.after.items[late[0]])}, which does not run before it", where=f"operator {int(own[late[0]])}",
                hint="list operators in an order in which they can run",
            )  # fmt: skip
        for what in (self.sources, self.consumers):
            if len(what.items) and not 0 <= int(what.items.min()) <= int(what.items.max()) < ops:
                at = int(np.flatnonzero((what.items < 0) | (what.items >= ops))[0])
                storage = int(np.searchsorted(what.starts, at, side="right")) - 1
                raise UsageError(f"there is no operator {int(what.items[at])}", where=self.name(storage))
        empty = [t for t in np.flatnonzero(np.diff(self.sources.starts) == 0).tolist() if t not in self.from_start]
        if empty:
            raise UsageError(
                "no operator writes it",
                where=self.name(empty[0]), hint="list a storage that is full before the first operator in `from_start`",
            )  # fmt: skip
        seen: set[int] = set()
        for run in self.runs:
            for t in run:
                if not 0 <= t < storages or t in seen:
                    raise UsageError(f"storage {t} is in two runs or in none of the problem's", where="runs")
                seen.add(t)

    def name(self, storage: int) -> str:
        return self.names[storage] if self.names else f"storage {storage}"


def intervals_problem(
    lower: Sequence[int], upper: Sequence[int], size_bytes: Sequence[int], *, alignment_bytes: int = 1, names: Sequence[str] = ()
) -> ArenaProblem:
    """Storages alive in [lower, upper) of one order of time. Raises: UsageError for an empty interval, named."""
    for i, (a, b) in enumerate(zip(lower, upper, strict=True)):
        if a >= b:
            raise UsageError(f"is alive from {a} to {b}", where=names[i] if names else f"storage {i}", hint="its end must be above its start")
    moments = sorted({*lower, *upper})
    at = {moment: i for i, moment in enumerate(moments)}
    return ArenaProblem(
        stream=np.zeros(len(moments), np.int32), after=rows([[]] * len(moments)), size_bytes=np.array(size_bytes, np.int64),
        sources=rows([[at[x]] for x in lower]), consumers=rows([[at[x] - 1] for x in upper]), alignment_bytes=alignment_bytes, names=tuple(names),
        clock=np.array(moments, np.int64),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ArenaPlan:
    """`offset_bytes[t]` in an arena of `arena_bytes`. `clique`: storages that are in use together in some interleaving, or of which no two may ever
    share a byte: no arena is smaller than their aligned sizes, `bound_bytes`. `tried`: height reached by each way.
    `cut`: the clock ended the search after so many ways of so many."""

    strategy: str
    offset_bytes: I64
    arena_bytes: int
    bound_bytes: int
    clique: tuple[int, ...]
    tried: tuple[tuple[str, int], ...] = ()
    optimal: bool = False
    notes: tuple[str, ...] = field(default=())
    cut: tuple[int, int] | None = None
