"""`Program`: the executable form of a plan. Lanes of steps, channels, buffers, work; no times, no device names.

Semantics (a program is a marked graph, so its outcome does not depend on timing):
- A lane runs its steps in order, one at a time, `repeat` times. `after (d, lag)`: iteration i of a step waits until step d has
  completed iteration i - lag (no wait while i < lag). Both lanes are on one actor and have equal `repeat`; an edge from a
  lane with `repeat` 1 means "wait once".
- A transfer step is a subset of, in this order: RECV from `chan_in`, READ `src`, ADD (received and read, or read and present
  `dst`), STORE to `dst`, SEND to `chan_out`. Receive+add+send (`rrs`) keeps nothing.
- Channels are FIFO with exactly one sending and one receiving lane; at most `depth` messages are sent and not yet consumed.
- A send is complete when its source may be overwritten, a receive when `dst` holds the data (then the credit returns).
- Two compute steps of one actor and unit never overlap. Transfers and lanes with unit -1 occupy no unit.
- Happens-before = lane order + after + channel matching. Credits never protect against races.

Everything is columns (`tables`). Global ranks only.
`program.validate` checks shape and ranges; whether a program is right is `meshwright.check`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..notebook_repr import repr_html
from .tables import I32, I64, Buffers, Calls, Channels, Comms, Lanes, Ops, Sizes, Steps

__all__ = [
    "CHUNKWISE", "COLLECTIVES", "Contract", "Fold", "FoldAxis", "Kind", "Part", "Program", "REPRODUCIBLE", "REPRODUCIBLE_SUMS", "Role", "Space",
    "Step", "Unit",
]  # fmt: skip

SCHEMA = "meshwright.program"
VERSION = 1
# Entries of a column in a file: checked from headers before arrays are made.
MAX_STEPS = 10_000_000
# Steps (and `after` edges) that a file's repeats, calls or fold may stand for: a small file must not become a large program unasked.
MAX_EXECUTED_STEPS = 1 << 24
# Ranks and switches of one program.
MAX_ACTORS = 1 << 20
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "scatter", "gather", "permute")
# What a collective promises of the bits of its sums (docs/reproducibility.md), the weakest first.
REPRODUCIBLE = ("run", "tree", "exact")
# Operations that add: of the others every level holds by itself.
REPRODUCIBLE_SUMS = ("all-reduce", "reduce-scatter", "reduce")
# Ops of collectives that work chunk by chunk, see `Ops`.
CHUNKWISE = frozenset({"select", "encode", "decode", "accumulate", "merge", "expert"})
FEATURES = frozenset({"multi", "lag", "symbolic-size", "fold", "calls", "repeat"})


class Kind(IntEnum):
    COMPUTE = 0
    TRANSFER = 1
    CALL = 2
    NOP = 3


class Part(IntFlag):
    """What a transfer step does, in this order. IN_SET / OUT_SET: the channel field names a channel set."""

    RECV = 1
    READ = 2
    ADD = 4
    STORE = 8
    SEND = 16
    IN_SET = 32
    OUT_SET = 64


_RECV, _SEND, _IN_SET, _OUT_SET = int(Part.RECV), int(Part.SEND), int(Part.IN_SET), int(Part.OUT_SET)  # flags as numbers are ten times faster


@cache
def _parts_text(parts: int) -> str:
    return "+".join(str(p.name).lower() for p in Part if p & parts and p < Part.IN_SET)


class Unit(IntEnum):
    NONE = -1
    COMPUTE = 0
    COPY = 1
    HOST = 2


class Role(IntEnum):
    """Role of a lane (display, executors) …"""

    COMPUTE = 0
    COMM = 1
    FILLER = 2
    BLOCK = 3


class Space(IntEnum):
    DEVICE = 0
    HOST = 1
    SWITCH = 2


# Roles of buffers, by number.
BUFFER_ROLES = ("input", "output", "weight", "gradient", "state", "activation", "scratch")


class FoldAxis(NamedTuple):
    """One mesh axis of the ranks: `size` values, rank = sum(coordinate · stride). Folded axes hold symmetric ranks."""

    name: str
    size: int
    stride: int
    kind: Literal["shift", "xor", "plain"]  # plain: not folded


@dataclass(frozen=True)
class Fold:
    """Symmetric ranks share lane bodies: only ranks whose folded coordinates are all 0 are stored.

    The image of a stored body under member offset m (one value per folded axis): every actor's coordinate on that axis becomes
    (coordinate + m) mod size, or coordinate xor m; a buffer of the representative becomes the image's twin, and a chunk index c
    of it becomes (c + m · shift) mod chunks for the buffer's `shift` on that axis. A channel goes from the image of its
    source to the image of its destination. Comms map to the comm that holds the images.

    `fixed`: ranks that every member leaves where they are, rising; the axes tile the others, numbered in order. They are stored too. A lane of theirs
    has one image per member like any other, all at its rank; a buffer of theirs is one buffer, whose chunks move.

    `by_rank`: every buffer is one block of equally many chunks per rank, and a block moves as its rank does. In the block of a rank that stays,
    chunk c becomes (c + m · shift) mod chunks of a block, for the buffer's `shift`; in all other blocks chunks keep their place.
    """

    axes: tuple[FoldAxis, ...]
    buffer_shift: I32  # (folded axes, buffers): chunks moved per unit of offset
    fixed: tuple[int, ...] = ()
    by_rank: bool = False

    @property
    def members(self) -> int:
        total = 1
        for axis in self.axes:
            if axis.kind != "plain":
                total *= axis.size
        return total

    def plain_buffers(self, actor: I32) -> int:
        """How many buffers the plain form has: all that are stored (at `actor`), then member after member those that move."""
        return len(actor) + int((~np.isin(actor, self.fixed)).sum()) * (self.members - 1)

    def stored_buffers(self, actor: I32, buffer: NDArray[np.integer[Any]]) -> tuple[I64, I64]:
        """(stored buffer, member) of buffers of the plain form."""
        moving = np.flatnonzero(~np.isin(actor, self.fixed))
        later = np.maximum(buffer.astype(np.int64) - len(actor), 0)
        first = buffer < len(actor)
        each = max(len(moving), 1)
        stored = np.where(first, buffer, moving[later % each] if len(moving) else 0)
        return stored.astype(np.int64), np.where(first, 0, 1 + later // each).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a collective program promises to one group of ranks, for the checker. Per member: its input and its output.

    Ranges are (buffer, first chunk, count). `ranks`: the members, () = all ranks; members are numbered by their place in it, and so are
    `root` and `peers`. Origin chunk j of member m is chunk j of `inputs[m]`.
    all-reduce: every output chunk j = sum over members of input chunk j. reduce: the same, at the root. broadcast: the root's input.
    all-gather: every output = the inputs, member after member (their counts may differ). gather: the same, at the root.
    reduce-scatter: member m's output = its part of the sum, parts in member order (their counts may differ).
    scatter: member m's output = its part of the root's input, parts in member order; only the root has an input.
    all-to-all: inputs are equal blocks by destination, outputs equal blocks by source: block s of member m = block m of member s.
    permute: member m's output = the input of member `peers[m]`; -1: nothing is promised.
    `reproducible`, of sums: "run", the order that the steps say; "tree", the fold of the complete binary tree over the contributions' numbers 0, 1,
    ... from left to right (an odd last one moves up unchanged), whatever the steps; "exact", chunks hold integers, so no order matters.
    `numbers[m]`: of member m's contribution in the tree, () = m. It belongs to the job: another placement of ranks keeps it.
    """

    op: str
    inputs: tuple[tuple[int, int, int], ...]
    outputs: tuple[tuple[int, int, int], ...]
    root: int = -1
    ranks: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    reproducible: str = "run"
    numbers: tuple[int, ...] = ()

    def members(self, ranks: int) -> tuple[int, ...]:
        """The group's ranks in a program of `ranks` ranks."""
        return self.ranks or tuple(range(ranks))


