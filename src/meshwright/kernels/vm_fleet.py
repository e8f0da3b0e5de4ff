"""Where a virtual machine goes: the hosts as a placement rule sees them, and the rules themselves, compiled.

A rule is a list of keys: the host with the smallest first key is taken, later keys break ties, then the lowest number. `method` names the keys:
packing alone (first fit, best fit, Kubernetes' Most- and LeastAllocated), or how much later the host would become empty, and then packing. Sizes are
whole billionths of a host, so nothing drifts. When a host becomes empty is read off its machines' forecasts, again at every change and tick.

`decide.cluster.vms` says what each rule is for and where it is from. Cost: O(hosts · resources) per decision, O(machines of a host) per change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compile import inlined, kernel

__all__ = [
    "BEST", "BINARY", "EXPECTED", "FIRST", "LA", "LAVA", "LEAST", "MOST", "NILAS", "Fleet", "Outlook", "Rule", "choose", "leave", "make_fleet", "put",
    "release", "review",
]  # fmt: skip

FIRST, BEST, MOST, LEAST, LA, BINARY, NILAS, LAVA, EXPECTED = range(9)
EMPTY, OPEN, RECYCLING = range(3)  # LAVA's states of a host
WHOLE = 1_000_000_000  # parts that a host has of every resource
HOUR_S = 3600.0
NEVER_S = np.inf
FIRST_S = 60.0  # uptime of the second point of a forecast; two points to a doubling from there on
CLASSES = 4  # of lifetimes: below 1, 10, 100 hours, and longer
FULL = 900_000_000  # of a host, in any resource: LAVA recycles it from there on
LATE = 1.1  # of a class's upper limit: then the host was predicted wrong
OVERDUE = 3.0  # times its predicted lifetime: so old a machine counts as mispredicted
CALMER = 0.75  # of a limit, below which the guard trusts predictions again


class Rule(NamedTuple):
    """`method`, and `packing` (FIRST or BEST) behind it. `first_bucket_s`: extensions up to it count alike; buckets double from there. `short_s`: of
    LA-binary. `once`: predictions are made at arrival only. `doubt`, `distrust`: shares of the load that is overdue from which the guard falls back
    to NILAS, and to packing alone; above 1: never."""

    method: int
    packing: int = BEST
    first_bucket_s: float = 1800.0
    short_s: float = 7200.0
    once: bool = False
    doubt: float = 2.0
    distrust: float = 2.0


class Outlook(NamedTuple):
    """Per row of forecasts and uptime (0, then 60 s and doublings in two steps): mean seconds left, and the share that lives so long. `end_s`: true
    ends, where `exact`."""

    row: NDArray[np.int32]
    left_s: NDArray[np.float64]
    alive: NDArray[np.float64]
    end_s: NDArray[np.float64]
    exact: bool


class Fleet(NamedTuple):
    """`size[shape, kind of host, resource]`; `free[host, resource]`; a record per host and per machine; `told`: level of the guard, share of the
    load that is overdue, host deadlines that came, of these missed."""

    size: NDArray[np.int64]
    free: NDArray[np.int64]
    hosts: NDArray[np.void]
    machines: NDArray[np.void]
    told: NDArray[np.float64]


# `head`: first of its machines, as a list. `end_s`: when it becomes empty. `due_s`: deadline of its class. `residual`: machines from before it was
# recycled.
HOST = np.dtype([
    ("end_s", "f8"), ("due_s", "f8"), ("kind", "i4"), ("count", "i4"), ("head", "i4"), ("residual", "i4"), ("phase", "i4"), ("klass", "i4"),
    ("blocked", "i4"),
], align=True)  # fmt: skip
# `after`, `before`: its neighbours in the list of its host. `predicted_s`: lifetime, as predicted at arrival. `stayed`: it is residual.
MACHINE = np.dtype([
    ("arrival_s", "f8"), ("predicted_s", "f8"), ("after", "i4"), ("before", "i4"), ("host", "i4"), ("shape", "i4"), ("stayed", "i4"),
], align=True)  # fmt: skip


def make_fleet(size: NDArray[np.int64], kind: NDArray[np.int32], shape: NDArray[np.int32], arrival_s: NDArray[np.float64]) -> Fleet:
    """All hosts empty. Sizes in billionths; more than a whole one: that shape does not fit that kind."""
    hosts, machines = np.zeros(len(kind), HOST), np.zeros(len(shape), MACHINE)
    hosts["kind"], hosts["head"], hosts["due_s"] = kind, -1, NEVER_S
    machines["shape"], machines["arrival_s"] = shape, arrival_s
    machines["after"] = machines["before"] = machines["host"] = -1
    return Fleet(size=size, free=np.full((len(kind), size.shape[2]), WHOLE, np.int64), hosts=hosts, machines=machines, told=np.zeros(4))


@inlined
def _point(up_s, points):  # type: ignore[no-untyped-def]
    """Where an uptime lies among the points of a forecast."""
    at = up_s / FIRST_S if up_s < FIRST_S else 1.0 + 2.0 * math.log2(up_s / FIRST_S)
    return min(max(at, 0.0), points - 1.0)


@inlined
def left_of(outlook, v, up_s, now_s):  # type: ignore[no-untyped-def]
    """Mean seconds that a machine of this uptime still lives."""
    if outlook.exact:
        return max(outlook.end_s[v] - now_s, 0.0)
    row, points = outlook.row[v], outlook.left_s.shape[1]
    at = _point(up_s, points)
    low = min(int(at), points - 2)
    return outlook.left_s[row, low] + (at - low) * (outlook.left_s[row, low + 1] - outlook.left_s[row, low])


@inlined
def _extension(outlook, v, life_s, up_s, now_s, gap_s):  # type: ignore[no-untyped-def]
    """Mean seconds by which a machine of this uptime outlives a moment `gap_s` from now: the share that lives so long, times what they then have
    left."""
    if outlook.exact or gap_s <= 0.0:
        return max(life_s - gap_s, 0.0)
    row, points = outlook.row[v], outlook.left_s.shape[1]
    a, b = _point(up_s, points), _point(up_s + gap_s, points)
    i, k = min(int(a), points - 2), min(int(b), points - 2)
    here = outlook.alive[row, i] + (a - i) * (outlook.alive[row, i + 1] - outlook.alive[row, i])
    then = outlook.alive[row, k] + (b - k) * (outlook.alive[row, k + 1] - outlook.alive[row, k])
    left = outlook.left_s[row, k] + (b - k) * (outlook.left_s[row, k + 1] - outlook.left_s[row, k])
    return then / max(here, 1e-12) * left


@inlined
def _class_of(life_s):  # type: ignore[no-untyped-def]
    if life_s < HOUR_S:
        return 0
    if life_s < 10.0 * HOUR_S:
        return 1
    return 2 if life_s < 100.0 * HOUR_S else 3


@inlined
def _due(klass, now_s):  # type: ignore[no-untyped-def]
    """Deadline of a host of a class; the longest has none."""
    return now_s + LATE * HOUR_S * 10.0**klass if klass < CLASSES - 1 else NEVER_S


@kernel
def refresh(fleet, outlook, rule, h, now_s):  # type: ignore[no-untyped-def]
    """When the host becomes empty: the latest of its machines. Of LA-binary: whether one of them is long, as a far time."""
    end_s, v = now_s, fleet.hosts[h].head
    while v >= 0:
        at_s = fleet.machines[v].arrival_s + fleet.machines[v].predicted_s
        if rule.method == BINARY:
            long = fleet.machines[v].predicted_s >= rule.short_s or now_s - fleet.machines[v].arrival_s >= rule.short_s
            at_s = NEVER_S if long else now_s
        elif not rule.once or at_s <= now_s:
            at_s = now_s + left_of(outlook, v, now_s - fleet.machines[v].arrival_s, now_s)
        end_s = max(end_s, at_s)
        v = fleet.machines[v].after
    fleet.hosts[h].end_s = end_s


@inlined
def _bucket(extension_s, first_s):  # type: ignore[no-untyped-def]
    """0 for none, then the number of doublings from the first."""
    if extension_s <= 1.0:
        return 0.0
    if extension_s <= first_s:
        return 1.0
    return min(math.ceil(math.log2(extension_s / first_s)) + 1.0, 10.0)


@inlined
def _packing(fleet, h, s, method):  # type: ignore[no-untyped-def]
    """Smaller is better: free afterwards; of Kubernetes' rules their scores of 0 to 100 in whole numbers; of first fit nothing."""
    if method == FIRST:
        return 0.0
    k, resources = fleet.hosts[h].kind, fleet.free.shape[1]
    total = 0
    for j in range(resources):
        rest = fleet.free[h, j] - fleet.size[s, k, j]
        if method == BEST:
            total += rest
        elif method == MOST:
            total -= 100 * (WHOLE - rest) // WHOLE
        else:
            total -= 100 * rest // WHOLE
    return float(total if method == BEST else -(-total // resources))


@inlined
def _lifetime_key(fleet, outlook, rule, method, h, v, life_s, up_s, now_s):  # type: ignore[no-untyped-def]
    """First key of a rule that looks at lifetimes."""
    empty = fleet.hosts[h].count == 0
    gap_s = 0.0 if empty else max(fleet.hosts[h].end_s - now_s, 0.0)
    if method == BINARY:
        long, there = life_s >= rule.short_s, fleet.hosts[h].end_s == NEVER_S
        return (1.0 if long else 2.0) if empty else 0.0 if long == there else 2.0 if long else 1.0
    if method == LAVA:
        klass = _class_of(life_s)
        if fleet.hosts[h].phase == RECYCLING and fleet.hosts[h].klass > klass:
            return float(fleet.hosts[h].klass - klass) - 10.0
        if fleet.hosts[h].phase == OPEN and fleet.hosts[h].klass == klass:
            return -1.0
        if empty:
            return 100.0
    if method == EXPECTED:
        return _bucket(_extension(outlook, v, life_s, up_s, now_s, gap_s), rule.first_bucket_s)
    return _bucket(max(life_s - gap_s, 0.0), rule.first_bucket_s)


@kernel
def choose(fleet, outlook, rule, v, now_s, life_s, used_only):  # type: ignore[no-untyped-def]
    """The host for machine `v` that is expected to live `life_s` from now on, -1 where it fits nowhere. `used_only`: no host that is empty."""
    method, s, best, resources = rule.method, fleet.machines[v].shape, -1, fleet.free.shape[1]
    if fleet.told[0] >= 1.0 and method == LAVA:
        method = NILAS
    if fleet.told[0] >= 2.0 and method >= LA:
        method = rule.packing
    first = second = NEVER_S
    up_s = now_s - fleet.machines[v].arrival_s
    for h in range(len(fleet.hosts)):
        if fleet.hosts[h].blocked or (used_only and fleet.hosts[h].count == 0) or h == fleet.machines[v].host:
            continue
        k, fits = fleet.hosts[h].kind, True
        for j in range(resources):
            fits = fits and fleet.free[h, j] >= fleet.size[s, k, j]
        if not fits:
            continue
        if method < LA:
            a, b = 0.0, _packing(fleet, h, s, method)
        else:
            if fleet.hosts[h].end_s < now_s and fleet.hosts[h].count > 0:
                refresh(fleet, outlook, rule, h, now_s)
            a = _lifetime_key(fleet, outlook, rule, method, h, v, life_s, up_s, now_s)
            if a > first:
                continue
            b = _packing(fleet, h, s, rule.packing)
        if a < first or b < second:
            first, second, best = a, b, h
            if method == FIRST:
                break
    return best


@kernel
def put(fleet, outlook, rule, v, h, now_s):  # type: ignore[no-untyped-def]
    """Machine `v` is on host `h` from now on."""
    if fleet.machines[v].host < 0 and fleet.machines[v].predicted_s == 0.0:
        up_s = now_s - fleet.machines[v].arrival_s
        fleet.machines[v].predicted_s = up_s + left_of(outlook, v, up_s, now_s)
    k, s, empty = fleet.hosts[h].kind, fleet.machines[v].shape, fleet.hosts[h].count == 0
    full = False
    for j in range(fleet.free.shape[1]):
        fleet.free[h, j] -= fleet.size[s, k, j]
        full = full or fleet.free[h, j] <= WHOLE - FULL
    fleet.hosts[h].count += 1
    fleet.machines[v].host, fleet.machines[v].after, fleet.machines[v].before, fleet.machines[v].stayed = h, fleet.hosts[h].head, -1, 0
    if fleet.hosts[h].head >= 0:
        fleet.machines[fleet.hosts[h].head].before = v
    fleet.hosts[h].head = v
    if rule.method >= LA:
        refresh(fleet, outlook, rule, h, now_s)
    if rule.method == LAVA:
        if empty:
            fleet.hosts[h].phase, fleet.hosts[h].klass = OPEN, _class_of(fleet.machines[v].predicted_s)
            fleet.hosts[h].due_s = _due(fleet.hosts[h].klass, now_s)
        if full and fleet.hosts[h].phase == OPEN:
            fleet.hosts[h].phase = RECYCLING
            _all_stayed(fleet, h)


@inlined
def _all_stayed(fleet, h):  # type: ignore[no-untyped-def]
    """All machines that are there are residual."""
    n, v = 0, fleet.hosts[h].head
    while v >= 0:
        fleet.machines[v].stayed = 1
        n += 1
        v = fleet.machines[v].after
    fleet.hosts[h].residual = n


@inlined
def unlink(fleet, v):  # type: ignore[no-untyped-def]
    """Out of its host's list; what it takes is still taken."""
    h, a, b = fleet.machines[v].host, fleet.machines[v].after, fleet.machines[v].before
    if b >= 0:
        fleet.machines[b].after = a
    else:
        fleet.hosts[h].head = a
    if a >= 0:
        fleet.machines[a].before = b
    fleet.machines[v].host = -1
    if fleet.machines[v].stayed:
        fleet.machines[v].stayed = 0
        fleet.hosts[h].residual -= 1


@kernel
def release(fleet, outlook, rule, h, s, now_s):  # type: ignore[no-untyped-def]
    """What a machine of shape `s` took on the host is free again."""
    k = fleet.hosts[h].kind
    for j in range(fleet.free.shape[1]):
        fleet.free[h, j] += fleet.size[s, k, j]
    fleet.hosts[h].count -= 1
    if rule.method >= LA:
        refresh(fleet, outlook, rule, np.int64(h), now_s)
    if rule.method == LAVA:
        if fleet.hosts[h].count == 0:
            if fleet.hosts[h].due_s < NEVER_S:
                fleet.told[2] += 1.0
            fleet.hosts[h].phase, fleet.hosts[h].klass, fleet.hosts[h].due_s, fleet.hosts[h].residual = EMPTY, 0, NEVER_S, 0
        elif fleet.hosts[h].phase == RECYCLING and fleet.hosts[h].residual == 0:
            fleet.hosts[h].klass = max(fleet.hosts[h].klass - 1, 0)
            fleet.hosts[h].due_s = _due(fleet.hosts[h].klass, now_s)
            _all_stayed(fleet, h)


@kernel
def expected_left(fleet, outlook, v, now_s):  # type: ignore[no-untyped-def]
    """Mean seconds that machine `v` still lives."""
    return left_of(outlook, v, now_s - fleet.machines[v].arrival_s, now_s)


@kernel
def leave(fleet, outlook, rule, v, now_s):  # type: ignore[no-untyped-def]
    """Machine `v` is gone."""
    h = fleet.machines[v].host
    unlink(fleet, v)
    release(fleet, outlook, rule, h, fleet.machines[v].shape, now_s)


@kernel
def review(fleet, outlook, rule, now_s):  # type: ignore[no-untyped-def]
    """At a tick: forecasts are read again, LAVA's host deadlines looked at, and the guard weighs what is overdue."""
    late = used = 0.0
    for h in range(len(fleet.hosts)):
        v = fleet.hosts[h].head
        while v >= 0:
            load = float(fleet.size[fleet.machines[v].shape, fleet.hosts[h].kind, 0])
            used += load
            if now_s - fleet.machines[v].arrival_s > OVERDUE * fleet.machines[v].predicted_s + FIRST_S:
                late += load
            v = fleet.machines[v].after
        if rule.method >= LA and fleet.hosts[h].count > 0:
            refresh(fleet, outlook, rule, h, now_s)
        if fleet.hosts[h].due_s < now_s and fleet.hosts[h].count > 0:
            fleet.told[2] += 1.0
            fleet.told[3] += 1.0
            fleet.hosts[h].klass = min(fleet.hosts[h].klass + 1, CLASSES - 1)
            fleet.hosts[h].due_s = _due(fleet.hosts[h].klass, now_s)
    share = late / used if used > 0.0 else 0.0
    fleet.told[1] = share
    level = fleet.told[0]
    if share > rule.distrust or (level == 2.0 and share > CALMER * rule.distrust):
        fleet.told[0] = 2.0
    else:
        fleet.told[0] = 1.0 if share > rule.doubt or (level >= 1.0 and share > CALMER * rule.doubt) else 0.0
