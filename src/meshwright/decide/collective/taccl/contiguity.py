"""Stage 3: which transfers of a link travel as one message, and the exact times (TACCL, NSDI 2023, section 5.3).

Routes and orders are fixed. Joining saves a message's overhead and costs pipelining: a run starts when its last chunk is there and arrives as a
whole. At most MAX_RUN_TRANSFERS transfers that follow each other on all their resources, with adjoining addresses; inside boxes too, unlike in the
paper. Without an overhead per message joining cannot gain, the times of the given order are exact as they are, and nothing is solved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from ....errors import Infeasible, TimeLimit
from ....kernels.effort import Deadline
from ....kernels.highs import affords, solve, solver, values
from .schedule import HORIZON_UNITS, Schedule, Timing, Transfer

__all__ = ["Runs", "join_runs", "replay_runs"]

MAX_RUN_TRANSFERS = 6  # transfers that become one message
MAX_BINARIES = 1500  # transfers that may join another, up to which the integer program is solved
Runs = list[tuple[int, ...]]


def replay_runs(transfers: Sequence[Transfer], timing: Timing, runs: Sequence[Sequence[int]]) -> Schedule:
    """Exact times when resources serve the runs in this order; the order must respect `after`."""
    free: dict[int, float] = {}
    start, end = [0.0] * len(transfers), [0.0] * len(transfers)
    for run in runs:
        link, extra = transfers[run[0]].link, len(run) - 1
        at = max((end[b] for t in run for b in transfers[t].after), default=0.0)
        resources, offsets, holds = timing.resources[link], timing.offset_s[link], timing.hold_s[link]
        for r, offset in zip(resources, offsets, strict=True):
            # A resource is reached `offset` after the start, so the message may set off that long before it is free.
            at = max(at, free.get(r, 0.0) - offset)
        slowest = 0.0
        for k, (r, offset, hold) in enumerate(zip(resources, offsets, holds, strict=True)):
            service = hold - (timing.overhead_s if k == 0 else 0.0)
            slowest = max(slowest, service)
            # The overhead is paid once per message, at the sender; every further chunk adds its service only.
            free[r] = at + offset + hold + extra * service
        for t in run:
            start[t], end[t] = at, at + timing.delay_s[link] + extra * slowest
    return Schedule(tuple(start), tuple(end), tuple(t for run in runs for t in run))


def join_runs(
    transfers: Sequence[Transfer], timing: Timing, schedule: Schedule, may_join: Callable[[int, int], bool], *, deadline: Deadline, nodes: int,
    gap: float = 1e-6,
) -> tuple[Runs, Schedule]:  # fmt: skip
    """The runs with the earliest end that are found, and their times; all single where joining does not help.

    Runs of equal length are always tried, the integer program with `nodes` > 0 where the work that is left affords it, to within `gap`.
    """
    best: Runs = [(t,) for t in schedule.order]
    times = replay_runs(transfers, timing, best)
    if timing.overhead_s <= 0:
        return best, times
    joinable = _joinable(transfers, timing, schedule, may_join)
    if not joinable:
        return best, times
    tried = [_uniform(transfers, schedule, joinable, length) for length in range(2, MAX_RUN_TRANSFERS + 1)]
    if nodes and len(joinable) <= MAX_BINARIES and not deadline.past:
        solved = _solved(transfers, timing, schedule, joinable, times, deadline, nodes, gap)
        tried += [solved] if solved is not None else []
    for runs in tried:
        ordered = _in_order(transfers, timing, schedule, runs)
        if ordered is not None and (other := replay_runs(transfers, timing, ordered)).makespan_s < times.makespan_s:
            best, times = ordered, other
    return best, times


def _joinable(transfers: Sequence[Transfer], timing: Timing, schedule: Schedule, may_join: Callable[[int, int], bool]) -> dict[int, int]:
    """transfer -> the one before it that it may join: next on each of its resources."""
    last: dict[int, int] = {}
    found: dict[int, int] = {}
    for t in schedule.order:
        resources = timing.resources[transfers[t].link]
        before = {last.get(r, -1) for r in resources}
        # The same transfer came last on all its resources: joined, nothing that lies between the two is overtaken.
        if len(before) == 1 and (p := before.pop()) >= 0 and transfers[p].link == transfers[t].link and may_join(p, t):
            found[t] = p
        for r in resources:
            last[r] = t
    return found


def _uniform(transfers: Sequence[Transfer], schedule: Schedule, joinable: dict[int, int], length: int) -> Runs:
    """Runs as long as allowed up to `length`, by first fit."""
    return _runs(schedule, joinable, length)


def _runs(schedule: Schedule, joined: dict[int, int], length: int = MAX_RUN_TRANSFERS) -> Runs:
    """Transfers with those that they join, each run where its last member stands in the order."""
    run_of: dict[int, list[int]] = {}
    for t in schedule.order:
        p = joined.get(t)
        if p is not None and len(run_of[p]) < length:
            run_of[p].append(t)
            run_of[t] = run_of[p]
        else:
            run_of[t] = [t]
    return [tuple(run_of[t]) for t in schedule.order if run_of[t][-1] == t]


def _in_order(transfers: Sequence[Transfer], timing: Timing, schedule: Schedule, runs: Runs) -> Runs | None:
    """The runs so that each comes after what it waits for, resources serving in the schedule's order; None if they wait for each other."""
    place = {t: i for i, t in enumerate(schedule.order)}
    number = {t: i for i, run in enumerate(runs) for t in run}
    before: list[set[int]] = [{number[b] for t in run for b in transfers[t].after} for run in runs]
    last: dict[int, int] = {}
    for i in sorted(range(len(runs)), key=lambda i: place[runs[i][0]]):
        for r in timing.resources[transfers[runs[i][0]].link]:
            if r in last:
                before[i].add(last[r])
            last[r] = i
    behind: list[list[int]] = [[] for _ in runs]
    for i, earlier in enumerate(before):
        for j in earlier:
            behind[j].append(i)
    missing = [len(x) for x in before]
    heap = [(place[runs[i][0]], i) for i, m in enumerate(missing) if not m]
    heapify(heap)
    out: Runs = []
    while heap:
        _, i = heappop(heap)
        out.append(runs[i])
        for j in behind[i]:
            missing[j] -= 1
            if not missing[j]:
                heappush(heap, (place[runs[j][0]], j))
    return out if len(out) == len(runs) else None


