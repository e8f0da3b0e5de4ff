"""What every cell holds during a training step, who adds to which gradient, and what a wrong cell is told as: the state of `training`'s induction."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from msgspec import UNSET

from ...plan.plan import Segment, TrainingLayout
from ...program.program import BUFFER_ROLES, Kind, Program
from ..program.order import Order
from ..program.values import QUANTITY_MASK
from ..program.wellformed import witness
from ..verdict import Finding
from .cells import ADDING, EXPERTS, FIRST, WeightCells, made_twice, members
from .copies import block_in_place, stands_for
from .data_groups import DataGroups

__all__ = ["GIVEN", "StepState"]

GIVEN = ("weight", "state", "input")  # roles of what is there when the step begins


class StepState(WeightCells):
    """Cells start with the old weights, zero gradients and garbage; `found` says what is wrong."""

    def __init__(self, p: Program, order: Order, layout: TrainingLayout, grain: np.ndarray[Any, Any] | None = None) -> None:
        super().__init__(p, order, nothing_is_zero=True, grain=grain)
        self.layout = layout
        self.segment: dict[str, Segment] = {s.key: s for s in layout.segments}
        self.index = {key: i for i, key in enumerate(self.segment)}
        self.readers: dict[str, list[Segment]] = {}
        gradless = {v.name for v in layout.values if not v.differentiable}
        self.exchanged = {} if layout.exchanges is UNSET else {x.target: x for x in layout.exchanges}
        self.neighbours = {x.target: members(layout, x) for x in self.exchanged.values()}  # replicas that exchange a value
        for s in layout.segments:
            for v in s.reads:
                if v not in gradless:
                    self.readers.setdefault(self.sent(v), []).append(s)
        self.again = {x.target for x in self.exchanged.values() if x.again is True}
        self.twice = made_twice(layout)
        self.copied = {x.source: x.copies for x in self.exchanged.values() if x.copies is not UNSET}
        self.blocks = {v.name: max(1, *v.shape[:1]) for v in layout.values if v.name in self.copied or self.sent(v.name) in self.copied}
        self.over_replicas = frozenset(() if layout.batch_sums is UNSET else layout.batch_sums)
        self.maker = {v: s for s in layout.segments for v in s.writes}
        self.maker |= {v: self.maker[self.sent(v)] for v in self.exchanged if self.sent(v) in self.maker}
        self.split = {v.name for v in layout.values if v.split is not None}
        touched = {v for s in layout.segments for v in (*s.gathers, *s.sum_writes, *((*s.reads, *s.writes) if s.sequence else ()))}
        self.along = self.split & touched  # along the sequence
        self.number, self.places, self.rows = {}, {}, {}
        self.found = []
        self.coordinates = [layout.coordinates(rank) for rank in range(layout.ranks)]
        self._names = [_named(name) for name in p.buffers.name]
        self._spread: dict[int, tuple[int, bool]] = {}
        self._complete: dict[tuple[str, range, int], int] = {}  # by segment, replicas, shares
        self.actor = p.lanes.actor[p.lane_of_step()].tolist()
        self.role = [BUFFER_ROLES[int(r)] for r in p.buffers.role]
        self.old, self.garbage = (1 << 32 | self.quantity(name) for name in ("initial", "garbage"))
        self.data = DataGroups(p, layout)
        self.data_buffers = {(int(p.buffers.actor[b]), name): b for b, name in enumerate(p.buffers.name)}
        self.norms = {(int(p.buffers.actor[b]), name[5:]): b for b, name in enumerate(p.buffers.name) if name.startswith("norm:")}
        for b, cells in self.memory.items():
            if self.in_cells(b) and self.role[b] == "weight":
                cells[:] = [self.weight("old", int(p.buffers.actor[b]), b, i) for i in range(len(cells))]
            elif self.role[b] in GIVEN:
                cells[:] = [self.old] * len(cells)
            elif self.role[b] != "gradient" and not p.buffers.name[b].startswith("grad"):  # gradients start at zero, all else is garbage
                cells[:] = [self.garbage] * len(cells)
        self.users = self.gradient_users()

    def wrong(self, step: int, text: str, *, chunk: int | None = None, **more: Any) -> None:
        facts = witness(self.p, step, chunk=chunk, **more)
        self.found.append(Finding(check="values", message=f"{self.p.describe(step)} {text}", witness=facts))

    def ranks(self) -> Iterable[int]:
        """The ranks whose lanes the program holds."""
        return range(self.p.ranks)

    def gradient_users(self) -> dict[tuple[str, int, int, int], set[str]]:
        """(gradient buffer name, stage or -1 when shared, tensor index, cell) -> segments whose B adds to it."""
        users: dict[tuple[str, int, int, int], set[str]] = {}
        for step in np.flatnonzero(self.p.steps.kind == Kind.COMPUTE).tolist():
            op = int(self.p.steps.op[step])
            if self.p.ops.name[op] not in ADDING:
                continue
            for b, first, count in self.p.ops.writes[op].reshape(-1, 3).tolist():
                if self.role[b] == "gradient":
                    _, lo, hi = self.locate(b, first, count, 0)
                    for cell in range(lo, hi):
                        users.setdefault(self.place(self.actor[step], b, cell), set()).add(self.p.ops.graph[op])
        return users

    def contribution(self, key: str, microbatch: int, replica: int, part: int = 0) -> int:
        """Bit of B(segment, micro-batch) of a data replica; `part`: of the ranks whose partial gradients are added."""
        lay = self.layout
        index = self.index.get(key, len(self.index))
        return 1 << (((index * lay.microbatches + microbatch) * lay.data + replica) * lay.tensor + part)

    def gradient(self, key: str, microbatch: int, rank: int, b: int, cell: int) -> int:
        """What B(segment, micro-batch) of a rank adds to a cell of its gradient buffer."""
        _, replica, tensor = self.coordinates[rank]
        share = self.group(self.data.named(b, self.p.buffers.name[b]), tensor).index(tensor)
        return self.contribution(key, microbatch, replica, share) << 32 | self.quantity("gradient", *self.place(rank, b, cell))

    def gradients_of(self, key: str, microbatch: int, rank: int, b: int, lo: int, hi: int) -> list[int]:
        """`gradient`, cell by cell: which contribution it is, is the same in all of them, and which cell is the same in every micro-batch."""
        if (known := self.rows.get((key, rank, b, lo, hi))) is None:
            known = self.rows[key, rank, b, lo, hi] = [self.gradient(key, microbatch, rank, b, cell) & QUANTITY_MASK for cell in range(lo, hi)]
        bits = self.gradient(key, microbatch, rank, b, lo) & ~QUANTITY_MASK if lo < hi else 0
        return [bits | quantity for quantity in known]

    def whole_gradient(self, rank: int, b: int, cell: int) -> int:
        """What the optimizer must find in a cell: every contribution of every replica."""
        lay, place = self.layout, self.place(rank, b, cell)
        shares = len(self.group(self.data.named(b, self.p.buffers.name[b]), lay.coordinates(rank)[2]))
        replicas = range(lay.data)
        if EXPERTS in place[0].partition(":")[0]:  # those with the same experts
            replicas = range(self.coordinates[rank][1] % lay.expert, lay.data, lay.expert)
        bits = reduce(or_, (self._all_contributions(key, replicas, shares) for key in self.users.get(place, ())), 0)
        return bits << 32 | self.quantity("gradient", *place) if bits else 0

    def _all_contributions(self, key: str, replicas: range, shares: int) -> int:
        """Bits of all micro-batches of these replicas of a segment."""
        if (known := self._complete.get((key, replicas, shares))) is None:
            rows = ((key, m, d, share) for d in replicas for m in range(self.layout.microbatches_of(d)) for share in range(shares))
            known = self._complete[key, replicas, shares] = reduce(or_, (self.contribution(*row) for row in rows), 0)
        return known

    def sent(self, value: str) -> str:
        """What a segment writes and others get, over any number of exchanges, as `value`; a value that is not exchanged is its own."""
        for _ in range(len(self.exchanged)):
            if value not in self.exchanged:
                break
            value = self.exchanged[value].source
        return value

    def home(self, value: str, replica: int, cell: int, cells: int) -> tuple[str, int, int]:
        """(value that a segment writes, replica, cell there) that a cell of a replica's value is, of the rank's own part of `cells` cells."""
        block = max(1, cells // self.blocks.get(value, 1))
        for _ in range(len(self.exchanged)):
            x = self.exchanged.get(value)
            if x is None:
                break
            parts = self.neighbours[value]
            group = replica - replica % parts
            if x.copies is not UNSET:  # weights in a place are those of a block of their home
                home, there = block_in_place(x.copies, replica - group, cell // block)
                replica, cell = group + home, there * block + cell % block
            elif x.kind == "shift":  # of the neighbour before it
                replica = group + (replica - group - 1) % parts
            else:  # block i is this member's block of member i
                block = max(1, cells // parts)
                replica, cell = group + cell // block, (replica - group) * block + cell % block
            value = x.source
        if (copies := self.copied.get(value)) is not None:
            cell = stands_for(copies, replica % copies.members, cell // block) * block + cell % block
        return value, replica, cell

    def of_value(self, kind: str, value: str, mb: int, rank: int, b: int, cell: int) -> int:
        """The quantity that a cell of a buffer of a value's parts, or of its gradient, stands for."""
        if (known := self._spread.get(b)) is None:
            _, lo, hi = self.locate(b, 0, int(self.p.buffers.chunks[b]), 0)
            known = self._spread[b] = hi - lo, self.holds_all(b)
        cells, of_all = known
        slot = max(1, cells // self.layout.tensor)
        at, part = (cell % slot, cell // slot) if of_all else (cell, self.own(value, rank))
        root, replica, at = self.home(value, self.coordinates[rank][1], at, cells)
        replica = 0 if value in self.over_replicas else replica  # the sum is the same on all
        return self.quantity(kind, root, mb, replica, at, part)

    def own(self, value: str, rank: int) -> int:
        """The tensor index where a value is split: each part is a quantity of its own; -1 elsewhere."""
        return self.coordinates[rank][2] if value in self.split else -1

    def named(self, b: int) -> tuple[str, str, str]:
        """(kind, value or segment, micro-batch) that a buffer's name says; of a second forward pass, the kind of the first: values are the same."""
        return self._names[b]

    def holds_all(self, b: int) -> bool:
        kind, value, _ = self.named(b)
        return value in self.along and kind in ("actsum", "actall", "actagain", "gradall", "gradpart")

    def parts(self, s: Segment, value: str, *, gradient: bool) -> int:
        """Of how many parts a value (or what a reader hands back of its gradient) is the sum."""
        if value not in (s.sum_grads if gradient else s.sum_writes):
            return 1
        return self.layout.data if value in self.over_replicas else self.layout.tensor if s.split else 1

    def part_of(self, value: str, rank: int, part: int) -> int:
        """Which of these parts a rank makes; `part`: its tensor index where the segment is split."""
        return self.coordinates[rank][1] if value in self.over_replicas else part

    def gradient_bits(self, value: str, reader: Segment, part: int) -> tuple[int, int]:
        """(bit of one part, bits of all parts) of a reader's contribution to the gradient of a value."""
        first = 0
        for s in self.readers.get(self.sent(value), []):
            n = self.parts(s, value, gradient=True)
            if s.key == reader.key:
                return 1 << (first + (part if n > 1 else 0)), ((1 << n) - 1) << first
            first += n
        return 0, 0

    def mismatch(self, step: int, b: int, cell: int, have: int, want: int) -> None:
        root = self.root[b]
        chunk = max(0, cell * self.grain[b] - self.offset[b]) // max(1, self.unit[b])
        writer = self.writer[root][cell]
        what = f"reads chunk {chunk} of {self.p.buffer_name(b)}, which "
        if have < 0:
            what += f"is spoilt: {self.p.describe(-1 - have)} adds a contribution twice, or adds what does not belong together"
        elif have in (0, self.garbage):
            what += "nothing has been written to"
        elif (have ^ want) & QUANTITY_MASK:
            what += "holds another value"
        else:
            missing, extra = (want & ~have) >> 32, (have & ~want) >> 32
            what += f"lacks {missing.bit_count()} of {(want >> 32).bit_count()} contributions"
            what += f" and has {extra.bit_count()} foreign ones" if extra else ""
        if writer >= 0 and have >= 0:
            what += f"; last written by {self.p.describe(writer)}"
        self.wrong(step, what, chunk=chunk, buffer=b, writer=writer)


def _named(name: str) -> tuple[str, str, str]:
    kind, _, rest = name.partition(":")
    kind = FIRST.get(kind, kind)
    value, _, number = rest.rpartition(":")
    return kind, value.rpartition(":")[0] if kind in ("gradpart", "actall", "actagain") else value, number
