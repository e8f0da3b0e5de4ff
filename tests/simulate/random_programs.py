"""Random programs and fabrics with many ties: small integer times and sizes, fused steps, sets, repeats, lags, shared links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.fabric.fabric import Device, Fabric, Link, Switch
from meshwright.program.builder import LaneBuilder, ProgramBuilder, StepRef
from meshwright.program.program import Program, Unit


@dataclass
class Case:
    program: Program
    fabric: Fabric
    placement: list[str]
    durations_s: np.ndarray


def random_fabric(rng: np.random.Generator, ranks: int, switches: int, *, bursts: bool, ties: bool) -> Fabric:
    """Devices around switch `hub` (or a ring of direct links), with in-network actors `s0...` on it."""

    def rate() -> int:
        return int(rng.integers(1, 5)) if ties else int(rng.integers(1, 1_000_003))

    def latency() -> float:
        return float(rng.integers(0, 3)) if ties else float(rng.random() * 1e-3)

    links = []
    star = bool(switches) or rng.random() < 0.6
    names = [f"d{i}" for i in range(ranks)] + [f"s{i}" for i in range(switches)]
    pairs = [(n, "hub") for n in names] if star else [(names[i], names[(i + 1) % ranks]) for i in range(ranks)]
    for a, b in pairs:
        for src, dst in ((a, b), (b, a)):
            burst = int(rng.integers(0, 6)) if bursts else 0
            library = latency() if rng.random() < 0.3 else 0.0
            links.append(Link(src=src, dst=dst, rate_Bps=rate(), latency_s=latency(), library_latency_s=library, burst_bytes=burst))
    hubs = (Switch(name="hub"),) if star else ()
    devices, inside = tuple(Device(name=n) for n in names[:ranks]), tuple(Switch(name=n) for n in names[ranks:])
    return Fabric(name="random", devices=devices, switches=inside + hubs, links=tuple(links))


class _Builder:
    def __init__(self, rng: np.random.Generator, ranks: int, switches: int) -> None:
        self.rng = rng
        self.b = ProgramBuilder(ranks, switches=switches, name="random")
        self.repeat = int(rng.choice([1, 1, 2, 3]))
        actors = ranks + switches
        self.buffer = [self.b.buffer(a, chunks=16, chunk_bytes=1, window=1) for a in range(actors)]
        self.op = self.b.op("F", graph="g")
        self.once = [self.b.lane(a, unit=Unit.COMPUTE) for a in range(ranks)] if self.repeat > 1 else []
        self.lanes: list[list[LaneBuilder]] = [
            [self.b.lane(a, unit=int(rng.choice([-1, 0, 0, 1])), repeat=self.repeat) for _ in range(int(rng.integers(1, 4)))] for a in range(actors)
        ]
        self.before: list[list[StepRef]] = [[] for _ in range(actors)]
        self.channels: dict[tuple[int, int], int] = {}
        self.held: list[Callable[[], None]] = []
        self.delayed = float(rng.choice([0.0, 0.3, 0.6, 0.9]))

    def channel(self, src: LaneBuilder, dst: LaneBuilder) -> int:
        key = (src.number, dst.number)
        if key not in self.channels:
            self.channels[key] = self.b.channel(src.actor, dst.actor, depth=int(self.rng.choice([1, 1, 2, 3])))
        return self.channels[key]

    def pick(self, but: int = -1) -> LaneBuilder:
        actors = [a for a in range(len(self.lanes)) if a != but]
        lanes = self.lanes[int(self.rng.choice(actors))]
        return lanes[int(self.rng.integers(len(lanes)))]

    def after(self, lane: LaneBuilder) -> list[tuple[StepRef, int]]:
        known = self.before[lane.actor]
        if not known or self.rng.random() < 0.5:
            return []
        chosen = self.rng.choice(len(known), size=min(len(known), int(self.rng.integers(1, 3))), replace=False)
        return [(known[int(i)], int(self.rng.choice([0, 0, 0, 1, 2]))) for i in chosen]

    def add(self, lane: LaneBuilder, ref: StepRef) -> None:
        self.before[lane.actor].append(ref)

    def message(self) -> None:
        """A message, sometimes passed on by fused steps, sometimes a set at one end."""
        rng = self.rng
        count = int(rng.integers(0, 9))
        src = self.pick()
        dst = self.pick(but=src.actor)
        if rng.random() < 0.15 and len(self.lanes) > 2:
            other = self.pick(but=src.actor)
            if other.number != dst.number:
                self.multicast(src, [dst, other], count)
                return
        channel = self.channel(src, dst)
        self.add(src, src.send(channel, self.buffer[src.actor], 0, count, after=self.after(src)))
        while rng.random() < 0.4:
            onward = self.pick(but=dst.actor)
            out = self.channel(dst, onward)
            args = (channel, out, self.buffer[dst.actor], 0, count)
            step = dst.recv_add_send(*args, after=self.after(dst)) if rng.random() < 0.5 else dst.recv_send(*args, after=self.after(dst))
            self.add(dst, step)
            dst, channel = onward, out
        self.later(dst, channel, count)

    def later(self, dst: LaneBuilder, channel: int, count: int) -> None:
        """Receive now, or after other steps: then a small depth, or another lane's order, may make a deadlock."""

        def receive() -> None:
            self.add(dst, dst.recv(channel, self.buffer[dst.actor], 0, count, after=self.after(dst)))

        if self.rng.random() < self.delayed:
            self.held.append(receive)
        else:
            receive()

    def multicast(self, src: LaneBuilder, ends: list[LaneBuilder], count: int) -> None:
        channels = [self.channel(src, end) for end in ends]
        ports = self.b.channel_set(channels)
        self.add(src, src.transfer(send=ports, src=(self.buffer[src.actor], 0), count=count, out_set=True, after=self.after(src)))
        for end, channel in zip(ends, channels, strict=True):
            self.later(end, channel, count)

    def gather(self) -> None:
        """Two messages taken by one step with a receive set."""
        dst = self.pick()
        sources = {lane.number: lane for lane in (self.pick(but=dst.actor), self.pick(but=dst.actor))}
        channels = []
        for src in sources.values():
            channels.append(self.channel(src, dst))
            self.add(src, src.send(channels[-1], self.buffer[src.actor], 0, 2, after=self.after(src)))
        ports = self.b.channel_set(channels)
        self.add(dst, dst.transfer(recv=ports, dst=(self.buffer[dst.actor], 0), count=2, store=True, in_set=True, after=self.after(dst)))

    def grow(self, actions: int) -> Program:
        rng = self.rng
        for lane in self.once:
            if rng.random() < 0.5:
                self.add(lane, lane.compute(self.op))
        for _ in range(actions):
            kind = rng.random()
            lane = self.pick()
            if kind < 0.35:
                self.add(lane, lane.compute(self.op, after=self.after(lane)))
            elif kind < 0.4:
                self.add(lane, lane.nop(after=self.after(lane)))
            elif kind < 0.9 or len(self.lanes) < 3:
                self.message()
            else:
                self.gather()
            if self.held and rng.random() < 0.15:
                self.held.pop(int(rng.integers(len(self.held))))()
        while self.held:
            self.held.pop(int(rng.integers(len(self.held))))()
        return self.b.build()


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    ranks, switches = int(rng.integers(2, 5)), int(rng.random() < 0.2)
    ties = rng.random() < 0.7
    program = _Builder(rng, ranks, switches).grow(int(rng.integers(1, 25)))
    fabric = random_fabric(rng, ranks, switches, bursts=bool(rng.random() < 0.25), ties=ties)
    n = len(program.steps)
    durations = rng.integers(0, 4, n).astype(float) if ties else np.where(rng.random(n) < 0.3, 0.0, rng.random(n))
    return Case(program, fabric, [f"d{i}" for i in range(ranks)] + [f"s{i}" for i in range(switches)], durations)
