"""Embedding tables and how often they are looked up: what is split over devices. A shard is a rectangle of a table's rows and columns on a device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError

__all__ = ["ALIGNMENT", "BINS", "MAX_TABLES", "Shard", "Table", "Tables", "histogram_of", "moved_bytes", "uniform_histogram"]

BINS = 17  # of an access histogram: rows met once, 2, 3-4, 5-8, ... times in a batch, the last without an end
ALIGNMENT = 4  # columns that lookup operators read at once; a table's and a shard's number of columns is a multiple
MAX_TABLES = 20_000  # the largest published recommenders have some thousand
MAX_ROWS = 1 << 40


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`pooling`: mean lookups of a sample, 0 and fractions included. `histogram`: of the rows that a batch meets, the share met as often as each of
    `BINS` bins says; empty: unknown. `mode`: what becomes of a sample's rows. `most`: lookups of a sample at most, where that is known, else 0."""

    name: str
    rows: int
    dim: int
    pooling: float = 1.0
    histogram: tuple[float, ...] = ()
    mode: Literal["sum", "mean"] = "sum"
    most: int = 0


class Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """`batch`: samples of one iteration, of all devices together. `element_bytes`: of a weight and of what is sent of it; `state_bytes`: kept beside
    each weight by the optimizer (SGD 0, Adagrad 4, Adam 8).

    Raises: UsageError for no or too many tables, equal names, columns that are no multiple of `ALIGNMENT`, and numbers out of range."""

    tables: tuple[Table, ...]
    batch: int
    name: str = "tables"
    element_bytes: Literal[2, 4, 8] = 4
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.tables) <= MAX_TABLES:
            raise UsageError(f"{len(self.tables)} tables, must be 1..{MAX_TABLES}", where="tables")
        if not 1 <= self.batch <= 1 << 30 or not 0 <= self.state_bytes <= 64:
            raise UsageError(f"a batch of {self.batch} and {self.state_bytes} bytes beside a weight", where="batch", hint="1 to 2^30, and 0 to 64")
        for i, t in enumerate(self.tables):
            where = f"tables[{i}]"
            if not t.name or self.number_of[t.name] != i:
                raise UsageError(f"the name {t.name[:64]!r} is empty or taken", where=f"{where}.name", hint="give every table a name of its own")
            if not 1 <= t.rows <= MAX_ROWS or not 1 <= t.dim <= 1 << 16:
                raise UsageError(f"table {t.name} has {t.rows} rows of {t.dim}", where=where, hint=f"1 to {MAX_ROWS} rows, 1 to 65,536 columns")
            if t.dim % ALIGNMENT:
                wider = -(-t.dim // ALIGNMENT) * ALIGNMENT
                raise UsageError(
                    f"table {t.name} has {t.dim} columns, no multiple of {ALIGNMENT}", where=f"{where}.dim",
                    hint=f"lookup operators read {ALIGNMENT} columns at once: pad it to {wider} with columns of zeros",
                )  # fmt: skip
            if not (math.isfinite(t.pooling) and 0 <= t.pooling <= 1e6):
                raise UsageError(f"table {t.name} is looked up {t.pooling} times by a sample", where=f"{where}.pooling", hint="0 to 1e6")
            if not 0 <= t.most <= 1_000_000:
                raise UsageError(f"table {t.name} is looked up {t.most} times by a sample at most", where=f"{where}.most", hint="0 (unknown) to 1e6")
            shares = t.histogram
            if shares and (len(shares) != BINS or not all(math.isfinite(x) and x >= 0 for x in shares) or abs(sum(shares) - 1) > 1e-3 < sum(shares)):
                raise UsageError(f"table {t.name}: a histogram has {BINS} shares from 0 on, with the sum 1", where=f"{where}.histogram")

    @cached_property
    def number_of(self) -> dict[str, int]:
        """The first table of each name."""
        found: dict[str, int] = {}
        for i, t in enumerate(self.tables):
            found.setdefault(t.name, i)
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes that a device keeps for a weight: itself and the optimizer's state."""
        return self.element_bytes + self.state_bytes


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rows `rows[0]` to `rows[1]` and columns `columns[0]` to `columns[1]` of a table, on a device of the fabric, by name. Devices that have the same
    columns of different rows hold partial sums of them, which add up where they arrive."""

    table: str
    device: str
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def height(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def elements(self) -> int:
        return self.width * self.height


def moved_bytes(old: Iterable[Shard], new: Iterable[Shard], tables: Tables) -> int:
    """Bytes of the new shards that their devices do not hold yet, of tables that the old ones hold somewhere."""
    held: dict[tuple[str, str], list[Shard]] = {}
    before: dict[str, list[Shard]] = {}
    for s in old:
        held.setdefault((s.table, s.device), []).append(s)
        before.setdefault(s.table, []).append(s)
    return tables.weight_bytes * sum(_common(s, before.get(s.table, ())) - _common(s, held.get((s.table, s.device), ())) for s in new)


def _common(shard: Shard, others: Iterable[Shard]) -> int:
    return sum(
        max(0, min(shard.rows[1], o.rows[1]) - max(shard.rows[0], o.rows[0]))
        * max(0, min(shard.columns[1], o.columns[1]) - max(shard.columns[0], o.columns[0]))
        for o in others
    )  # fmt: skip


def histogram_of(indices: ArrayLike) -> tuple[float, ...]:
    """Of the rows that a batch's lookups meet, the share met (2^(i-2), 2^(i-1)] times, i = 1..17, the last without an end (NeuroShard's bins)."""
    _, counts = np.unique(np.asarray(indices), return_counts=True)
    if not len(counts):
        return (0.0,) * BINS
    at = np.minimum(np.ceil(np.log2(counts)).astype(int), BINS - 1)
    return tuple((np.bincount(at, minlength=BINS) / len(counts)).tolist())


def uniform_histogram(rows: int, lookups: float) -> tuple[float, ...]:
    """The histogram expected where every row is as likely as the others: numbers of visits follow Poisson's law, those of no visit left out."""
    mean = max(lookups, 1e-9) / rows
    top = 1 << (BINS - 1)
    n = np.arange(1, min(top, int(mean + 12 * math.sqrt(mean) + 24)) + 1)
    logs = n * math.log(mean) - mean - np.concatenate([[0.0], np.cumsum(np.log(n))])[1:]
    weight: NDArray[np.float64] = np.exp(logs - logs.max())
    at = np.ceil(np.log2(n)).astype(int)
    return tuple((np.bincount(at, weights=weight, minlength=BINS)[:BINS] / weight.sum()).tolist())
