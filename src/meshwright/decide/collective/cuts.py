"""The worst cut of a rate graph: the node set whose weights leave it most slowly, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ...errors import Disconnected, Unsupported
from ...kernels.maxflow import FlowNetwork
from .rates import RateGraph
from .trees.symmetry import sinks_of_each_kind

__all__ = ["Cut", "worst_cut"]


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
        # A violated cut has a strictly larger ratio (Dinkelbach), and there are finitely many cuts, so the loop ends.
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
