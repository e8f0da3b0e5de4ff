"""The steps of a collective program as MSCCL sees memory: input, output and scratch in chunks of one size.

A program works on buffers of its own; MSCCL on those of the call, which may coincide (in place) or not. A chunk of the message has the input as
its first home and the output, or scratch, as its second: the first store moves it. So a schedule written in place runs on separate buffers
without copies, as vendor files do (`rrc` from `i` to `o`), and never writes into the caller's input. Chunks that no step stores but the
output needs (a rank's own part) are copied; so are those that a local sum would both read and store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Literal

import numpy as np

from ..errors import Unsupported
from ..program.program import Kind, Part, Program

__all__ = ["Access", "Home", "Memory", "Move", "Place", "accesses_of", "execution_order"]

Place = Literal["in", "out", "both"]
Home = tuple[str, int]  # buffer letter, chunk

_LETTERS = ((Part.RECV, "R"), (Part.READ, "X"), (Part.ADD, "A"), (Part.STORE, "D"), (Part.SEND, "S"))


@dataclass(slots=True)
class Move:
    """A step. `order`: its place in one order that respects every wait; `after`: moves of the same rank that it waits for."""

    rank: int
    lane: int
    order: int
    parts: str
    receives: int  # channel of the program, -1 = none
    sends: int
    src: Home
    dst: Home
    count: int
    after: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Access:
    """A step before its chunks have homes: byte ranges of root buffers."""

    move: Move
    src: tuple[int, int]  # root buffer, first byte
    dst: tuple[int, int]
    size: int


class Memory:
    """Homes of every rank's chunks. Chunk = `unit` bytes of the program; `whole` chunks are the message of `nchunksperloop`."""

    def __init__(self, p: Program, place: Place) -> None:
        self.p, self.place = p, place
        c = p.contract
        assert c is not None
        self.contract = c
        b = p.buffers
        self.root, self.base = b.alias_of.astype(np.int64), np.zeros(len(b), np.int64)
        top, up, by = np.arange(len(b)), b.alias_of.astype(np.int64), b.alias_offset_bytes.astype(np.int64)
        while np.any(live := up >= 0):
            self.base = np.where(live, self.base + by, self.base)
            top = np.where(live, up, top)
            by, up = np.where(live, b.alias_offset_bytes[np.maximum(up, 0)], 0), np.where(live, b.alias_of[np.maximum(up, 0)], -1)
        self.root = top
        one = c.op in ("broadcast", "scatter")  # only the root gives something; of a reduce or gather only the root gets something
        self.inputs = [self._region(r, empty=one and m != c.root) for m, r in enumerate(c.inputs)]
        self.outputs = [self._region(r, empty=c.op in ("reduce", "gather") and m != c.root) for m, r in enumerate(c.outputs)]
        self.unit = 1
        self.scratch = [0] * p.ranks
        self.extra: list[dict[tuple[int, int], int]] = [{} for _ in range(p.ranks)]

    def _region(self, of: tuple[int, int, int], *, empty: bool) -> tuple[int, int, int]:
        """(root buffer, first byte, end byte) of a range of the contract."""
        buffer, first, count = of[0], of[1], 0 if empty else of[2]
        lo = int(self.base[buffer] + first * self.p.buffers.chunk_bytes[buffer])
        return int(self.root[buffer]), lo, lo + int(count * self.p.buffers.chunk_bytes[buffer])

    def cut(self, accesses: Sequence[Access]) -> None:
        """Choose the biggest chunk of which everything is a multiple."""
        unit = 0
        for a in accesses:
            for used, (_, lo) in (("X" in a.move.parts, a.src), ("D" in a.move.parts, a.dst)):
                unit = gcd(unit, lo) if used else unit
            unit = gcd(unit, a.size)
        for _, lo, hi in (*self.inputs, *self.outputs):
            unit = gcd(gcd(unit, lo), hi - lo)
        self.unit = max(1, unit)

    def chunks(self, region: tuple[int, int, int]) -> int:
        return (region[2] - region[1]) // self.unit

    def in_input(self, rank: int, cell: tuple[int, int]) -> int:
        return self._inside(self.inputs[rank], cell)

    def in_output(self, rank: int, cell: tuple[int, int]) -> int:
        return self._inside(self.outputs[rank], cell)

    def _inside(self, region: tuple[int, int, int], cell: tuple[int, int]) -> int:
        root, lo, hi = region
        at = cell[1] * self.unit
        return (at - lo) // self.unit if root == cell[0] and lo <= at < hi else -1

    def first_home(self, rank: int, cell: tuple[int, int]) -> Home | None:
        k = self.in_input(rank, cell)
        if self.place == "in" and k >= 0:
            return self.second_home(rank, cell)
        return ("i", k) if k >= 0 else None

    def second_home(self, rank: int, cell: tuple[int, int]) -> Home:
        k = self.in_output(rank, cell)
        if k >= 0:
            return ("o", k)
        if self.place == "in" and (k := self.in_input(rank, cell)) >= 0:
            return ("i", k)
        return ("s", self.extra[rank][cell])

    def allot(self, rank: int, cells: set[tuple[int, int]]) -> None:
        """Scratch for the cells that the call has no room for, neighbours side by side."""
        for cell in sorted(cells):
            if self.in_output(rank, cell) < 0 and not (self.place == "in" and self.in_input(rank, cell) >= 0):
                self.extra[rank][cell] = self.scratch[rank]
                self.scratch[rank] += 1

    def more_scratch(self, rank: int, chunks: int) -> Home:
        first = self.scratch[rank]
        self.scratch[rank] += chunks
        return ("s", first)

    def require_in_place(self) -> None:
        """The program's own input and output must coincide as those of an in-place call do."""
        op = self.contract.op
        for r, (i, o) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            if i[1] == i[2] or o[1] == o[2]:
                continue
            size_i, size_o = i[2] - i[1], o[2] - o[1]
            shift = r * size_i if op in ("all-gather", "gather") else -r * size_o if op in ("reduce-scatter", "scatter") else 0
            if i[0] != o[0] or i[1] - o[1] != shift:
                raise Unsupported(
                    f"rank {r}: this schedule's input and output do not coincide as those of an in-place {op}", hint="export it with --place out"
                )