def _solved(
    transfers: Sequence[Transfer], timing: Timing, schedule: Schedule, joinable: dict[int, int], first: Schedule, deadline: Deadline, nodes: int,
    gap: float,
) -> Runs | None:  # fmt: skip
    """The integer program: joined[t], start, end and position in the run of every transfer."""
    n, unit = len(transfers), first.makespan_s / HORIZON_UNITS
    start, end, position = range(n), range(n, 2 * n), range(2 * n, 3 * n)
    joined = {t: 3 * n + i for i, t in enumerate(joinable)}
    makespan = 3 * n + len(joined)
    low, high = np.zeros(makespan + 1), np.full(makespan + 1, HORIZON_UNITS * (1 + 1e-7))
    low[2 * n : 3 * n], high[2 * n : 3 * n] = 1.0, float(MAX_RUN_TRANSFERS)
    high[3 * n : makespan] = 1.0
    rows: list[tuple[dict[int, float], float, float]] = []
    inf = float("inf")
    overhead = timing.overhead_s / unit

    def service(t: int, k: int) -> float:
        return timing.hold_s[transfers[t].link][k] / unit - (overhead if k == 0 else 0.0)

    last: dict[int, tuple[int, int]] = {}
    for t in schedule.order:
        link = transfers[t].link
        rows += [({start[t]: 1.0, end[b]: -1.0}, 0.0, inf) for b in transfers[t].after]
        slowest = max(service(t, k) for k in range(len(timing.resources[link])))
        rows.append(({end[t]: 1.0, start[t]: -1.0, position[t]: -slowest}, timing.delay_s[link] / unit - slowest, inf))
        rows.append(({makespan: 1.0, end[t]: -1.0}, 0.0, inf))
        y = joined.get(t, -1)
        for k, r in enumerate(timing.resources[link]):
            if r in last:
                p, kp = last[r]
                gap = (timing.offset_s[transfers[p].link][kp] - timing.offset_s[link][k]) / unit + (overhead if kp == 0 else 0.0)
                row = {start[t]: 1.0, start[p]: -1.0, position[p]: -service(p, kp)}
                # In force unless t joins p: then t begins with p, and the row must be slack whatever p's position in the run.
                big = gap + MAX_RUN_TRANSFERS * service(p, kp)
                rows.append((row | ({y: big} if y >= 0 else {}), gap, inf))
            last[r] = (t, k)
        if y >= 0:
            p, big = joinable[t], 2 * HORIZON_UNITS
            # Joined: both start together, p arrives no earlier than t, and t's position is one more than p's.
            rows.append(({start[t]: 1.0, start[p]: -1.0}, 0.0, inf))
            rows.append(({start[t]: 1.0, start[p]: -1.0, y: big}, -inf, big))
            rows.append(({end[p]: 1.0, end[t]: -1.0, y: -big}, -big, inf))
            rows.append(({position[t]: 1.0, position[p]: -1.0, y: -float(MAX_RUN_TRANSFERS)}, 1.0 - MAX_RUN_TRANSFERS, inf))
    model = solver(mip_rel_gap=gap, mip_max_nodes=nodes, random_seed=1)
    model.addVars(makespan + 1, low, high)
    model.changeColCost(makespan, 1.0)
    import highspy

    integers = np.arange(3 * n, makespan, dtype=np.int32)
    model.changeColsIntegrality(len(integers), integers, np.array([highspy.HighsVarType.kInteger] * len(integers)))
    begins = np.cumsum([0, *(len(row) for row, _, _ in rows[:-1])]).astype(np.int32)
    index = np.array([v for row, _, _ in rows for v in row], np.int32)
    value = np.array([a for row, _, _ in rows for a in row.values()])
    model.addRows(len(rows), np.array([x for _, x, _ in rows]), np.array([x for _, _, x in rows]), len(index), begins, index, value)
    if not affords(model, deadline):
        return None
    solution = np.concatenate([np.array(first.start_s) / unit, np.array(first.end_s) / unit, np.ones(n), np.zeros(len(joined)), [HORIZON_UNITS]])
    model.setSolution(makespan + 1, np.arange(makespan + 1, dtype=np.int32), solution)
    try:
        solve(model, what="contiguity", deadline=deadline)
    except (TimeLimit, Infeasible):
        return None
    found = values(model)
    return _runs(schedule, {t: p for t, p in joinable.items() if found[joined[t]] > 0.5})
