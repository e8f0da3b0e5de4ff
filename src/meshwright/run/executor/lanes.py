"""Fusing a rank's lanes into one order, so that one thread can walk them.

All ranks' orders are restrictions of ONE order of all steps that respects lane order, `after`, matching and credits. A walk blocks only on
steps that come before it in that order, so fused programs cannot deadlock whatever the times are; times only decide how well it runs.
A step's place is the simulated start of a compute, the simulated end of a receive (when its data is there), and for a send the moment at which
what it sends is ready.

Deviation from program.md section 7 (start for every step, ties by completion): a receive lane "starts" when it begins to wait, long before data
arrives; placing receives at their end keeps the walk computing meanwhile. A send only posts a message, so the second of two messages
must not wait for the first one's time in its lane, which would put it behind the next compute step, and the peer with it.
Deadlock freedom does not rest on times or ties.
Cost: O(S log S) for S steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import Deadlock, Unsupported
from ...plan.experts import FILLED
from ...program.program import Kind, Part, Program
from ...program.tables import I32

__all__ = ["channel_messages", "fuse_lanes", "require_executable"]

Float = NDArray[np.float64]


def require_executable(program: Program) -> None:
    """Raise Unsupported unless every step can be executed by ranks with point-to-point messages."""
    s = program.steps
    for what, found, hint in (
        ("in-network actors", program.switches > 0, "a strategy without them, or a switch in software: `meshwright collective aggregator`"),
        ("folded ranks", program.fold is not None, "expand the program first"),
        ("calls", bool(np.any(s.kind == Kind.CALL)), "inline the program first"),
        ("repeated lanes", bool(np.any(program.lanes.repeat > 1)), "call it from a program and inline that"),
        ("channel sets", bool(np.any(s.parts & (Part.IN_SET | Part.OUT_SET))), "choose a strategy without multicast"),
        ("messages of data-dependent size", any(not program.sizes.name[i].startswith(FILLED) for i in np.unique(s.size[s.size >= 0])), ""),
    ):
        if found:
            raise Unsupported(f"the executor cannot run a program with {what}", where=program.name, hint=hint)


def channel_messages(program: Program) -> tuple[list[list[int]], list[list[int]]]:
    """(sending steps, receiving steps) of every channel, in message order."""
    n = len(program.channels)
    sends: list[list[int]] = [[] for _ in range(n)]
    receives: list[list[int]] = [[] for _ in range(n)]
    s = program.steps
    parts, chan_in, chan_out = s.parts.tolist(), s.chan_in.tolist(), s.chan_out.tolist()
    for step in np.flatnonzero(s.kind == Kind.TRANSFER).tolist():
        if parts[step] & Part.SEND:
            sends[chan_out[step]].append(step)
        if parts[step] & Part.RECV:
            receives[chan_in[step]].append(step)
    for channel, (out, into) in enumerate(zip(sends, receives, strict=True)):
        if len(out) != len(into):
            raise Unsupported(f"channel {channel} sends {len(out)} messages and receives {len(into)}", where=program.name)
    return sends, receives


def fuse_lanes(
    program: Program, start_s: Float | None = None, end_s: Float | None = None, *, late_receives: bool = False,
    together: Sequence[Sequence[int]] = (),
) -> list[I32]:  # fmt: skip
    """For every rank the order in which its steps are walked. Times: of every step, from a simulation; without them, by depth in the graph.

    `late_receives`: a message that compute steps use is waited for when the first of them is due, not when it should arrive, so one that is
    late holds up nothing else; one that no step waits for comes at the end. Receives are posted ahead either way. `together`: steps of different
    ranks that end only once all of a group have begun; they are neighbours in the one order.

    Raises: Unsupported (not executable), Deadlock with the steps that wait for each other.
    """
    require_executable(program)
    n = len(program.steps)
    leader = {step: group[0] for group in together for step in group}
    after, waits = _edges(program, leader)
    if start_s is None or end_s is None:
        first, second = np.zeros(n), np.zeros(n)
    else:
        receives = (program.steps.parts & Part.RECV) > 0
        # A receive is due when its message should be there: walked earlier, its wait would hold up all that comes after it in the one order.
        first, second = np.where(receives, end_s, start_s), np.array(end_s, copy=True)
        # Of steps that are due at the same moment, those that wait for nobody come first: a collective's send must not wait behind the message
        # that the next compute step needs.
        second[program.steps.kind == Kind.NOP] = -1.0
        for step, ready in _send_times(program, end_s).items():
            first[step], second[step] = ready, -1.0
        if late_receives:
            for step, used in _use_times(program, start_s).items():
                first[step] = second[step] = max(first[step], used)
            for step in _for_nobody(program, after):
                first[step] = second[step] = float("inf")
    for group in together:
        first[group[0]], second[group[0]] = max(first[s] for s in group), max(second[s] for s in group)
    # One order of the steps of all ranks, cut into walks: the first step in it that is not done never waits for a later one, so walks that
    # each follow their part of it cannot wait in a circle, whatever the times say. Times are priorities alone.
    order = _topological(n, after, waits, first.tolist(), second.tolist(), leader, by_depth=start_s is None)
    if len(order) < n:
        raise Deadlock(
            "steps wait for each other", where=program.name, hint="raise the depth of the channels on the cycle",
            data={"cycle": [program.describe(i) for i in _cycle(after, set(range(n)) - set(order))]},
        )  # fmt: skip
    actor = program.lanes.actor[program.lane_of_step()]
    sequence = np.array(order, np.int32)
    of_sequence = actor[sequence] if n else np.zeros(0, np.int32)
    return [sequence[of_sequence == rank] for rank in range(program.ranks)]


def _send_times(program: Program, end_s: Float) -> dict[int, float]:
    """When every step that only sends could be posted: what it waits for is done, and the sends before it in its lane are posted."""
    s = program.steps
    only_sends = ((s.parts & Part.SEND) > 0) & ((s.parts & Part.RECV) == 0)
    found: dict[int, float] = {}
    begins = set(program.lanes.start.tolist())
    for step in np.flatnonzero(only_sends).tolist():
        on = s.after_step[s.after_ptr[step] : s.after_ptr[step + 1]]
        ready = float(end_s[on].max(initial=0.0))
        if step not in begins:
            ready = max(ready, found.get(step - 1, float(end_s[step - 1])))
        found[step] = ready
    return found


def _use_times(program: Program, start_s: Float) -> dict[int, float]:
    """When the first compute step starts that waits for each receive, or for one behind it in its lane: messages come in their order.

    Receives that no compute step waits for are left out.
    """
    s = program.steps
    found: dict[int, float] = {}
    for step in np.flatnonzero(s.kind == Kind.COMPUTE).tolist():
        for on in s.after_step[s.after_ptr[step] : s.after_ptr[step + 1]].tolist():
            if s.parts[on] & Part.RECV:
                found[on] = min(found.get(on, float("inf")), float(start_s[step]))
    for lo, hi in zip(program.lanes.start.tolist(), program.lanes.end.tolist(), strict=True):
        soonest = float("inf")
        # Backwards, since a later message of the lane that is needed sooner pulls all before it.
        for step in range(hi - 1, lo - 1, -1):
            if step in found:
                soonest = found[step] = min(found[step], soonest)
    return found


def _for_nobody(program: Program, after: Sequence[Sequence[int]]) -> set[int]:
    """Receives that pass nothing on and that no step waits for but others of that kind."""
    parts, found = program.steps.parts.tolist(), set[int]()
    for lo, hi in zip(program.lanes.start.tolist(), program.lanes.end.tolist(), strict=True):
        for step in range(hi - 1, lo - 1, -1):
            if not parts[step] & Part.RECV or parts[step] & Part.SEND or not found.issuperset(after[step]):
                break
            found.add(step)
    return found


def _edges(program: Program, leader: Mapping[int, int]) -> tuple[list[list[int]], list[int]]:
    """Successors and number of predecessors of every step: lane order, after, match, credit. Steps with a leader are one with it."""
    s, n = program.steps, len(program.steps)
    after: list[list[int]] = [[] for _ in range(n)]
    waits = [0] * n

    def edge(a: int, b: int) -> None:
        a, b = leader.get(a, a), leader.get(b, b)
        after[a].append(b)
        waits[b] += 1

    for lo, hi in zip(program.lanes.start.tolist(), program.lanes.end.tolist(), strict=True):
        for step in range(lo + 1, hi):
            edge(step - 1, step)
    ptr, on, lag = s.after_ptr.tolist(), s.after_step.tolist(), s.after_lag.tolist()
    for step in range(n):
        for e in range(ptr[step], ptr[step + 1]):
            if lag[e] == 0:
                edge(on[e], step)
    sends, receives = channel_messages(program)
    for channel, depth in enumerate(program.channels.depth.tolist()):
        for j, (a, b) in enumerate(zip(sends[channel], receives[channel], strict=True)):
            edge(a, b)
            if j + depth < len(sends[channel]):
                # Credit: the channel holds `depth` messages, so this one is sent when that one has been received.
                edge(b, sends[channel][j + depth])
    return after, waits


def _topological(
    n: int, after: Sequence[Sequence[int]], waits: Sequence[int], first: Sequence[float], second: Sequence[float], leader: Mapping[int, int], *,
    by_depth: bool,
) -> list[int]:  # fmt: skip
    left = list(waits)
    depth = [0.0] * n
    with_it: dict[int, list[int]] = {}
    for step, its in leader.items():
        with_it.setdefault(its, []).append(step)
    # Ties go to the lower step, so all ranks that compute this get the same order.
    ready = [(first[i], second[i], i) for i in range(n) if left[i] == 0 and leader.get(i, i) == i]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        step = heapq.heappop(ready)[2]
        order += with_it.get(step, [step])
        for follower in after[step]:
            depth[follower] = max(depth[follower], depth[step] + 1)
            left[follower] -= 1
            if left[follower] == 0:
                key = (depth[follower], 0.0) if by_depth else (first[follower], second[follower])
                heapq.heappush(ready, (*key, follower))
    return order


def _cycle(after: Sequence[Sequence[int]], stuck: set[int]) -> list[int]:
    """Some cycle among the stuck steps: follow predecessors until one repeats."""
    before: dict[int, int] = {}
    for a in stuck:
        for b in after[a]:
            if b in stuck:
                before[b] = a
    at, seen = min(before), []
    while at not in seen:
        seen.append(at)
        at = before[at]
    return seen[seen.index(at) :][::-1]
