"""Stage 1: which links every chunk takes, as an integer program (TACCL, NSDI 2023, section 5.1) on HiGHS.

x[c, l] = chunk c takes link l; start[c, r] = when c is at rank r if links were always free; T = time. T covers every arrival, the load of every
resource (fabric link) and the serial fan-out of a chunk. No order is decided here, so T is a lower bound for these routes. Beyond the paper:
relay cuts (a chunk that a box needs enters it), T at least the certified bound, symmetric variables identified instead of equated, big-M no
larger than the horizon of a known schedule, whose routes are also the first solution. Times are scaled by the horizon and never rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from math import inf
from typing import Any

import numpy as np

from ....errors import Infeasible, TimeLimit
from ....kernels.effort import Deadline
from ....kernels.highs import solve, solver, values
from .routing_problem import Routes, RoutingProblem
from .schedule import HORIZON_UNITS

__all__ = ["Routed", "route_exactly"]

SECONDARY_WEIGHT_SHARE = 1e-4  # weight of all secondary wishes of a sketch together, as a share of the horizon's
MAX_TIMES_FLOOR = 1.0 + 1e-7  # a time within this factor of what is proven counts as optimal: floats do not meet exactly


@dataclass(frozen=True)
class Routed:
    """`time_s`: T of the routes; `floor_s`: what is proven that no routes can beat; `optimal`: they meet."""

    routes: Routes
    time_s: float
    floor_s: float
    optimal: bool
    binaries: int


def route_exactly(problem: RoutingProblem, first: Routes, horizon_s: float, *, deadline: Deadline, nodes: int) -> Routed | None:
    """The best routes found until `deadline` or after `nodes` branch-and-bound nodes; None without any.

    Args: `first`: known routes whose schedule takes `horizon_s`; they are offered as first solution if they are symmetric.
    """
    return _Program(problem, horizon_s).solve(first, deadline, nodes)


@dataclass
class _Rows:
    """Rows `low <= sum(value · variable) <= high`, in HiGHS's compressed form."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    seen: set[tuple[object, ...]] = field(default_factory=set)

    def add(self, terms: Iterable[tuple[int, float]], low: float, high: float = float("inf")) -> None:
        merged: dict[int, float] = {}
        for variable, value in terms:
            merged[variable] = merged.get(variable, 0.0) + value
        key = (low, high, *sorted(merged.items()))
        if key in self.seen:
            return
        self.seen.add(key)
        self.low.append(low)
        self.high.append(high)
        self.start.append(len(self.index))
        self.index += merged.keys()
        self.value += merged.values()


