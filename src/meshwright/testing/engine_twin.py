"""The engine again in plain Python, for clarity and not for speed: what the compiled engine must equal, bit for bit.

A lane is a generator that yields conditions; it goes on when its condition holds. Time moves from event to event; at one instant
first all events by (lane, then channel, then message), then every lane once in lane order, until nothing changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from ..simulate.tables import WAKE_S, LinkTables, ProgramTables

__all__ = ["Twin", "simulate_twin"]

Condition = Callable[[], bool]
Key = tuple[int, int, int]  # (0, lane, 0) before (1, channel, message)


@dataclass
class Channel:
    depth: int
    sender: int
    route: list[int]
    sent: int = 0
    arrived: int = 0
    consumed: int = 0

    def has_message(self) -> bool:
        return self.arrived > self.consumed

    def has_credit(self) -> bool:
        return self.sent - self.consumed < self.depth


@dataclass
class Link:
    rate: float
    latency: float
    burst: float
    free: float = 0.0
    busy: float = 0.0
    tokens: float = 0.0
    tokens_at: float = 0.0
    unused: float = 0.0


@dataclass
class Processor:
    """Gives `quota` seconds of itself per `period`, one piece of work after the other; quota 0: no limit. Goes from period to period.

    While it runs it may overdraw by `overrun`; it starts again when that is paid."""

    quota: float
    period: float
    overrun: float = 0.0
    free: float = 0.0
    number: int = 0  # of the period that `left` is of
    left: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.quota

    def serve(self, asked: float, work: float) -> tuple[float, float]:
        now, begin, running = max(asked, self.free), None, asked <= self.free
        self.advance(now)
        while work > 0:
            until = (self.number + 1) * self.period
            may = self.left + self.overrun if running or self.left > 0 else 0.0
            part = min(work, max(0.0, may), until - now) if self.quota else work
            if part > 0:
                begin = now if begin is None else begin
                now, work, self.left = now + part, work - part, self.left - part
            if work > 0:
                running = now >= until
                now = until
                self.advance(now)
        self.free = now
        return now if begin is None else begin, now

    def advance(self, now: float) -> None:
        """Fill up once for every period that begins until `now`."""
        while self.quota and now >= (self.number + 1) * self.period:
            self.number, self.left = self.number + 1, min(self.quota, self.left + self.quota)


@dataclass
class Flow:
    left: float
    since: float
    rate: float = 0.0
    ends: float = float("inf")


@dataclass
class Twin:
    """State and outcome. `start`, `end`: by (step, iteration); `deadlocked`: lanes that never finish."""

    t: ProgramTables
    k: LinkTables
    now: float = 0.0
    start: dict[tuple[int, int], float] = field(default_factory=dict)
    end: dict[tuple[int, int], float] = field(default_factory=dict)
    deadlocked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        t, k = self.t, self.k
        self.channels = [
            Channel(int(t.depth[c]), int(t.sender[c]), k.route_link[k.route_ptr[c] : k.route_ptr[c + 1]].tolist()) for c in range(len(t.depth))
        ]
        rows = zip(k.rate.tolist(), k.latency.tolist(), k.burst.tolist(), strict=True)
        self.links = [Link(rate, latency, burst, tokens=burst, unused=rate) for rate, latency, burst in rows]
        self.processors = [Processor(*x) for x in zip(t.quota.tolist(), t.period.tolist(), t.overrun.tolist(), strict=True)]
        for one, work in zip(self.processors, t.begin.tolist(), strict=True):
            one.serve(0.0, work)
        waiting = [one.free for one, step in zip(self.processors, t.waits_in.tolist(), strict=True) if step >= 0]
        self.known = max(waiting, default=0.0) + t.begin_wait
        self.events: list[tuple[float, Key, int, Callable[[], object]]] = []
        self.pushed = count()
        for one, step in zip(self.processors, t.waits_in.tolist(), strict=True):
            if step >= 0 and t.begin_sum > 0:
                self.at(one.free, (-1, 0, 0), partial(one.serve, one.free, t.begin_sum))
        self.done = [0] * len(t.kind)
        self.unit_owner: dict[int, int] = {}
        self.unit_queue: dict[int, list[int]] = {}
        self.pending = [0] * len(t.lane_start)  # messages a lane waits to be released
        self.release = [0.0] * len(t.lane_start)
        self.flows: dict[int, Flow] = {}
        self.flows_before: dict[int, float] = {}  # rates of the flows that were active when this instant began
        self.changed: set[int] = set()
        self.released: dict[int, Callable[[], object]] = {}  # by channel: what the end of its flow completes

    # ---- events ------------------------------------------------------------------------------------------------
    def at(self, time: float, key: Key, action: Callable[[], object]) -> None:
        heapq.heappush(self.events, (time, key, next(self.pushed), action))

    def run(self) -> Twin:
        lanes = [self.lane(number) for number in range(len(self.t.lane_start))]
        waits: list[Condition | None] = [lambda: True for _ in lanes]
        while True:
            while self.next_time() <= self.now:
                self.next_event()
            if self.visit(lanes, waits) or self.next_time() <= self.now:
                continue
            if self.changed:
                self.new_rates()
            elif self.next_time() < float("inf"):
                self.now = self.next_time()
            else:
                break
        self.deadlocked = [number for number, wait in enumerate(waits) if wait is not None]
        return self

    def next_time(self) -> float:
        flows = min((flow.ends for flow in self.flows.values()), default=float("inf"))
        return min(flows, self.events[0][0] if self.events else float("inf"))

    def next_event(self) -> None:
        ready = [((1, c, -1), c) for c, flow in self.flows.items() if flow.ends <= self.now]
        if ready and (not self.events or self.events[0][:2] > (self.flows[min(ready)[1]].ends, min(ready)[0])):
            self.end_flow(min(ready)[1])
        else:
            heapq.heappop(self.events)[3]()

    def visit(self, lanes: list[Generator[Condition, None, None]], waits: list[Condition | None]) -> bool:
        moved = False
        for number, lane in enumerate(lanes):
            wait = waits[number]
            while wait is not None and wait():
                moved = True
                wait = next(lane, None)
                waits[number] = wait
        return moved

    # ---- a lane ------------------------------------------------------------------------------------------------
    def lane(self, lane: int) -> Generator[Condition, None, None]:
        t = self.t
        for turn in range(int(t.lane_repeat[lane])):
            for step in range(int(t.lane_start[lane]), int(t.lane_end[lane])):
                for e in range(int(t.after_ptr[step]), int(t.after_ptr[step + 1])):
                    other = int(t.after_step[e])
                    needed = min(turn - int(t.after_lag[e]) + 1, int(t.repeat[other]))
                    yield partial(self.has_done, other, needed)
                if t.kind[step] == 0:
                    yield from self.compute(lane, step, turn)
                else:
                    yield from self.transfer(lane, step, turn)

    def local_part(self, lane: int, work: float) -> tuple[float, float]:
        processor = int(self.t.lane_processor[lane])
        return (self.now, self.now + work) if processor < 0 or work <= 0 else self.processors[processor].serve(self.now, work)

    def has_done(self, step: int, times: int) -> bool:
        return self.done[step] >= times

    def finish(self, step: int, turn: int) -> None:
        self.end[step, turn] = self.now
        self.done[step] += 1

    def compute(self, lane: int, step: int, turn: int) -> Generator[Condition, None, None]:
        t = self.t
        unit, duration = int(t.lane_unit[lane]), float(t.duration[step])
        if unit >= 0:
            queue = self.unit_queue.setdefault(unit, [])
            queue.append(lane)
            yield lambda: unit not in self.unit_owner and queue[0] == lane
            self.unit_owner[unit] = queue.pop(0)
        self.start[step, turn], end = self.local_part(lane, duration)
        processor = int(t.lane_processor[lane])
        if turn == 0 and processor >= 0 and t.waits_in[processor] == step and duration > 0 and end < self.known:
            _, end = self.processors[processor].serve(self.known, WAKE_S)

        def ended() -> None:
            self.unit_owner.pop(unit, None)
            self.finish(step, turn)

        if duration > 0:
            self.at(end, (0, lane, 0), ended)
            yield lambda: (step, turn) in self.end
        else:
            ended()

    def transfer(self, lane: int, step: int, turn: int) -> Generator[Condition, None, None]:
        t = self.t
        incoming = [self.channels[c] for c in t.in_channel[t.in_ptr[step] : t.in_ptr[step + 1]]]
        outgoing = t.out_channel[t.out_ptr[step] : t.out_ptr[step + 1]].tolist()
        self.start[step, turn] = self.now
        for channel in incoming:
            yield channel.has_message
        taken: list[bool] = []

        def local_done() -> None:
            for channel in incoming:
                channel.consumed += 1
            taken.append(True)
            if not outgoing:
                self.finish(step, turn)

        if t.duration[step] > 0:
            work, processor = float(t.duration[step]), int(t.lane_processor[lane])
            if processor >= 0 and outgoing and not incoming:
                self.processors[processor].serve(self.now, work)
                self.at(self.now + work, (0, lane, 0), local_done)
            else:
                self.at(self.local_part(lane, work)[1], (0, lane, 0), local_done)
            yield lambda: bool(taken)
        else:
            local_done()
        if not outgoing:
            return
        for c in outgoing:
            yield self.channels[c].has_credit
        self.pending[lane], self.release[lane] = len(outgoing), self.now
        released = partial(self.finish, step, turn)
        for c in outgoing:
            self.channels[c].sent += 1
            if self.k.fair:
                self.begin_flow(c, float(t.size[step]), released)
            else:
                self.inject(c, float(t.size[step]), self.channels[c].sent, 0, released)
        yield lambda: (step, turn) in self.end

    def arrive(self, c: int) -> None:
        self.channels[c].arrived += 1

    # ---- exclusive links ---------------------------------------------------------------------------------------
    def inject(self, c: int, left: float, message: int, segment: int, released: Callable[[], object]) -> None:
        size = min(left, self.k.segment) if self.k.segment > 0 else left
        leaves = self.pass_link(c, 0, size, self.now, (1, c, message * 1_000_000 + segment + 1), last=size == left)
        if size < left:
            self.at(leaves, (1, c, 0), partial(self.inject, c, left - size, message, segment + 1, released))
            return
        lane = self.channels[c].sender
        self.pending[lane] -= 1
        self.release[lane] = max(self.release[lane], leaves)
        if not self.pending[lane]:
            self.at(self.release[lane], (0, lane, 0), released)

    def pass_link(self, c: int, hop: int, size: float, tail_before: float, key: Key, *, last: bool) -> float:
        route = self.channels[c].route
        if not route:
            if last:
                self.at(self.now + float(self.k.library[c]), key, lambda: self.arrive(c))
            return self.now
        x = self.links[route[hop]]
        start = max(self.now, x.free)
        service = size / x.rate
        if x.burst > 0:
            have = min(x.burst, x.tokens + x.rate * (start - x.tokens_at))
            service = max(0.0, size - have) / x.rate
            x.tokens, x.tokens_at = max(0.0, have - size), start + service
        tail = max(start + service, tail_before)
        x.free = tail
        x.busy += service
        if hop + 1 < len(route):
            self.at(start + x.latency, key, partial(self.next_hop, c, hop + 1, size, tail + x.latency, key, last))
        elif last:
            self.at(tail + x.latency + float(self.k.library[c]), key, lambda: self.arrive(c))
        return tail

    def next_hop(self, c: int, hop: int, size: float, tail_before: float, key: Key, last: bool) -> None:
        self.pass_link(c, hop, size, tail_before, key, last=last)

    # ---- fair links --------------------------------------------------------------------------------------------
    def begin_flow(self, c: int, size: float, released: Callable[[], object]) -> None:
        route = self.channels[c].route
        self.released[c] = released
        rest = size - self.take_tokens(route, size) if size > 0 and route else 0.0
        if rest <= 0:
            self.at(self.now, (1, c, -1), lambda: self.release_fair(c))
            return
        for x in route:
            self.links[x].busy += rest / self.links[x].rate
        flow = self.flows[c] = Flow(rest, self.now)
        if c in self.flows_before:  # the last one ended at this very instant
            flow.rate = self.flows_before[c]
            flow.ends = self.now + rest / flow.rate
            self.changed.discard(c)
            del self.flows_before[c]
        else:
            self.changed.add(c)

    def take_tokens(self, route: list[int], size: float) -> float:
        free = size
        for x in route:
            if self.links[x].burst <= 0:
                return 0.0
            self.refill(x)
            free = min(free, self.links[x].tokens)
        for x in route:
            self.links[x].tokens -= free
        return free

    def refill(self, x: int) -> None:
        link = self.links[x]
        link.tokens = min(link.burst, link.tokens + max(0.0, link.unused) * (self.now - link.tokens_at))
        link.tokens_at = self.now

    def end_flow(self, c: int) -> None:
        self.flows_before[c] = self.flows.pop(c).rate
        self.changed.add(c)
        self.release_fair(c)

    def release_fair(self, c: int) -> None:
        channel = self.channels[c]
        self.at(self.now + float(self.k.flight[c]), (1, c, channel.sent), lambda: self.arrive(c))
        self.pending[channel.sender] -= 1
        if not self.pending[channel.sender]:
            self.released[c]()

    def new_rates(self) -> None:
        """Max-min fair rates of all flows; a flow whose rate stays keeps its planned end."""
        self.flows_before.clear()
        touched = self.connected({x for c in self.changed for x in self.channels[c].route})
        self.changed.clear()
        for x in touched:
            if self.links[x].burst > 0:
                self.refill(x)
        for c, rate in self.fill().items():
            flow = self.flows[c]
            if rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (self.now - flow.since))
                flow.since, flow.rate, flow.ends = self.now, rate, self.now + flow.left / rate

    def connected(self, links: set[int]) -> set[int]:
        while True:
            more = {x for c in self.flows for x in self.channels[c].route if links & set(self.channels[c].route)}
            if more <= links:
                return links
            links = links | more

    def fill(self) -> dict[int, float]:
        left = {x: link.rate for x, link in enumerate(self.links)}
        rate: dict[int, float] = {}
        level: dict[int, float] = {}
        while len(rate) < len(self.flows):
            waiting = {x: [c for c in self.flows if c not in rate and x in self.channels[c].route] for x in left}
            share = {x: left[x] / len(flows) for x, flows in waiting.items() if flows}
            component = self.connected(set(self.channels[next(c for c in self.flows if c not in rate)].route))
            least = max(min(share[x] for x in component if x in share), max((level.get(x, 0.0) for x in component), default=0.0))
            full = [x for x in component if x in share and share[x] <= least * (1.0 + 1e-12)]
            for c in sorted({c for x in full for c in waiting[x]}):
                rate[c] = least
                for x in self.channels[c].route:
                    left[x] -= least
            for x in component:
                level[x] = least
        for x, link in enumerate(self.links):
            link.unused = left[x]
        return rate


def simulate_twin(t: ProgramTables, k: LinkTables) -> Twin:
    """Run the tables through the twin."""
    return Twin(t, k).run()
