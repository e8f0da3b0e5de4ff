"""Types of the table decision: which rectangle of which embedding table lies on which device.

One iteration, as published: gradients of pooled rows come back (an exchange among all devices), each device updates and looks up its tables, pooled
rows go out (a second exchange). A device's time is the sum of the three; the iteration lasts as long as the slowest. Devices end their lookups at
different times, so the second exchange begins with a skew, which its costs see.
Shapes: B plans looked at together, D devices, n pieces, K units of an embedding (`cost_models.lookups`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...cost_models.lookups import LookupCosts
from ...errors import Infeasible, Unsupported, UsageError
from ...fabric.fabric import Fabric, Link
from ...graph.embeddings import ALIGNMENT, Shard, Tables, moved_bytes, uniform_histogram
from ..strategies import Listed

__all__ = ["Learned", "Phases", "Piece", "TablePlan", "TableProblem", "TableStrategy"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MAX_PIECES = 40_000


class Piece(NamedTuple):
    """A rectangle of a table, before it lies on a device."""

    table: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def kind(self) -> tuple[int, int, int]:
        """What its costs depend on: table, rows, columns."""
        return self.table, self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


class Phases(NamedTuple):
    """Seconds of devices: lookups, backward exchange, forward exchange, [..., D]; and of the slowest device all together, [...]."""

    compute_s: F64
    backward_s: F64
    forward_s: F64
    total_s: F64


@dataclass(frozen=True, kw_only=True)
class Learned:
    """Lookups of a device take `factor` times (what its costs say, the share `of_table` of each table's alone, and `each_s` for every piece)."""

    factor: float
    of_table: tuple[float, ...]
    each_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TableProblem:
    """`costs`: of each kind of device; `kinds`: the kind of every device of the fabric, by number. `start`: where shards lie now; `move_bytes`: how
    much may be moved from there, None for any amount. `learned`: what this job's own lookups taught (`learned`); none: nothing.

    Raises: UsageError for costs of another batch; Infeasible with the bytes for tables that do not fit; Disconnected."""

    tables: Tables
    fabric: Fabric
    costs: tuple[LookupCosts, ...]
    kinds: tuple[int, ...] = ()
    start: tuple[Shard, ...] = ()
    move_bytes: int | None = None
    learned: Learned | None = None

    def __post_init__(self) -> None:
        for c in self.costs:
            if c.batch != self.tables.batch:
                raise UsageError(
                    f"costs are of batches of {c.batch} samples, the tables' batch has {self.tables.batch}", where="costs",
                    hint="measure again with `meshwright tables fit`, or set the tables' batch",
                )  # fmt: skip
        if self.kinds and (len(self.kinds) != self.devices or not set(self.kinds) <= set(range(len(self.costs)))):
            raise UsageError(f"{len(self.kinds)} kinds of devices for {self.devices} devices and {len(self.costs)} costs", where="kinds")
        if len({c.table is None for c in self.costs}) > 1 or (self.move_bytes is not None and not self.start):
            what = "costs of a net and of a formula do not mix" if self.move_bytes is None else "a limit of moved bytes without a plan to start from"
            raise UsageError(what, where="costs", hint="measure every kind of device, or none; give the plan that runs now")
        self.fabric.require_connected()
        need, have = float(self.bytes_of(self.whole).sum()), float(self.memory.sum())
        if need > have:
            raise Infeasible(
                f"the tables need {need:,.0f} bytes on their devices, which have {have:,.0f} together", where=self.fabric.name,
                hint=f"{need - have:,.0f} bytes more: another device, smaller tables, or an optimizer that keeps less",
                data={"needed_bytes": need, "available_bytes": have},
            )  # fmt: skip

    @property
    def devices(self) -> int:
        return len(self.fabric.devices)

    @cached_property
    def of_kind(self) -> tuple[I64, ...]:
        """Devices of every kind."""
        kinds = np.array(self.kinds or (0,) * self.devices)
        return tuple(np.flatnonzero(kinds == k) for k in range(len(self.costs)))

    @cached_property
    def kind_of(self) -> I64:
        return np.array(self.kinds or (0,) * self.devices, np.int64)

    @cached_property
    def samples(self) -> I64:
        """Samples of a batch that each device trains on."""
        return np.array([len(range(d, self.tables.batch, self.devices)) for d in range(self.devices)], np.int64)

    @cached_property
    def memory(self) -> F64:
        """Bytes for tables and their pooled rows: memory less what comes from the other devices, rows and their gradients."""
        received = 2 * self.samples * sum(t.dim for t in self.tables.tables) * self.tables.element_bytes
        return np.array([d.memory_bytes - x if d.memory_bytes else np.inf for d, x in zip(self.fabric.devices, received, strict=True)])

    @cached_property
    def rates(self) -> tuple[F64, F64]:
        """Bytes per second that can leave and enter each device."""
        return self._at_ends(lambda link: link.rate_Bps)

    @cached_property
    def ahead_s(self) -> tuple[F64, F64]:
        """Seconds that full token buckets save on what leaves and what enters each device. 0 for links without."""
        buckets = self._at_ends(lambda link: link.burst_bytes)
        out, into = (np.divide(b, r, out=np.zeros(self.devices), where=b > 0) for b, r in zip(buckets, self.rates, strict=True))
        return out, into

    def _at_ends(self, of: Callable[[Link], float]) -> tuple[F64, F64]:
        """Sums over the links that leave and that enter each device."""
        out, into = np.zeros(self.devices), np.zeros(self.devices)
        for x in self.fabric.links:
            for end, sums in ((x.src, out), (x.dst, into)):
                if (number := self.fabric.actor_of[end]) < self.devices:
                    sums[number] += of(x)
        return out, into

    @cached_property
    def whole(self) -> list[Piece]:
        """Every table in one piece."""
        return [Piece(i, (0, t.rows), (0, t.dim)) for i, t in enumerate(self.tables.tables)]

    def bytes_of(self, pieces: Iterable[Piece]) -> F64:
        """Bytes that a piece takes on its device: weights, optimizer's state, pooled rows and their gradients."""
        shapes = np.array([p.kind[1:] for p in pieces], np.float64).reshape(-1, 2)
        return shapes[:, 0] * shapes[:, 1] * self.tables.weight_bytes + 2 * shapes[:, 1] * self.tables.batch * self.tables.element_bytes

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], F64]:
        return {}

    def embed(self, pieces: Sequence[Piece]) -> F64:
        """[D, n, K]: what pieces add to the sums of each device."""
        unknown = list(dict.fromkeys(p.kind for p in pieces if p.kind not in self._known))
        if unknown:
            tables = [self.tables.tables[t] for t, _, _ in unknown]
            rows, dim = np.array([r for _, r, _ in unknown], float), np.array([c for _, _, c in unknown], float)
            share = rows / np.array([t.rows for t in tables], float)
            pooling = np.array([t.pooling for t in tables]) * share
            histogram = np.array([t.histogram or uniform_histogram(t.rows, t.pooling * self.tables.batch) for t in tables])
            found = np.stack([c.embed(rows, dim, pooling, histogram) for c in self.costs])
            if self.learned is not None:
                alone = np.stack([c.compute_s(x) for c, x in zip(self.costs, found, strict=True)])
                more = alone * [self.learned.of_table[t] for t, _, _ in unknown] + self.learned.each_s
                found = np.concatenate([found, more[..., None]], -1)
            self._known.update({kind: found[:, i] for i, kind in enumerate(unknown)})
        return np.stack([self._known[p.kind] for p in pieces], 1)[self.kind_of]

    def compute_s(self, sums: F64) -> F64:
        """[..., D] of sums [..., D, K]."""
        found = np.empty(sums.shape[:-1])
        for costs, devices in zip(self.costs, self.of_kind, strict=True):
            mine = sums[..., devices, :]
            if self.learned is None:
                found[..., devices] = costs.compute_s(mine)
            else:
                more, mine = mine[..., -1], mine[..., :-1]
                found[..., devices] = np.maximum(self.learned.factor * (costs.compute_s(mine) + more), mine[..., -1])
        return found

    @cached_property
    def per_column_s(self) -> tuple[F64, F64, F64, F64]:
        """Seconds on a device's links that one column costs: of its own leaving and coming back, of others' coming and going back."""
        size, (out, into) = self.tables.element_bytes, self.rates
        others = self.tables.batch - self.samples
        return others * size / out, others * size / into, self.samples * size / into, self.samples * size / out

    @property
    def exchanges_measured(self) -> bool:
        """Whether exchanges are priced by nets: those of this fabric, and of as many devices."""
        first = self.costs[0]
        return first.forward is not None and first.devices == self.devices and first.fabric == self.fabric.name

    def by_links(self, columns: F64, starts_s: F64 | None = None) -> F64:
        """[..., D] seconds of the backward exchange by the fabric's links, or of the forward one where devices start so late."""
        own_out, own_in, other_in, other_out = self.per_column_s
        rest = columns.sum(-1, keepdims=True) - columns
        (out, into), (out_ahead, in_ahead) = self.rates, self.ahead_s
        if starts_s is None:
            return np.asarray(np.maximum(np.maximum(columns * own_in - in_ahead, rest * other_out - out_ahead), 0.0))
        size = columns[..., :, None] * self.samples * self.tables.element_bytes
        message = np.maximum(np.maximum(size / out[:, None] - out_ahead[:, None], size / into - in_ahead), 0.0)
        sends = np.where((columns[..., :, None] > 0) & ~np.eye(self.devices, dtype=bool), starts_s[..., :, None] + message, 0.0)
        late = sends.max(-2) - starts_s  # what the latest sends last
        return np.asarray(np.maximum(np.maximum(columns * own_out - out_ahead, rest * other_in - in_ahead), np.maximum(late, 0.0)))

    def phases(self, sums: F64, columns: F64) -> Phases:
        """Of plans with these sums [..., D, K] and columns [..., D]. A net is not believed below what a device's links take for its bytes."""
        return self.timed(self.compute_s(sums), columns)

    def timed(self, compute: F64, columns: F64) -> Phases:
        """The same of plans whose lookups take so long, [..., D] seconds."""
        first, back = self.costs[0], self.by_links(columns)
        if self.exchanges_measured and (net := first.exchange_s(columns, None)) is not None:
            back = np.maximum(net, back)
        ends = compute + back
        starts = ends - ends.min(-1, keepdims=True)
        if self.exchanges_measured and (net := first.exchange_s(columns, starts)) is not None:
            fore = np.maximum(net, self.by_links(columns, np.zeros(columns.shape)))
        else:
            fore = self.by_links(columns, starts)
        return Phases(compute, back, fore, (ends + fore).max(-1))

    def judged(
        self, strategy: TableStrategy, pieces: Sequence[Piece], on: Sequence[int], *, evaluations: int, notes: Mapping[str, Any] | None = None
    ) -> TablePlan:  # fmt: skip
        """The plan of pieces on devices; pieces that meet on a device become one. Raises: Unsupported where more is moved than may be;
        Infeasible where cuts in rows make partial sums that find no room."""
        shards = merged(self, pieces, on)
        held = [Piece(self.tables.number_of[s.table], s.rows, s.columns) for s in shards]
        where = np.array([self.fabric.actor_of[s.device] for s in shards])
        sums, columns = self.sums(held, where)
        moved = moved_bytes(self.start, shards, self.tables)
        if self.move_bytes is not None and moved > self.move_bytes:
            raise Unsupported(
                f"{strategy.name} would move {moved} bytes, {self.move_bytes} may be moved", hint="--strategy fewest-moves keeps to the limit",
            )  # fmt: skip
        self._require_room(held, where, columns)
        phases = self.phases(sums, columns)
        return TablePlan(
            strategy=strategy.name, shards=shards, phases=Phases(*(np.asarray(x) for x in phases)), columns=tuple(columns.astype(int).tolist()),
            moved_bytes=moved, evaluations=evaluations, notes=dict(notes or {}),
        )  # fmt: skip

    def _require_room(self, held: Sequence[Piece], on: I64, columns: F64) -> None:
        """Cuts in rows are received by more devices than `memory` has counted."""
        received = 2 * self.samples * (columns.sum() - columns) * self.tables.element_bytes
        need = np.bincount(on, weights=self.bytes_of(held), minlength=self.devices) + received
        for d, more in zip(self.fabric.devices, need, strict=True):
            if 0 < d.memory_bytes < more:
                raise Infeasible(
                    f"tables, pooled rows and partial sums take {more:.0f} bytes on {d.name}, which has {d.memory_bytes}", where=d.name,
                    hint=f"{more - d.memory_bytes:.0f} bytes more, or a smaller batch", data={"needed_bytes": float(more)},
                )  # fmt: skip

    def sums(self, pieces: Sequence[Piece], on: I64) -> tuple[F64, F64]:
        """Sums [D, K] and columns [D] of one plan."""
        embedded = self.embed(pieces)
        sums, columns = np.zeros((self.devices, embedded.shape[2])), np.zeros(self.devices)
        for i, (piece, d) in enumerate(zip(pieces, on, strict=True)):
            sums[d] += embedded[d, i]
            columns[d] += piece.kind[2]
        return sums, columns


