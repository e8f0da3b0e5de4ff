"""Certificates of kind `delay`, proved again: a cut, and what its last bytes still have to travel (`decide.collective.bounds.delay` states why).

Distances come from Floyd and Warshall's recurrence over whole units of time, one table per library latency; the integral over the share of ranks
that a copy can still serve is summed step by step over the times at which it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...fabric.fabric import Fabric

__all__ = ["DelayOpen", "delay_seconds"]

MAX_ACTORS = 1200  # devices and switches; shortest times between all of them take the cube of their number
UNREACHABLE = 1 << 60  # a time above every real one; two of them added stay below 2^63
I64 = NDArray[np.int64]


class DelayOpen(Exception):
    """Too large to be checked here."""


def delay_seconds(data: Mapping[str, Any], fabric: Fabric, crossing: Fraction, leaving: Fraction) -> tuple[Fraction, Fraction]:
    """(time that the cut forces, time from which on that holds). `crossing` bytes and `leaving` bytes/s are those of the cut itself.

    Raises: ValueError (not such a cut), DelayOpen.
    """
    op, inside, ranks = data["demand"], set(data["inside"]), set(data["devices"])
    if op not in ("all-gather", "reduce-scatter", "broadcast", "reduce"):
        raise ValueError(f"delays bound no {op}")
    if len(fabric.actor_names) > MAX_ACTORS:
        raise DelayOpen(f"{len(fabric.actor_names)} actors, more than {MAX_ACTORS}")
    turned = op in ("reduce-scatter", "reduce")
    number = {name: i for i, name in enumerate(fabric.actor_names)}
    far_side = [number[name] for name in fabric.actor_names if (name in inside) == turned]
    goals = [v for v in far_side if fabric.actor_names[v] in ranks]
    hosts = [v for v in far_side if v < len(fabric.devices)]
    scale, tables = _tables(fabric, turned)
    devices = np.arange(len(fabric.devices))
    onward = np.full((len(hosts), len(goals)), UNREACHABLE, np.int64)
    for level, table in tables.items():
        onward = np.minimum(onward, table[np.ix_(hosts, goals)] + level)
    onward[np.equal.outer(hosts, goals)] = 0
    lost, latest = Fraction(0), 0
    for x in fabric.links:
        if x.src not in inside or x.dst in inside:
            continue
        u, w = (number[x.dst], number[x.src]) if turned else (number[x.src], number[x.dst])
        own, wire = (int(Fraction(repr(t)) * scale) for t in (x.library_latency_s, x.latency_s))
        first = np.full(len(hosts), UNREACHABLE, np.int64)
        for level, table in tables.items():
            if own <= level:
                first = np.minimum(first, table[devices, u].min() + wire + table[w, hosts] + level)
        arrivals = np.sort(np.minimum(first[:, None] + onward, UNREACHABLE), axis=1)
        unserved, last = _unserved(arrivals)
        lost += x.rate_Bps * Fraction(unserved, scale * len(goals))
        latest = max(latest, last)
    return (crossing + lost) / leaving, Fraction(latest, scale)


def _tables(fabric: Fabric, turned: bool) -> tuple[int, dict[int, I64]]:
    """Per library latency: wire latency between all actors over links that add no more; and units per second."""
    pairs = [(Fraction(repr(x.latency_s)), Fraction(repr(x.library_latency_s))) for x in fabric.links]
    scale = lcm(*(f.denominator for pair in pairs for f in pair))
    if sum(int(f * scale) for pair in pairs for f in pair) >= UNREACHABLE >> 2:
        raise DelayOpen("latencies without a common unit of a reasonable size")
    n = len(fabric.actor_names)
    number = {name: i for i, name in enumerate(fabric.actor_names)}
    out: dict[int, I64] = {}
    for level in sorted({int(library * scale) for _, library in pairs}):
        table = np.full((n, n), UNREACHABLE, np.int64)
        np.fill_diagonal(table, 0)
        for x, (wire, library) in zip(fabric.links, pairs, strict=True):
            if library * scale <= level:
                u, v = (number[x.dst], number[x.src]) if turned else (number[x.src], number[x.dst])
                table[u, v] = min(table[u, v], int(wire * scale))
        for k in range(n):
            table = np.minimum(table, np.minimum(table[:, k, None] + table[None, k, :], UNREACHABLE))
        out[level] = table
    return scale, out


def _unserved(arrivals: I64) -> tuple[int, int]:
    """Integral over time of the goals that no single host has served yet, and when the last is: rows hosts, sorted times of the goals."""
    goals = arrivals.shape[1]
    times = sorted({0, *arrivals[arrivals < UNREACHABLE].tolist()})
    total = 0
    for now, then in pairwise(times):
        total += (goals - int((arrivals <= now).sum(axis=1).max())) * (then - now)
        if int((arrivals <= then).sum(axis=1).max()) == goals:
            return total, then
    if times == [0] and int((arrivals <= 0).sum(axis=1).max(initial=0)) == goals:
        return 0, 0
    raise ValueError("no device beyond the cut reaches every rank there")