@dataclass(frozen=True)
class Step:
    """One step as an object, made on demand for messages and tests."""

    index: int
    lane: int
    actor: int
    kind: Kind
    parts: Part
    op: int
    chan_in: int
    chan_out: int
    src: tuple[int, int]
    dst: tuple[int, int]
    count: int
    size: int
    after: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """See the module's docstring. Actors 0..ranks-1 are ranks, ranks..ranks+switches-1 are in-network compute."""

    ranks: int
    lanes: Lanes
    steps: Steps
    channels: Channels
    buffers: Buffers
    ops: Ops
    switches: int = 0
    sizes: Sizes = field(default_factory=Sizes)
    comms: Comms = field(default_factory=Comms)
    calls: Calls = field(default_factory=Calls.none)
    fold: Fold | None = None
    contracts: tuple[Contract, ...] = ()
    name: str = ""
    _repr_html_ = repr_html

    @property
    def contract(self) -> Contract | None:
        """The contract of a program that has one; None without, or where several groups have one each."""
        return self.contracts[0] if len(self.contracts) == 1 else None

    @property
    def requires(self) -> tuple[str, ...]:
        """Features a reader must know."""
        found = []
        if len(self.channels.sets):
            found.append("multi")
        if np.any(self.steps.after_lag):
            found.append("lag")
        if len(self.sizes):
            found.append("symbolic-size")
        if self.fold is not None:
            found.append("fold")
        if len(self.calls):
            found.append("calls")
        if np.any(self.lanes.repeat > 1):
            found.append("repeat")
        return tuple(found)

    @property
    def executed_steps(self) -> int:
        """Steps executed by the stored lanes, repeats counted (times fold members for a folded program)."""
        total = int(((self.lanes.end - self.lanes.start).astype(np.int64) * self.lanes.repeat).sum())
        return total * (self.fold.members if self.fold else 1)

    def lane_of_step(self) -> I32:
        """Lane of every step."""
        out: I32 = np.repeat(np.arange(len(self.lanes), dtype=np.int32), self.lanes.end - self.lanes.start)
        return out

    def step(self, index: int) -> Step:
        s = self.steps
        lane = int(np.searchsorted(self.lanes.end, index, side="right"))
        lo, hi = int(s.after_ptr[index]), int(s.after_ptr[index + 1])
        return Step(
            index, lane, int(self.lanes.actor[lane]), Kind(int(s.kind[index])), Part(int(s.parts[index])), int(s.op[index]),
            int(s.chan_in[index]), int(s.chan_out[index]), (int(s.src_buffer[index]), int(s.src_chunk[index])),
            (int(s.dst_buffer[index]), int(s.dst_chunk[index])), int(s.count[index]), int(s.size[index]),
            tuple(zip(s.after_step[lo:hi].tolist(), s.after_lag[lo:hi].tolist(), strict=True)),
        )  # fmt: skip

    def iter_steps(self) -> Iterator[Step]:
        return (self.step(i) for i in range(len(self.steps)))

    def describe(self, index: int) -> str:
        """A step in words, for messages: `rank 3 lane 5 step 17 (recv+add 2 chunks from rank 2 into grad[4])`."""
        lane = int(np.searchsorted(self.lanes.end, index, side="right"))
        actor = int(self.lanes.actor[lane])
        who = f"rank {actor}" if actor < self.ranks else f"switch {actor - self.ranks}"
        return f"{who} lane {lane} step {index} ({self.says(index)})"

    def says(self, index: int) -> str:
        """What a step does, in words: `recv+add 2 chunks from rank 2 into grad[4]`."""
        s = self.steps
        kind, parts, op, count = int(s.kind[index]), int(s.parts[index]), int(s.op[index]), int(s.count[index])
        if kind == Kind.COMPUTE:
            o = self.ops
            return f"{o.name[op]} {o.graph[op]} micro-batch {int(o.microbatch[op])}"
        if kind == Kind.CALL:
            return f"call {self.calls.names[int(self.calls.callee[op])][:12]} on comm {self.comms.name[int(self.calls.comm[op])]}"
        if kind != Kind.TRANSFER:
            return Kind(kind).name.lower()
        what = f"{_parts_text(parts)} {count} chunk{'s' if count != 1 else ''}"
        if parts & _RECV and not parts & _IN_SET:
            what += f" from rank {int(self.channels.src[s.chan_in[index]])}"
        if parts & _SEND and not parts & _OUT_SET:
            what += f" to rank {int(self.channels.dst[s.chan_out[index]])}"
        for word, buffer, chunk in (("of", int(s.src_buffer[index]), s.src_chunk), ("into", int(s.dst_buffer[index]), s.dst_chunk)):
            if buffer >= 0:
                what += f" {word} {self.buffer_name(buffer)}[{int(chunk[index])}]"
        return what

    def buffer_name(self, buffer: int) -> str:
        named = self.buffers.name[buffer] if self.buffers.name else ""
        return named or f"{BUFFER_ROLES[int(self.buffers.role[buffer])]}{buffer}"

    def message_bytes(self, which: Literal["lower", "expected", "upper"] = "expected") -> I64:
        """Bytes that every transfer step moves (0 for other steps): count · chunk bytes, or the symbol's lower, expected or upper size."""
        s, b = self.steps, self.buffers
        buffer = np.where(s.dst_buffer >= 0, s.dst_buffer, s.src_buffer)
        per = np.where(buffer >= 0, b.chunk_bytes[np.maximum(buffer, 0)] if len(b) else 0, 0)
        out: I64 = np.where(s.kind == Kind.TRANSFER, per * s.count, 0).astype(np.int64)
        if len(self.sizes):
            out = np.where(s.size >= 0, getattr(self.sizes, which)[np.maximum(s.size, 0)], out)
        return out