def merged(problem: TableProblem, pieces: Sequence[Piece], on: Sequence[int]) -> tuple[Shard, ...]:
    """Shards, ordered by table and place. Columns are alike: where nothing lies anywhere yet, tables are cut anew, one run of columns per device."""
    names = [d.name for d in problem.fabric.devices]
    where = [(p, int(d)) for p, d in zip(pieces, on, strict=True)]
    if not problem.start:
        where = _one_run_each(where)
    tables = problem.tables.tables
    shards = [Shard(table=tables[p.table].name, device=names[d], rows=p.rows, columns=p.columns) for p, d in where]
    return tuple(sorted(_joined(_joined(shards, "rows", "columns"), "columns", "rows"), key=lambda s: (s.table, s.rows, s.columns)))


def _one_run_each(where: Sequence[tuple[Piece, int]]) -> list[tuple[Piece, int]]:
    """Of the same rows, each device gets its columns in one run, out of the columns that pieces of these rows have: others may be cut in rows."""
    bands: dict[tuple[int, tuple[int, int]], tuple[dict[int, int], list[tuple[int, int]]]] = {}
    for piece, d in where:
        widths, spans = bands.setdefault((piece.table, piece.rows), ({}, []))
        widths[d] = widths.get(d, 0) + piece.kind[2]
        spans.append(piece.columns)
    found = []
    for (table, rows), (widths, spans) in bands.items():
        free = deque(sorted(spans))
        for d in sorted(widths):
            left = widths[d]
            while left:
                begin, end = free.popleft()
                cut = min(end, begin + left)
                found.append((Piece(table, rows, (begin, cut)), d))
                left -= cut - begin
                if cut < end:
                    free.appendleft((cut, end))
    return found


