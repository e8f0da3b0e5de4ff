"""A fabric as a graph of integer rates, ranks first: what the bounds and the tree planner compute on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd
from typing import TypeVar

import numpy as np

from ...errors import Disconnected, Unsupported
from ...fabric import Fabric
from ...kernels.maxflow import FlowNetwork

__all__ = ["Cut", "RateGraph", "pinned_route", "rate_graph", "with_relays", "worst_cut"]

T = TypeVar("T")


@dataclass(frozen=True)
class RateGraph:
    """Node i < ranks is rank i; the rest are switches and relaying devices. `arcs[u, v]` · `unit_Bps` is the rate from u to v."""

    names: tuple[str, ...]
    ranks: int
    group: tuple[int, ...]
    arcs: dict[tuple[int, int], int]
    unit_Bps: int

    @property
    def nodes(self) -> int:
        return len(self.names)

    @cached_property
    def mirrored(self) -> bool:
        """Every arc has a twin of equal rate the other way."""
        return all(self.arcs.get((v, u), 0) == rate for (u, v), rate in self.arcs.items())

    def reversed(self) -> RateGraph:
        return RateGraph(self.names, self.ranks, self.group, {(v, u): rate for (u, v), rate in self.arcs.items()}, self.unit_Bps)

    def leaving(self, inside: Sequence[bool]) -> int:
        """Rate (in units) of the arcs that leave a set of nodes."""
        return sum(rate for (u, v), rate in self.arcs.items() if inside[u] and not inside[v])


def rate_graph(fabric: Fabric, ranks: Sequence[str], *, relay: bool = True) -> RateGraph:
    """The fabric's graph with parallel links added up.

    Args: `relay`: keep devices that are no rank, as nodes that forward. Bounds must keep them, since their links exist.
    """
    kept = list(ranks) + ([d.name for d in fabric.devices if d.name not in set(ranks)] if relay else []) + [s.name for s in fabric.switches]
    number = {name: i for i, name in enumerate(kept)}
    found: dict[tuple[int, int], int] = {}
    for link in fabric.links:
        u, v = number.get(link.src), number.get(link.dst)
        if u is not None and v is not None and u != v:
            found[u, v] = found.get((u, v), 0) + link.rate_Bps
    arcs = dict(sorted(found.items()))
    unit = gcd(*arcs.values()) if arcs else 1
    labels = {d.name: d.group for d in fabric.devices} | {s.name: s.group or s.name for s in fabric.switches}
    order = {label: i for i, label in enumerate(dict.fromkeys(labels[name] for name in kept))}
    return RateGraph(tuple(kept), len(ranks), tuple(order[labels[name]] for name in kept), {a: r // unit for a, r in arcs.items()}, unit)


def with_relays(fabric: Fabric, ranks: Sequence[str], relay: bool | None, make: Callable[[bool], T]) -> tuple[T, bool]:
    """`make(relay)` and that relay; None: devices outside the collective forward only if the ranks are not connected without them.

    Raises: Disconnected, as the last `make` does.
    """
    if relay is not None or len(ranks) == len(fabric.devices):
        return make(bool(relay)), bool(relay)
    try:
        return make(False), False
    except Disconnected:
        return make(True), True


def pinned_route(fabric: Fabric, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """The route of a channel along these actors; None where the fabric's own routing takes it anyway, so that programs stay free of names."""
    links = fabric.route(fabric.actor_of[names[0]], fabric.actor_of[names[-1]])
    return None if names == (names[0], *(fabric.links[x].dst for x in links)) else names


@dataclass(frozen=True)
class Cut:
    """`ratio` = demand inside / rate leaving, in 1/units; `inside[v]` for every node."""

    ratio: Fraction
    inside: tuple[bool, ...]


def worst_cut(graph: RateGraph, weight: Sequence[int], *, sinks: Sequence[int] | None = None) -> Cut:
    """max over node sets that miss a rank of (weight inside) / (rate leaving), exactly, with a set that reaches it.

    `sinks`: only sets that miss one of these ranks count (default: any rank).

    Method: Newton's (Dinkelbach's) iteration on the ratio; each round asks by max-flow whether every rank can receive all weights at
    the current ratio and takes the violated cut of one that cannot. Usually two rounds.
    Raises: Disconnected when a rank cannot be reached; Unsupported when the rates need more than 63 bits.
    """
    total = sum(weight)
    entering = [0] * graph.nodes
    for (_, v), rate in graph.arcs.items():
        entering[v] += rate
    if sinks is None:
        from .forestcoll.symmetry import sinks_of_each_kind  # it builds on this module

        kinds = sinks_of_each_kind(graph, weight)
    else:
        kinds = list(sinks)
    sinks = [v for v in kinds if total > weight[v]]
    for v in sinks:
        if not entering[v]:
            raise _disconnected(graph, [u != v for u in range(graph.nodes)])
    start = max(sinks, key=lambda v: (Fraction(total - weight[v], entering[v]), -v))
    best = Cut(Fraction(total - weight[start], entering[start]), tuple(u != start for u in range(graph.nodes)))
    order = np.array(sinks, np.int32)
    while True:
        p, q = best.ratio.numerator, best.ratio.denominator
        arcs = {arc: rate * p for arc, rate in graph.arcs.items()}
        arcs.update({(graph.nodes, r): q * w for r, w in enumerate(weight) if w})
        network = FlowNetwork.of(graph.nodes + 1, arcs)
        if network.sweep(graph.nodes, order, q * total).failed < 0:
            return best
        side = tuple(bool(x) for x in network.source_side()[: graph.nodes])
        leaving = graph.leaving(side)
        if not leaving:
            raise _disconnected(graph, side)
        found = Cut(Fraction(sum(w for r, w in enumerate(weight) if side[r]), leaving), side)
        if found.ratio <= best.ratio:
            raise Unsupported("the cut iteration does not converge on this fabric", hint="please report the fabric file")
        best = found


def _disconnected(graph: RateGraph, inside: Sequence[bool]) -> Disconnected:
    here = [graph.names[v] for v in range(graph.ranks) if inside[v]]
    there = [graph.names[v] for v in range(graph.ranks) if not inside[v]]
    return Disconnected(
        f"no path from {here[0] if here else '-'} to {there[0]}",
        hint="add links, or name a connected part of the devices",
        data={"from": here[:64], "to": there[:64]},
    )
