"""Messages between pipeline stages, for `lowering`: activations forward, gradients back, in the producer's order, with back-pressure.

A connection carries the messages of one kind (activations, gradients) and one copy of the stages from one rank to another. They are sent in the
order in which the sender computes them and received in that order, so first in first out always matches. A receive waits until the
receiver has used what came `window` groups before it: 2, or more where the receiver uses them in another order than they are made. So at most
`window` received groups per connection are ever unused, whatever the speed of the stages.

A gradient that arrives for a value to which other stages of the rank have added theirs is added; else it is stored, being the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import Unsupported
from .plan import TrainingLayout
from .program_builder import LaneBuilder, StepRef

if TYPE_CHECKING:
    from .lowering import _Lowering, _Rank

__all__ = ["RECEIVES_AHEAD", "PipelineMessages", "RankOrder", "require_orders"]

RECEIVES_AHEAD = 2

RankOrder = Sequence[tuple[str, int, int]]  # (phase, stage, micro-batch) of a rank's compute steps, in order


def require_orders(layout: TrainingLayout, orders: Sequence[RankOrder]) -> None:
    """Every pipeline index runs every phase of its micro-batches in its stages once. Raises: Unsupported."""
    phases = "FIW" if layout.split_backward else "FB"
    for p, order in enumerate(orders):
        wanted = {
            (phase, s, m) for s, c in layout.hosted(p) for m in range(layout.microbatches) if layout.copy(m) == c for phase in phases
        }  # fmt: skip
        if len(order) != len(wanted) or set(order) != wanted:
            odd = sorted(set(order) ^ wanted)
            what = f"{odd[0][1]}{odd[0][0]}{odd[0][2]}" if odd else "an action twice"
            raise Unsupported(f"the order of pipeline index {p} does not fit the layout: {what}", hint="plan order and layout together")


@dataclass
class _Connection:
    """`groups`: (stage, micro-batch) that the messages are for, in the order in which they are made; `first`: number of a group's first message."""

    kind: str  # "F": activations, "B": gradients
    copy: int
    source: int  # pipeline indices
    target: int
    groups: list[tuple[int, int]] = field(default_factory=list)
    first: dict[tuple[int, int], int] = field(default_factory=dict)
    messages: int = 0


