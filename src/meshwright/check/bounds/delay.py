"""Certificates of kind `delay`, proved again: a cut, and what its last bytes still have to travel (`decide.collective.bounds.delay` states why).

Distances come from Floyd and Warshall's recurrence over whole units of time, one table per library latency; the integral over the share of ranks
that a copy can still serve is summed step by step over the times at which it changes. Certificates `by` servers need least times alone: of links,
within servers and between them. They come from repeated relaxation over all links at once, and from a table per kind of server.
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
    if data.get("by", "devices") not in ("devices", "servers"):
        raise ValueError("times are told apart by devices or by servers")
    if data.get("by") == "servers":
        return _by_server(data, fabric, crossing, leaving)
    if len(fabric.actor_names) > MAX_ACTORS:
        raise DelayOpen(f"{len(fabric.actor_names)} actors, more than {MAX_ACTORS}")
    turned = op in ("reduce-scatter", "reduce")
    number = {name: i for i, name in enumerate(fabric.actor_names)}
    far_side = [number[name] for name in fabric.actor_names if (name in inside) == turned]
    goals = [v for v in far_side if fabric.actor_names[v] in ranks]
    scale, tables = _tables(fabric, turned)
    devices = _hosts(fabric)
    hosts = [v for v in far_side if v in set(devices.tolist())]
    onward = np.full((len(hosts), len(goals)), UNREACHABLE, np.int64)
    for level, table in tables.items():
        onward = np.minimum(onward, table[np.ix_(hosts, goals)] + level)
    onward[np.equal.outer(np.array(hosts), np.array(goals))] = 0
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


def _hosts(fabric: Fabric) -> I64:
    """Who can receive a message and send it on: devices, and switches that add or copy."""
    able = [i for i, x in enumerate(fabric.switches) if x.multicast or x.aggregate]
    return np.array([*range(len(fabric.devices)), *(len(fabric.devices) + i for i in able)], np.int64)


class _Links:
    """Columns of all links in whole units of time, reversed where data comes together; `place`: by actor its server, -1 = between servers."""

    def __init__(self, fabric: Fabric, turned: bool) -> None:
        number = {name: i for i, name in enumerate(fabric.actor_names)}
        stated = {t: Fraction(repr(t)) for t in {t for x in fabric.links for t in (x.latency_s, x.library_latency_s)}}
        self.scale = lcm(*(f.denominator for f in stated.values()))
        whole = {t: int(exact * self.scale) for t, exact in stated.items()}
        if sum(whole[x.latency_s] + whole[x.library_latency_s] for x in fabric.links) >= UNREACHABLE >> 2:
            raise DelayOpen("latencies without a common unit of a reasonable size")
        wire = np.array([whole[x.latency_s] for x in fabric.links], np.int64)
        library = np.array([whole[x.library_latency_s] for x in fabric.links], np.int64)
        src, dst = np.array([(number[x.src], number[x.dst]) for x in fabric.links], np.int64).reshape(-1, 2).T
        self.wire, self.library, self.tail, self.head = wire, library, dst if turned else src, src if turned else dst
        self.hosts, self.actors = _hosts(fabric), len(fabric.actor_names)
        names = [*(d.group for d in fabric.devices), *(s.group for s in fabric.switches)]
        codes = {group: i for i, group in enumerate(dict.fromkeys(g for g in names if g))}
        self.place = np.array([codes.get(g, -1) for g in names], np.int64)
        lone = self.hosts[self.place[self.hosts] < 0]
        self.place[lone] = len(codes) + np.arange(len(lone))
        self.levels = sorted(set(library.tolist()))

    def reach(self, level: int, forward: bool, inside: bool) -> I64:
        """Wires from the nearest host to every actor, or on to one, over links that add no more than `level`; `inside`: of its own server."""
        used = self.library <= level
        if inside:
            used &= self.place[self.tail] == self.place[self.head]
        a, b, wire = self.tail[used], self.head[used], self.wire[used]
        a, b = (a, b) if forward else (b, a)
        far = np.full(self.actors, UNREACHABLE, np.int64)
        far[self.hosts] = 0
        while True:
            after = far.copy()
            np.minimum.at(after, b, np.minimum(far[a] + wire, UNREACHABLE))
            if (after == far).all():
                return far
            far = after

    def apart(self) -> int:
        """What a message from one server to another takes at least: the library counts where it leaves, or where it arrives."""
        out, into = [UNREACHABLE, UNREACHABLE], [UNREACHABLE, UNREACHABLE]
        crosses = self.place[self.tail] != self.place[self.head]
        for level in self.levels:
            used = crosses & (self.library <= level)
            before, after = self.reach(level, True, True)[self.tail], self.reach(level, False, True)[self.head]
            leaves, enters = used & (self.place[self.tail] >= 0), used & (self.place[self.head] >= 0)
            # Where a link joins two servers, its wire counts as the first one's.
            first, last = before + self.wire, after + np.where(self.place[self.tail] < 0, self.wire, 0)
            for i, added in enumerate((0, level)):
                out[i] = min(out[i], int(first[leaves].min(initial=UNREACHABLE)) + added)
                into[i] = min(into[i], int(last[enters].min(initial=UNREACHABLE)) + added)
        sums = [a + b for a, b in ((out[1], into[0]), (out[0], into[1])) if max(a, b) < UNREACHABLE]
        return max(sums, default=UNREACHABLE)

    def within(self) -> int:
        """What a message between two hosts of one server takes at least, if it stays inside: a table of all pairs per kind of server."""
        members: dict[int, list[int]] = {}
        for v, server in enumerate(self.place.tolist()):
            members.setdefault(server, []).append(v)
        position = {v: i for row in members.values() for i, v in enumerate(row)}
        hosts = set(self.hosts.tolist())
        links: dict[int, list[tuple[int, int, int, int]]] = {}
        same = np.flatnonzero((self.place[self.tail] == self.place[self.head]) & (self.place[self.tail] >= 0))
        for k in same.tolist():
            u, v = int(self.tail[k]), int(self.head[k])
            links.setdefault(int(self.place[u]), []).append((position[u], position[v], int(self.wire[k]), int(self.library[k])))
        kinds = {(len(members[s]), tuple(position[v] for v in members[s] if v in hosts), tuple(sorted(row))) for s, row in links.items()}
        best = UNREACHABLE
        for (size, ends, row), level in ((kind, level) for kind in kinds for level in self.levels):
            table = np.full((size, size), UNREACHABLE, np.int64)
            for u, v, wire, library in row:
                if library <= level:
                    table[u, v] = min(int(table[u, v]), wire)
            for k in range(size):
                table = np.minimum(table, np.minimum(table[:, k, None] + table[None, k, :], UNREACHABLE))
            np.fill_diagonal(table, UNREACHABLE)
            best = min(best, int(table[np.ix_(ends, ends)].min(initial=UNREACHABLE)) + level)
        return best


def _by_server(data: Mapping[str, Any], fabric: Fabric, crossing: Fraction, leaving: Fraction) -> tuple[Fraction, Fraction]:
    turned = data["demand"] in ("reduce-scatter", "reduce")
    links, inside, ranks = _Links(fabric, turned), set(data["inside"]), set(data["devices"])
    apart = links.apart()
    within = min(links.within(), apart)
    goals = [v for v, d in enumerate(fabric.devices) if d.name in ranks and (d.name in inside) == turned]
    full, count = int(np.bincount(links.place[goals]).max()), len(goals)
    if (count > full and apart >= UNREACHABLE) or (full > 1 and within >= UNREACHABLE):
        raise ValueError("no device beyond the cut reaches every rank there")
    onward = (full - 1) * within * (full > 1) + (count - full) * apart * (count > full)
    last = apart if count > full else within if full > 1 else 0
    first = np.full(len(fabric.links), UNREACHABLE, np.int64)
    for level in links.levels:
        way = links.reach(level, True, False)[links.tail] + links.wire + links.reach(level, False, False)[links.head] + level
        first = np.where(links.library <= level, np.minimum(first, way), first)
    lost, latest = Fraction(0), 0
    for k, x in enumerate(fabric.links):
        if x.src in inside and x.dst not in inside:
            if first[k] >= UNREACHABLE:
                raise ValueError("no device beyond the cut reaches every rank there")
            lost += x.rate_Bps * (int(first[k]) + Fraction(onward, count))
            latest = max(latest, int(first[k]) + last)
    return (crossing + lost / links.scale) / leaving, Fraction(latest, links.scale)


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
