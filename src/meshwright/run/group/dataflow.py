"""What each instruction of a rank's code waits for, and nothing more.

The code is one checked order (`rank_code`). Walked strictly in it, a rank stands still at one neighbour's late message while another's lies there. So
the order is only a priority: an instruction may run as soon as what it depends on is over. It depends on
  - whoever last wrote what it reads or overwrites, and everybody who still reads what it overwrites. A posted receive writes from its posting to its
    arrival, a send reads from its posting until the transport has taken it;
  - the steps before it in its lane and the steps that its step is `after`: sends posted, everything else done;
  - on a channel, the posting before it; a receive also on the arrival `depth` messages ahead, which bounds what is in flight.
Adds into one place keep their order, so equal plans give equal bits whatever comes first.

All dependencies point backwards in the code, and all codes of a program are parts of one order of all ranks. So the first instruction in that order
that has not run can run: nobody waits for ever.
Cost: O(I log I) for I instructions whose places have few different borders.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...program.program import Program
from ..executor.tags import TAG_WINDOW
from .instructions import Instruction, Op, Place

__all__ = ["Dataflow", "dataflow"]


@dataclass(frozen=True)
class Dataflow:
    """By instruction: how many others it waits for, and who waits for it (ascending)."""

    waits: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]


def dataflow(instructions: Sequence[Instruction], program: Program, order: Sequence[int]) -> Dataflow:
    """`program`: the unrolled form whose steps the instructions name; `order`: the rank's walk through it (of steps)."""
    before: list[set[int]] = [set() for _ in instructions]
    _places(instructions, before)
    _steps(instructions, program, order, before)
    _channels(instructions, program.channels.depth.tolist(), before)
    followers: list[list[int]] = [[] for _ in instructions]
    for row, on in enumerate(before):
        for earlier in on:
            followers[earlier].append(row)
    return Dataflow(tuple(map(len, before)), tuple(map(tuple, followers)))


class _Space:
    """Who last wrote and who reads every stretch of a buffer or slot between two borders."""

    def __init__(self, borders: set[int]) -> None:
        self.borders = sorted(borders)
        self.writer = [-1] * len(self.borders)
        self.readers: list[list[int]] = [[] for _ in self.borders]

    def stretches(self, place: Place) -> range:
        return range(bisect_left(self.borders, place[1]), bisect_left(self.borders, place[2]))

    def read(self, place: Place, until: int) -> set[int]:
        """Instruction `until` ends the reading; gives what it waits for."""
        found = set()
        for at in self.stretches(place):
            found.add(self.writer[at])
            self.readers[at].append(until)
        return found

    def write(self, place: Place, until: int) -> set[int]:
        found = set()
        for at in self.stretches(place):
            found.add(self.writer[at])
            # Earlier writers need not be kept: this one waits for the last, which waited for them.
            found.update(self.readers[at])
            self.writer[at], self.readers[at] = until, []
        return found


def _places(instructions: Sequence[Instruction], before: list[set[int]]) -> None:
    ends = {(i.op, i.key): row for row, i in enumerate(instructions) if i.op in (Op.TAKE, Op.DONE)}
    borders: dict[int, set[int]] = defaultdict(set)
    for i in instructions:
        for place in (i.place, i.source) if i.op in (Op.COPY, Op.ADD) else (i.place,) if i.op in (Op.POST, Op.SEND) else ():
            borders[place[0]].update(place[1:])
    spaces = {number: _Space(found) for number, found in borders.items()}
    for row, i in enumerate(instructions):
        if i.op in (Op.POST, Op.SEND):
            until = ends[Op.TAKE if i.op == Op.POST else Op.DONE, i.key]
            # The end of a message waits for its posting, and stands for both: whoever comes later waits for the end alone.
            before[until].add(row)
            space = spaces[i.place[0]]
            before[row] |= space.write(i.place, until) if i.op == Op.POST else space.read(i.place, until)
        elif i.op in (Op.COPY, Op.ADD):
            before[row] |= spaces[i.source[0]].read(i.source, row) | spaces[i.place[0]].write(i.place, row)
        # -1: nobody has written there. A copy within one stretch finds itself as its reader.
        before[row] -= {-1, row}


def _steps(instructions: Sequence[Instruction], program: Program, order: Sequence[int], before: list[set[int]]) -> None:
    """Lane order and `after`. A receive may be posted, and its message arrive, before its step's turn."""
    of_step: dict[int, list[int]] = defaultdict(list)
    takes: dict[int, int] = {}
    for row, i in enumerate(instructions):
        if i.op == Op.TAKE:
            takes[i.step] = row
        elif i.op not in (Op.POST, Op.DONE):
            of_step[i.step].append(row)
    s = program.steps
    ptr, on, lag = s.after_ptr.tolist(), s.after_step.tolist(), s.after_lag.tolist()
    begins = set(program.lanes.start.tolist())
    ends: dict[int, frozenset[int]] = {}  # step -> the instructions that end it
    for step in order:
        earlier = ends[step - 1] if step not in begins else frozenset()
        for e in range(ptr[step], ptr[step + 1]):
            if lag[e] == 0:
                earlier |= ends[on[e]]
        rows = of_step.get(step)
        if rows:
            before[rows[0]] |= earlier
            for first, second in pairwise(rows):
                before[second].add(first)
            earlier = frozenset(rows[-1:])
        elif step in takes:  # a message that lies where it belongs when it arrives
            earlier |= {takes[step]}
        ends[step] = earlier


def _channels(instructions: Sequence[Instruction], depth: Sequence[int], before: list[set[int]]) -> None:
    sent: dict[int, int] = {}
    posted: dict[int, int] = {}
    takes: dict[int, list[int]] = defaultdict(list)
    for row, i in enumerate(instructions):
        channel = i.tag // TAG_WINDOW
        if i.op == Op.TAKE:
            takes[channel].append(row)
    count: dict[int, int] = defaultdict(int)
    for row, i in enumerate(instructions):
        channel = i.tag // TAG_WINDOW
        if i.op == Op.SEND:
            if channel in sent:
                before[row].add(sent[channel])
            sent[channel] = row
        elif i.op == Op.POST:
            if channel in posted:
                before[row].add(posted[channel])
            if count[channel] >= depth[channel]:
                # The arrival `depth` messages before: so no more than `depth` receives of a channel are posted at a time.
                before[row].add(takes[channel][count[channel] - depth[channel]])
            posted[channel] = row
            count[channel] += 1