class PipelineMessages:
    """Of one program. `arrivals` says where messages will come; `emit` appends them once a rank's compute steps are there."""

    def __init__(self, low: _Lowering, ranks: Sequence[_Rank], orders: Sequence[RankOrder]) -> None:
        self.low, self.layout = low, low.layout
        self.place = [{("B" if phase == "I" else phase, s, m): i for i, (phase, s, m) in enumerate(order)} for order in orders]
        self.connections: dict[tuple[str, int, int, int], _Connection] = {}
        for p, order in enumerate(orders):
            for phase, s, m in order:
                if phase != "W":
                    self._produce(p, "F" if phase == "F" else "B", s, m)
        self.channel: dict[tuple[str, int, int, int], int] = {}  # (kind, copy, source rank, target rank)
        self.lane: dict[tuple[int, int], LaneBuilder] = {}  # (rank, id of the connection) -> its lane there
        self._open(ranks)

    def _produce(self, p: int, kind: str, stage: int, mb: int) -> None:
        """What a step makes for the stage after (before) its own."""
        onward, lay = stage + (1 if kind == "F" else -1), self.layout
        if not 0 <= onward < len(lay.stages) or not (count := len(self.values(kind, onward))):
            return
        copy = lay.copy(mb)
        target = lay.placement[copy][onward] if lay.placement else onward
        found = self.connections.setdefault((kind, copy, p, target), _Connection(kind, copy, p, target))
        found.first[onward, mb] = found.messages
        found.messages += count
        found.groups.append((onward, mb))

    def values(self, kind: str, stage: int) -> tuple[str, ...]:
        """What arrives for a stage: values that it receives, or gradients of values that it sends."""
        s = self.layout.stages[stage]
        return s.receives if kind == "F" else tuple(v for v in s.sends if self.low.value[v].differentiable)

    # ---- lanes and channels ------------------------------------------------------------------------------------
    def _open(self, ranks: Sequence[_Rank]) -> None:
        """A channel per connection, and a lane at both ends: a rank's own four for the first of each kind, more where it has more.

        Depth counts messages, so it is that of `RECEIVES_AHEAD` groups: else the last value of a group would wait for the first one's receipt.
        """
        lay, b = self.layout, self.low.b
        for r in ranks:
            p, d, t = lay.coordinates(r.number)
            for c in self.of(p, "F", sending=True):
                peer = lay.rank(c.target, d, t)
                self.channel["F", c.copy, r.number, peer] = b.channel(r.number, peer, depth=self._depth(c))
                if (back := self.connections.get(("B", c.copy, c.target, p))) is not None:
                    self.channel["B", c.copy, peer, r.number] = b.channel(peer, r.number, depth=self._depth(back))
        for r in ranks:
            p = lay.coordinates(r.number)[0]
            own = {("F", False): r.recv_act, ("F", True): r.send_act, ("B", False): r.recv_grad, ("B", True): r.send_grad}
            for (kind, sending), lane in own.items():
                for i, c in enumerate(self.of(p, kind, sending=sending)):
                    self.lane[r.number, id(c)] = b.lane(r.number) if i else lane

    def _depth(self, c: _Connection) -> int:
        return RECEIVES_AHEAD * max(len(self.values(c.kind, stage)) for stage, _ in c.groups)

    def of(self, p: int, kind: str, *, sending: bool) -> list[_Connection]:
        """Connections of a pipeline index."""
        return [c for c in self.connections.values() if c.kind == kind and p == (c.source if sending else c.target)]

    def arrivals(self, r: _Rank, kind: str, stage: int, mb: int) -> list[StepRef]:
        """The receives that a stage's step waits for; they are appended later."""
        p = self.layout.coordinates(r.number)[0]
        for c in self.of(p, kind, sending=False):
            if (stage, mb) in c.first:
                first = c.first[stage, mb]
                return [StepRef(self.lane[r.number, id(c)].number, first + i) for i in range(len(self.values(kind, stage)))]
        return []

    # ---- messages ----------------------------------------------------------------------------------------------
    def emit(self, r: _Rank) -> None:
        p = self.layout.coordinates(r.number)[0]
        mine = [(c, sending) for kind in "FB" for sending in (False, True) for c in self.of(p, kind, sending=sending)]
        windows = {id(c): self._window(c) for c, sending in mine if not sending}
        for i in range(max((len(c.groups) for c, _ in mine), default=0)):
            for c, sending in mine:
                if i < len(c.groups):
                    if sending:
                        self._send(r, c, *c.groups[i])
                    else:
                        self._receive(r, c, i, windows[id(c)])

    def _peer(self, r: _Rank, c: _Connection) -> int:
        p, d, t = self.layout.coordinates(r.number)
        return self.layout.rank(c.target if p == c.source else c.source, d, t)

    def _receive(self, r: _Rank, c: _Connection, i: int, window: int) -> None:
        stage, mb = c.groups[i]
        done = r.forward_done if c.kind == "F" else r.backward_done
        freed = [done[c.groups[i - window]]] if i >= window else []
        lane, channel = self.lane[r.number, id(c)], self.channel[c.kind, c.copy, self._peer(r, c), r.number]
        for v in self.values(c.kind, stage):
            buffer = self.low.activation(r, "act" if c.kind == "F" else "grad", v, mb)
            chunks = self.low.b.chunks_of(buffer)
            earlier = self._added_before(r, v, stage, mb) if c.kind == "B" else []
            if earlier:
                lane.recv_add(channel, buffer, 0, chunks, after=[*freed, *earlier])
                continue
            ref = lane.recv(channel, buffer, 0, chunks, after=freed)
            if c.kind == "F":
                r.produced.setdefault((v, mb), ref)

    def _added_before(self, r: _Rank, value: str, stage: int, mb: int) -> list[StepRef]:
        """Backward steps of later stages of this rank that add to the gradient that arrives."""
        lay = self.layout
        p = lay.coordinates(r.number)[0]
        found = []
        for s, copy in lay.hosted(p):
            keys = lay.stages[s].segments
            reads = any(value in self.low.segment[key].reads for key in keys)
            if s > stage and copy == lay.copy(mb) and (reads or value in self.values("B", s)):
                found.append(r.backward_done[s, mb])
        return found

    def _send(self, r: _Rank, c: _Connection, stage: int, mb: int) -> None:
        lane, channel = self.lane[r.number, id(c)], self.channel[c.kind, c.copy, r.number, self._peer(r, c)]
        for v in self.values(c.kind, stage):
            buffer = self.low.activation(r, "act" if c.kind == "F" else "grad", v, mb)
            after = r.produced[v, mb] if c.kind == "F" else r.backward_done[stage + 1, mb]
            sent = lane.send(channel, buffer, 0, self.low.b.chunks_of(buffer), after=[after])
            self.low.b.dies_after(buffer, sent)

    def _window(self, c: _Connection) -> int:
        """Groups that the receiver holds at most: 2, or as many as its order of use asks for."""
        place = self.place[c.target]
        window, highest = RECEIVES_AHEAD, list[int]()
        for j, (stage, mb) in enumerate(c.groups):
            used = place[c.kind, stage, mb]
            highest.append(max(used, highest[-1]) if highest else used)
            while j >= window and highest[j - window] > used:  # all up to j - window must be used before group j is
                window += 1
        return window
