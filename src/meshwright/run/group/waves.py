"""A collective program as waves of messages, for transports that have neither tags nor waits: NCCL's point-to-point calls.

NCCL matches messages of a pair in the order of the calls, and a call occupies its stream until the peer has made its own. Calls made as one group
go on together. So all messages of a program are given to waves, the same at all ranks: wave w of a rank is one group of everything that it sends and
receives in w, then the additions and copies that this makes possible. A rank's group w needs its peers' groups w and nothing later, so waves
made in ascending order at every rank all end, whatever the program (induction over w).

The wave of a message is the longest way to it in the graph of what the program orders: a message comes at least one wave after what its sender
sends is there, and after the message `depth` before it on its channel has been used; the steps after a sending step come no sooner than its message.
That graph is the one that is checked for deadlock (`check`), so a checked program always has waves.
A message whose place is still in use, or is added to, is received into staging.

What it costs against `rank_code` (a lane goes on as soon as its own message is there): all messages of a wave wait for its slowest.
Cost: O(steps) for the waves, once per program; O(steps of the rank) for its code, once per length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

import torch

from ...errors import Deadlock
from ...program.program import Kind, Part, Program
from ..executor.lanes import channel_messages
from .chunk_places import Form, Places, paired, viewer
from .instructions import Op, Place

__all__ = ["BoundWaves", "Exchange", "WaveCode", "Waves", "compile_waves", "walk_waves", "waves_of"]


@dataclass(frozen=True)
class Waves:
    """By step: `act`, the wave after which it adds, copies or sends (0: before all); `wave`, that of the message which it sends, or 0."""

    act: tuple[int, ...]
    wave: tuple[int, ...]

    @property
    def count(self) -> int:
        return max(self.wave, default=0)


def waves_of(program: Program) -> Waves:
    """Of a program without repeats. Raises: Deadlock (its steps wait for each other), Unsupported (a channel with unequal ends)."""
    s, count = program.steps, len(program.steps)
    ptr, on, lag = s.after_ptr.tolist(), s.after_step.tolist(), s.after_lag.tolist()
    begins, parts = set(program.lanes.start.tolist()), s.parts.tolist()
    sends, receives = channel_messages(program)
    # Nodes: steps, and after them the messages by their sending steps. Edges: (node, waves later).
    follow: list[list[tuple[int, int]]] = [[] for _ in range(2 * count)]
    left = [0] * (2 * count)

    def edge(first: int, then: int, waves: int) -> None:
        follow[first].append((then, waves))
        left[then] += 1

    sending = {step for steps in sends for step in steps}
    for step in range(count):
        earlier = [step - 1] if step not in begins else []
        earlier += [on[e] for e in range(ptr[step], ptr[step + 1]) if lag[e] == 0]
        for one in earlier:
            # What follows a sending step follows its message: a group of calls returns only when all of its messages have gone.
            edge(one + count if one in sending else one, step, 0)
        if step in sending:
            # A wave later than the step: the additions of wave w come after its group, so their result can be sent in w + 1 at the earliest.
            edge(step, step + count, 1)
    depth = program.channels.depth.tolist()
    for channel, (out, into) in enumerate(zip(sends, receives, strict=True)):
        for i, (sender, receiver) in enumerate(zip(out, into, strict=True)):
            # In the same wave: what a message makes possible is done right behind its group.
            edge(sender + count, receiver, 0)
            if i:
                # Without tags NCCL matches calls in their order, so messages of a channel may share a wave but never overtake each other.
                edge(out[i - 1] + count, sender + count, 0)
            if i >= depth[channel]:
                # The channel holds `depth` messages: this one needs the place of the one that many before it, used a wave before.
                edge(into[i - depth[channel]], sender + count, 1)
    # Longest ways in topological order: every edge is relaxed once, when all that comes before its node is known.
    at = [0] * (2 * count)
    todo = [node for node in range(2 * count) if not left[node] and (node < count or node - count in sending)]
    done = 0
    while todo:
        node = todo.pop()
        done += 1
        for then, waves in follow[node]:
            at[then] = max(at[then], at[node] + waves)
            left[then] -= 1
            if not left[then]:
                todo.append(then)
    # A node that was never free is in a circle or behind one.
    if done < count + len(sending):
        stuck = [step for step in range(count) if left[step]]
        raise Deadlock(
            f"{len(stuck)} steps wait for each other", where=program.describe(stuck[0]), hint="check the program with `meshwright collective check`",
            data={"steps": stuck[:16]},
        )  # fmt: skip
    messages = [at[step + count] if parts[step] & Part.SEND else 0 for step in range(count)]
    return Waves(tuple(at[:count]), tuple(messages))


@dataclass(frozen=True)
class _Wave:
    """What one rank does: messages as (place, peer), in the same order at both ends; then (operation, place, source)."""

    sends: tuple[tuple[Place, int], ...]
    receives: tuple[tuple[Place, int], ...]
    then: tuple[tuple[Op, Place, Place], ...]


@dataclass(frozen=True)
class WaveCode:
    """One rank's part of a program, for one tensor length. Fields as in `rank_code.RankCode`; `waves[0]` has no messages."""

    rank: int
    waves: tuple[_Wave, ...]
    spaces: tuple[int, ...]
    roles: tuple[str, ...]
    staging: tuple[int, ...]
    elements: int
    blocks: int
    unrolled: Program = field(repr=False)

    def bind(self, buffers: Sequence[torch.Tensor], staging: Sequence[torch.Tensor]) -> BoundWaves:
        """`buffers`: flat tensors of the rank's buffers; `staging`: of its slots."""
        view = viewer(buffers, staging)
        return tuple(
            (
                [(view(place), peer) for place, peer in wave.sends],
                [(view(place), peer) for place, peer in wave.receives],
                [(op, view(place), view(source)) for op, place, source in wave.then],
            )
            for wave in self.waves
        )


