"""Lower bound on the time of a collective from bytes and latency together: what crosses a cut last has still to get where it is needed.

For a set S of actors, b bytes must leave S (the `cut` bound), and each of them is needed by every rank outside, or holds what every rank inside
adds to it. A message that leaves S over link e goes to one device; from there to any rank that needs the byte it takes messages of their own.
So of a copy sent while the time to go is τ, at most a share q_e(τ) of the ranks outside can profit: the most ranks that one device can serve in
time. All shares together must be b times one, hence for links of rate r_e

    sum of r_e · ∫_0^T q_e(τ) dτ >= b,    so    T >= (b + sum of r_e · A_e) / sum of r_e,    A_e = ∫_0^∞ (1 - q_e(τ)) dτ,

claimed only where T is no less than every time at which some q_e reaches one. A message takes its links' latencies and the largest that a library
adds on one of them; it may pass through devices. Reduce-scatter and reduce are the same with time reversed: of what a device sends, at most what
q_e(τ) of the ranks inside have contributed by then. Switches only forward (in-network ones can serve many with one message), and rates are
sustained ones, without token buckets. This is no statement about rates: `bandwidth_bound` stays their optimum.
Source: ours; the cut bound is that of ForestColl (arXiv 2402.06787).
Certificate `delay`: as for `cut`; `check.delay` works everything out again.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from ....bound import Bound, Certificate
from ..memo import remember
from ..problem import ROOTED, CollectiveProblem
from .collective import bandwidth_bound, crossing_bytes

__all__ = ["delay_bound"]

OPERATIONS = ("all-gather", "reduce-scatter", "broadcast", "reduce")
MAX_CUTS = 48  # cuts tried beside the bottleneck; of more, every second, third, ... is taken: any choice gives a valid bound
MAX_RANKS_TRIED_ALONE = 256  # among more ranks only the bottleneck is tried


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
    ways = _Ways(problem)
    found: Bound | None = None
    for inside in _cuts(problem, frozenset(bandwidth.certificate.data["inside"])):
        bound = _of_cut(problem, ways, inside)
        if bound is not None and bound.exact > (found or bandwidth).exact:
            found = bound
    return found


def _cuts(problem: CollectiveProblem, bottleneck: frozenset[str]) -> list[frozenset[str]]:
    """Sets of actors that bytes must leave: the bottleneck; all but one rank, or one rank alone; all but one server, or one server."""
    fabric, ranks = problem.fabric, set(problem.ranks)
    everyone = frozenset(fabric.actor_names)
    cuts = [bottleneck]
    if len(ranks) <= MAX_RANKS_TRIED_ALONE:
        servers: dict[str, set[str]] = {}
        for name, group in [(d.name, d.group) for d in fabric.devices] + [(s.name, s.group) for s in fabric.switches]:
            if group:
                servers.setdefault(group, set()).add(name)
        alone = [frozenset([r]) for r in problem.ranks]
        if problem.op in ROOTED:
            alone.insert(0, alone[problem.root])
        parts = alone[:1] + [frozenset(part) for part in servers.values() if part & ranks] + alone[1:]
        # Both sides of every part are cuts, hence twice the parts.
        every = -(-2 * len(parts) // MAX_CUTS)
        cuts += [side for part in parts[::every] for side in (part, everyone - part)]
    return list(dict.fromkeys(cuts))


class _Ways:
    """Latencies in whole units, of messages between devices and over given links. Backwards for reductions."""

    def __init__(self, problem: CollectiveProblem) -> None:
        self.fabric = problem.fabric
        self.turned = problem.op in ("reduce-scatter", "reduce")
        wire = [Fraction(repr(x.latency_s)) for x in self.fabric.links]
        library = [Fraction(repr(x.library_latency_s)) for x in self.fabric.links]
        # Latencies as whole units of one denominator: the bound is exact, and sums of them compare without rounding.
        self.scale = lcm(*(f.denominator for f in (*wire, *library)))
        self.wire, self.library = ([int(f * self.scale) for f in row] for row in (wire, library))
        self.levels = sorted(set(self.library))
        self.ends = [(v, u) if self.turned else (u, v) for u, v in self.fabric.link_ends]
        self.known: dict[tuple[int, int, bool], dict[int, int]] = {}
        self.nearest: dict[int, dict[int, int]] = {level: self._reach(range(len(self.fabric.devices)), level, True) for level in self.levels}

    def _reach(self, sources: Sequence[int], level: int, forward: bool) -> dict[int, int]:
        """Wire latency from the nearest source over links whose library adds no more than `level`."""
        out: list[list[tuple[int, int]]] = [[] for _ in self.fabric.actor_names]
        for (u, v), wire, library in zip(self.ends, self.wire, self.library, strict=True):
            if library <= level:
                out[u if forward else v].append((v if forward else u, wire))
        reach: dict[int, int] = {}
        heap = [(0, source) for source in sources]
        while heap:
            far, u = heapq.heappop(heap)
            if u in reach:
                continue
            reach[u] = far
            for v, wire in out[u]:
                if v not in reach:
                    heapq.heappush(heap, (far + wire, v))
        return reach

    def _to(self, target: int, level: int) -> dict[int, int]:
        """Wire latency from every actor to `target`."""
        key = target, level, False
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
    devices = [d for d in range(len(fabric.devices)) if flags[d] == ways.turned]
    served = {d: [ways.message(d, v) for v in beyond] for d in devices}
    rate, lost, latest = 0, Fraction(0), Fraction(0)
    for k in leaving:
        delay, last = _delay([(first, served[d]) for d in devices if (first := ways.over(k, d)) is not None], len(beyond))
        if delay is None:
            return None
        r = fabric.links[k].rate_Bps
        rate, lost, latest = rate + r, lost + r * delay / ways.scale, max(latest, Fraction(last, ways.scale))
    value = (crossing + lost) / rate
    # The formula counts every link's loss in full, which holds only if T is past the last step of every q.
    return _bound(problem, inside, value, rate, crossing) if value >= latest else None


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


def _bound(problem: CollectiveProblem, inside: frozenset[str], value: Fraction, rate: int, crossing: Fraction) -> Bound:
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
                **({} if problem.shard_bytes is None else {"shard_bytes": list(problem.shard_bytes)}),
            },
        ),
    )  # fmt: skip
