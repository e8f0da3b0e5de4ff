"""The worst cut of a rate graph: the node set whose weights leave it most slowly, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ...errors import Disconnected, Unsupported
from ...kernels.maxflow import FlowNetwork, checked_capacities
from .memo import remember
from .rates import RateGraph
from .trees.symmetry import sinks_of_each_kind

__all__ = ["Cut", "network_below", "worst_cut"]


@dataclass(frozen=True)
class Cut:
    """`ratio` = demand inside / rate leaving, in 1/units; `inside[v]` for every node."""

    ratio: Fraction
    inside: tuple[bool, ...]


def worst_cut(graph: RateGraph, weight: Sequence[int], *, sinks: Sequence[int] | None = None) -> Cut:
    """max over node sets that miss a rank of (weight inside) / (rate leaving), exactly, with a set that reaches it. Found once for a graph.

    `sinks`: only sets that miss one of these ranks count (default: any rank).

    Method: Newton's (Dinkelbach's) iteration on the ratio; each round asks by max-flow whether every rank can receive all weights at
    the current ratio and takes the violated cut of one that cannot. Usually two rounds.
    Raises: Disconnected when a rank cannot be reached; Unsupported when the rates need more than 63 bits.
    """
    key = ("worst cut", tuple(weight), None if sinks is None else tuple(sinks))
    return remember(graph, key, lambda: _worst_cut(graph, weight, sinks))


def _worst_cut(graph: RateGraph, weight: Sequence[int], sinks: Sequence[int] | None) -> Cut:
    total = sum(weight)
    entering = [0] * graph.nodes
    for (_, v), rate in graph.arcs.items():
        entering[v] += rate
    if sinks is None:
        kinds = sinks_of_each_kind(graph, weight)
    else:
        kinds = list(sinks)
    sinks = [v for v in kinds if total > weight[v]]
    for v in sinks:
        if not entering[v]:
            raise _disconnected(graph, [u != v for u in range(graph.nodes)])
    # Start at the best cut around a single rank: often it is the answer, and any true ratio is a valid start.
    start = max(sinks, key=lambda v: (Fraction(total - weight[v], entering[v]), -v))
    best = Cut(Fraction(total - weight[start], entering[start]), tuple(u != start for u in range(graph.nodes)))
    order = np.array(sinks, np.int32)
    while True:
        # At ratio p / q every rank can receive all weights exactly if no cut has more weight inside per rate leaving: links p · rate, weights q · w.
        p, q = best.ratio.numerator, best.ratio.denominator
        network = network_below(graph, lambda rate, p=p: rate * p, [q * w for w in weight])  # type: ignore[misc]
        if network.sweep(graph.nodes, order, q * total).failed < 0:
            return best
        side = tuple(bool(x) for x in network.source_side()[: graph.nodes])
        leaving = graph.leaving(side)
        if not leaving:
            raise _disconnected(graph, side)
        found = Cut(Fraction(sum(w for r, w in enumerate(weight) if side[r]), leaving), side)
        # A violated cut has a strictly larger ratio (Dinkelbach), and there are finitely many cuts, so the loop ends.
        if found.ratio <= best.ratio:
            raise Unsupported("the cut iteration does not converge on this fabric", hint="please report the fabric file")
        best = found


def network_below(graph: RateGraph, capacity: Callable[[int], int], given: Sequence[int]) -> FlowNetwork:
    """Arcs as wide as `capacity` says of their rates (0: none), and a source above the ranks, node `graph.nodes`, that gives each what is `given`.

    Raises: Unsupported when the capacities need more than 63 bits.
    """
    tails, heads, place, rates = graph.columns
    wide, times = [capacity(rate) for rate in rates], np.bincount(place, minlength=len(rates)).tolist()
    checked_capacities([*(w * n for w, n in zip(wide, times, strict=True)), *given])
    arcs = np.array(wide, np.int64)[place]
    there, roots = arcs > 0, np.array([r for r, w in enumerate(given) if w], np.int64)
    return FlowNetwork.of_arrays(
        graph.nodes + 1, np.concatenate([tails[there], np.full(len(roots), graph.nodes)]), np.concatenate([heads[there], roots]),
        np.concatenate([arcs[there], np.array(given, np.int64)[roots]]),
    )  # fmt: skip


def _disconnected(graph: RateGraph, inside: Sequence[bool]) -> Disconnected:
    here = [graph.names[v] for v in range(graph.ranks) if inside[v]]
    there = [graph.names[v] for v in range(graph.ranks) if not inside[v]]
    return Disconnected(
        f"no path from {here[0] if here else '-'} to {there[0]}",
        hint="add links, or name a connected part of the devices",
        data={"from": here[:64], "to": there[:64]},
    )
