"""One rank's part of a sparse all-reduce's program, walked by the walk of all collectives (`run.group.walk`).

The program says what is computed, what is sent to whom, in which order, and what each of that waits for. Where a message's data lie and how long
they are, which is a symbol in the program, is asked of the exchange's arithmetic (`exchange.Exchange`) when the message is posted; messages that turn
out empty are not posted, at either end. All that a size depends on is a step that its message is `after`, and a checked program orders all accesses
to a buffer, so nothing else is worked out here: a send may be posted when the one before it in its lane is, a receive when the arrival `depth`
messages ahead on its channel is over, a compute step when the one before it in its lane is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from ...errors import Unsupported
from ...program.program import Kind, Part, Program
from ..group.dataflow import Dataflow
from ..group.instructions import Op
from ..group.walk import Under, Wait, walk

__all__ = ["ExchangeWalk", "Place", "Port", "Work"]

Words = NDArray[Any]  # one-dimensional and contiguous
SENDS = int(Part.READ | Part.SEND)
RECEIVES, RECEIVES_ADDING = int(Part.RECV | Part.STORE), int(Part.RECV | Part.READ | Part.ADD | Part.STORE)


class Place(NamedTuple):
    """Chunks of the rank's buffer `name`. Of a message also its step, the phase that it belongs to, and whether it is received, and added."""

    name: str
    first: int
    chunks: int
    step: int = -1
    phase: str = ""
    receives: bool = False
    adds: bool = False
    peer: int = -1


class Work(Protocol):
    """What compute steps do, by `<graph>|<name>` and the places that they read; and where data lie now."""

    def run(self, key: str, reads: tuple[Place, ...]) -> None: ...
    def place(self, at: Place) -> Words: ...
    def add(self, into: Place) -> None: ...


class Port(Protocol):
    """Non-blocking messages; data are not empty, and stay as they are until the work was waited for. `tag`: number of the message on its channel."""

    def send(self, data: Words, peer: int, tag: int, at: Place) -> Any: ...
    def receive(self, data: Words, peer: int, tag: int, at: Place) -> Any: ...


@dataclass
class _Row:
    op: Op
    step: int
    level: int  # longest way to it
    place: Place | None
    source: Any
    key: int
    peer: int
    tag: int


class ExchangeWalk:
    """`steps(port)` runs the program once and yields what must be waited for; compiled once per program and rank.

    Raises: Unsupported for steps that are no plain send, receive or computation. `steps`: what the work raises.
    """

    def __init__(self, program: Program, rank: int, work: Work) -> None:
        self.program, self.rank, self.work = program, rank, work
        if program.lanes.repeat.max(initial=1) > 1 or program.fold is not None or program.switches:
            raise Unsupported("repeated or folded lanes and switches take no part in a sparse exchange", where=program.name)
        compiled = _Compiler(program, rank, work)
        order = compiled.order()
        number = {row: i for i, row in enumerate(order)}
        rows, before = compiled.rows, compiled.before
        followers: list[list[int]] = [[] for _ in order]
        for i, row in enumerate(order):
            for earlier in before[row]:
                followers[number[earlier]].append(i)
        self.flow = Dataflow(tuple(len(before[row]) for row in order), tuple(tuple(sorted(f)) for f in followers))
        self.rows: tuple[tuple[int, int, Any, Any, int, int, int], ...] = tuple(
            (r.op, r.step, r.place, r.source, r.key, r.peer, r.tag) for r in (rows[row] for row in order)
        )

    def steps(self, port: Port) -> Iterator[Wait]:
        posted = _Posted(self.work, port)
        for wait in walk(self, posted, lambda place, _: self.work.add(place), Under()):
            if wait.work is not None:  # an empty message
                yield wait

    def phase(self, step: int) -> str:
        return _phase(self.program, step)


@dataclass
class _Posted:
    """`run.group.walk.Messages` over places."""

    work: Work
    port: Port

    def send(self, at: Any, peer: int, tag: int) -> Any:
        data = self.work.place(at)
        return self.port.send(data, peer, tag, at) if len(data) else None

    def receive(self, at: Any, peer: int, tag: int) -> Any:
        data = self.work.place(at)
        return self.port.receive(data, peer, tag, at) if len(data) else None


def _phase(program: Program, step: int) -> str:
    """The first word of a message's size, or of the buffer that it comes from or goes to."""
    s, b = program.steps, program.buffers
    if s.size[step] >= 0:
        return program.sizes.name[int(s.size[step])].split()[0]
    buffer = s.dst_buffer[step] if s.dst_buffer[step] >= 0 else s.src_buffer[step]
    return b.name[int(buffer)].split(":")[0]


