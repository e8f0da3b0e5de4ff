"""Times of transfers: how long a chunk takes on a logical link, and list scheduling of routed transfers on the links' resources.

The model is the simulator's `exclusive` one: a message holds every fabric link of its route for bytes / rate, the next hop beginning one latency
later; it arrives after the latencies and the service of the slowest link. So alpha delays a chunk but does not occupy a link (in
TACCL it does); what occupies besides bytes is the transport's cost per message, at the lane that sends. `Timing.of(occupy_alpha=True)` gives
TACCL's own accounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....cost import Transport
from ....kernels.effort import NEVER, Deadline
from ....kernels.list_schedule import Csr, ListProblem, place_items
from .topology import LogicalTopology

__all__ = ["HORIZON_UNITS", "Schedule", "Timing", "Transfer", "improved", "list_schedule", "replay"]

MAX_IMPROVEMENTS = 6  # rounds of scheduling backwards and forwards; a round without gain is the last anyway
HORIZON_UNITS = 1000.0  # what a known schedule takes, in units of the integer programs: far from HiGHS's tolerances (1e-6) on both sides


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


def remaining_s(transfers: Sequence[Transfer], timing: Timing) -> list[float]:
    """Travel time from the start of a transfer to the last leaf below it, on empty links."""
    out = [timing.delay_s[x.link] for x in transfers]
    for t in reversed(_topological(transfers)):
        for b in transfers[t].after:
            out[b] = max(out[b], timing.delay_s[transfers[b].link] + out[t])
    return out


def _topological(transfers: Sequence[Transfer]) -> list[int]:
    waiting = _turned(_lists([x.after for x in transfers]))
    missing, ptr, values = [len(x.after) for x in transfers], waiting.ptr.tolist(), waiting.values.tolist()
    ready = [t for t, m in enumerate(missing) if not m]
    for t in ready:
        for s in values[ptr[t] : ptr[t + 1]]:
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
    return _placed(_columns(transfers, timing)[0], urgency, tie, eager)


def _columns(transfers: Sequence[Transfer], timing: Timing) -> tuple[ListProblem, ListProblem]:
    """The transfers as arrays; and backwards: what was waited for waits, and holds are counted from the end."""
    after, behind = _lists([x.after for x in transfers]), _lists([x.behind for x in transfers])
    waiting, line = _turned(after), _turned(behind)
    rows = zip(timing.delay_s, timing.offset_s, timing.hold_s, strict=True)
    # Counted from the arrival backwards, a resource is held from (delay - offset - hold) on.
    ends = np.array([delay - o - h for delay, row, held in rows for o, h in zip(row, held, strict=True)])
    forward = ListProblem(
        route=np.array([x.link for x in transfers], np.int64), resources=Csr.of(timing.resources),
        offset=np.array([o for row in timing.offset_s for o in row]), hold=np.array([h for row in timing.hold_s for h in row]),
        delay=np.array(timing.delay_s), after=waiting, behind=line, waits=np.diff(after.ptr) + np.diff(behind.ptr),
    )  # fmt: skip
    return forward, replace(forward, offset=ends, after=after, behind=behind, waits=np.diff(waiting.ptr) + np.diff(line.ptr))


def _lists(lists: Sequence[Sequence[int]]) -> Csr:
    if not any(lists):
        return Csr(np.zeros(len(lists) + 1, np.int64), np.zeros(0, np.int64))
    return Csr.of(lists)


def _turned(lists: Csr) -> Csr:
    """For every item, the lists that it is in."""
    n = len(lists.ptr) - 1
    ptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(lists.values, minlength=n), out=ptr[1:])
    owner = np.repeat(np.arange(n), np.diff(lists.ptr))
    return Csr(ptr, owner[np.argsort(lists.values, kind="stable")])


def _placed(columns: ListProblem, urgency: Sequence[float], tie: Sequence[int] | None, eager: bool) -> Schedule:
    ties = np.zeros(len(urgency), np.int64) if tie is None else np.array(tie[: len(urgency)], np.int64)
    start, end, order = place_items(columns, np.array(urgency, np.float64), ties, eager=eager)
    return Schedule(tuple(start.tolist()), tuple(end.tolist()), tuple(order.tolist()))


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


def improved(transfers: Sequence[Transfer], timing: Timing, tie: Sequence[int], deadline: Deadline = NEVER) -> list[Schedule]:
    """TACCL's rule, the eager rule, and the better one improved by scheduling backwards and forwards in turns; the shortest first.

    Backwards: the reversed transfers on the same resources, those that ended last first; their ends are how urgent each transfer is, links'
    queues included (justification, as in resource-constrained project scheduling). Orders with the same times count once.
    """
    travel = remaining_s(transfers, timing)
    forward, backward = _columns(transfers, timing)
    found = [_placed(forward, travel, tie, eager) for eager in (True, False)]
    now = best = min(found, key=lambda s: s.makespan_s)
    for _ in range(MAX_IMPROVEMENTS):
        if deadline.past:
            break
        # A transfer's end in the backward schedule is how long before the end of all it must begin: the larger, the more urgent.
        ends = _placed(backward, now.end_s, tie, True).end_s
        now = min((_placed(forward, ends, tie, eager) for eager in (True, False)), key=lambda s: s.makespan_s)
        if now.makespan_s >= best.makespan_s:
            break
        best = now
        found.append(now)
    unlike: dict[tuple[float, ...], Schedule] = {}
    for schedule in found:
        unlike.setdefault(schedule.start_s, schedule)
    return sorted(unlike.values(), key=lambda s: s.makespan_s)
