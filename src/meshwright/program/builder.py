"""Builds a `Program` step by step. Planners use this; the columns it makes are what everything else reads.

    b = ProgramBuilder(ranks=2, name="swap")
    x = b.buffer(0, chunks=1, chunk_bytes=4, role="input"); y = b.buffer(1, chunks=1, chunk_bytes=4, role="output")
    c = b.channel(0, 1)
    b.lane(0).send(c, x, 0); b.lane(1).recv(c, y, 0)
    program = b.build()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, cast

import numpy as np

from .program import BUFFER_ROLES, Contract, Fold, Kind, Part, Program, Role, Space, Unit
from .tables import Buffers, Calls, Channels, Comms, Csr, Lanes, Ops, Sizes, Steps
from .validate import validate as validate_program

__all__ = ["LaneBuilder", "ProgramBuilder", "StepRef"]

Range = tuple[int, int, int]  # (buffer, first chunk, count)

COLUMNS = ("kind", "parts", "op", "chan_in", "chan_out", "src_buffer", "src_chunk", "dst_buffer", "dst_chunk", "count", "size")
_COMPUTE, _TRANSFER, _CALL, _NOP = int(Kind.COMPUTE), int(Kind.TRANSFER), int(Kind.CALL), int(Kind.NOP)
_SEND, _RECV = int(Part.READ | Part.SEND), int(Part.RECV | Part.STORE)
_RECV_ADD, _RECV_SEND = int(Part.RECV | Part.READ | Part.ADD | Part.STORE), int(Part.RECV | Part.STORE | Part.SEND)


class StepRef(NamedTuple):
    """A step not yet numbered: lane and position in it."""

    lane: int
    position: int


After = Iterable["StepRef | tuple[StepRef, int]"]


class LaneBuilder:
    """Appends steps to one lane; every method returns the step's reference, to be used in other steps' `after`."""

    __slots__ = ("actor", "cells", "edges", "number", "repeat", "role", "unit")

    def __init__(self, number: int, actor: int, unit: int, repeat: int, role: Role) -> None:
        self.number, self.actor, self.unit, self.repeat, self.role = number, actor, unit, repeat, role
        self.cells: list[int] = []  # COLUMNS of one step after the other
        self.edges: list[tuple[int, int, int, int]] = []  # (position, lane and position waited for, lag)

    def __len__(self) -> int:
        return len(self.cells) // len(COLUMNS)

    @property
    def last(self) -> StepRef:
        """The step added last."""
        return StepRef(self.number, len(self) - 1)

    def ops(self) -> Iterator[tuple[int, int]]:
        """(position, op) of every compute step."""
        return ((i, self.cells[j + 2]) for i, j in enumerate(range(0, len(self.cells), len(COLUMNS))) if self.cells[j] == _COMPUTE)

    def add(self, cells: tuple[int, ...], after: After) -> StepRef:
        """A step given by its COLUMNS."""
        position = len(self.cells) // len(COLUMNS)
        self.cells += cells
        for item in after:
            self.wait(position, item)
        return StepRef(self.number, position)

    def wait(self, position: int, on: StepRef | tuple[StepRef, int]) -> None:
        """Let a step wait for another, given with or without a lag."""
        if type(on) is StepRef:
            self.edges.append((position, on[0], on[1], 0))
        else:
            ref, lag = cast("tuple[StepRef, int]", on)
            self.edges.append((position, ref[0], ref[1], lag))

    def compute(self, op: int, *, after: After = ()) -> StepRef:
        return self.add((_COMPUTE, 0, op, -1, -1, -1, 0, -1, 0, 0, -1), after)

    def call(self, call: int, *, after: After = ()) -> StepRef:
        return self.add((_CALL, 0, call, -1, -1, -1, 0, -1, 0, 0, -1), after)

    def nop(self, *, after: After = ()) -> StepRef:
        return self.add((_NOP, 0, -1, -1, -1, -1, 0, -1, 0, 0, -1), after)

    def transfer(
        self, *, recv: int = -1, send: int = -1, src: tuple[int, int] = (-1, 0), dst: tuple[int, int] = (-1, 0), count: int = 1,
        add: bool = False, store: bool = False, size: int = -1, in_set: bool = False, out_set: bool = False, after: After = (),
    ) -> StepRef:  # fmt: skip
        """The general transfer: parts follow from which arguments are given; `src` given means READ."""
        parts = (recv >= 0) | (src[0] >= 0) << 1 | add << 2 | store << 3 | (send >= 0) << 4 | in_set << 5 | out_set << 6  # as in Part
        return self.add((_TRANSFER, parts, -1, recv, send, *src, *dst, count, size), after)

    def send(self, channel: int, buffer: int, chunk: int, count: int = 1, *, after: After = ()) -> StepRef:
        return self.add((_TRANSFER, _SEND, -1, -1, channel, buffer, chunk, -1, 0, count, -1), after)

    def recv(self, channel: int, buffer: int, chunk: int, count: int = 1, *, after: After = ()) -> StepRef:
        return self.add((_TRANSFER, _RECV, -1, channel, -1, -1, 0, buffer, chunk, count, -1), after)

    def recv_add(self, channel: int, buffer: int, chunk: int, count: int = 1, *, after: After = ()) -> StepRef:
        """Receive and add into place: R X A D with source and destination the same chunks."""
        return self.add((_TRANSFER, _RECV_ADD, -1, channel, -1, buffer, chunk, buffer, chunk, count, -1), after)

    def recv_send(self, channel: int, out: int, buffer: int, chunk: int, count: int = 1, *, after: After = ()) -> StepRef:
        """Receive, store and pass on (rcs)."""
        return self.add((_TRANSFER, _RECV_SEND, -1, channel, out, -1, 0, buffer, chunk, count, -1), after)

    def recv_add_send(self, channel: int, out: int, buffer: int, chunk: int, count: int = 1, *, keep: bool = False, after: After = ()) -> StepRef:
        """Receive, add the local chunks, pass the sum on (rrs); `keep` also stores it in place (rrcs)."""
        dst = (buffer, chunk) if keep else (-1, 0)
        return self.transfer(recv=channel, send=out, src=(buffer, chunk), dst=dst, count=count, add=True, store=keep, after=after)

    def copy(self, src: tuple[int, int], dst: tuple[int, int], count: int = 1, *, add: bool = False, after: After = ()) -> StepRef:
        return self.transfer(src=src, dst=dst, count=count, add=add, store=True, after=after)


@dataclass
class _Buffer:
    actor: int
    chunks: int
    chunk_bytes: int
    role: int
    space: Space
    size: int
    alias_of: int
    alias_offset_bytes: int
    window: int
    persistent: bool
    name: str
    last: list[StepRef]


@dataclass
class _Op:
    name: str
    graph: str
    module: str
    copy: int
    stage: int
    microbatch: int
    part: int
    parts: int
    accumulate: bool
    workspace_bytes: int
    reads: Sequence[Range]
    writes: Sequence[Range]


class ProgramBuilder:
    def __init__(self, ranks: int, *, switches: int = 0, name: str = "") -> None:
        self.ranks, self.switches, self.name = ranks, switches, name
        self._lanes: list[LaneBuilder] = []
        self._buffers: list[_Buffer] = []
        self._channels: list[tuple[int, int, int, int, int]] = []
        self._routes: list[tuple[str, ...]] = []
        self._sets: list[Sequence[int]] = []
        self._ops: list[_Op] = []
        self._sizes: list[tuple[str, int, int, int, StepRef | None]] = []
        self._comms: list[tuple[str, Sequence[int]]] = []
        self._calls: list[tuple[int, str, Sequence[Range]]] = []
        self.contract: Contract | None = None  # or, for several groups at once:
        self.contracts: tuple[Contract, ...] = ()
        self.fold: Fold | None = None

    def lane(self, actor: int, *, unit: int = Unit.NONE, repeat: int = 1, role: Role = Role.COMM) -> LaneBuilder:
        lane = LaneBuilder(len(self._lanes), actor, unit, repeat, role)
        self._lanes.append(lane)
        return lane

    def buffer(
        self, actor: int, *, chunks: int, chunk_bytes: int, role: str = "scratch", space: Space = Space.DEVICE, size: int = -1,
        alias_of: int = -1, alias_offset_bytes: int = 0, window: int = 0, persistent: bool = False, name: str = "",
    ) -> int:  # fmt: skip
        self._buffers.append(
            _Buffer(actor, chunks, chunk_bytes, BUFFER_ROLES.index(role), space, size, alias_of, alias_offset_bytes, window, persistent, name, [])
        )
        return len(self._buffers) - 1

    def view(self, of: int, *, chunks: int, role: str, name: str) -> int:
        """The first chunks of a buffer as one of its own."""
        x = self._buffers[of]
        return self.buffer(x.actor, chunks=chunks, chunk_bytes=x.chunk_bytes, role=role, persistent=x.persistent, name=name, alias_of=of)

    def chunks_of(self, buffer: int) -> int:
        return self._buffers[buffer].chunks

    def op_key(self, op: int) -> tuple[str, str, int]:
        """(name, graph, micro-batch) of an op, to find its step again."""
        o = self._ops[op]
        return o.name, o.graph, o.microbatch

    def dies_after(self, buffer: int, *steps: StepRef) -> None:
        """The buffer is dead once all of these steps (added up over calls) are complete."""
        self._buffers[buffer].last.extend(steps)

    def channel(self, src: int, dst: int, *, depth: int = 1, tag: int = -1, route: Sequence[str] | None = None) -> int:
        number = -1
        if route is not None:
            number = len(self._routes)
            self._routes.append(tuple(route))
        self._channels.append((src, dst, tag, depth, number))
        return len(self._channels) - 1

    def channel_set(self, channels: Sequence[int]) -> int:
        self._sets.append(channels)
        return len(self._sets) - 1

    def op(
        self, name: str, *, graph: str = "", module: str = "", copy: int = 0, stage: int = -1, microbatch: int = -1, part: int = 0, parts: int = 1,
        accumulate: bool = False, workspace_bytes: int = 0, reads: Sequence[Range] = (), writes: Sequence[Range] = (),
    ) -> int:  # fmt: skip
        self._ops.append(_Op(name, graph, module, copy, stage, microbatch, part, parts, accumulate, workspace_bytes, reads, writes))
        return len(self._ops) - 1

    def size(self, name: str, *, lower: int, expected: int, upper: int, producer: StepRef | None = None) -> int:
        self._sizes.append((name, lower, expected, upper, producer))
        return len(self._sizes) - 1

    def comm(self, name: str, ranks: Sequence[int]) -> int:
        self._comms.append((name, ranks))
        return len(self._comms) - 1

    def call(self, comm: int, callee: str, binds: Sequence[Range]) -> int:
        """A call of program `callee` (content hash) on `comm`; `binds` as in `Calls`."""
        self._calls.append((comm, callee, binds))
        return len(self._calls) - 1

    def build(self, *, validate: bool = True) -> Program:
        lengths = [len(lane) for lane in self._lanes]
        starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])

        def number(ref: StepRef) -> int:
            return int(starts[ref.lane]) + ref.position

        def numbers(refs: Sequence[Sequence[StepRef]]) -> Csr:
            pairs = np.fromiter(chain.from_iterable(chain.from_iterable(refs)), np.int64).reshape(-1, 2)
            return Csr(_ends(refs), (starts[pairs[:, 0]] + pairs[:, 1]).astype(np.int32))

        names = sorted({callee for _, callee, _ in self._calls})
        where = {callee: i for i, callee in enumerate(names)}

        def i32(values: Iterable[int]) -> np.ndarray:
            return np.fromiter(values, np.int32)

        def i64(values: Iterable[int]) -> np.ndarray:
            return np.fromiter(values, np.int64)

        def triples(ranges: Sequence[Sequence[Range]]) -> Csr:
            return Csr(3 * _ends(ranges), i32(chain.from_iterable(chain.from_iterable(ranges))))

        bs, ops, lanes = self._buffers, self._ops, self._lanes
        promised = self.contracts or (() if self.contract is None else (self.contract,))
        program = Program(
            ranks=self.ranks, switches=self.switches, name=self.name, contracts=promised, fold=self.fold,
            lanes=Lanes(
                actor=i32(x.actor for x in lanes), unit=i32(x.unit for x in lanes), repeat=i32(x.repeat for x in lanes),
                role=i32(x.role for x in lanes), start=i32(starts[:-1]), end=i32(starts[1:]),
            ),
            steps=self._steps(starts),
            channels=Channels(
                src=i32(c[0] for c in self._channels), dst=i32(c[1] for c in self._channels), tag=i32(c[2] for c in self._channels),
                depth=i32(c[3] for c in self._channels), route=i32(c[4] for c in self._channels),
                routes=tuple(self._routes), sets=Csr.of(self._sets),
            ),
            buffers=Buffers(
                actor=i32(x.actor for x in bs), space=i32(x.space for x in bs), role=i32(x.role for x in bs), chunks=i32(x.chunks for x in bs),
                chunk_bytes=i64(x.chunk_bytes for x in bs), size=i32(x.size for x in bs), alias_of=i32(x.alias_of for x in bs),
                alias_offset_bytes=i64(x.alias_offset_bytes for x in bs), window=i32(x.window for x in bs),
                persistent=i32(x.persistent for x in bs), last=numbers([x.last for x in bs]),
                arena_offset=np.full(len(bs), -1, np.int64), name=tuple(x.name for x in bs) if any(x.name for x in bs) else (),
            ),
            ops=Ops(
                name=tuple(o.name for o in ops), graph=tuple(o.graph for o in ops), module=tuple(o.module for o in ops),
                copy=i32(o.copy for o in ops), stage=i32(o.stage for o in ops), microbatch=i32(o.microbatch for o in ops),
                part=i32(o.part for o in ops), parts=i32(o.parts for o in ops), accumulate=i32(o.accumulate for o in ops),
                workspace_bytes=i64(o.workspace_bytes for o in ops), reads=triples([o.reads for o in ops]), writes=triples([o.writes for o in ops]),
            ),
            sizes=Sizes(
                name=tuple(x[0] for x in self._sizes), lower=i64(x[1] for x in self._sizes), expected=i64(x[2] for x in self._sizes),
                upper=i64(x[3] for x in self._sizes), producer=i32(-1 if x[4] is None else number(x[4]) for x in self._sizes),
            ),
            comms=Comms(name=tuple(c[0] for c in self._comms), groups=Csr.of([c[1] for c in self._comms])),
            calls=Calls(
                comm=i32(c[0] for c in self._calls), callee=i32(where[c[1]] for c in self._calls), names=tuple(names),
                binds=triples([c[2] for c in self._calls]),
            ),
        )  # fmt: skip
        if validate:
            validate_program(program)
        return program

    def _steps(self, starts: np.ndarray) -> Steps:
        """All lanes' steps as columns, `starts[i]` the number of lane i's first."""
        total, width = int(starts[-1]), len(COLUMNS)
        flat = np.fromiter(chain.from_iterable(lane.cells for lane in self._lanes), np.int32, count=total * width).reshape(total, width)
        columns = {name: np.ascontiguousarray(flat[:, i]) for i, name in enumerate(COLUMNS)}
        edges = np.fromiter(chain.from_iterable(edge for lane in self._lanes for edge in lane.edges), np.int64).reshape(-1, 4)
        at = np.repeat(starts[:-1], [len(lane.edges) for lane in self._lanes]) + edges[:, 0]
        order = np.argsort(at, kind="stable")  # edges may have been added late
        ptr = np.zeros(total + 1, np.int32)
        np.cumsum(np.bincount(at, minlength=total), out=ptr[1:])
        on = (starts[edges[:, 1]] + edges[:, 2])[order]
        return Steps(**columns, after_ptr=ptr, after_step=on.astype(np.int32), after_lag=edges[order, 3].astype(np.int32))


def _ends(lists: Sequence[Sequence[object]]) -> np.ndarray:
    """0, and where each list ends among all their entries."""
    ptr = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, lists), np.int32, count=len(lists)), out=ptr[1:])
    return ptr