# ---- from the program --------------------------------------------------------------------------------------------------
def execution_order(p: Program, depth: int) -> np.ndarray:
    """A place for every step in an order in which each can be executed as a whole."""
    s = p.steps
    rank_of = np.full(len(s), -1, np.int64)
    at, end = p.lanes.start.tolist(), p.lanes.end.tolist()
    has_in, has_out = ((s.parts & Part.RECV) != 0).tolist(), ((s.parts & Part.SEND) != 0).tolist()
    chan_in, chan_out = s.chan_in.tolist(), s.chan_out.tolist()
    lane_of = p.lane_of_step().tolist()
    waiting: list[list[int]] = [[] for _ in range(len(s))]
    full = [0] * len(p.channels)
    wakes: dict[tuple[str, int], list[int]] = {}
    todo, queued, done = deque(range(len(at))), [True] * len(at), 0
    ptr, on, lag = s.after_ptr.tolist(), s.after_step.tolist(), s.after_lag.tolist()
    while todo:
        lane = todo.popleft()
        queued[lane] = False
        step = at[lane]
        if step == end[lane]:
            continue
        late = next((on[e] for e in range(ptr[step], ptr[step + 1]) if not lag[e] and rank_of[on[e]] < 0), -1)
        if late >= 0:
            waiting[late].append(lane)
            continue
        if has_in[step] and not full[chan_in[step]]:
            wakes.setdefault(("in", chan_in[step]), []).append(lane)
            continue
        if has_out[step] and full[chan_out[step]] >= depth:
            wakes.setdefault(("out", chan_out[step]), []).append(lane)
            continue
        rank_of[step], done = done, done + 1
        at[lane] += 1
        woken = [lane, *waiting[step]]
        if has_in[step]:
            full[chan_in[step]] -= 1
            woken += wakes.pop(("out", chan_in[step]), [])
        if has_out[step]:
            full[chan_out[step]] += 1
            woken += wakes.pop(("in", chan_out[step]), [])
        for w in woken:
            if not queued[w]:
                queued[w] = True
                todo.append(w)
    if done < len(s):
        stuck = int(np.argmax(rank_of < 0))
        raise Unsupported(
            f"with channels of depth {depth} this schedule stops before {p.describe(stuck)}", hint="the executor's channels hold no more",
            data={"limit": "depth", "lane": lane_of[stuck]},
        )  # fmt: skip
    return rank_of


