"""Which share of every pair's bytes goes over which path: the concurrent flow of least time, then paths, then whole units.

The flow is a linear program (`bounds.flow`): the least time in which all pairs' bytes pass the links, and among the flows that reach it the one
of fewest hops. A source's flow is cut into paths one after the other (textbook flow decomposition); what remains after each is a flow still. A pair's
shares are rounded to units, all of one size, by largest remainders, in the number of units that loads the fullest link least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from ....errors import Infeasible
from ..bounds.flow import Arc, Wanted, least_time_flow
from ..rates import RateGraph

__all__ = ["Pair", "Paths", "Share", "fullest_s", "in_units", "shares_of"]

MIN_PAIR_SHARE = 1e-6  # share of a pair's bytes below which a flow is what the solver's arithmetic leaves
MIN_LOAD_SHARE_SAVED = 0.003  # more units per pair must take so much off the fullest link, since every unit is lanes of its own
Pair = tuple[int, int]
Paths = Mapping[Pair, list[tuple[tuple[int, ...], int]]]  # of every pair: nodes, units


@dataclass(frozen=True)
class Share:
    """A path as nodes of the graph, source and destination included, and its part of the pair's bytes."""

    path: tuple[int, ...]
    part: float


def shares_of(graph: RateGraph, wanted: Wanted) -> dict[Pair, list[Share]]:
    """Paths of every pair, the largest share first. Raises: Infeasible (a pair has no path), Unsupported (too large)."""
    flows = least_time_flow(graph, wanted)
    found: dict[Pair, list[Share]] = {}
    for s, row in wanted.items():
        left = dict(flows[s])
        whole = {t: float(d) for t, d in row.items()}
        # What is left after a destination's paths are taken off is still a flow to the others, so destinations can be served one after the other.
        for t in sorted(row, key=lambda t: (-row[t], t)):
            shares: dict[tuple[int, ...], float] = {}
            missing = whole[t]
            while missing > MIN_PAIR_SHARE * whole[t]:
                # A path's whole width empties an arc or the demand, so there are at most as many paths as arcs.
                path, width = _widest(left, s, t, least=MIN_PAIR_SHARE * whole[t] / 16)
                amount = min(missing, width)
                if not path:
                    break  # rounding of the solver: the paths found share what is missing
                for arc in pairwise(path):
                    left[arc] -= amount
                shares[path] = shares.get(path, 0.0) + amount
                missing -= amount
            if not shares:
                raise Infeasible(f"no path from {graph.names[s]} to {graph.names[t]}", where="multipath")
            total = sum(shares.values())
            found[s, t] = [Share(p, x / total) for p, x in sorted(shares.items(), key=lambda item: (-item[1], item[0]))]
    return found


def _widest(flow: Mapping[Arc, float], s: int, t: int, *, least: float) -> tuple[tuple[int, ...], float]:
    """Of the paths of fewest hops along arcs that carry more than `least` the widest, and its width; () where there is none."""
    out: dict[int, list[int]] = {}
    for (u, v), x in flow.items():
        if x > least:
            out.setdefault(u, []).append(v)
    depth, queue = {s: 0}, deque([s])
    width, before = {s: float("inf")}, dict[int, int]()
    while queue:
        u = queue.popleft()
        if u == t:
            break
        for v in out.get(u, ()):
            through = min(width[u], flow[u, v])
            if v not in depth:
                depth[v], width[v], before[v] = depth[u] + 1, through, u
                queue.append(v)
            elif depth[v] == depth[u] + 1 and through > width[v]:
                width[v], before[v] = through, u
    if t not in depth:
        return (), 0.0
    path = [t]
    while path[-1] != s:
        path.append(before[path[-1]])
    return tuple(path[::-1]), width[t]


def in_units(
    graph: RateGraph, wanted: Wanted, shares: Mapping[Pair, list[Share]], most: int, *, units: int | None = None
) -> tuple[int, Paths]:  # fmt: skip
    """(units per pair, paths of every pair with whole units): as many as asked, or of 1..most those worth having."""
    best: tuple[float, int, Paths] | None = None
    for count in range(1, most + 1) if units is None else (units,):
        paths = {pair: _rounded(own, count) for pair, own in shares.items()}
        time = float(fullest_s(graph, wanted, paths, count))
        if best is None or time < best[0] * (1 - MIN_LOAD_SHARE_SAVED):
            best = time, count, paths
    assert best is not None
    return best[1], best[2]


def _rounded(shares: list[Share], units: int) -> list[tuple[tuple[int, ...], int]]:
    """Whole units by largest remainders; paths without any are left out."""
    exact = [x.part * units for x in shares]
    whole = [int(x + 1e-9) for x in exact]
    order = sorted(range(len(shares)), key=lambda i: (-(exact[i] - whole[i]), i))
    for i in order[: units - sum(whole)]:
        whole[i] += 1
    return [(x.path, n) for x, n in zip(shares, whole, strict=True) if n]


def fullest_s(graph: RateGraph, wanted: Wanted, paths: Paths, units: int) -> Fraction:
    """Seconds that the fullest link needs."""
    load: dict[Arc, Fraction] = {}
    for (s, t), own in paths.items():
        each = wanted[s][t] / units
        for path, count in own:
            for arc in pairwise(path):
                load[arc] = load.get(arc, Fraction(0)) + each * count
    return max((x / graph.arcs[arc] for arc, x in load.items()), default=Fraction(0)) / graph.unit_Bps