def _joined(shards: Sequence[Shard], same: str, along: str) -> list[Shard]:
    """Shards of one device with the same rows (or columns), whose columns (or rows) follow each other, become one."""
    found: list[Shard] = []
    for s in sorted(shards, key=lambda s: (s.table, s.device, getattr(s, same), getattr(s, along))):
        last = found[-1] if found else None
        if last is not None and (last.table, last.device, getattr(last, same), getattr(last, along)[1]) == (
            s.table, s.device, getattr(s, same), getattr(s, along)[0]
        ):  # fmt: skip
            found[-1] = msgspec.structs.replace(last, **{along: (getattr(last, along)[0], getattr(s, along)[1])})
        else:
            found.append(s)
    return found


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """`columns`: sums of devices. `evaluations`: plans looked at. `others`: plans that are worth a measurement too, the cheapest first."""

    strategy: str
    shards: tuple[Shard, ...]
    phases: Phases
    columns: tuple[int, ...]
    moved_bytes: int
    evaluations: int
    notes: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[TablePlan, ...] = ()

    @property
    def cost_s(self) -> float:
        return float(self.phases.total_s)


class TableStrategy(Listed, Protocol):
    """A frozen dataclass of options."""

    def plan(self, problem: TableProblem, *, rng: np.random.Generator) -> TablePlan: ...


