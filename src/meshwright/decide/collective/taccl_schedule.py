"""Times of transfers: how long a chunk takes on a logical link, and list scheduling of routed transfers on the links' resources.

The model is the simulator's `exclusive` one: a message holds every fabric link of its route for bytes / rate, the next hop beginning one latency
later; it arrives after the latencies and the service of the slowest link. So alpha delays a chunk but does not occupy a link (in
TACCL it does); what occupies besides bytes is the transport's cost per message, at the lane that sends. `Timing.of(occupy_alpha=True)` gives
TACCL's own accounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from time import monotonic

from ...cost import Transport
from .taccl_topology import LogicalTopology

__all__ = ["Schedule", "Timing", "Transfer", "improved", "list_schedule", "replay"]

IMPROVEMENTS = 6  # rounds, two above MANY transfers
MANY = 1000


@dataclass(frozen=True)
class Transfer:
    """Chunk `chunk` over logical link `link`, after the transfers `after` (numbers in the same list) have arrived.

    `behind`: transfers on the same link that go first (a sketch's ordering at senders).
    """

    chunk: int
    link: int
    after: tuple[int, ...]
    adds: bool = False
    behind: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timing:
    """Per logical link, for messages of `chunk_bytes`: resources held, from when on after the start, for how long; and the delay to arrival."""

    resources: tuple[tuple[int, ...], ...]
    offset_s: tuple[tuple[float, ...], ...]
    hold_s: tuple[tuple[float, ...], ...]
    delay_s: tuple[float, ...]
    overhead_s: float  # per message, part of every first hold

    @staticmethod
    def of(topology: LogicalTopology, chunk_bytes: float, transport: Transport | None, *, occupy_alpha: bool = False) -> Timing:
        cost = transport or Transport()
        per_message_s = cost.per_message_s + cost.per_step_s
        handling_s = per_message_s + cost.per_byte_s * chunk_bytes
        links = topology.fabric.links
        offsets, holds, delays = [], [], []
        for x in topology.links:
            at, before, hold = 0.0, [], []
            alpha_s = x.latency_s if occupy_alpha else 0.0
            for number, k in enumerate(x.route):
                before.append(0.0 if occupy_alpha else at)
                hold.append(chunk_bytes / links[k].rate_Bps + alpha_s + (handling_s if number == 0 else 0.0))
                at += links[k].latency_s
            offsets.append(tuple(before))
            holds.append(tuple(hold))
            slowest_s = max(chunk_bytes / links[k].rate_Bps for k in x.route)
            delays.append(x.latency_s + slowest_s + 2 * handling_s)
        return Timing(tuple(x.route for x in topology.links), tuple(offsets), tuple(holds), tuple(delays), per_message_s)


@dataclass(frozen=True)
class Schedule:
    """`start_s[t]`, `end_s[t]` (arrival) of every transfer and the order in which they were placed."""

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    order: tuple[int, ...]

    @property
    def makespan_s(self) -> float:
        return max(self.end_s, default=0.0)


def successors(transfers: Sequence[Transfer]) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in transfers]
    for t, x in enumerate(transfers):
        for before in x.after:
            out[before].append(t)
    return out


def remaining_s(transfers: Sequence[Transfer], timing: Timing) -> list[float]:
    """Travel time from the start of a transfer to the last leaf below it, on empty links."""
    after = successors(transfers)
    out = [0.0] * len(transfers)
    for t in reversed(_topological(transfers, after)):
        out[t] = timing.delay_s[transfers[t].link] + max((out[s] for s in after[t]), default=0.0)
    return out


def _topological(transfers: Sequence[Transfer], after: Sequence[Sequence[int]]) -> list[int]:
    missing = [len(x.after) for x in transfers]
    ready = [t for t, m in enumerate(missing) if not m]
    for t in ready:
        for s in after[t]:
            missing[s] -= 1
            if not missing[s]:
                ready.append(s)
    assert len(ready) == len(transfers), "transfers wait for each other"
    return ready


def list_schedule(
    transfers: Sequence[Transfer], timing: Timing, urgency: Sequence[float], *, eager: bool = True, tie: Sequence[int] | None = None
) -> Schedule:
    """Places one transfer after the other, each as early as its chunk and its resources allow.

    eager: next is the one that can start first, ties to the highest urgency; else the highest urgency among those whose chunk has been placed
    (TACCL's rule), even if it starts later. Then `tie`, then number.
    """
    rank = list(tie) if tie is not None else [0] * len(transfers)
    after = successors(transfers)
    next_in_line: list[list[int]] = [[] for _ in transfers]
    for t, x in enumerate(transfers):
        for first in x.behind:
            next_in_line[first].append(t)
    missing = [len(x.after) + len(x.behind) for x in transfers]
    ready = [0.0] * len(transfers)
    start, end = [0.0] * len(transfers), [0.0] * len(transfers)
    free: dict[int, float] = {}
    order: list[int] = []

    def earliest(t: int) -> float:
        link, at = transfers[t].link, ready[t]
        for r, offset in zip(timing.resources[link], timing.offset_s[link], strict=True):
            at = max(at, free.get(r, 0.0) - offset)
        return at

    def key(t: int) -> tuple[float, float, int, int]:
        at = earliest(t)
        return (at, -urgency[t], rank[t], t) if eager else (-urgency[t], at, rank[t], t)

    def one_less(t: int) -> None:
        missing[t] -= 1
        if not missing[t]:
            heappush(heap, key(t))

    heap = [key(t) for t, m in enumerate(missing) if not m]
    heapify(heap)
    while heap:
        found = heappop(heap)
        t = found[3]
        now = key(t)
        if now != found and heap and now > heap[0]:
            heappush(heap, now)
            continue
        start[t] = now[0] if eager else now[1]
        end[t] = start[t] + timing.delay_s[transfers[t].link]
        link = transfers[t].link
        for r, offset, hold in zip(timing.resources[link], timing.offset_s[link], timing.hold_s[link], strict=True):
            free[r] = start[t] + offset + hold
        order.append(t)
        for s in after[t]:
            ready[s] = max(ready[s], end[t])
            one_less(s)
        for s in next_in_line[t]:
            one_less(s)
    return Schedule(tuple(start), tuple(end), tuple(order))


def replay(transfers: Sequence[Transfer], timing: Timing, order: Sequence[int]) -> Schedule:
    """Every transfer as early as possible when each resource serves in `order` (a topological order): the exact times of that order."""
    free: dict[int, float] = {}
    start, end = [0.0] * len(transfers), [0.0] * len(transfers)
    for t in order:
        link = transfers[t].link
        at = max((end[b] for b in transfers[t].after), default=0.0)
        held = list(zip(timing.resources[link], timing.offset_s[link], timing.hold_s[link], strict=True))
        for r, offset, _ in held:
            at = max(at, free.get(r, 0.0) - offset)
        for r, offset, hold in held:
            free[r] = at + offset + hold
        start[t], end[t] = at, at + timing.delay_s[link]
    return Schedule(tuple(start), tuple(end), tuple(order))


def improved(transfers: Sequence[Transfer], timing: Timing, tie: Sequence[int], deadline: float = inf) -> list[Schedule]:
    """TACCL's rule, the eager rule, and the better one improved by scheduling backwards and forwards in turns; the shortest first.

    Backwards: the reversed transfers on the same resources, those that ended last first; their ends are how urgent each transfer is, links'
    queues included (justification, as in resource-constrained project scheduling).
    """
    travel = remaining_s(transfers, timing)
    found = [list_schedule(transfers, timing, travel, eager=eager, tie=tie) for eager in (True, False)]
    now = best = min(found, key=lambda s: s.makespan_s)
    after = successors(transfers)
    ahead: list[list[int]] = [[] for _ in transfers]
    for t, x in enumerate(transfers):
        for first in x.behind:
            ahead[first].append(t)
    back = [Transfer(x.chunk, x.link, tuple(after[t]), x.adds, tuple(ahead[t])) for t, x in enumerate(transfers)]
    held = zip(timing.delay_s, timing.offset_s, timing.hold_s, strict=True)
    behind = tuple(tuple(delay - o - h for o, h in zip(offsets, holds, strict=True)) for delay, offsets, holds in held)
    mirrored = Timing(timing.resources, behind, timing.hold_s, timing.delay_s, timing.overhead_s)
    for _ in range(IMPROVEMENTS if len(transfers) <= MANY else 2):
        if monotonic() > deadline:
            break
        backward = list_schedule(back, mirrored, now.end_s, tie=tie)
        now = list_schedule(transfers, timing, backward.end_s, tie=tie)
        other = list_schedule(transfers, timing, backward.end_s, eager=False, tie=tie)
        now = min(now, other, key=lambda s: s.makespan_s)
        if now.makespan_s >= best.makespan_s:
            break
        best = now
        found.append(now)
    return sorted(found, key=lambda s: s.makespan_s)
