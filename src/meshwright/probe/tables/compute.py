"""Measured lookups: one device's tables at a time, on one thread, with evicted caches; and points to learn from.

Cite: NeuroShard, MLSys 2023, section 3.2. Points are 1 to 15 tables of the pool with replacement, every table with every number of columns from the
largest down by halves. Deviations: sizes are drawn first, and only tables that do not fit are drawn again (the paper draws all again, so that large
tables are rare); median of `RUNS` after one warm-up (the paper: 10 after 5), which makes 3,000 points a matter of minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import UsageError
from ...graph.embeddings import ALIGNMENT, Shard, Table, Tables
from ...run.tables.batches import indices_of
from .operator import CacheEvictor, Lookup, weights_buffer

__all__ = ["ComputePoints", "Meter", "collect_compute", "widths_of"]

RUNS, ROUNDS = 4, 3  # of a point: medians of 5 in a row differed by 7 % from a minute to the next, on a busy machine
MOST_TABLES = 15  # of a point
MAX_POINT_BYTES = 2 << 30
SLACK = 1.5  # of room for weights: who needs a little more does not move them all
KEPT_BYTES = 1 << 30  # of the operators that are kept for the next look
Part = Sequence[tuple[int, tuple[int, int], int]]  # (table, rows, columns) of each shard of a device


@dataclass(frozen=True)
class ComputePoints:
    """Row i of `points`: (table of the pool, columns) of each; `time_s[i]`."""

    points: tuple[tuple[tuple[int, int], ...], ...]
    time_s: tuple[float, ...]


class Meter:
    """Measures shards of a pool's tables. Holds one batch of each table's indices, drawn once."""

    def __init__(self, tables: Tables, *, seed: int = 0, operator: str = "", most_bytes: int = MAX_POINT_BYTES) -> None:
        rng = np.random.default_rng(seed)
        self.tables, self.operator = tables, operator
        self.inputs = [indices_of(t, tables.batch, rng) for t in tables.tables]
        self._evict, self._most = CacheEvictor(), most_bytes // 4
        self._buffer, self._kept, self._room = weights_buffer(0), dict[Part, Lookup](), KEPT_BYTES
        torch.set_num_threads(1)

    def time_s(self, shards: Part, *, runs: int = RUNS) -> float:
        """Median seconds of a step of (table, rows, columns) shards on one device; 0 for none. Raises: UsageError beyond this machine's memory."""
        return self.times_s([shards], runs=runs, rounds=1)[0]

    def times_s(self, parts: Sequence[Part], *, runs: int = RUNS, rounds: int = ROUNDS, on_part: Callable[[], None] = lambda: None) -> list[float]:
        """The same of several devices' shards, which take turns."""
        taken: list[list[float]] = [[] for _ in parts]
        for _ in range(rounds):
            for part, found in zip(parts, taken, strict=True):
                found += self._runs_s(part, runs)
                on_part()
        return [statistics.median(x) for x in taken]

    def plans_s(
        self, plans: Sequence[Sequence[Shard]], devices: Sequence[str], *, runs: int = RUNS, rounds: int = ROUNDS
    ) -> list[list[float]]:  # fmt: skip
        """The same of the devices of plans. Devices with equal shards are measured once; operators are kept, so that the next look makes none."""
        of_table = self.tables.number_of
        parts = [[tuple(sorted((of_table[s.table], s.rows, s.width) for s in shards if s.device == name)) for name in devices] for shards in plans]
        once = list(dict.fromkeys(part for of_plan in parts for part in of_plan))
        self._make_room(max(map(self._elements, once), default=0))
        for part in once:
            if part and part not in self._kept and self._room > 0:
                lookup = self._lookup(part)
                self._kept[part] = lookup
                self._room -= lookup.held_bytes
        found = dict(zip(once, self.times_s(once, runs=runs, rounds=rounds), strict=True))
        return [[found[part] for part in of_plan] for of_plan in parts]

    def _runs_s(self, shards: Part, runs: int) -> list[float]:
        if not shards:
            return [0.0] * runs
        lookup, taken = self._kept.get(tuple(shards)) or self._lookup(shards), []
        for _ in range(runs):
            self._evict()
            taken.append(lookup.step_s())
        return taken

    def _lookup(self, shards: Part) -> Lookup:
        """Warmed up."""
        self._make_room(self._elements(shards))
        sizes = [(hi - lo, columns) for _, (lo, hi), columns in shards]
        lookup = Lookup(sizes, [self._input(t, rows) for t, rows, _ in shards], buffer=self._buffer, operator=self.operator)
        lookup.step_s()
        return lookup

    @staticmethod
    def _elements(shards: Part) -> int:
        return sum((hi - lo) * columns for _, (lo, hi), columns in shards)

    def _make_room(self, elements: int) -> None:
        """For as many weights. What uses the smaller room is let go."""
        if elements > self._most:
            raise UsageError(f"{4 * elements} bytes of tables cannot be measured here", hint=f"at most {4 * self._most} bytes on a device")
        if elements > len(self._buffer):
            self._buffer, self._kept, self._room = weights_buffer(min(self._most, int(SLACK * elements))), {}, KEPT_BYTES

    def _input(self, table: int, rows: tuple[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        indices, offsets = self.inputs[table]
        if rows == (0, self.tables.tables[table].rows):
            return indices, offsets
        kept = (indices >= rows[0]) & (indices < rows[1])
        return indices[kept] - rows[0], np.concatenate([[0], np.cumsum(kept)])[offsets]


def widths_of(table: Table) -> tuple[int, ...]:
    """The table's columns, halved as often as they can be."""
    found = [table.dim]
    while found[-1] % (2 * ALIGNMENT) == 0:
        found.append(found[-1] // 2)
    return tuple(found)


def collect_compute(meter: Meter, points: int, rng: np.random.Generator, *, on_point: Callable[[], None] = lambda: None) -> ComputePoints:
    """So many measured points. A set of tables that fits is drawn table by table. `on_point` is called `ROUNDS` times for each."""
    tables = meter.tables.tables
    drawn: list[tuple[tuple[int, int], ...]] = []
    for _ in range(points):
        wanted, left, chosen = int(rng.integers(1, MOST_TABLES + 1)), MAX_POINT_BYTES // 4, list[tuple[int, int]]()
        for _ in range(20 * wanted):
            if len(chosen) == wanted:
                break
            t = int(rng.integers(len(tables)))
            width = int(rng.choice(widths_of(tables[t])))
            if tables[t].rows * width <= left:
                chosen.append((t, width))
                left -= tables[t].rows * width
        if not chosen:
            raise UsageError("none of the tables fits into this machine's measurements", hint="give a pool with smaller tables")
        drawn.append(tuple(chosen))
    parts = [[(t, (0, tables[t].rows), width) for t, width in chosen] for chosen in drawn]
    return ComputePoints(tuple(drawn), tuple(meter.times_s(parts, on_part=on_point)))