def halves(piece: Piece) -> tuple[Piece, Piece] | None:
    """Halves of a piece by columns or, where they cannot be halved, by rows; None for one row of the least columns."""
    (top, bottom), (left, right) = piece.rows, piece.columns
    if (right - left) % (2 * ALIGNMENT) == 0:
        middle = (left + right) // 2
        return Piece(piece.table, piece.rows, (left, middle)), Piece(piece.table, piece.rows, (middle, right))
    if bottom - top < 2:
        return None
    middle = (top + bottom) // 2
    return Piece(piece.table, (top, middle), piece.columns), Piece(piece.table, (middle, bottom), piece.columns)


def fitting(problem: TableProblem) -> list[Piece]:
    """Tables, those larger than the largest device halved until they fit. Raises: Infeasible naming the table that no device can hold a part of."""
    most, todo, found = float(problem.memory.max()), list(reversed(problem.whole)), list[Piece]()
    while todo:
        piece = todo.pop()
        if float(problem.bytes_of([piece])[0]) <= most:
            found.append(piece)
            continue
        parts = halves(piece)
        if parts is None or len(found) + len(todo) > MAX_PIECES:
            name, least = problem.tables.tables[piece.table].name, float(problem.bytes_of([piece])[0])
            raise Infeasible(
                f"no device holds even {piece.kind[1]} rows of {piece.kind[2]} columns of table {name}: {least:.0f} bytes, {most:.0f} are free",
                where=f"table {name}", hint="devices with more memory, or a smaller batch",
                data={"table": name, "needed_bytes": least, "available_bytes": most},
            )  # fmt: skip
        todo += reversed(parts)
    return found
