"""A switch whose ports' packets are added up by small cores: how long a packet takes, how fast a block's sum comes, how much memory it needs.

Cite: D. De Sensi, S. Di Girolamo, S. Ashkboos, S. Li, T. Hoefler, "Flare: Flexible In-Network Allreduce" (SC 2021, arXiv 2106.15565), sections 4-6.
Left open by the paper: service times between its two limits. Our answer: events, and closed forms that agree with them where blocks come one by one.
Deviations: cycles only; caches, the network on the chip and the parsing of packets are in the handler's fixed cost.
Invariant: a block's packets run on one cluster, first come, first served, on any idle core; a core that waits for a lock spins.
Cost: O(log cores) per packet.

Designs: `single`, one buffer and one lock per block; `multi`, several buffers, which the last packet adds up; `tree`, a packet climbs the fold over
child numbers for as long as the other half is there, and never waits.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from ..errors import UsageError

__all__ = ["DESIGNS", "HandlerSwitch", "Handlers", "Packets", "arrivals", "simulate_handlers"]

DESIGNS = ("single", "multi", "tree")
CYCLES_PER_ELEMENT = {4: 4, 2: 2, 1: 1}  # by bytes: load, add, store of a 4-byte number; packed arithmetic below (the paper's cores)
MAX_PACKETS = 1 << 20  # of a simulation: some seconds


@dataclass(frozen=True, kw_only=True)
class HandlerSwitch:
    """`children`: ports whose packets are summed; `gap_cycles`: between packets at the switch, all ports together; `fixed_cycles`: of a handler."""

    children: int
    clusters: int = 64
    cores: int = 8
    packet_bytes: int = 1024
    element_bytes: int = 4
    fixed_cycles: int = 0
    gap_cycles: Fraction = Fraction(0)
    buffers: int = 4

    def __post_init__(self) -> None:
        counts = (self.children, self.clusters, self.cores, self.packet_bytes, self.buffers)
        if min(counts) < 1 or self.gap_cycles < 0 or self.fixed_cycles < 0 or self.element_bytes not in CYCLES_PER_ELEMENT:
            raise UsageError("children, clusters, cores, bytes and buffers are at least 1; elements have 1, 2 or 4 bytes", where="switch")

    @property
    def add_cycles(self) -> int:
        """To add one packet to a buffer."""
        return -(-self.packet_bytes // self.element_bytes) * CYCLES_PER_ELEMENT[self.element_bytes] + self.fixed_cycles


Packets = Sequence[tuple[Fraction, int, int]]  # (when it comes, block, child), in order of coming


@dataclass(frozen=True)
class Handlers:
    """`service_cycles`: mean over packets, from a core's beginning to its end; `total_cycles`: until the last block's sum is there; `queued`: most
    packets that waited; `held`: most buffers of a block at a time; `open_blocks`: most blocks that had a packet and no sum yet.
    """

    service_cycles: float
    total_cycles: float
    queued: int
    held: int
    open_blocks: int


def arrivals(switch: HandlerSwitch, blocks: int, window: int = 0) -> list[tuple[Fraction, int, int]]:
    """Packets of all children at line rate.

    `window`: child i begins each window of so many blocks at i * window / children, rotated; 0: all at the same block. Raises: UsageError.
    """
    n = switch.children
    if blocks < 1 or blocks * n > MAX_PACKETS or (window and blocks % window):
        raise UsageError(f"1 to {MAX_PACKETS // n} blocks of {n} children, whole windows", where="blocks")
    width, packets = window or 1, []
    for turn in range(blocks):
        first, step = turn // width * width, turn % width
        packets += [(switch.gap_cycles * (turn * n + i), first + (step + i * width // n) % width, i) for i in range(n)]
    return packets


def simulate_handlers(switch: HandlerSwitch, design: str, packets: Packets) -> Handlers:
    """Every packet on its cluster. Raises: UsageError for a design that does not exist."""
    if design not in DESIGNS:
        raise UsageError(f"no design {design!r}", where="design", hint=", ".join(DESIGNS))
    scale = lcm(*{when.denominator for when, _, _ in packets})  # whole numbers inside: exact, and quick
    clusters: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for when, block, child in packets:
        clusters[block % switch.clusters].append((int(when * scale), block, child))
    runs = [_Cluster(switch, design, own, switch.add_cycles * scale).run() for own in clusters.values()]
    service = sum(run.service for run in runs)
    spans = [span for run in runs for span in run.spans.values()]
    total, queued, held = max(end for _, end in spans), max(run.queued for run in runs), max(run.held for run in runs)
    return Handlers(service / len(packets) / scale, total / scale, queued, held, _open(spans))


def _open(spans: Sequence[tuple[int, int]]) -> int:
    """Most intervals at one time."""
    most = now = 0
    for _, change in sorted([(end, -1) for _, end in spans] + [(begin, 1) for begin, _ in spans]):
        now += change
        most = max(most, now)
    return most


class _Cluster:
    """Cores that share a queue. Events: a packet comes; a core ends an addition."""

    def __init__(self, switch: HandlerSwitch, design: str, packets: Sequence[tuple[int, int, int]], add: int) -> None:
        self.switch, self.design, self.packets, self.add = switch, design, packets, add
        self.idle, self.queue, self.events = switch.cores, deque[tuple[int, int]](), list[tuple[int, int, int, int, int, int]]()
        self.service = self.queued = self.held = self.number = 0
        self.free: dict[int, list[int]] = {}  # block -> when its buffers are free
        self.come: dict[int, int] = defaultdict(int)  # block -> packets that a core has begun
        self.stored: dict[int, set[tuple[int, int]]] = defaultdict(set)  # block -> nodes of the fold whose sums wait
        self.spans: dict[int, tuple[int, int]] = {}

    def run(self) -> _Cluster:
        at = 0
        while at < len(self.packets) or self.events:
            if at < len(self.packets) and (not self.events or self.packets[at][0] < self.events[0][0]):
                now, block, child = self.packets[at]
                at += 1
                self.queue.append((block, child))
            else:
                now, _, block, child, level, began = heapq.heappop(self.events)
                self._ended(now, block, child, level, began)
            while self.idle and self.queue:
                self._begin(now, *self.queue.popleft())
            self.queued = max(self.queued, len(self.queue))
        return self

    def _push(self, when: int, block: int, child: int, level: int, began: int) -> None:
        self.number += 1
        heapq.heappush(self.events, (when, self.number, block, child, level, began))

    def _begin(self, now: int, block: int, child: int) -> None:
        self.idle -= 1
        self.come[block] += 1
        self.spans.setdefault(block, (now, now))
        if self.design == "tree":
            self._push(now, block, child, 0, now)
            return
        buffers = 1 if self.design == "single" else self.switch.buffers
        free = self.free.setdefault(block, [])
        if len(free) < buffers:
            free.append(now)
        place = min(range(len(free)), key=free.__getitem__)
        free[place] = max(now, free[place]) + self.add
        self.held = max(self.held, len(free))
        end = free[place]
        if self.come[block] == self.switch.children and len(free) > 1:
            end = max(free) + (len(free) - 1) * self.add
        self._push(end, block, child, -1, now)

    def _ended(self, now: int, block: int, child: int, level: int, began: int) -> None:
        """A core has ended an addition: the packet's, or one of the fold's, whose node's first child is `child`."""
        n, stored = self.switch.children, self.stored[block]
        while level >= 0 and 1 << level < n:
            other = (child >> level ^ 1) << level
            if other >= n:  # an odd tail is promoted
                level += 1
            elif (level, other) in stored:
                stored.remove((level, other))
                self._push(now + self.add, block, min(child, other), level + 1, began)
                return
            else:
                stored.add((level, child))
                self.held = max(self.held, len(stored))
                break
        self.service += now - began
        self.spans[block] = (self.spans[block][0], max(now, self.spans[block][1]))
        self.idle += 1
