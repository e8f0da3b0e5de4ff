"""Messages of context parallelism, for `training`: values exchanged among the ranks that share samples, and their gradients the other way.

Each rank has two lanes that send and receive for forward, and two for backward. An exchanged value is sent as soon as it is there, so a block is on
its way while the one before it is attended to. A receive waits until the rank has made, or got, what it sends in the same exchange: it never holds
more than its own micro-batches in flight ask for. Gradients that come back are added to those that the rank has for what it sent.

A block that is received again (`ContextExchange.again`) is `act:` until its forward steps are done, and `actagain:` for its backward. It comes from
the neighbour behind, which had it for the backward before its own, or made it itself. It may come while the step before its backward is computed, so
a rank holds two at a time.

Where segments run forward again, their exchanges do, over the channels and lanes of forward.
Of experts' rows (`plan.experts`) messages carry the filled ones alone. Their numbers travel before, and both ends keep them as long as rows travel.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from ..plan.context import among_experts, came_from, filled_rows, layout_exchanges, received_again
from ..plan.copies import COPIED, blocks_of, given, places_of
from ..plan.copies import came_from as copy_came_from
from ..plan.experts import BACK, FILLED
from ..plan.plan import ContextExchange, Segment
from ..program.builder import LaneBuilder, StepRef
from .step import RankLanes, StepLowering

__all__ = ["ContextMessages"]


class ContextMessages:
    """Of one program; nothing without context parallelism."""

    def __init__(self, low: StepLowering, ranks: Sequence[RankLanes]) -> None:
        self.low, lay = low, low.layout
        self.exchanges = layout_exchanges(low.layout)
        self.kind = {x.target: "experts" if among_experts(lay, x) else "context" for x in self.exchanges}  # whose exchange it is
        self.parts = {"experts": lay.expert, "context": lay.context}
        self.targets = {x.target: x for x in self.exchanges}
        self.sources = {x.source: x for x in self.exchanges}
        self.lanes: dict[tuple[int, str], LaneBuilder] = {}
        self.channels: dict[tuple[str, str, int, int], int] = {}  # (way, kind, from, to)
        self.back: dict[tuple[int, str, int], StepRef] = {}  # (rank, value, micro-batch) -> the last gradient of it that came back
        self.read = {v for s in low.layout.segments for v in s.reads}
        self.again = received_again(low.layout)
        self.filled, self.sizes = filled_rows(low.layout), dict[str, int]()
        self.keys = {v: s.key for s in low.layout.segments for v in s.reads if v in self.again}
        if not self.exchanges:
            return
        for r in ranks:
            for way in ("send F", "receive F", "send B", "receive B", *(("send again", "receive again") if self.again else ())):
                self.lanes[r.number, way] = low.b.lane(r.number)
        for r in ranks:
            for kind in sorted({*self.kind.values()}):
                self._channels(r.number, kind)

    def _channels(self, rank: int, kind: str) -> None:
        """With the other members of a rank's group."""
        low, parts, me = self.low, self.parts[kind], self.member(rank, kind)
        p, d, t = low.layout.coordinates(rank)
        comm = low.comm(f"{kind}:{p}.{d // parts}.{t}", tuple(self.rank(rank, kind, i) for i in range(parts)))
        ways = {x.kind for x in self.exchanges if self.kind[x.target] == kind}
        others = {i for way in {*ways} - {COPIED} for block in range(parts) for i in (came_from(way, me, parts, block)[0],) if i != me}
        for source in sorted(others):
            peer = self.rank(rank, kind, source)
            ahead = (rank, self.rank(rank, kind, (me - source) % parts)) if low.folded else (peer, rank)  # the first of an orbit is stored
            self.channels["F", kind, *ahead] = low.b.channel(*ahead, tag=comm)
            self.channels["B", kind, rank, peer] = low.b.channel(rank, peer, tag=comm)
            if self.again and kind == "context":
                self.channels["again", kind, rank, peer] = low.b.channel(rank, peer, tag=comm)

    def member(self, rank: int, kind: str) -> int:
        return self.low.layout.coordinates(rank)[1] % self.parts[kind]

    def rank(self, rank: int, kind: str, member: int) -> int:
        """The rank of this one's group that is member `member`."""
        lay = self.low.layout
        p, d, t = lay.coordinates(rank)
        return lay.rank(p, d - d % self.parts[kind] + member, t)

    def channel(self, way: str, x: ContextExchange, source: int, target: int, of: int) -> int:
        """From member `source` to member `target` of the group of rank `of`."""
        return self.between(way, self.kind[x.target], source, target, of)

    def between(self, way: str, kind: str, source: int, target: int, of: int) -> int:
        """The same of one way; folded, its image that starts at the representative."""
        if self.low.folded:
            source, target = self.member(of, kind), (self.member(of, kind) + target - source) % self.parts[kind]
        return self.channels[way, kind, self.rank(of, kind, source), self.rank(of, kind, target)]

    def blocks(self, x: ContextExchange, member: int) -> list[tuple[int, int, int]]:
        """(from which member, its block, block here) of what a member gets of others, in the order in which it comes; and of itself, last."""
        parts = self.parts[self.kind[x.target]]
        if x.copies is not UNSET:
            return [(*copy_came_from(x.copies, member, i), i) for i in range(places_of(x.copies))]
        if x.kind == "shift":
            return [(came_from(x.kind, member, parts, 0)[0], 0, 0)]
        order = [(member - k) % parts for k in (*range(1, parts), 0)]
        return [(*came_from(x.kind, member, parts, i), i) for i in order]

    def sends(self, x: ContextExchange, member: int) -> list[tuple[int, int]]:
        """(to which member, block here) of what a member has for others, in the order of their receives."""
        parts = self.parts[self.kind[x.target]]
        if x.copies is not UNSET:
            return [(to, i) for i, (_, to) in enumerate(given(x.copies, member))]
        if x.kind == "shift":
            return [((member + 1) % parts, 0)]
        return [((member + k) % parts, (member + k) % parts) for k in range(1, parts)]

    # ---- messages of filled rows -------------------------------------------------------------------------------
    def size(self, x: ContextExchange, source: int, target: int) -> int:
        """The symbol for the size of a message between a member with the source and one with the target; -1 for whole blocks."""
        if x.expected_bytes is UNSET:
            return -1
        experts = source if x.target.rpartition("/")[2] == BACK else target
        expected = x.expected_bytes[experts]
        if self.low.folded:  # one size for all: what goes to the fullest
            experts, expected = 0, max(x.expected_bytes)
        name = f"{FILLED}{x.target}:{experts}"
        if name not in self.sizes:
            whole, lay = self.low.value[x.source], self.low.layout
            most, among = whole.size_bytes // self.parts[self.kind[x.target]], lay.tensor if whole.split is not None else 1  # with equal shares
            self.sizes[name] = self.low.b.size(name, lower=0, expected=min(expected, most) // among, upper=most // among)
        return self.sizes[name]

    def counted(self, r: RankLanes, value: str, mb: int, step: StepRef) -> None:
        """A message of filled rows needs their numbers, which live as long."""
        if value in self.filled:
            self.low.b.dies_after(self.low.activation(r, "act", self.filled[value], mb), step)

    # ---- forward -----------------------------------------------------------------------------------------------
    def waits(self, r: RankLanes, s: Segment, mb: int, *, again: bool = False) -> list[StepRef]:
        """Receives of what a segment reads."""
        remade = self.low.remade[s.key] if again else frozenset()
        return [r.produced[f"remade:{v}" if v in remade else v, mb] for v in s.reads if v in self.targets]

    def forward(self, r: RankLanes, s: Segment, mb: int, *, again: bool = False) -> None:
        """Exchanges of what a segment wrote, and of what came of it in turn; `again`: once more, with what the second forward pass wrote."""
        for value in sorted(s.writes, key=self.filled.__contains__):  # numbers of rows before rows
            while (x := self.sources.get(value)) is not None and (not again or x.target in self.low.remade[s.key]):
                self._exchange(r, x, mb, again=again)
                value = x.target

    def _exchange(self, r: RankLanes, x: ContextExchange, mb: int, *, again: bool) -> None:
        pass_, kind = ("remade:", "remade") if again else ("", "act")
        made, me = r.produced[pass_ + x.source, mb], self.member(r.number, self.kind[x.target])
        own, came = self.low.activation(r, kind, x.source, mb), self.low.activation(r, kind, x.target, mb)
        send, receive = self.lanes[r.number, "send F"], self.lanes[r.number, "receive F"]
        for member, block in self.sends(x, me):
            size = self.size(x, me, member)
            sent = send.transfer(send=self.channel("F", x, me, member, r.number), src=(own, block), size=size, after=[made])
            self.low.b.dies_after(own, sent)
            self.counted(r, x.source, mb, sent)
        for member, there, here in self.blocks(x, me):
            if member == me:
                last = receive.copy((own, there), (came, here), 1, after=[made])
                self.low.b.dies_after(own, last)
            else:
                channel, size = self.channel("F", x, member, me, r.number), self.size(x, member, me)
                last = receive.transfer(recv=channel, dst=(came, here), store=True, size=size, after=[made])
                self.counted(r, x.target, mb, last)
        r.produced[pass_ + x.target, mb] = last

    # ---- backward ----------------------------------------------------------------------------------------------
    def name(self, s: Segment, value: str, mb: int) -> str:
        """The buffer in which backward of a segment finds a value that it read."""
        return f"actagain:{value}:{s.key}:{mb}" if value in self.again or value in s.gathers else f"{self.low.kind(s.key, value)}:{value}:{mb}"

    def receive_again(self, r: RankLanes, s: Segment, mb: int) -> tuple[list[StepRef], list[int]]:
        """Before backward of a segment: what it waits for, and the buffers that end with it."""
        waits, buffers = [], []
        for value in s.reads:
            if value not in self.again:
                continue
            kind, ahead = self.kind[value], self.sources.get(value)
            me = self.member(r.number, kind)
            if ahead is None:  # the last round: the neighbour behind made that block itself
                held = value
                while held in self.targets:
                    held = self.targets[held].source
                sent, made = self.low.activation(r, "act", held, mb), r.produced[held, mb]
            else:
                sent = r.buffers[self.name(self.low.segment[self.keys[ahead.target]], ahead.target, mb)]
                made = r.produced[f"{ahead.target}/again", mb]
            before, behind = ((me + k) % self.parts[kind] for k in (-1, 1))
            step = self.lanes[r.number, "send again"].send(self.between("again", kind, me, before, r.number), sent, 0, 1, after=[made])
            self.low.b.dies_after(sent, step)
            into = self.low.activation(r, "actagain", value, mb, segment=s.key)
            early = StepRef(r.compute.number, len(r.compute) - 2)
            step = self.lanes[r.number, "receive again"].recv(self.between("again", kind, behind, me, r.number), into, 0, 1, after=[early])
            r.produced[f"{value}/again", mb] = step
            waits.append(step)
            buffers.append(into)
        return waits, buffers

    def gradients(self, r: RankLanes, s: Segment, mb: int, done: StepRef) -> None:
        """After the backward step of a segment: gradients of what others sent go back to them, those that come back are added to the rank's own."""
        for value in s.reads:
            if not self.low.value[value].differentiable:
                continue
            ready = done
            if value in self.sources:  # those that read what was sent have added theirs: later in forward, so earlier in backward
                ready = self._add_up(r, self.sources[value], mb, [done], add=True)
            if value in self.targets:
                self._give_back(r, self.targets[value], mb, ready)

    def returned(self, r: RankLanes, s: Segment, mb: int) -> list[StepRef]:
        """What the backward step of a segment waits for: gradients of what it wrote and others got."""
        return [self.back[r.number, v, mb] for v in s.writes if (r.number, v, mb) in self.back]

    def _give_back(self, r: RankLanes, x: ContextExchange, mb: int, ready: StepRef) -> None:
        me, lane = self.member(r.number, self.kind[x.target]), self.lanes[r.number, "send B"]
        gradient = self.low.activation(r, "grad", x.target, mb)
        for member, _, here in self.blocks(x, me):
            if member != me:
                channel, size = self.channel("B", x, me, member, r.number), self.size(x, member, me)
                sent = lane.transfer(send=channel, src=(gradient, here), size=size, after=[ready])
                self.low.b.dies_after(gradient, sent)
                self.counted(r, x.target, mb, sent)
        if x.source not in self.read:
            self._add_up(r, x, mb, [ready], add=False)

    def _add_up(self, r: RankLanes, x: ContextExchange, mb: int, after: Sequence[StepRef], *, add: bool) -> StepRef:
        """Receives the gradients of a value's exchange; `add`: to what this rank has of it."""
        me, lane = self.member(r.number, self.kind[x.target]), self.lanes[r.number, "receive B"]
        into = self.low.activation(r, "grad", x.source, mb)
        for member, block in self.sends(x, me):
            channel = self.channel("B", x, member, me, r.number)
            place, size = (into, block), self.size(x, me, member)
            last = lane.transfer(recv=channel, src=place if add else (-1, 0), dst=place, add=add, store=True, size=size, after=after)
            self.counted(r, x.source, mb, last)
        for member, there, here in self.blocks(x, me):
            if member == me and (x.copies is UNSET or not given(x.copies, me)):  # nobody reads what lies in a place that no copy needs
                own = self.low.activation(r, "grad", x.target, mb)
                last = lane.copy((own, here), (into, there), 1, add=add, after=after)
                self.low.b.dies_after(own, last)
                if x.copies is not UNSET:
                    break
        for block in range(max(1, len(given(x.copies, me))), blocks_of(x.copies)) if x.copies is not UNSET else ():
            last = lane.copy((into, 0), (into, block), 1, after=after)
        self.back[r.number, x.source, mb] = last
        return last
