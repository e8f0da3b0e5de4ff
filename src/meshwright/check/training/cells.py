"""Cells of weights and gradients as quantities of a training step, where data replicas may divide them: the part of `training` that knows groups."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from ...plan.plan import ContextExchange, TrainingLayout
from ...program.program import Program
from ..program.values import Machine
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .data_groups import DataGroups

__all__ = [
    "ADDING", "EXPERTS", "FIRST", "KEPT", "WeightCells", "among_experts", "compute_steps", "forward_again",
    "made_twice", "members", "run_twice", "too_small",
]  # fmt: skip

FIRST = {"remade": "act", "remadeall": "actall", "remadesum": "actsum"}  # kinds of buffers of a second forward pass -> those of the first
ADDING = ("B", "W")  # compute steps that add to gradients of parameters
EXPERTS = "%"  # ends names of gradient buffers of experts that neighbouring data replicas divide
KEPT = ("saved", "left")  # what a segment's steps keep for its later ones


def among_experts(layout: TrainingLayout, x: ContextExchange) -> bool:
    """Whether those exchange that divide experts or tables: rows and numbers of rows; and all there is, where nobody divides positions."""
    exchanges = () if layout.exchanges is UNSET else layout.exchanges
    numbers = {y.counts for y in exchanges if y.counts is not UNSET}
    return layout.context == 1 or x.copies is not UNSET or x.counts is not UNSET or bool({x.source, x.target} & numbers)


def members(layout: TrainingLayout, x: ContextExchange) -> int:
    """Neighbours that take part in an exchange: those that divide experts, or those that divide positions."""
    return layout.expert if among_experts(layout, x) else layout.context


def compute_steps(layout: TrainingLayout, pipeline: int, data: int) -> Iterator[tuple[str, str, int]]:
    """(name, segment, micro-batch) of what the ranks of a pipeline and a data index run once: stages, for micro-batches of the copies held."""
    names, twice = "FIW" if layout.split_backward else "FB", run_twice(layout)
    for stage, copy in layout.hosted(pipeline):
        for m in range(layout.microbatches_of(data)):
            if layout.copy(m) == copy:
                yield from ((n, key, m) for key in layout.stages[stage].segments for n in (*names, *("R" if key in twice else "")))


def forward_again(layout: TrainingLayout) -> tuple[tuple[str, ...], ...]:
    return () if layout.forward_again is UNSET else layout.forward_again


def run_twice(layout: TrainingLayout) -> set[str]:
    """Keys of the segments that run forward again."""
    return {key for group in forward_again(layout) for key in group}


def made_twice(layout: TrainingLayout) -> dict[str, set[str]]:
    """By segment that runs forward again: values that its group reads and has a second time, written in it or got of others, with what these came
    of; numbers of filled rows stay as they were."""
    exchanges = () if layout.exchanges is UNSET else layout.exchanges
    numbers = {x.counts for x in exchanges if x.counts is not UNSET}
    numbers |= {x.target for x in exchanges if x.source in numbers} | {x.source for x in exchanges if x.target in numbers}
    found: dict[str, set[str]] = {}
    for group in forward_again(layout):
        mine = [s for s in layout.segments if s.key in group]
        there = {v for s in mine for v in s.writes}
        for x in exchanges:  # in the order of the layout, so one that comes of another after it
            if x.source in there:
                there.add(x.target)
        read = {v for s in mine for v in s.reads}
        for x in reversed(exchanges):
            if x.target in read:
                read.add(x.source)
        for key in group:
            found[key] = (there & read) - numbers
    return found


def too_small(p: Program, layout: TrainingLayout) -> list[Finding]:
    """What a segment that recomputes keeps has room in its buffers."""
    twice = run_twice(layout)
    keeps = {s.key: s.saved_bytes for s in layout.segments if s.recompute or s.step is not None or s.key in twice}
    for b, name in enumerate(p.buffers.name or ()):
        kind, _, rest = name.partition(":")
        size = int(p.buffers.chunks[b]) * int(p.buffers.chunk_bytes[b])
        if kind == "saved" and size < keeps.get(rest.rpartition(":")[0], 0):
            text = f"{p.buffer_name(b)} has {size} bytes for the {keeps[rest.rpartition(':')[0]]} that its segment keeps"
            return [Finding(check="values", message=text, witness={"rank": int(p.buffers.actor[b]), "buffer": b})]
    return []


class WeightCells(Machine):
    """`number`: of every quantity; `role`: of every buffer. Set by the machine that is derived."""

    layout: TrainingLayout
    data: DataGroups
    number: dict[tuple[object, ...], int]
    role: list[str]
    found: list[Finding]
    places: dict[tuple[int, int], tuple[str, int, int, int]]  # (rank, buffer) -> what `place` says of it, with the cell that its first is
    rows: dict[tuple[str, int, int, int, int], list[int]]  # what many cells hold, asked for in every micro-batch

    def in_cells(self, b: int) -> bool:
        """Weights that replicas divide are quantities cell by cell, others one."""
        part = self.data.parts[b]
        return self.layout.zero_level > 0 and part is not None and part.kind in ("weights", "shard", "gathered") and bool(part.group)

    def weight(self, state: str, rank: int, b: int, cell: int) -> int:
        return 1 << 32 | self.quantity(state, *self.place(rank, b, cell))

    def weights(self, rank: int, b: int, lo: int, hi: int) -> list[int]:
        """Old weights, cell by cell."""
        if (known := self.rows.get(("old", rank, b, lo, hi))) is None:
            known = self.rows["old", rank, b, lo, hi] = [self.weight("old", rank, b, cell) for cell in range(lo, hi)]
        return known

    def quantity(self, *name: object) -> int:
        return self.number.setdefault(name, len(self.number) + 1)

    def place(self, rank: int, buffer: int, cell: int) -> tuple[str, int, int, int]:
        if (known := self.places.get((rank, buffer))) is None:
            stage, _, tensor = self.layout.coordinates(rank)
            name = self.data.named(buffer, self.p.buffers.name[buffer])
            shift = self.data.shift(rank, buffer, len(self.memory[self.root[buffer]])) if self.root[buffer] == buffer else 0
            if name.partition(":")[0].endswith(EXPERTS):  # each rank of an expert group has gradients of other experts there
                name += str(self.layout.coordinates(rank)[1] % self.layout.expert)
            known = self.places[rank, buffer] = name, -1 if ":" in name else self.layout.mates(stage)[0], self.group(name, tensor)[0], shift
        return known[0], known[1], known[2], cell + known[3]

    def group(self, name: str, tensor: int) -> tuple[int, ...]:
        """Tensor indices whose contributions a gradient buffer adds up: `gradients+0.1`."""
        listed = name.partition(":")[0].partition("+")[2]
        found = tuple(int(i) for i in listed.split(".") if i.isdigit())
        return found if tensor in found else (tensor,)

    def covers(self, step: int, b: int, verb: str) -> bool:
        """All chunks of a buffer are among what the step's op reads, or writes."""
        lists = self.p.ops.reads if verb == "read" else self.p.ops.writes
        chunks = {c for x, first, count in lists[int(self.p.steps.op[step])].reshape(-1, 3).tolist() if x == b for c in range(first, first + count)}
        return len(chunks) == int(self.p.buffers.chunks[b])

    def weights_at_the_end(self) -> None:
        """Every copy of a weight that lives on is updated, on every replica."""
        for b in range(len(self.p.buffers)):
            if not self.in_cells(b) or self.role[b] != "weight" or len(self.found) >= MAX_FINDINGS_OF_A_KIND:
                continue
            rank = int(self.p.buffers.actor[b])
            for cell, have in enumerate(self.memory[b]):
                if have != self.weight("updated", rank, b, cell):
                    writer = self.writer[b][cell]
                    chunk = cell * self.grain[b] // max(1, self.unit[b])
                    facts = {"rank": rank, "lane": -1, "step": writer, "iteration": 0, "chunk": chunk, "buffer": b}
                    what = f"; last written by {self.p.describe(writer)}" if writer >= 0 else ""
                    text = f"rank {rank} ends the step with a chunk {chunk} of {self.p.buffer_name(b)} that is not the updated one{what}"
                    self.found.append(Finding(check="values", message=text, witness=facts))
                    break
