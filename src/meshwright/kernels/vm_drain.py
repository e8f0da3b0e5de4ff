"""Emptying hosts by moving machines, the longest first, within a budget: one host at a time takes nothing new until it is empty, compiled.

Cite: Ling et al., "LAVA", MLSys 2025 (LARS). Machines that end within the horizon by themselves are not moved. Cost: O(machines) at a tick.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compile import called, inlined
from .vm_fleet import WHOLE, choose, left_of

__all__ = ["Drain", "make_drain", "next_move"]

DAY_S = 86_400.0
ROOM = 1.5  # times what a host holds must be free on the others in use before it is drained
PATIENCE = 2.0  # horizons after which draining a host is given up


class Drain(NamedTuple):
    """`per_day`: moves, 0: none. `horizon_s`: who ends within it stays. `now`: host that is drained (or -1), moves saved up, since when, last tick,
    until when no other is begun."""

    per_day: float
    horizon_s: float
    now: NDArray[np.float64]


def make_drain(per_day: float, horizon_s: float, since_s: float) -> Drain:
    """Nothing is drained yet, no moves are saved up."""
    return Drain(per_day, horizon_s, np.array([-1.0, 0.0, since_s, since_s, since_s]))


@inlined
def _victim(fleet, outlook, drain, now_s):  # type: ignore[no-untyped-def]
    """The host in use with the fewest machines that would have to move, then the least in use; -1 where the others lack room."""
    resources, best, fewest, least = fleet.free.shape[1], -1, np.inf, np.inf
    for h in range(len(fleet.hosts)):
        if fleet.hosts[h].count == 0:
            continue
        v, moves = fleet.hosts[h].head, 0
        while v >= 0:
            moves += left_of(outlook, v, now_s - fleet.machines[v].arrival_s, now_s) > drain.horizon_s
            v = fleet.machines[v].after
        if moves == 0 or moves > drain.now[1]:
            continue
        used = 0.0
        for j in range(resources):
            used += float(WHOLE - fleet.free[h, j])
        if moves < fewest or (moves == fewest and used < least):
            best, fewest, least = h, float(moves), used
    if best >= 0:
        for j in range(resources):
            room = 0.0
            for h in range(len(fleet.hosts)):
                if h != best and fleet.hosts[h].count > 0:
                    room += float(fleet.free[h, j])
            if room < ROOM * float(WHOLE - fleet.free[best, j]):
                return -1
    return best


@called
def next_move(fleet, outlook, rule, drain, now_s):  # type: ignore[no-untyped-def]
    """The machine to move now and its new host; (-1, -1) for none."""
    now = drain.now
    now[1] = min(now[1] + drain.per_day * (now_s - now[3]) / DAY_S, drain.per_day)
    now[3] = now_s
    h = int(now[0])
    if h >= 0 and (fleet.hosts[h].count == 0 or now_s - now[2] > PATIENCE * drain.horizon_s):
        fleet.hosts[h].blocked = 0
        now[0] = -1.0
        h = -1
    if h < 0 and now[1] >= 1.0 and now_s >= now[4]:
        h = _victim(fleet, outlook, drain, now_s)
        if h >= 0:
            fleet.hosts[h].blocked = 1
            now[0], now[2] = h, now_s
    if h < 0 or now[1] < 1.0:
        return -1, -1
    v, chosen, longest = fleet.hosts[h].head, -1, drain.horizon_s
    while v >= 0:
        left_s = left_of(outlook, v, now_s - fleet.machines[v].arrival_s, now_s)
        if left_s > longest:
            chosen, longest = v, left_s
        v = fleet.machines[v].after
    if chosen < 0:
        return -1, -1
    target = choose(fleet, outlook, rule, chosen, now_s, longest, np.bool_(True))
    if target < 0:  # the others are full: try again later
        fleet.hosts[h].blocked = 0
        now[0], now[4] = -1.0, now_s + drain.horizon_s
        return -1, -1
    now[1] -= 1.0
    return chosen, target