def accesses_of(p: Program, memory: Memory, order: np.ndarray) -> list[Access]:
    """The transfers with data, in program order; waits for and of nops are handed on to their neighbours."""
    s = p.steps
    lane_of = p.lane_of_step().tolist()
    number: dict[int, int] = {}
    found: list[Access] = []
    behind: dict[int, list[int]] = {}  # nop or empty step -> steps whose completion it stands for
    carried: list[int] = []
    previous, lane = -1, -1

    def meant(step: int) -> list[int]:
        return behind.get(step, [step])

    rows: list[tuple[Access, list[int]]] = []
    # Columns as lists, and a word per set of parts: programs have a million steps, and a look at an array's element costs as much as the rest of one.
    ptr, on, lag = s.after_ptr.tolist(), s.after_step.tolist(), s.after_lag.tolist()
    words = {mask: "".join(letter for part, letter in _LETTERS if mask & int(part)) for mask in np.unique(s.parts).tolist()}
    parts_of, is_transfer, count, place = s.parts.tolist(), (s.kind == Kind.TRANSFER).tolist(), s.count.tolist(), order.tolist()
    chan_in, chan_out, actor = s.chan_in.tolist(), s.chan_out.tolist(), p.lanes.actor.tolist()
    src_buffer, src_chunk, dst_buffer, dst_chunk = s.src_buffer.tolist(), s.src_chunk.tolist(), s.dst_buffer.tolist(), s.dst_chunk.tolist()
    root, base, chunk_bytes = memory.root.tolist(), memory.base.tolist(), p.buffers.chunk_bytes.tolist()

    def address(buffer: int, chunk: int) -> tuple[int, int]:
        return root[buffer], base[buffer] + chunk * chunk_bytes[buffer]

    for step in range(len(s)):
        if lane_of[step] != lane:
            lane, previous, carried = lane_of[step], -1, []
        waits = [on[e] for e in range(ptr[step], ptr[step + 1]) if not lag[e]]
        parts = words[parts_of[step]] if is_transfer[step] else ""
        if not parts or not count[step]:
            carried += waits
            behind[step] = [*([previous] if previous >= 0 else []), *carried]
            continue
        buffer = dst_buffer[step] if dst_buffer[step] >= 0 else src_buffer[step]
        receives, sends = chan_in[step] if "R" in parts else -1, chan_out[step] if "S" in parts else -1
        move = Move(actor[lane], lane, place[step], parts, receives, sends, ("", 0), ("", 0), 0)
        src = address(src_buffer[step], src_chunk[step]) if "X" in parts else (-1, 0)
        dst = address(dst_buffer[step], dst_chunk[step]) if "D" in parts else (-1, 0)
        access = Access(move, src, dst, count[step] * chunk_bytes[buffer])
        number[step] = len(found)
        found.append(access)
        rows.append((access, carried + waits))
        previous, carried = step, []
    for access, waits in rows:
        todo, seen = list(waits), set()
        while todo:
            step = todo.pop()
            if step in seen:
                continue
            seen.add(step)
            if step in number:
                access.move.after.append(number[step])
            else:
                todo += meant(step)
    return found