class _Program:
    def __init__(self, problem: RoutingProblem, horizon_s: float) -> None:
        self.p = p = problem
        self.unit_s = horizon_s / HORIZON_UNITS
        self.inf = float("inf")
        orbits = p.orbits
        self.pairs, self.x, self.binaries, self.representatives = orbits.pairs, orbits.x, orbits.moves, orbits.representatives
        self.start = {item: self.binaries + i for item, i in orbits.start.items()}
        self.time = self.binaries + orbits.stays
        self.columns = self.time + 1
        self.soonest = {c: [x / self.unit_s for x in p.distance_s(c)] for c in self.representatives}
        self.delay = [x / self.unit_s for x in p.timing.delay_s]
        self.hold = [[x / self.unit_s for x in row] for row in p.timing.hold_s]
        self.rows = _Rows()
        self.at_least: list[tuple[list[tuple[int, float]], float]] = []  # T >= terms + constant
        self.objective: dict[int, float] = {self.time: 1.0}
        self.extra_integer: list[int] = []
        self._chunk_rows()
        self._load_rows()
        self._cut_rows()
        self._hint_rows()

    def _entering(self, c: int) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {}
        for i in sorted(self.p.allowed[c]):
            out.setdefault(self.p.links[i][1], []).append(i)
        return out

    def _finish(self, terms: Sequence[tuple[int, float]], constant: float) -> None:
        self.at_least.append((list(terms), constant))
        self.rows.add([(self.time, 1.0), *((v, -a) for v, a in terms)], constant)

    def _chunk_rows(self) -> None:
        for c in self.representatives:
            chunk, into, soonest = self.p.chunks[c], self._entering(c), self.soonest[c]
            for rank, links in into.items():
                terms = [(self.x[c, i], 1.0) for i in links]
                wanted = rank in chunk.dests
                self.rows.add(terms, 1.0 if wanted else 0.0, 1.0)
                if wanted:
                    self._finish([(self.start[c, rank], 1.0)], 0.0)
            leaving: dict[tuple[int, int], list[int]] = {}
            for i in sorted(self.p.allowed[c]):
                a, b, _ = self.p.links[i]
                leaving.setdefault((a, self.p.timing.resources[i][0]), []).append(i)
                x, here = self.x[c, i], self.start[c, b]
                if a == chunk.source:
                    # No big-M: start >= soonest holds anyway, and taking this link raises it to the link's delay.
                    self.rows.add([(here, 1.0), (x, -(self.delay[i] - soonest[b]))], soonest[b])
                    continue
                # A chunk leaves a rank only if it entered it.
                self.rows.add([*((self.x[c, j], 1.0) for j in into.get(a, ())), (x, -1.0)], 0.0)
                # If x = 0 the row must allow here = soonest and start[a] = horizon, and no more: a smaller M is a tighter relaxation.
                big = HORIZON_UNITS + self.delay[i] - soonest[b]
                self.rows.add([(here, 1.0), (self.start[c, a], -1.0), (x, -big)], self.delay[i] - big)
            for (a, _), links in leaving.items():
                # Copies of one chunk leave a port one after the other, all after it arrived: the last cannot end before their sum.
                if len(links) > 1:
                    begin = [] if a == chunk.source else [(self.start[c, a], 1.0)]
                    self._finish([*begin, *((self.x[c, i], self.hold[i][0]) for i in links)], 0.0)

    def _load_rows(self) -> None:
        users: dict[int, list[tuple[int, float, float, float]]] = {}
        for c, i in self.pairs:
            for k, r in enumerate(self.p.timing.resources[i]):
                offset = self.p.timing.offset_s[i][k] / self.unit_s
                tail = self.delay[i] - offset - self.hold[i][k]
                users.setdefault(r, []).append((self.x[c, i], self.hold[i][k], offset, max(tail, 0.0)))
        always = self._unavoidable()
        for r, uses in sorted(users.items()):
            # A resource that is surely used begins no sooner than the least offset to it, and after its last use the least tail is still to go.
            constant = min(u[2] for u in uses) + min(u[3] for u in uses) + always[r] if r in always else 0.0
            self._finish([(x, hold) for x, hold, _, _ in uses], constant)

    def _unavoidable(self) -> dict[int, float]:
        """Resources that some chunk must use, and the least travel still to go (in the box behind) after it, in units."""
        found: set[int] = set()
        for c in range(len(self.p.chunks)):
            for links in self._entries(c):
                found |= set.intersection(*(set(self.p.timing.resources[i]) for i in links))
        least: dict[int, float] = {}
        for c, i in self.pairs:
            needed = [r for r in self.p.timing.resources[i] if r in found]
            rest = self._rest(c, i) if needed else 0.0
            for r in needed:
                least[r] = min(least.get(r, rest), rest)
        return least

    def _rest(self, c: int, link: int) -> float:
        """Units from the arrival over `link` until the chunk can be everywhere that only this link leads to; 0 where others do too."""
        _, b, remote = self.p.links[link]
        if not self.p.relayed or not remote:
            return 0.0
        # Another link may bring the chunk to the box sooner: then nothing is sure to follow this arrival.
        if self._ways_in(c)[self.p.box[b]] > 1:
            return 0.0
        return float(self._spread[b, frozenset(d for d in self.p.chunks[c].dests if self.p.box[d] == self.p.box[b])])

    def _ways_in(self, c: int) -> dict[int, int]:
        """Links between boxes that the chunk may take, by the box that they lead to."""
        allowed = self.p.allowed[c]
        if allowed not in self._ways:
            counts: dict[int, int] = {}
            for i in allowed:
                _, b, remote = self.p.links[i]
                if remote:
                    counts[self.p.box[b]] = counts.get(self.p.box[b], 0) + 1
            self._ways[allowed] = counts
        return self._ways[allowed]

    @cached_property
    def _ways(self) -> dict[frozenset[int], dict[int, int]]:
        return {}

    @cached_property
    def _spread(self) -> Any:
        problem, delay = self.p, self.delay

        class Spread(dict[tuple[int, frozenset[int]], float]):
            def __missing__(self, key: tuple[int, frozenset[int]]) -> float:
                begin, dests = key
                if begin not in reach:
                    out = {begin: 0.0}
                    heap = [(0.0, begin)]
                    while heap:
                        at, v = heappop(heap)
                        for i in problem.leaving[v] if at <= out[v] else ():
                            _, b, remote = problem.links[i]
                            if not remote and at + delay[i] < out.get(b, inf):
                                out[b] = at + delay[i]
                                heappush(heap, (out[b], b))
                    reach[begin] = out
                self[key] = max((reach[begin].get(d, 0.0) for d in dests), default=0.0)
                return self[key]

        reach: dict[int, dict[int, float]] = {}
        return Spread()

    def _entries(self, c: int) -> list[list[int]]:
        """For each other box that needs the chunk, the links by which it may enter."""
        box, chunk = self.p.box, self.p.chunks[c]
        needy = sorted({box[d] for d in chunk.dests} - {box[chunk.source]})
        links = sorted(self.p.allowed[c])
        return [[i for i in links if self.p.links[i][2] and box[self.p.links[i][1]] == h and box[self.p.links[i][0]] != h] for h in needy]

    def _cut_rows(self) -> None:
        for c in self.representatives:
            for links in self._entries(c):
                self.rows.add([(self.x[c, i], 1.0) for i in links], 1.0)

    # ---- what a sketch asks ----
    def _hint_rows(self) -> None:
        hints = self.p.hints
        if hints.used:
            self._used_rows(dict(hints.used))
        if hints.balance != "none":
            level, sign = self._column(), 1.0 if hints.balance == "minmax" else -1.0
            self.objective[level] = sign * SECONDARY_WEIGHT_SHARE
            for i, (_, _, remote) in enumerate(self.p.links):
                load = [(x, -self.hold[i][0]) for (c, j), x in self.x.items() if j == i]
                if not remote and load:
                    self.rows.add([(level, 1.0), *load], *((0.0,) if sign > 0 else (-self.inf, 0.0)))
        if hints.own_first:
            self._order_rows()

    def _column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def _used_rows(self, wish: dict[int, int]) -> None:
        carried: dict[int, set[int]] = {}
        for (_, i), x in self.x.items():
            if i in wish:
                carried.setdefault(i, set()).add(x)
        one: dict[frozenset[int], int] = {}  # links with the same variables are images of each other
        for i, xs in sorted(carried.items()):
            key = frozenset(xs)
            if key not in one:
                one[key] = self._column()
                self.extra_integer.append(one[key])
                for x in sorted(xs):
                    self.rows.add([(one[key], 1.0), (x, -1.0)], 0.0)
                self.rows.add([*((x, 1.0) for x in sorted(xs)), (one[key], -1.0)], 0.0)
            self.objective[one[key]] = self.objective.get(one[key], 0.0) + wish[i] * SECONDARY_WEIGHT_SHARE * HORIZON_UNITS / len(carried)

    def _order_rows(self) -> None:
        """A sender's own chunk leaves before one that it forwards, on the same link."""
        for i, (a, b, remote) in enumerate(self.p.links):
            if not remote:
                continue
            riders = [c for c in range(len(self.p.chunks)) if (c, i) in self.x]
            for own in (c for c in riders if self.p.chunks[c].source == a):
                for other in (c for c in riders if self.p.chunks[c].source != a):
                    big = 2 * HORIZON_UNITS
                    terms = [(self.start[other, b], 1.0), (self.start[own, b], -1.0), (self.x[own, i], -big), (self.x[other, i], -big)]
                    self.rows.add(terms, self.hold[i][0] - 2 * big)

    # ---- solving ----
    def solve(self, first: Routes, deadline: Deadline, nodes: int) -> Routed | None:
        low, high = np.zeros(self.columns), np.full(self.columns, HORIZON_UNITS)
        high[: self.binaries] = 1.0
        high[self.extra_integer] = 1.0
        high[self.time] = HORIZON_UNITS * MAX_TIMES_FLOOR
        floor = min(self.p.floor_s / self.unit_s, HORIZON_UNITS)
        low[self.time] = floor
        for (c, rank), column in self.start.items():
            if c in self.soonest:
                low[column] = max(low[column], min(self.soonest[c][rank], HORIZON_UNITS))
        model = solver(mip_rel_gap=1e-6, mip_abs_gap=1e-6 * HORIZON_UNITS, mip_max_nodes=nodes, random_seed=1)
        model.addVars(self.columns, low, high)
        for column, weight in self.objective.items():
            model.changeColCost(column, weight)
        integers = np.array([*range(self.binaries), *self.extra_integer], np.int32)
        import highspy

        model.changeColsIntegrality(len(integers), integers, np.array([highspy.HighsVarType.kInteger] * len(integers)))
        rows = self.rows
        model.addRows(
            len(rows.low), np.array(rows.low), np.array(rows.high), len(rows.index), np.array(rows.start, np.int32),
            np.array(rows.index, np.int32), np.array(rows.value),
        )  # fmt: skip
        if len(self.objective) == 1 and floor > 0:
            # Routes at the proven bound cannot be beaten, so the search may stop there.
            model.setOptionValue("objective_target", float(floor * MAX_TIMES_FLOOR))
        self._offer(model, first)
        try:
            status = solve(model, what="routing", deadline=deadline)
        except (TimeLimit, Infeasible):  # infeasible: no symmetric routes, or none within the horizon's rounding
            return None
        found = values(model)
        routes = self._routes(found)
        reached = self._value(found)
        proven = max(floor, float(model.getInfo().mip_dual_bound)) if len(self.objective) == 1 else floor
        done = status == "optimal" or reached <= floor * MAX_TIMES_FLOOR
        if done and len(self.objective) == 1:
            proven = max(proven, reached * (1 - 2e-6))
        return Routed(routes, reached * self.unit_s, min(proven, reached) * self.unit_s, done, self.binaries)

    def _value(self, solution: Sequence[float]) -> float:
        return max(constant + sum(a * solution[v] for v, a in terms) for terms, constant in self.at_least)

    def _offer(self, model: Any, first: Routes) -> None:
        """The known routes as first solution, when they are symmetric."""
        taken = {self.x.get((c, i), -1) for c, links in enumerate(first) for i in links}
        pairs = {(c, i) for c, links in enumerate(first) for i in links}
        # One variable stands for a whole orbit: the first solution must use all its images or none.
        if -1 in taken or any((pair in pairs) != (x in taken) for pair, x in self.x.items()) or self.extra_integer or len(self.objective) > 1:
            return
        solution = [0.0] * self.columns
        for x in taken:
            solution[x] = 1.0
        for (c, rank), column in self.start.items():
            if c in self.soonest:
                solution[column] = min(self.soonest[c][rank], HORIZON_UNITS)
        for c in self.representatives:
            at = {self.p.chunks[c].source: 0.0}
            for i in first[c]:
                a, b, _ = self.p.links[i]
                at[b] = at[a] + self.delay[i]
                solution[self.start[c, b]] = max(solution[self.start[c, b]], at[b])
        solution[self.time] = max(self.p.floor_s / self.unit_s, self._value(solution))
        model.setSolution(self.columns, np.arange(self.columns, dtype=np.int32), np.array(solution))

    def _routes(self, solution: Sequence[float]) -> Routes:
        """The links that serve a destination, from the source outwards."""
        out = []
        for c, chunk in enumerate(self.p.chunks):
            by = {self.p.links[i][1]: i for i in sorted(self.p.allowed[c]) if solution[self.x[c, i]] > 0.5}
            done: dict[int, None] = {}
            for d in sorted(chunk.dests):
                way, v = [], d
                while v != chunk.source and by[v] not in done:
                    way.append(by[v])
                    v = self.p.links[by[v]][0]
                done |= dict.fromkeys(reversed(way))
            out.append(tuple(done))
        return tuple(out)
