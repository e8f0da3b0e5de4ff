"""One rank's part of a collective program as a flat list of instructions, worked out once per program and tensor length.

The lanes of all ranks are fused into one checked order per rank (`run.executor.lanes`), receives are posted `depth` messages ahead and sends are
waited on
as late as possible (`run.executor.schedule`), so a single thread keeps all of a rank's links busy. Here that schedule meets the tensors: chunks
become
elements (`chunks`), staging is given out like registers (a slot is free again when its last reader is done), and every step becomes one or
two instructions. What each of them waits for is worked out last (`dataflow`): the order is then only who goes first among those that can go.
A collective of a length seen before costs no planning and no allocation.

A message is received straight into its place wherever nobody else touches that place meanwhile. What is added is received into staging, while
the message before it is being added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ...program.program import Kind, Part, Program
from ...program.tables import I32
from ..executor.collective import callable_form
from ..executor.lanes import fuse_lanes
from ..executor.schedule import Schedule, compile_schedule
from ..executor.tags import TAG_WINDOW
from .chunk_places import Form, Places, paired, viewer
from .dataflow import Dataflow, dataflow
from .instructions import Instruction, Op, Place

__all__ = ["F64", "MAX_ELEMENTS_AHEAD", "Bound", "Form", "RankCode", "compile_rank", "form_of", "posted_depth"]


F64 = NDArray[np.float64]
# Of the receives that a channel has posted ahead of its turn. gloo sends nothing before the word that the receive is posted, and that word waits
# behind whatever this rank has handed the same connection: 128 KiB on a link of 20 Mbit/s held up a message's start by 48 ms.
MAX_ELEMENTS_AHEAD = 1 << 18
MAX_SENDS_AHEAD = 64  # sends of a channel under way at once; they hold no memory of their own, and posted receives bound the bytes on the way


@dataclass(frozen=True)
class RankCode:
    """`spaces`: elements of the rank's buffers by number; `staging`: of every slot. `roles`: what each buffer is."""

    rank: int
    instructions: tuple[Instruction, ...]
    spaces: tuple[int, ...]
    roles: tuple[str, ...]
    staging: tuple[int, ...]
    elements: int  # per block, padding included
    blocks: int
    steps: int
    unrolled: Program = field(repr=False)
    order: I32 = field(repr=False)  # the rank's walk, in steps

    @cached_property
    def flow(self) -> Dataflow:
        return dataflow(self.instructions, self.unrolled, self.order.tolist())

    def bind(self, buffers: Sequence[torch.Tensor], staging: Sequence[torch.Tensor]) -> Bound:
        """`buffers`: flat tensors of the rank's buffers; `staging`: of its slots, at least as long as `staging` asks."""
        view = viewer(buffers, staging)
        rows = []
        for i in self.instructions:
            tensor = view(i.place) if i.op not in (Op.TAKE, Op.DONE) else None
            source = view(i.source) if i.op in (Op.COPY, Op.ADD) else None
            rows.append((int(i.op), i.step, tensor, source, i.key, i.peer, i.tag))
        return Bound(tuple(rows), self)


@dataclass(frozen=True)
class Bound:
    """Rows of (op, step, tensor, source, key, peer, tag)."""

    rows: tuple[tuple[int, int, torch.Tensor | None, torch.Tensor | None, int, int, int], ...]
    code: RankCode

    @property
    def flow(self) -> Dataflow:
        return self.code.flow


def form_of(program: Program, times: Callable[[Program], tuple[F64, F64]] | None = None) -> Form:
    """Unroll and fuse. `times` gives start and end of every step of the unrolled form; the walks then follow them, else the graph's depth.

    Raises: Unsupported (not executable), Deadlock, what `times` raises.
    """
    unrolled = callable_form(program)
    start_s, end_s = times(unrolled) if times is not None else (None, None)
    return Form(program, unrolled, fuse_lanes(unrolled, start_s, end_s))


def compile_rank(form: Form, rank: int, elements: int) -> RankCode:
    """Code of `rank` for `elements` elements per block (all-gather: of one shard; all-reduce: of the tensor).

    Raises: Unsupported (no contract, unequal blocks, chunks that change their size on the way), at all ranks or at none.
    """
    return _Compiler(form, rank, elements).run()


def posted_depth(sizes: Sequence[int], depth: int, most: int) -> int:
    """How many receives of a channel are posted ahead: its depth, or more while they hold no more than `most`. `sizes`: of its messages, in order."""
    first = held = 0
    fitting = min(len(sizes), TAG_WINDOW)
    for end, size in enumerate(sizes, 1):
        held += size
        while held > most:
            held -= sizes[first]
            first += 1
        if first:  # the longest run of messages up to this one that fits begins there
            fitting = min(fitting, end - first)
    return max(depth, fitting)