@dataclass
class _Compiler:
    program: Program
    rank: int
    work: Work
    rows: list[_Row] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)  # rows that a row waits for

    def __post_init__(self) -> None:
        s, lanes = self.program.steps, self.program.lanes
        self.kind, self.parts, self.op, self.count = s.kind.tolist(), s.parts.tolist(), s.op.tolist(), s.count.tolist()
        self.ptr, self.after = s.after_ptr.tolist(), s.after_step.tolist()
        own = (lanes.actor == self.rank).nonzero()[0].tolist()
        mine = [range(int(lanes.start[lane]), int(lanes.end[lane])) for lane in own]
        self.ends: dict[int, int] = {}  # step -> the row that ends it
        self.sent: dict[int, int] = defaultdict(int)  # channel -> messages so far
        self.posts: dict[int, list[int]] = defaultdict(list)  # channel -> rows
        self.takes: dict[int, list[int]] = defaultdict(list)
        at = [lane.start for lane in mine]
        last: list[int | None] = [None] * len(mine)
        waiting = True
        while waiting:  # lanes in turns: a step comes when all that it is `after` have come
            waiting = False
            for i, lane in enumerate(mine):
                while at[i] < lane.stop:
                    step = at[i]
                    on = self.after[self.ptr[step] : self.ptr[step + 1]]
                    if any(e not in self.ends for e in on):
                        break
                    last[i] = self.add_step(step, {self.ends[e] for e in on}, last[i])
                    at[i] += 1
                    waiting = True

    def order(self) -> list[int]:
        """Messages are posted first, then steps computed; of what must be waited for, what has the shortest way comes first."""
        first = (Op.POST, Op.SEND)
        return sorted(range(len(self.rows)), key=lambda row: (self.rows[row].op not in first, self.rows[row].level, self.rows[row].step, row))

    def row(
        self, op: Op, step: int, before: set[int], place: Place | None = None, *, source: Any = None, key: int = -1, peer: int = -1, tag: int = -1
    ) -> int:
        level = 1 + max((self.rows[b].level for b in before), default=0)
        self.rows.append(_Row(op, step, level, place, source, key, peer, tag))
        self.before.append(before)
        return len(self.rows) - 1

    def add_step(self, step: int, after: set[int], last: int | None) -> int:
        """The row that the next step of the lane waits for."""
        in_lane = set() if last is None else {last}
        kind, parts = self.kind[step], self.parts[step]
        if kind == Kind.COMPUTE:
            self.ends[step] = self.row(Op.RUN, step, after | in_lane, source=self.compute(self.op[step]))
        elif kind == Kind.TRANSFER and parts == SENDS:
            return self.send(step, after | in_lane)
        elif kind == Kind.TRANSFER and parts in (RECEIVES, RECEIVES_ADDING):
            self.receive(step, after, in_lane, adds=parts == RECEIVES_ADDING)
        else:
            raise Unsupported("a sparse exchange sends, receives and computes", where=self.program.describe(step))
        return self.ends[step]

    def send(self, step: int, before: set[int]) -> int:
        s, channels = self.program.steps, self.program.channels
        channel = int(s.chan_out[step])
        peer, number = int(channels.dst[channel]), self.sent[channel]
        self.sent[channel] += 1
        place = self.place(int(s.src_buffer[step]), int(s.src_chunk[step]), self.count[step], step, peer=peer)
        row = self.row(Op.SEND, step, before, place, key=step, peer=peer, tag=number)
        self.ends[step] = self.row(Op.DONE, step, {row}, key=step, peer=peer)
        return row

    def receive(self, step: int, after: set[int], in_lane: set[int], *, adds: bool) -> None:
        s, channels = self.program.steps, self.program.channels
        channel = int(s.chan_in[step])
        peer, depth, posts = int(channels.src[channel]), int(channels.depth[channel]), self.posts[channel]
        before = after | set(posts[-1:])
        if len(posts) >= depth:
            before.add(self.takes[channel][-depth])
        place = self.place(int(s.dst_buffer[step]), int(s.dst_chunk[step]), self.count[step], step, receives=True, adds=adds, peer=peer)
        row = self.row(Op.POST, step, before, place, key=step, peer=peer, tag=len(posts))
        posts.append(row)
        taken = self.row(Op.TAKE, step, {row} | in_lane, key=step, peer=peer)
        self.takes[channel].append(taken)
        self.ends[step] = self.row(Op.ADD, step, {taken}, place) if adds else taken

    def place(self, buffer: int, first: int, count: int, step: int = -1, *, receives: bool = False, adds: bool = False, peer: int = -1) -> Place:
        phase = _phase(self.program, step) if step >= 0 else ""
        return Place(self.program.buffers.name[buffer].split(":")[0], first, count, step, phase, receives, adds, peer)

    def compute(self, op: int) -> Callable[[], None]:
        ops, run = self.program.ops, self.work.run
        triples = ops.reads[op].tolist()
        reads = tuple(self.place(*triples[i : i + 3]) for i in range(0, len(triples), 3))
        key = f"{ops.graph[op]}|{ops.name[op]}"
        return lambda: run(key, reads)
