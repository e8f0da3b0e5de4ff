"""Values of a folded training step: `training`'s induction on the representatives' lanes, a collective over a folded axis adding up images.

What member m of an axis holds is the image of what the representative holds: the m-th part further round where a value has parts, another replica's
contribution where it is a gradient. So what an all-reduce leaves follows from the representative's value alone: every member's contribution is
there once exactly when the representative's is a single part (or only its own replica's), and anything else would be added twice. Gradients carry
what they have been summed over instead of one bit per replica and member: images of equal sets of micro-batches are equal sets.

    findings = check_folded_training(program, programs, layout)

The callees are checked by who calls this. Cost: as `training`, of the stored steps, a collective being one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from msgspec import UNSET

from ...errors import Unsupported
from ...plan.plan import TrainingLayout
from ...program.program import Program
from ..program.deadlock import check_deadlock
from ..program.order import Order
from ..program.races import check_races, turns_needed
from ..program.values import QUANTITY_MASK
from ..program.wellformed import check_wellformed, witness
from ..training.cells import EXPERTS
from ..training.rows import check_rows
from ..training.step import TrainingStep, too_small
from ..verdict import MAX_FINDINGS_OF_A_KIND, Finding
from .messages import End
from .shadow import ORBIT, RECEIVED, SENT, OrbitCall, Shadow, shadow
from .slots import check_slots, near_axis

SUMMED = {"data": 0, "context": 1, "experts": 1, "server": 1, "tensor": 2}  # where a gradient's quantity says that it is summed over an axis
DIVIDED = ("old", "updated", "gradient")  # quantities of a group's cells, (name, group, stage, tensor index, cell, ...)

__all__ = ["FoldedProof", "check_folded_training", "prove_folded"]


class FoldedProof:
    """`shadow` and its `order`, where the program got so far; `found`."""

    def __init__(self, shadow_of: Shadow | None, order: Order | None, found: list[Finding]) -> None:
        self.shadow, self.order, self.found = shadow_of, order, found


def check_folded_training(program: Program, programs: Mapping[str, Program], layout: TrainingLayout | None) -> list[Finding]:
    """Form, deadlock, races, order of calls and values. Raises: Unsupported where a representative cannot stand for the others, see `shadow`."""
    return prove_folded(program, programs, layout).found


def prove_folded(program: Program, programs: Mapping[str, Program], layout: TrainingLayout | None) -> FoldedProof:
    """`check_folded_training`, and what it was done on."""
    made = shadow(program, programs)
    p = made.program
    found = check_wellformed(p) or check_deadlock(made.linked)
    if found:
        return FoldedProof(made, None, found)
    order = Order(p, iterations=turns_needed(p))
    found = check_races(p, order) or _call_order(made, order)
    if not found and layout is not None:
        found = too_small(p, layout) or check_rows(p, layout, order, made.moves())
        found = found or _values(made, Order(made.linked) if made.messages else order, layout)
    return FoldedProof(made, order, found)


def _call_order(made: Shadow, order: Order) -> list[Finding]:
    """Calls of a representative on one communicator have a defined order."""
    p = made.program
    step = np.flatnonzero(np.isin(p.steps.op, list(made.calls)) & (p.steps.kind == 0)) if made.calls else np.zeros(0, np.int64)
    comm = np.array([made.calls[int(op)].comm for op in p.steps.op[step]], np.int64)
    by = np.lexsort((order.rank_in_order[order.node(step, 0)], comm)) if len(step) else step
    same = comm[by][1:] == comm[by][:-1]
    first, second = step[by][:-1][same], step[by][1:][same]
    bad = np.flatnonzero(~order.before(order.node(first, 0), order.node(second, 0)))
    found = []
    for k in bad[:MAX_FINDINGS_OF_A_KIND].tolist():
        one, two = p.describe(int(first[k])), p.describe(int(second[k]))
        text = f"{one} and {two} call on one communicator in no defined order; add an `after`"
        found.append(Finding(check="wellformed", message=text, witness=witness(p, int(second[k]), other_step=int(first[k]))))
    return found


def _values(made: Shadow, order: Order, layout: TrainingLayout) -> list[Finding]:
    p = made.program
    if not p.buffers.name:
        return [Finding(check="values", message="gradients cannot be followed: its buffers have no names", status="unknown")]
    if layout.ranks != p.ranks:
        return [Finding(check="values", message=f"the layout has {layout.ranks} ranks, the program {p.ranks}", witness={"ranks": p.ranks})]
    step = _FoldedStep(made, order, layout)
    holds_all = [step.holds_all(b) for b in range(len(p.buffers))]
    step.found += check_slots(p, layout, made.axes, made.shift, step.data.parts, holds_all, step.in_blocks)
    step.found += [*step.given_apart(), *step.work()]
    if not step.found:
        step.run()
        step.weights_at_the_end()
        step.kept_at_the_end()
    return step.found[:MAX_FINDINGS_OF_A_KIND]


def _slots(made: Shadow) -> np.ndarray[Any, Any]:
    """Per buffer: bytes of a member's part where a collective gives members parts; 0 elsewhere."""
    b = made.program.buffers
    found = np.zeros(len(b), np.int64)
    for call in made.calls.values():
        if call.kind != "all-reduce":
            size = int(b.chunks[call.buffer]) * int(b.chunk_bytes[call.buffer])
            found[call.buffer] = np.gcd(found[call.buffer], size // made.axes[call.axis].size)
    return found


class _FoldedStep(TrainingStep):
    """A gradient's quantity ends with what it is summed over, axis by axis (`SUMMED`)."""

    besides = frozenset({ORBIT, SENT, RECEIVED})

    def __init__(self, made: Shadow, order: Order, layout: TrainingLayout) -> None:
        self.made = made
        self.names: list[tuple[object, ...]] = []
        self.sent_cells: dict[int, deque[list[int]]] = {}  # by channel, what is on its way
        self.moved: dict[tuple[Any, ...], list[int]] = {}  # what collectives make of quantities (`images`)
        self.block: dict[str, int] = {}  # of a value that goes in blocks, one to each member: cells of a block
        super().__init__(made.program, order, layout, _slots(made))
        self.axis = [axis.name for axis in made.axes]
        self.near = near_axis(layout)
        near = self.near.size
        for axis in made.axes:
            axes = {"tensor": (1, layout.tensor), self.near.name: (layout.tensor, near), "data": (layout.tensor * near, layout.data // near)}
            stride, size = axes.get(axis.name, (0, 0))
            if (axis.stride, axis.size) != (stride, size):
                raise Unsupported(f"axis {axis.name!r} of the fold is not the layout's")
        exchanges = () if layout.exchanges is UNSET else layout.exchanges
        self.in_blocks = {v for x in exchanges if x.kind == "all-to-all" for v in (x.source, x.target)}
        self.place_of_segment = {key: i for p in range(layout.pipeline) for i, key in enumerate(layout.held(p).segments)}

    def ranks(self) -> Iterable[int]:
        return sorted(set(self.p.lanes.actor.tolist()))

    # ---- gradients -----------------------------------------------------------------------------------------------
    def contribution(self, key: str, microbatch: int, replica: int, part: int = 0) -> int:
        """Bit of B(segment, micro-batch) of the representative, among those of its stages."""
        return 1 << (self.place_of_segment.get(key, len(self.index)) * self.layout.microbatches + microbatch)

    def gradient(self, key: str, microbatch: int, rank: int, b: int, cell: int) -> int:
        bit = self._bit(key, microbatch, b)
        return bit << 32 | self.quantity("gradient", *self.place(rank, b, cell), False, False, False)

    def _bit(self, key: str, microbatch: int, b: int) -> int:
        """Shared parameters get contributions of several stages' segments, others of one stage's only."""
        if ":" not in self.data.named(b, self.p.buffers.name[b]):
            return self.contribution(key, microbatch, 0)
        return 1 << (self.index.get(key, len(self.index)) * self.layout.microbatches + microbatch)

    def whole_gradient(self, rank: int, b: int, cell: int) -> int:
        place = self.place(rank, b, cell)
        bits = 0
        for key in self.users.get(place, set()):
            for m in range(self.layout.microbatches):
                bits |= self._bit(key, m, b)
        near = self.near.name in self.axis and EXPERTS not in place[0].partition(":")[0]  # whose neighbours have other experts
        summed = ("data" in self.axis, near, len(self.group(place[0], 0)) > 1)
        return bits << 32 | self.quantity("gradient", *place, *summed) if bits else 0

    # ---- collectives over a folded axis ----------------------------------------------------------------------------
    def compute(self, step: int, turn: int) -> None:
        op = int(self.p.steps.op[step])
        if op not in self.made.calls and op not in self.made.messages:
            super().compute(step, turn)
        elif len(self.found) < MAX_FINDINGS_OF_A_KIND:
            if op in self.made.calls:
                self.collective(step, self.made.calls[op])
            else:
                self.message(step, self.made.messages[op])

    def message(self, step: int, end: End) -> None:
        """What arrives at a representative is what the member sent from which the channel leads to it: an image of what the representative sent."""
        root, lo, hi = self.locate(*end.place, 0)
        queue = self.sent_cells.setdefault(end.channel, deque())
        if end.sends:
            queue.append(self.memory[root][lo:hi])
            return
        values = queue.popleft()
        if len(values) != hi - lo:
            raise Unsupported(f"a message of {len(values)} cells is received into {hi - lo}", where=self.p.describe(step))
        for axis, by in zip(self.made.axes, end.by, strict=True):
            values = [self.image(value, axis.name, -by % axis.size) for value in values]
        there = self.memory[root][lo:hi]
        self.store(root, lo, hi, [self.add(a, b, step) for a, b in zip(there, values, strict=True)] if end.adds else values, step)

    def of_value(self, kind: str, value: str, mb: int, rank: int, b: int, cell: int) -> int:
        found = super().of_value(kind, value, mb, rank, b, cell)
        if value in self.in_blocks:
            cells, of_all = self._spread[b]
            if of_all:
                raise Unsupported(f"{value} goes in blocks and is split along the sequence: not proved folded")
            self.block[str(self.name_of(found)[1])] = max(1, cells // self.near.size)
        return found

    def collective(self, step: int, call: OrbitCall) -> None:
        axis = self.made.axes[call.axis]
        root, lo, hi = self.locate(call.buffer, 0, int(self.p.buffers.chunks[call.buffer]), 0)
        memory = self.memory[root]
        if call.kind == "all-reduce":
            self.store(root, lo, hi, [self.summed(memory[cell], axis.name, step) for cell in range(lo, hi)], step)
            return
        size, slot = axis.size, (hi - lo) // axis.size
        if (hi - lo) % size:
            raise Unsupported(f"cells of {self.p.buffer_name(call.buffer)} do not divide into {size} parts")
        if call.kind == "all-gather":
            turns = [(k, m) for m in range(size) for k in range(slot)]
            self.store(root, lo, hi, self.images(memory[lo : lo + slot], turns, axis.name, lo, hi), step)
            return
        # Slot k of the representative gets its own part of slot 0 and, from member m, what the representative holds in slot size - m, moved by m.
        turns = [((size - m) % size * slot + k, m) for k in range(slot) for m in range(size)]
        moved = self.images(memory[lo:hi], turns, axis.name, lo, hi)
        kept = []
        for k in range(slot):
            terms = moved[k * size : (k + 1) * size]
            kept.append(reduce(lambda a, b: self.add(a, b, step), terms) if axis.name == "tensor" else self.alike(terms, axis.name, step))
        self.store(root, lo, hi, kept + [self.garbage] * (hi - lo - slot), step)

    def images(self, values: list[int], turns: list[tuple[int, int]], axis: str, lo: int, hi: int) -> list[int]:
        """`image` of the i-th value by so much, for each (i, by). Over replicas, which quantity an image is does not depend on whose contributions it
        has: where all values have the same, as weights and gradients do, every micro-batch's collective is that of the first."""
        bits = values[0] & ~QUANTITY_MASK
        if axis == "tensor" or min(values) <= 0 or any(value & ~QUANTITY_MASK != bits for value in values):
            return [self.image(values[i], axis, by, (lo, hi)) for i, by in turns]
        key = axis, lo, hi, len(turns), tuple([value & QUANTITY_MASK for value in values])
        if (known := self.moved.get(key)) is None:
            known = self.moved[key] = [self.image(values[i], axis, by, (lo, hi)) & QUANTITY_MASK for i, by in turns]
        return [bits | quantity for quantity in known]

    def alike(self, terms: Sequence[int], axis: str, step: int) -> int:
        """The sum of what replicas have: each the same gradient, of its own micro-batches or positions."""
        return self.summed(terms[0], axis, step) if len(set(terms)) == 1 else -1 - step

    def quantity(self, *name: object) -> int:
        number = self.number.get(name)
        if number is None:
            self.names.append(name)
            number = self.number[name] = len(self.names)
        return number

    def name_of(self, value: int) -> tuple[object, ...]:
        """The quantity's name."""
        return self.names[(value & QUANTITY_MASK) - 1]

    def fields(self, name: tuple[object, ...]) -> list[int]:
        """Widths of the bit fields of a value's contributions: one bit, or one for each tensor-parallel rank."""
        value = str(name[1])
        if name[0] == "act":
            return [self.parts(self.maker[value], value, gradient=False)] if value in self.maker else [1]
        return [self.parts(s, value, gradient=True) for s in self.readers.get(value, [])]

    def summed(self, value: int, axis: str, step: int) -> int:
        """The sum of a representative's value and of all its images along an axis, where none is counted twice."""
        if value <= 0:
            return value
        name = self.name_of(value)
        if name[0] == "gradient":
            group, done = name[1:-3], list(name[-3:])
            whole = self.group(str(name[1]), 0)
            at = SUMMED[axis]
            # Summed along this axis before, or held by some of the axis only: a second sum would count twice.
            if done[at] or (axis == "tensor" and len(whole) != self.layout.tensor):
                return -1 - step
            done[at] = True
            return value & ~QUANTITY_MASK | self.quantity("gradient", *group, *done)
        if name[0] not in ("act", "grad") or axis != "tensor" or name[-1] != -1:
            return -1 - step  # what every member has alike, or each for itself
        bits, out, first = value >> 32, 0, 0
        for width in self.fields(name):
            mine = bits >> first & (1 << width) - 1
            # The representative must hold exactly one of the axis's parts: then the images hold the others, and the sum has each once.
            if mine and (width != self.layout.tensor or mine & (mine - 1)):
                return -1 - step
            out |= ((1 << width) - 1) << first if mine else 0
            first += width
        return out << 32 | value & QUANTITY_MASK

    def image(self, value: int, axis: str, by: int, within: tuple[int, int] = (0, 0)) -> int:
        """What the member `by` further along an axis holds where the representative holds `value`; `within`: first and end cell of the buffer that
        members have parts of."""
        if value <= 0 or not by:
            return value
        name = self.name_of(value)
        if name[0] == "garbage":
            return value
        if name[0] in DIVIDED and axis != "tensor":  # the part that lies so many parts further, around the end
            lo, hi = within
            size = self.near.size if axis == self.near.name else self.layout.data // self.near.size
            cell = lo + (int(str(name[4])) - lo + by * ((hi - lo) // size)) % (hi - lo)
            return value & ~QUANTITY_MASK | self.quantity(*name[:4], cell, *name[5:])
        at = {"norm": -1 if axis == "tensor" else -2, "act": -1 if axis == "tensor" else 3, "grad": -1 if axis == "tensor" else 3}.get(str(name[0]))
        if at is None or (name[0] == "norm" and name[at] == -1) or (name[0] != "norm" and axis == "data"):
            raise Unsupported(f"images of {name[0]!r} along the axis {axis!r} are not followed")
        there = list(name)
        there[at] = self.further(int(str(name[at])), axis, by)
        bits = value >> 32
        if axis == self.near.name and name[0] != "norm" and (block := self.block.get(str(name[1]))):
            cell = int(str(name[4]))
            there[4] = (cell // block + by) % self.near.size * block + cell % block
        elif axis == "tensor" and name[0] != "norm":
            bits = self.turned(bits, name, by)
        return bits << 32 | self.quantity(*there)

    def further(self, index: int, axis: str, by: int) -> int:
        """The tensor or data index (-1: of none) that lies `by` further along an axis."""
        near = self.near.size
        if axis == "tensor":
            return (index + by) % self.layout.tensor if index != -1 else -1
        return (index + by * near) % self.layout.data if axis == "data" else index - index % near + (index % near + by) % near

    def turned(self, bits: int, name: tuple[object, ...], by: int) -> int:
        """Contributions of the tensor-parallel rank `by` further: a rotation of every field's bits."""
        out, first = 0, 0
        for width in self.fields(name):
            mine, turn = bits >> first & (1 << width) - 1, by % width
            out |= ((mine << turn | mine >> width - turn) & (1 << width) - 1) << first
            first += width
        return out
