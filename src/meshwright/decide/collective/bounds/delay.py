"""Lower bound on the time of a collective from bytes and latency together: what crosses a cut last has still to get where it is needed.

For a set S of actors, b bytes must leave S (the `cut` bound), and each of them is needed by every rank outside, or holds what every rank inside
adds to it. A message that leaves S over link e goes to one device; from there to any rank that needs the byte it takes messages of their own.
So of a copy sent while the time to go is τ, at most a share q_e(τ) of the ranks outside can profit: the most ranks that one device can serve in
time. All shares together must be b times one, hence for links of rate r_e

    sum of r_e · ∫_0^T q_e(τ) dτ >= b,    so    T >= (b + sum of r_e · A_e) / sum of r_e,    A_e = ∫_0^∞ (1 - q_e(τ)) dτ,

claimed only where T is no less than every time at which some q_e reaches one. A message takes its links' latencies and the largest that a library
adds on one of them; it may pass through devices. Reduce-scatter and reduce are the same with time reversed: of what a device sends, at most what
q_e(τ) of the ranks inside have contributed by then. Switches that can copy or add receive and send like devices; rates are sustained ones, without
token buckets. This is no statement about rates: `bandwidth_bound` stays their optimum.
Among many ranks (`by` "servers" in the certificate) times are told apart by server only: a device needs at least the least time between two devices
of one server to serve a second rank, at most those of the fullest server until the least time between two servers has passed, and all after it. The
latter is at least that of leaving any server and entering any; so no pair of devices is looked at.
Source: ours; the cut bound is that of ForestColl (arXiv 2402.06787).
Certificate `delay`: as for `cut`, and `by`; `check.delay` works everything out again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from ....bound import Bound, Certificate
from ....errors import Unsupported
from ..memo import remember
from ..problem import ROOTED, CollectiveProblem
from .bandwidth import bandwidth_bound, crossing_bytes

__all__ = ["delay_bound"]

OPERATIONS = ("all-gather", "reduce-scatter", "broadcast", "reduce")
MAX_CUTS = 48  # cuts tried beside the bottleneck; of more, every second, third, ... is taken: any choice gives a valid bound
MAX_UNITS = 1 << 57  # of all latencies together, in parts of their common denominator: more than a checker of 64 bits adds up
MAX_RANKS_ONE_BY_ONE = 72  # among more, times are those of servers, and cuts are few


def delay_bound(problem: CollectiveProblem) -> Bound | None:
    """The best of the bandwidth bound's cut, every rank alone, and every server; None where no cut gives more than the bandwidth bound, and for other
    operations.

    Raises: as `bandwidth_bound`.
    """
    if problem.op not in OPERATIONS:
        return None
    key = ("delay bound", problem.op, problem.ranks, problem.root, problem.size_bytes, problem.shard_bytes)
    return remember(problem.fabric, key, lambda: _best(problem))


def _best(problem: CollectiveProblem) -> Bound | None:
    bandwidth = bandwidth_bound(problem)
    if bandwidth.certificate.kind != "cut":
        return None
    try:
        ways = (_ByDevice if len(problem.ranks) <= MAX_RANKS_ONE_BY_ONE else _ByServer)(problem)
    except Unsupported:
        return None
    found: Bound | None = None
    for inside in _cuts(problem, frozenset(bandwidth.certificate.data["inside"])):
        bound = _of_cut(problem, ways, inside)
        if bound is not None and bound.exact > (found or bandwidth).exact:
            found = bound
    return found


def _cuts(problem: CollectiveProblem, bottleneck: frozenset[str]) -> list[frozenset[str]]:
    """Sets of actors that bytes must leave: the bottleneck; all but one rank, or one rank alone; all but one server, or one server.

    The root and its server come first, then a server with nothing special; among many ranks no more.
    """
    fabric, ranks = problem.fabric, set(problem.ranks)
    everyone = frozenset(fabric.actor_names)
    servers: dict[str, set[str]] = {}
    for name, group in [(d.name, d.group) for d in fabric.devices] + [(s.name, s.group) for s in fabric.switches]:
        if group:
            servers.setdefault(group, set()).add(name)
    root = problem.ranks[problem.root if problem.op in ROOTED else 0]
    home = fabric.device(root).group
    rows = [frozenset(part) for group, part in servers.items() if part & ranks and group != home]
    first = [frozenset([root]), *([frozenset(servers[home])] if home else []), *rows[:1]]
    rest = [] if len(ranks) > MAX_RANKS_ONE_BY_ONE else [*rows[1:], *(frozenset([r]) for r in problem.ranks if r != root)]
    # Both sides of every part are cuts, hence twice the parts.
    every = -(-2 * len(rest) // MAX_CUTS) or 1
    return list(dict.fromkeys([bottleneck, *(side for part in (*first, *rest[::every]) for side in (part, everyone - part))]))


class _Ways:
    """Latencies in whole units, of messages between devices and over given links. Backwards for reductions."""

    def __init__(self, problem: CollectiveProblem) -> None:
        self.problem, self.fabric = problem, problem.fabric
        self.turned = problem.op in ("reduce-scatter", "reduce")
        stated = {t: Fraction(repr(t)) for t in {t for x in self.fabric.links for t in (x.latency_s, x.library_latency_s)}}
        # Latencies as whole units of one denominator: the bound is exact, and sums of them compare without rounding.
        self.scale = lcm(*(f.denominator for f in stated.values()))
        units = {t: int(f * self.scale) for t, f in stated.items()}
        self.wire, self.library = [units[x.latency_s] for x in self.fabric.links], [units[x.library_latency_s] for x in self.fabric.links]
        self.levels = sorted(set(self.library))
        if sum(self.wire) + sum(self.library) >= MAX_UNITS:
            raise Unsupported("latencies have no common unit that 64 bits hold", hint="round them")
        self.ends = [(v, u) if self.turned else (u, v) for u, v in self.fabric.link_ends]
        ends = np.array(self.ends, np.int64).reshape(-1, 2)
        self.columns = ends[:, 0], ends[:, 1], np.array(self.wire, np.int64), np.array(self.library, np.int64)
        # Who may receive and send on: devices, and switches that add or copy.
        able = [s.multicast or s.aggregate for s in self.fabric.switches]
        self.hosts = [*range(len(self.fabric.devices)), *(len(self.fabric.devices) + i for i, can in enumerate(able) if can)]
        self.nearest = {level: self._reach(self.hosts, level, True) for level in self.levels}

    def _reach(self, sources: Iterable[int], level: int, forward: bool, within: Sequence[int] = ()) -> dict[int, int]:
        """Wire latency from the nearest source over links whose library adds no more than `level`; `within`: by actor, a part not to be left."""
        src, dst, wire, library = self.columns
        taken = library <= level
        if within:
            part = np.array(within)
            taken &= part[src] == part[dst]
        near, far, wire = (src if forward else dst)[taken], (dst if forward else src)[taken], wire[taken]
        at = np.full(len(self.fabric.actor_names), MAX_UNITS)
        at[list(sources)] = 0
        # All links at once, until none brings an actor nearer: paths from the nearest source have few hops.
        while True:
            before = at.copy()
            np.minimum.at(at, far, before[near] + wire)
            if np.array_equal(before, at):
                return {u: t for u, t in enumerate(at.tolist()) if t < MAX_UNITS}

    def delays(self, beyond: Sequence[int], hosts: Sequence[int]) -> Callable[[int], tuple[Fraction | None, int]]:
        """By link: the mean of the times after which one of `hosts` has served 1, 2, ... all of `beyond`, and the last of them."""
        raise NotImplementedError


class _ByDevice(_Ways):
    def __init__(self, problem: CollectiveProblem) -> None:
        super().__init__(problem)
        self.known: dict[tuple[int, int], dict[int, int]] = {}

    def _to(self, target: int, level: int) -> dict[int, int]:
        """Wire latency from every actor to `target`."""
        key = target, level
        if key not in self.known:
            self.known[key] = self._reach([target], level, False)
        return self.known[key]

    def message(self, src: int, dst: int) -> int | None:
        """The quickest message between two devices."""
        if src == dst:
            return 0
        return min((self._to(dst, level)[src] + level for level in self.levels if src in self._to(dst, level)), default=None)

    def over(self, link: int, dst: int) -> int | None:
        """The quickest message from any device over a link to a device."""
        u, w = self.ends[link]
        found = [
            self.nearest[level][u] + self.wire[link] + self._to(dst, level)[w] + level
            # The library adds the largest delay of a message's links once: a path over links of at most `level` costs its wire plus `level`, and the
            # least over all levels is the least over all paths.
            for level in self.levels if self.library[link] <= level and u in self.nearest[level] and w in self._to(dst, level)
        ]  # fmt: skip
        return min(found, default=None)

    def delays(self, beyond: Sequence[int], hosts: Sequence[int]) -> Callable[[int], tuple[Fraction | None, int]]:
        served = {d: [self.message(d, v) for v in beyond] for d in hosts}
        return lambda k: _delay([(first, served[d]) for d in hosts if (first := self.over(k, d)) is not None], len(beyond))


class _ByServer(_Ways):
    """Least times alone: between two hosts of one server (`within`), and of two (`apart`)."""

    def __init__(self, problem: CollectiveProblem) -> None:
        super().__init__(problem)
        self.toward = {level: self._reach(self.hosts, level, False) for level in self.levels}
        number: dict[str, int] = {}
        groups = [*(d.group for d in self.fabric.devices), *(s.group for s in self.fabric.switches)]
        for host in self.hosts:
            groups[host] = groups[host] or f"\0{self.fabric.actor_names[host]}"
        # A host of no group is a server of its own; a switch of none lies between servers (-1).
        self.server = [number.setdefault(group, len(number)) if group else -1 for group in groups]
        out, into = self._borders()
        sums = [a + b for a, b in ((out[1], into[0]), (out[0], into[1])) if a is not None and b is not None]
        self.apart = max(sums, default=None)
        self.within = min((t for t in (self._neighbours(), self.apart) if t is not None), default=0)

    def _borders(self) -> tuple[list[int | None], list[int | None]]:
        """Least time to leave a server from one of its hosts, and to get from outside to one: [wires alone, with the library's]."""
        out: list[list[int]] = [[], []]
        into: list[list[int]] = [[], []]
        for level in self.levels:
            left, right = (self._reach(self.hosts, level, forward, self.server) for forward in (True, False))
            for (u, v), wire, library in zip(self.ends, self.wire, self.library, strict=True):
                if self.server[u] == self.server[v] or library > level:
                    continue
                if u in left and self.server[u] >= 0:
                    out[0].append(left[u] + wire)
                    out[1].append(left[u] + wire + level)
                if v in right and self.server[v] >= 0:
                    # A link that joins two servers has been counted where it leaves the first.
                    last = right[v] + (wire if self.server[u] < 0 else 0)
                    into[0].append(last)
                    into[1].append(last + level)
        return [min(row, default=None) for row in out], [min(row, default=None) for row in into]

    def _neighbours(self) -> int | None:
        """Least time of a message between two hosts of one server that stays inside."""
        found, hosts = list[int](), set(self.hosts)
        for level in self.levels:
            heap = [(0, d, d) for d in self.hosts]
            seen: dict[int, set[int]] = {}
            out: list[list[tuple[int, int]]] = [[] for _ in self.server]
            for (u, v), wire, library in zip(self.ends, self.wire, self.library, strict=True):
                if library <= level and self.server[u] == self.server[v]:
                    out[u].append((v, wire))
            while heap:  # every actor by the two hosts that reach it first
                far, u, source = heapq.heappop(heap)
                sources = seen.setdefault(u, set())
                if source in sources or len(sources) > 1:
                    continue
                sources.add(source)
                if u in hosts and u != source:
                    found.append(far + level)
                for v, wire in out[u]:
                    heapq.heappush(heap, (far + wire, v, source))
        return min(found, default=None)

    def delays(self, beyond: Sequence[int], hosts: Sequence[int]) -> Callable[[int], tuple[Fraction | None, int]]:
        full, count = max(Counter(self.server[v] for v in beyond).values()), len(beyond)
        apart = self.apart or 0
        onward = Fraction((full - 1) * self.within + (count - full) * apart, count)
        last = apart if count > full else self.within if full > 1 else 0

        def of(link: int) -> tuple[Fraction | None, int]:
            (u, w), wire, library = self.ends[link], self.wire[link], self.library[link]
            first = min(
                (self.nearest[x][u] + wire + self.toward[x][w] + x
                 for x in self.levels if library <= x and u in self.nearest[x] and w in self.toward[x]), default=None,
            )  # fmt: skip
            return (None, 0) if first is None else (first + onward, first + last)

        return of


def _of_cut(problem: CollectiveProblem, ways: _Ways, inside: frozenset[str]) -> Bound | None:
    fabric = problem.fabric
    flags = [name in inside for name in fabric.actor_names]
    rank_flags = [name in inside for name in problem.ranks]
    crossing = _forced(problem, rank_flags)
    leaving = [k for k, (u, v) in enumerate(fabric.link_ends) if flags[u] and not flags[v]]
    if not crossing or not leaving:
        return None
    # Whom the bytes must still reach: the ranks outside, or with time reversed those inside, whose contributions the bytes hold.
    beyond = [fabric.actor_of[name] for name, within in zip(problem.ranks, rank_flags, strict=True) if within == ways.turned]
    delay_over = ways.delays(beyond, [d for d in ways.hosts if flags[d] == ways.turned])
    rate, lost, latest = 0, Fraction(0), Fraction(0)
    for k in leaving:
        delay, last = delay_over(k)
        if delay is None:
            return None
        r = fabric.links[k].rate_Bps
        rate, lost, latest = rate + r, lost + r * delay / ways.scale, max(latest, Fraction(last, ways.scale))
    value = (crossing + lost) / rate
    # The formula counts every link's loss in full, which holds only if T is past the last step of every q.
    return _bound(problem, inside, value, rate, crossing, "devices" if isinstance(ways, _ByDevice) else "servers") if value >= latest else None


def _forced(problem: CollectiveProblem, rank_flags: Sequence[bool]) -> Fraction:
    """Bytes that must leave the set; 0 where it forces none."""
    within = sum(rank_flags)
    if not 0 < within < len(rank_flags):
        return Fraction(0)
    if problem.op in ROOTED and rank_flags[problem.root] != (problem.op == "broadcast"):
        return Fraction(0)
    return crossing_bytes(problem, rank_flags)


def _delay(ways: Sequence[tuple[int, Sequence[int | None]]], ranks: int) -> tuple[Fraction | None, int]:
    """A_e: (∫ (1 - q), when q reaches one), from (time to a device, times on from there to every rank beyond)."""
    by_count: list[int | None] = [None] * (ranks + 1)  # the earliest time at which some device has served so many
    for first, onward in ways:
        for count, at in enumerate(sorted(first + t for t in onward if t is not None), start=1):
            known = by_count[count]
            by_count[count] = at if known is None else min(known, at)
    if by_count[ranks] is None:
        return None, 0
    for count in range(ranks - 1, 0, -1):  # who has served more has served that many, too
        later, here = by_count[count + 1], by_count[count]
        by_count[count] = here if later is None or (here is not None and here < later) else later
    times = [t for t in by_count[1:] if t is not None]
    # q steps up by 1/ranks at each of these times, so the integral of 1 - q is their mean.
    return Fraction(sum(times), ranks), max(times)


def _bound(problem: CollectiveProblem, inside: frozenset[str], value: Fraction, rate: int, crossing: Fraction, by: str) -> Bound:
    return Bound(
        quantity=f"{problem.op} time",
        value=str(value),
        unit="s",
        certificate=Certificate(
            kind="delay",
            data={
                "inside": [name for name in problem.fabric.actor_names if name in inside],
                "devices_inside": sum(1 for r in problem.ranks if r in inside),
                "leaving_Bps": str(rate),
                "demand": problem.op,
                "ranks": len(problem.ranks),
                "devices": list(problem.ranks),
                "root": problem.ranks[problem.root] if problem.op in ROOTED else "",
                "size_bytes": problem.size_bytes,
                "crossing_bytes": str(crossing),
                "by": by,
                **({} if problem.shard_bytes is None else {"shard_bytes": list(problem.shard_bytes)}),
            },
        ),
    )  # fmt: skip