class _Compiler(Places):
    def __init__(self, form: Form, rank: int, elements: int) -> None:
        super().__init__(form, rank, elements)
        self.require_fitting()
        self.program = self.posted_early()
        self.schedule: Schedule = compile_schedule(self.program, form.orders, rank, sends_ahead=MAX_SENDS_AHEAD, staged_ahead=True)
        self.out: list[Instruction] = []
        self.slots: list[int] = []  # elements of every staging slot
        self.channel_of: list[int] = []  # of every slot
        self.free: dict[int, list[int]] = defaultdict(list)  # channel -> free staging slots; channels share none, so none waits for another
        self.staged: dict[int, int] = {}  # step -> slot that its message lies in
        self.parted: dict[int, int] = {}  # step -> slot that a message of several runs is sent from

    def posted_early(self) -> Program:
        """The program with as many receives of this rank ahead as MAX_ELEMENTS_AHEAD allows: at least each channel's depth.

        More depth takes waits away and adds none, so the walks stay those of the checked order.
        """
        channels = self.program.channels
        depth = channels.depth.copy()
        for channel in np.flatnonzero(channels.dst == self.rank).tolist():
            sizes = [self.message(self.sender[step]) for step in self.receives[channel]]
            depth[channel] = posted_depth(sizes, int(depth[channel]), MAX_ELEMENTS_AHEAD)
        return replace(self.program, channels=replace(channels, depth=depth))

    def run(self) -> RankCode:
        schedule, order = self.schedule, self.schedule.order.tolist()
        for position in range(len(order) + 1):
            # Sends that must be over, then receives: a receive may land where such a send still read.
            for step in schedule.waits.get(position, ()):
                self.done(step)
            for receive in schedule.posts.get(position, ()):
                self.post(receive.step)
            if position < len(order):
                self.step(order[position])
        return RankCode(
            rank=self.rank, instructions=tuple(self.out), spaces=tuple(r.map.total for r in self.mine), roles=tuple(r.role for r in self.mine),
            staging=tuple(self.slots), elements=self.full.elements, blocks=self.full.blocks, steps=len(order), unrolled=self.program,
            order=schedule.order,
        )  # fmt: skip

    def slot(self, channel: int, elements: int) -> int:
        """A staging slot of at least so many elements: the channel's one that has been free for longest, or a new one."""
        free = self.free[channel]
        if free:
            # The one free for longest: its last reader is the likeliest to be over when the next message is posted into it.
            found = free.pop(0)
            self.slots[found] = max(self.slots[found], elements)
            return found
        self.slots.append(elements)
        self.channel_of.append(channel)
        return len(self.slots) - 1

    def release(self, slot: int) -> None:
        self.free[self.channel_of[slot]].append(slot)

    # ---- instructions ------------------------------------------------------------------------------------------
    def post(self, step: int) -> None:
        receive = self.schedule.receives[step]
        elements = self.message(self.sender[step])
        if not elements:
            return
        where = self.at(self.dst[step]) if receive.direct else []
        # Straight into its place only if that is one run of elements: a receive of gloo takes one tensor.
        if len(where) == 1:
            place = where[0]
        else:
            slot = self.staged[step] = self.slot(receive.tag // TAG_WINDOW, elements)
            place = (-1 - slot, 0, elements)
        self.out.append(Instruction(Op.POST, step, place=place, key=step, peer=receive.peer, tag=receive.tag))

    def done(self, step: int) -> None:
        if self.message(step):
            target = self.schedule.sends[step]
            self.out.append(Instruction(Op.DONE, step, key=step, peer=target.peer, tag=target.tag))
        for kept in (self.staged, self.parted):
            if (slot := kept.pop(step, None)) is not None:
                self.release(slot)

    def step(self, step: int) -> None:
        if int(self.program.steps.kind[step]) != Kind.TRANSFER:
            return
        parts = self.parts[step]
        passes = bool(parts & Part.SEND)
        if parts & Part.RECV:
            here = self.take(step, keep=passes and not parts & Part.STORE)
        elif parts & Part.STORE:
            here = self.local(step)
        else:
            here = self.at(self.src[step])
        if passes:
            self.send(step, here)

    def take(self, step: int, *, keep: bool) -> list[Place]:
        """Wait for the message and put it where it belongs; gives where what a send part would pass on lies."""
        receive, parts = self.schedule.receives[step], self.parts[step]
        elements = self.message(self.sender[step])
        if not elements:
            return []
        self.out.append(Instruction(Op.TAKE, step, key=step, peer=receive.peer, tag=receive.tag))
        if step not in self.staged:
            return self.at(self.dst[step])
        slot = self.staged[step]
        if parts & Part.STORE:
            into = self.at(self.dst[step])
            if parts & Part.ADD:
                if self.src[step] != self.dst[step]:
                    self.pairwise(Op.COPY, step, into, self.at(self.src[step]))
                self.from_slot(Op.ADD, step, into, slot)
            else:
                self.from_slot(Op.COPY, step, into, slot)
            self.release(self.staged.pop(step))
            return into
        if parts & Part.ADD:
            first = 0
            for place in self.at(self.src[step]):
                end = first + place[2] - place[1]
                self.out.append(Instruction(Op.ADD, step, place=(-1 - slot, first, end), source=place))
                first = end
        if not keep:
            self.release(self.staged.pop(step))
        return [(-1 - slot, 0, elements)]

    def local(self, step: int) -> list[Place]:
        into, source = self.at(self.dst[step]), self.at(self.src[step])
        self.pairwise(Op.ADD if self.parts[step] & Part.ADD else Op.COPY, step, into, source)
        return into

    def pairwise(self, op: Op, step: int, into: list[Place], source: list[Place]) -> None:
        self.out += [Instruction(op, step, place=place, source=other) for place, other in paired(into, source)]

    def from_slot(self, op: Op, step: int, into: list[Place], slot: int) -> None:
        self.pairwise(op, step, into, [(-1 - slot, 0, sum(b - a for _, a, b in into))])

    def send(self, step: int, where: list[Place]) -> None:
        elements = sum(high - low for _, low, high in where)
        if not elements:
            return
        if len(where) > 1:
            # Slots of sends have channel numbers below 0, so that no receive waits for a send's slot.
            slot = self.parted[step] = self.slot(-1 - self.schedule.sends[step].tag // TAG_WINDOW, elements)
            first = 0
            for place in where:
                end = first + place[2] - place[1]
                self.out.append(Instruction(Op.COPY, step, place=(-1 - slot, first, end), source=place))
                first = end
            where = [(-1 - slot, 0, elements)]
        target = self.schedule.sends[step]
        self.out.append(Instruction(Op.SEND, step, place=where[0], key=step, peer=target.peer, tag=target.tag))