Messages = list[tuple[torch.Tensor, int]]  # tensor, peer
BoundWaves = tuple[tuple[Messages, Messages, list[tuple[Op, torch.Tensor, torch.Tensor]]], ...]


class Exchange(Protocol):
    """Sends and receives as one group, in the order given for each pair. When it returns, what is done to the tensors next comes after the messages:
    at once, or in the order of the current stream."""

    def __call__(self, sends: Messages, receives: Messages) -> None: ...


def walk_waves(bound: BoundWaves, exchange: Exchange, reduce: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    """`reduce`: in place into the first. Raises: what `exchange` raises."""
    for sends, receives, then in bound:
        if sends or receives:
            exchange(sends, receives)
        for op, place, source in then:
            if op == Op.ADD:
                reduce(place, source)
            else:
                place.copy_(source)


def compile_waves(form: Form, waves: Waves, rank: int, elements: int) -> WaveCode:
    """Code of `rank` for `elements` elements per block, as `rank_code.compile_rank`.

    Raises: Unsupported (no contract, unequal blocks, chunks that change their size on the way), at all ranks or at none.
    """
    return _Compiler(form, waves, rank, elements).run()


@dataclass
class _Slots:
    """Staging. A slot is used from a moment to a moment, (wave, 0) while messages go, (wave, 1) after them; later uses take it again."""

    sizes: list[int] = field(default_factory=list)
    uses: list[tuple[tuple[int, int], tuple[int, int], int, int]] = field(default_factory=list)  # first, last, elements, number of the use

    def use(self, first: tuple[int, int], elements: int) -> int:
        """The number of a use; say when it ends."""
        self.uses.append((first, first, elements, len(self.uses)))
        return len(self.uses) - 1

    def until(self, use: int, last: tuple[int, int]) -> None:
        first, _, elements, number = self.uses[use]
        self.uses[use] = first, last, elements, number

    def places(self) -> list[int]:
        """A slot for every use: none has two uses at one moment."""
        found, free, busy = [0] * len(self.uses), [], []  # type: list[int], list[int], list[tuple[tuple[int, int], int]]
        for first, last, elements, number in sorted(self.uses):
            # Strictly before: a use that ends in the moment in which another begins still holds its slot.
            while busy and busy[0][0] < first:
                heappush(free, heappop(busy)[1])
            slot = heappop(free) if free else len(self.sizes)
            if slot == len(self.sizes):
                self.sizes.append(0)
            self.sizes[slot] = max(self.sizes[slot], elements)
            heappush(busy, (last, slot))
            found[number] = slot
        return found


class _Compiler(Places):
    """Places in staging are (-1 - use, first, end) until all uses are known."""

    def __init__(self, form: Form, waves: Waves, rank: int, elements: int) -> None:
        super().__init__(form, rank, elements)
        self.waves = waves
        self.slots = _Slots()
        self.sent: dict[int, list[tuple[int, Place, int]]] = defaultdict(list)  # wave -> (message, place, peer)
        self.received: dict[int, list[tuple[int, Place, int]]] = defaultdict(list)
        self.then: dict[int, list[tuple[Op, Place, Place]]] = defaultdict(list)
        s = self.program.steps
        self.kind, actor = s.kind.tolist(), self.program.lanes.actor.tolist()
        lane_of = self.program.lane_of_step().tolist()
        self.actor = [actor[lane] for lane in lane_of]
        self.receiver = {sender: receiver for receiver, sender in self.sender.items()}
        self.direct = self.undisturbed()

    def undisturbed(self) -> set[int]:
        """Receiving steps whose place nobody uses any more when the message comes. Only steps before them could: others use it after them."""
        act, wave = self.waves.act, self.waves.wave
        until: dict[tuple[int, int], int] = {}  # (buffer, chunk) -> the last wave that it is used in or after
        found: set[int] = set()
        for step in self.form.orders[self.rank].tolist():
            parts = self.parts[step]
            if self.kind[step] != Kind.TRANSFER:
                continue
            places = [self.src[step]] * bool(parts & Part.READ) + [self.dst[step]] * bool(parts & Part.STORE)
            chunks = [(buffer, first + i) for buffer, first, count in places for i in range(count)]
            kept = bool(parts & Part.RECV and parts & Part.STORE and not parts & Part.ADD)
            if kept and all(until.get(chunk, -1) < wave[self.sender[step]] for chunk in chunks):
                found.add(step)
            # A step that sends reads its place until its message has gone, which may be waves after it acts.
            last = max(act[step], wave[step])
            for chunk in chunks:
                until[chunk] = max(until.get(chunk, -1), last)
        return found

    def run(self) -> WaveCode:
        self.require_fitting()
        act = self.waves.act
        order = self.form.orders[self.rank].tolist()
        for step in sorted(order, key=lambda step: act[step]):  # of one wave in the order of the walk
            if self.kind[step] == Kind.TRANSFER:
                self.step(step)
        slot = self.slots.places()

        def placed(place: Place) -> Place:
            return place if place[0] >= 0 else (-1 - slot[-1 - place[0]], *place[1:])

        def messages(found: list[tuple[int, Place, int]]) -> tuple[tuple[Place, int], ...]:
            # By the numbers of the sending steps, which both ends know: so the calls of a pair match within a group.
            return tuple((placed(place), peer) for _, place, peer in sorted(found))

        waves = tuple(
            _Wave(messages(self.sent[w]), messages(self.received[w]), tuple((op, placed(a), placed(b)) for op, a, b in self.then[w]))
            for w in range(self.waves.count + 1)
        )
        return WaveCode(
            rank=self.rank, waves=waves, spaces=tuple(r.map.total for r in self.mine), roles=tuple(r.role for r in self.mine),
            staging=tuple(self.slots.sizes), elements=self.full.elements, blocks=self.full.blocks, unrolled=self.program,
        )  # fmt: skip

    def step(self, step: int) -> None:
        parts, at = self.parts[step], self.waves.act[step]
        use = -1
        if parts & Part.RECV:
            here, use = self.take(step, at)
        elif parts & Part.STORE:
            here = self.at(self.dst[step])
            self.pairwise(Op.ADD if parts & Part.ADD else Op.COPY, at, here, self.at(self.src[step]))
        else:
            here = self.at(self.src[step])
        if parts & Part.SEND:
            self.send(step, at, here, use)

    def take(self, step: int, at: int) -> tuple[list[Place], int]:
        """Receives the message and puts it where it belongs; gives where what is passed on lies, and its use of staging, or -1."""
        parts, sender = self.parts[step], self.sender[step]
        elements, wave = self.message(sender), self.waves.wave[sender]
        if not elements:
            return [], -1
        into = self.at(self.dst[step]) if parts & Part.STORE else []
        if len(into) == 1 and step in self.direct:
            self.received[wave].append((sender, into[0], self.actor[sender]))
            return into, -1
        use = self.slots.use((wave, 0), elements)
        # Busy from the moment in which the message may arrive until what is done with it is done.
        self.slots.until(use, (at, 1))
        whole = (-1 - use, 0, elements)
        self.received[wave].append((sender, whole, self.actor[sender]))
        if not parts & Part.STORE:
            if parts & Part.ADD:
                self.pairwise(Op.ADD, at, [whole], self.at(self.src[step]))
            return [whole], use
        if parts & Part.ADD and self.src[step] != self.dst[step]:
            self.pairwise(Op.COPY, at, into, self.at(self.src[step]))
        self.pairwise(Op.ADD if parts & Part.ADD else Op.COPY, at, into, [whole])
        return into, -1

    def pairwise(self, op: Op, at: int, into: list[Place], source: list[Place]) -> None:
        self.then[at] += [(op, place, other) for place, other in paired(into, source)]

    def send(self, step: int, at: int, where: list[Place], use: int) -> None:
        elements, wave = sum(high - low for _, low, high in where), self.waves.wave[step]
        if not elements:
            return
        if len(where) > 1:
            use = self.slots.use((at, 1), elements)
            self.pairwise(Op.COPY, at, [(-1 - use, 0, elements)], where)
            where = [(-1 - use, 0, elements)]
        if use >= 0:
            self.slots.until(use, (wave, 0))
        self.sent[wave].append((step, where[0], self.actor[self.receiver[step]]))
