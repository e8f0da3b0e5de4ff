"""Capacities under which every switch gives out as many units as it takes in, as edge splitting needs it, and every rank still receives everything.

Cite: ForestColl (see strategy).
Left open by the paper: it assumes such rates. Measured ones never are: a port of 999.3 Mbit/s in and 998.9 Mbit/s out rounds to unlike units.
Our answer: a tree that enters a switch leaves it, so a switch's surplus on one side is of no use to any packing; it is cut off, unit by unit, along
a path to a rank or to a switch that lacks the other side, as long as max-flow says that every rank still receives all.
Invariant: no capacity grows. Cost: one sweep of max-flows per path that is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

__all__ = ["balanced_capacities", "surpluses"]

Arcs = dict[tuple[int, int], int]
# Paths tried per cut-off, and kept per layer of the search: each costs a max-flow to every rank, so an unlucky fabric must not try them all.
MAX_TRIED_PATHS = 256
# Links of such a path: the number of paths grows with every further one.
MAX_PATH_HOPS = 4


def surpluses(nodes: int, ranks: int, capacities: Mapping[tuple[int, int], int]) -> dict[int, int]:
    """Units that a switch takes in beyond those that it gives out; switches where both are alike are left out."""
    found = [0] * nodes
    for (u, v), units in capacities.items():
        found[u] -= units
        found[v] += units
    return {w: found[w] for w in range(ranks, nodes) if found[w]}


def balanced_capacities(
    nodes: int, ranks: int, capacities: Mapping[tuple[int, int], int], enough: Callable[[Arcs], bool]
) -> Arcs | None:  # fmt: skip
    """`enough(capacities)`: every rank still receives all units. None where no path can be given up."""
    arcs = dict(capacities)
    while unlike := surpluses(nodes, ranks, arcs):
        # The largest surplus first: its paths may end at switches of the opposite surplus, which are then balanced with it.
        switch, surplus = max(unlike.items(), key=lambda x: (abs(x[1]), -x[0]))
        trimmed = _trimmed(arcs, ranks, unlike, switch, surplus, enough)
        if trimmed is None:
            return None
        arcs = trimmed
    return arcs


def _trimmed(
    arcs: Arcs, ranks: int, unlike: Mapping[int, int], switch: int, surplus: int, enough: Callable[[Arcs], bool]
) -> Arcs | None:  # fmt: skip
    for number, path in enumerate(_paths(arcs, ranks, unlike, switch, inward=surplus > 0)):
        if number == MAX_TRIED_PATHS:
            break
        # An arc gives up no more than it has, and a switch at the far end no more than its own opposite surplus, or it would get a new one.
        end = path[-1][0] if surplus > 0 else path[-1][1]
        most = min(abs(surplus), *(arcs[a] for a in path), *([abs(unlike[end])] if end in unlike else []))
        # All at once is one sweep instead of many; a single unit is what is left to try where that starves a rank.
        for amount in dict.fromkeys((most, 1)):
            tried = dict(arcs)
            for arc in path:
                tried[arc] -= amount
                if not tried[arc]:
                    del tried[arc]
            if enough(tried):
                return tried
    return None


def _paths(
    arcs: Arcs, ranks: int, unlike: Mapping[int, int], switch: int, *, inward: bool
) -> Iterator[tuple[tuple[int, int], ...]]:  # fmt: skip
    """Arcs from the switch against (`inward`) or along the direction of data, to a rank or to a switch of the opposite surplus; widest arcs first."""
    sides: dict[int, list[tuple[int, tuple[int, int]]]] = {}
    for arc in sorted(arcs, key=lambda a: (-arcs[a], a)):
        near, far = (arc[1], arc[0]) if inward else arc
        sides.setdefault(near, []).append((far, arc))
    layer: list[tuple[int, tuple[tuple[int, int], ...]]] = [(switch, ())]
    for _ in range(MAX_PATH_HOPS):
        beyond: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        for node, path in layer:
            for far, arc in sides.get(node, ()):
                if far == switch or any(far in a for a in path):
                    continue
                # Only switches must be balanced, so a path may end at any rank, but at a switch only where that lacks this side.
                if far < ranks or unlike.get(far, 0) * (-1 if inward else 1) > 0:
                    yield (*path, arc)
                else:
                    beyond.append((far, (*path, arc)))
        layer = beyond[:MAX_TRIED_PATHS]
