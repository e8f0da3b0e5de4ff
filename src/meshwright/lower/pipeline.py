"""Messages between pipeline stages, for `training`: activations forward, gradients back, over the `connections` of the schedule, by every value.

A gradient that arrives for a value to which other stages of the rank have added theirs is added; else it is stored, being the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.orders import RECEIVES_AHEAD
from ..program.builder import LaneBuilder, StepRef
from .connections import Connection, RankOrder, connections, uses, window
from .step import RankLanes, StepLowering

__all__ = ["PipelineMessages"]


class PipelineMessages:
    """Of one program. `arrivals` says where messages will come; `emit` appends them once a rank's compute steps are there."""

    def __init__(self, low: StepLowering, ranks: Sequence[RankLanes], orders: Sequence[RankOrder]) -> None:
        self.low, self.layout = low, low.layout
        where, stages = self.layout.placement, self.layout.stages
        self.used = [uses(order) for order in orders]
        self.connections = connections(
            orders, len(stages), self.layout.copy, lambda copy, stage: where[copy][stage] if where else stage,
            lambda kind, stage: len(self.values(kind, stage)),
        )  # fmt: skip
        self.channel: dict[tuple[str, int, int, int], int] = {}  # (kind, copy, source rank, target rank)
        self.lane: dict[tuple[int, int], LaneBuilder] = {}  # (rank, id of the connection) -> its lane there
        self._open(ranks)

    def values(self, kind: str, stage: int) -> tuple[str, ...]:
        """What arrives for a stage: values that it receives, or gradients of values that it sends."""
        s = self.layout.stages[stage]
        return s.receives if kind == "F" else tuple(v for v in s.sends if self.low.value[v].differentiable)

    # ---- lanes and channels ------------------------------------------------------------------------------------
    def _open(self, ranks: Sequence[RankLanes]) -> None:
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

    def _depth(self, c: Connection) -> int:
        return RECEIVES_AHEAD * max(len(self.values(c.kind, stage)) for stage, _ in c.groups)

    def of(self, p: int, kind: str, *, sending: bool) -> list[Connection]:
        """Connections of a pipeline index."""
        return [c for c in self.connections.values() if c.kind == kind and p == (c.source if sending else c.target)]

    def arrivals(self, r: RankLanes, kind: str, stage: int, mb: int) -> list[StepRef]:
        """The receives that a stage's step waits for; they are appended later."""
        p = self.layout.coordinates(r.number)[0]
        for c in self.of(p, kind, sending=False):
            if (stage, mb) in c.first:
                first = c.first[stage, mb]
                return [StepRef(self.lane[r.number, id(c)].number, first + i) for i in range(len(self.values(kind, stage)))]
        return []

    # ---- messages ----------------------------------------------------------------------------------------------
    def emit(self, r: RankLanes) -> None:
        p = self.layout.coordinates(r.number)[0]
        mine = [(c, sending) for kind in "FB" for sending in (False, True) for c in self.of(p, kind, sending=sending)]
        windows = {id(c): window(c, self.used[c.target], RECEIVES_AHEAD) for c, sending in mine if not sending}
        for i in range(max((len(c.groups) for c, _ in mine), default=0)):
            for c, sending in mine:
                if i < len(c.groups):
                    if sending:
                        self._send(r, c, *c.groups[i])
                    else:
                        self._receive(r, c, i, windows[id(c)])

    def _peer(self, r: RankLanes, c: Connection) -> int:
        p, d, t = self.layout.coordinates(r.number)
        return self.layout.rank(c.target if p == c.source else c.source, d, t)

    def _receive(self, r: RankLanes, c: Connection, i: int, window: int) -> None:
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

    def _added_before(self, r: RankLanes, value: str, stage: int, mb: int) -> list[StepRef]:
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

    def _send(self, r: RankLanes, c: Connection, stage: int, mb: int) -> None:
        lane, channel = self.lane[r.number, id(c)], self.channel[c.kind, c.copy, r.number, self._peer(r, c)]
        for v in self.values(c.kind, stage):
            buffer = self.low.activation(r, "act" if c.kind == "F" else "grad", v, mb)
            after = r.produced[v, mb] if c.kind == "F" else r.backward_done[stage + 1, mb]
            sent = lane.send(channel, buffer, 0, self.low.b.chunks_of(buffer), after=[after])
            self.low.b.dies_after(buffer, sent)
