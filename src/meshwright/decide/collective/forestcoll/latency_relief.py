"""Forests that leave slow ways a little time: rates of links behind long latencies count for less, so that their data sets off early.

Where every link is full, what goes over the longest way is the last to arrive. Taking a little off those links hides their way behind what the others
still carry: with rates r (T - t) / T, for a time T and the extra latency t of a link, the same cuts, splits and packings give forests in which all
links can end together. A little more data on the other links is the price; `finish_s` weighs it, and the simulator decides.
Deviation: the paper does not treat latency. Switches only forward, so all links of one switch get the same share of their rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd

from ....errors import TimeLimit, Unsupported, UsageError
from ..cuts import worst_cut
from ..problem import CollectiveProblem
from ..rates import RateGraph
from ..trees.symmetry import sinks_of_each_kind
from .arrival import HopTimes
from .finish_time import finish_s
from .forest import MAX_FEW_RANKS, Forest, smallest_stretch
from .prepared import Prepared, is_uneven, weights_of
from .throughput_estimate import LARGE_MESSAGE_BYTES

__all__ = ["IDLE_PER_LATENCY_FACTOR", "at_home", "may_relieve", "promising_counts", "relief_of", "relieved", "require_relief"]

Arc = tuple[int, int]
OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce")
# A link is left idle for so many times the latency that it has beyond the least of all links.
IDLE_PER_LATENCY_FACTOR = 2
MAX_RELIEVED_FORESTS = 2  # numbers of trees for which a relieved forest is built and compared, the most promising first
MIN_TIME_SHARE_SAVED = 0.003  # share of the time that another forest must promise to save, or the simulator is not asked
MIN_RELIEVED_BYTES = 1 << 28  # smaller messages have few pieces, and trees of unlike load leave fewer
SHARE_DENOMINATOR = 1000  # shares of a rate that are given up are multiples of 1 / SHARE_DENOMINATOR, so that rates stay whole numbers
MAX_RATE_SHARE_GIVEN_UP = Fraction(1, 4)  # of any link's rate


def relieved(graph: RateGraph, weight: Sequence[int], seconds: HopTimes, times: int) -> RateGraph:
    """The graph with less of every link's rate, the more latency it has beyond the least of all; itself for 0 times.

    A link's latency is the largest of the links that share switches with it.
    Raises: Unsupported where all links have the same.
    """
    if not times:
        return graph
    joined = _joined(graph)
    latency: dict[Arc, float] = {}
    for arc in graph.arcs:
        part = joined[arc]
        latency[part] = max(latency.get(part, 0.0), seconds.wire[arc] + seconds.library[arc])
    least = min(latency.values())
    time_s = float(LARGE_MESSAGE_BYTES * worst_cut(graph, weight).ratio / graph.unit_Bps / sum(weight))
    # t / T of the rate, the same on all links of a switch: scaled alike, what it takes in still equals what it gives out.
    share = {
        part: min(Fraction(round(times * (s - least) / time_s * SHARE_DENOMINATOR), SHARE_DENOMINATOR), MAX_RATE_SHARE_GIVEN_UP)
        for part, s in latency.items()
    }
    if not any(share.values()):
        raise Unsupported("no link has more latency than the others, to be left idle for", hint="leave relief out")
    arcs = {arc: int(rate * SHARE_DENOMINATOR * (1 - share[joined[arc]])) for arc, rate in graph.arcs.items()}
    unit = gcd(*arcs.values())
    return replace(graph, arcs={arc: rate // unit for arc, rate in arcs.items()}, unit_Bps=max(1, graph.unit_Bps * unit // SHARE_DENOMINATOR))


def _joined(graph: RateGraph) -> dict[Arc, Arc]:
    """A name for every arc, the same for arcs that meet at a switch, directly or through others."""
    leader = list(range(graph.nodes))

    def lead(v: int) -> int:
        while leader[v] != v:
            leader[v] = leader[leader[v]]
            v = leader[v]
        return v

    for u, v in graph.arcs:
        if min(u, v) >= graph.ranks:
            leader[lead(u)] = lead(v)
    return {(u, v): (lead(max(u, v)), -1) if max(u, v) >= graph.ranks else (u, v) for u, v in graph.arcs}


def promising_counts(graph: RateGraph, weight: Sequence[int], most: int) -> list[int]:
    """Numbers of trees per root, up to `most`, those with the largest share of the optimum first."""
    optimum, sinks = worst_cut(graph, weight).ratio, sinks_of_each_kind(graph, weight)
    share = {k: k * optimum / smallest_stretch(graph, weight, k, optimum, sinks) for k in range(1, most + 1)}
    return sorted(share, key=lambda k: (-share[k], k))


def at_home(forest: Forest, graph: RateGraph, relief: int | None) -> Forest:
    """A forest of the relieved graph as one of the graph itself: the same trees, its load and optimum. As it is without relief."""
    if not relief:
        return forest
    # Trees are the same; only what they are measured by changes: the fullest link at its real rate.
    stretch = max(Fraction(load, graph.arcs[arc]) for arc, load in forest.load.items())
    return replace(forest, graph=graph, stretch=stretch, optimum=worst_cut(graph, forest.weight).ratio)


def require_relief(problem: CollectiveProblem, relief: int | None) -> None:
    """Raises: UsageError for a negative relief, Unsupported for operations of one root, whose trees all begin at the same links."""
    if relief is not None and relief < 0:
        raise UsageError(f"relief must be >= 0, got {relief}", where="forestcoll")
    if relief and problem.op not in OPERATIONS:
        raise Unsupported(f"there is no relief for {problem.op}", hint=f"leave relief out; it is for {', '.join(OPERATIONS)}")


def may_relieve(problem: CollectiveProblem, ready: Prepared) -> bool:
    """Whether other forests are worth the work of finding them: among few ranks, for much data, where pieces are many."""
    few = len(problem.ranks) <= MAX_FEW_RANKS and ready.servers == 1 and not is_uneven(problem)
    return few and problem.op in ("all-gather", "reduce-scatter") and problem.size_bytes >= MIN_RELIEVED_BYTES


def relief_of(problem: CollectiveProblem, ready: Prepared, most: int, prepare: Callable[[int], Prepared]) -> int | None:
    """Trees per root, at most `most`, of the relieved forest that promises to end earliest, and earlier than the one at hand; None if none does.

    `prepare(trees)` builds one. Of those that promise less time only the lowest count: the simulator makes little of higher ones.
    """
    forest, weight = ready.forests[0], weights_of(problem)
    seconds = HopTimes(problem.fabric, forest.graph, turned=problem.op == "reduce-scatter")
    enough_s = finish_s(forest, seconds, problem.size_bytes) * (1 - MIN_TIME_SHARE_SAVED)
    try:
        graph = relieved(forest.graph, weight, seconds, IDLE_PER_LATENCY_FACTOR)
    except Unsupported:
        return None
    scale = max(Fraction(graph.arcs[arc], rate) for arc, rate in forest.graph.arcs.items())  # of links that keep their rate
    least = worst_cut(graph, weight).ratio * scale / forest.graph.unit_Bps / sum(weight)
    if float(problem.size_bytes * least) >= enough_s:
        return None  # the bottleneck itself is what would be left idle
    found: dict[int, tuple[int, float]] = {}
    for trees in promising_counts(graph, weight, most)[:MAX_RELIEVED_FORESTS]:
        try:
            other = prepare(trees).forests[0]
        except (TimeLimit, Unsupported):
            continue
        at_s = finish_s(other, seconds, problem.size_bytes)
        if at_s < enough_s and other.height <= forest.height:
            found[trees] = other.height, at_s
    return min(found, key=lambda trees: found[trees]) if found else None
