"""Lower bounds on the time of a collective that count bytes, with certificates that the fabric alone suffices to re-check.

Certificate `cut`: `inside` is a set S of actors. Some bytes must leave S, whatever the algorithm, and the links that leave S carry at
most `leaving_Bps`; so time >= crossing_bytes / leaving_Bps, where crossing_bytes follows from `demand`:
    all-gather      the shards of the ranks inside   each must reach a rank outside
    reduce-scatter  the shards of the ranks outside  each rank outside needs a sum that depends on the inputs inside
    all-reduce      size                             the ranks outside need the sum of the inputs inside
    broadcast       size, when the root is inside and some rank is outside
    reduce          size, when the root is outside and some rank is inside
    scatter         the shards of the ranks outside, when the root is inside
    gather          the shards of the ranks inside, when the root is outside
    all-to-all      size / ranks · ranks inside · ranks outside
    permute         size · ranks outside whose peer is inside
These hold for every algorithm, with or without multicast or reduction in the network. They are exact for all but all-reduce (`partition`, and the
dual of the packing), all-to-all and permute (`flow`), where the worst cut may lie below the optimum.

Certificate `partition` (all-reduce only): disjoint sets P_1..P_p of actors, each with a rank, together all ranks. For one element,
every part must send before any part can hold the full sum (p - 1 messages into other parts), and every part but the first to be
complete must receive afterwards (p - 1 more): 2 (p - 1) messages enter parts. So time >= 2 (p - 1) · size / entering_Bps, with
entering_Bps the rate of all links that enter a part from outside it. Here a message carries one partial sum per element, as in
`Program`; switches that add or copy must lie inside a part, where they count as part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from math import gcd

from ....bound import Bound, Certificate
from ....errors import Disconnected
from ..connected import require_connected
from ..cuts import worst_cut
from ..memo import remember
from ..problem import ROOTED, CollectiveProblem
from ..rates import RateGraph, whole_graph
from ..trees.symmetry import sinks_of_each_kind
from .allreduce import all_reduce_dual_bound
from .flow import flow_bound
from .latency import latency_bound

__all__ = ["bandwidth_bound", "bandwidth_bounds", "crossing_bytes"]

MAX_DUAL_ARCS = 1000  # up to so many an all-reduce's dual is solved; larger graphs have partitions, which find the optimum where servers are alike
MAX_WIDTHS = 16  # partitions tried, one per rate of links that stay inside a part; more distinct rates than this are sampled


def bandwidth_bound(problem: CollectiveProblem) -> Bound:
    """The best bound that counts bytes only; that of latency where no byte need move.

    It is the exact optimum for all-gather, reduce-scatter, broadcast, reduce, scatter and gather without in-network compute, and for all-to-all and
    permute on fabrics small enough for `flow`.
    Raises: Disconnected; Unsupported when rates need more than 63 bits.
    """
    return max(bandwidth_bounds(problem), key=lambda b: b.exact, default=None) or latency_bound(problem)


def bandwidth_bounds(problem: CollectiveProblem) -> list[Bound]:
    key = ("bandwidth bounds", problem.op, problem.ranks, problem.root, problem.size_bytes, problem.shard_bytes, problem.peers)
    return remember(problem.fabric, key, lambda: _bounds(problem))


def _bounds(problem: CollectiveProblem) -> list[Bound]:
    fabric, among = problem.fabric, problem.ranks
    graph = whole_graph(fabric, among)
    require_connected(problem, graph)
    n, op, root = graph.ranks, problem.op, problem.root
    weight = [1] * n
    if problem.shard_bytes is not None:
        unit = gcd(*problem.shard_bytes) or 1
        weight = [shard // unit for shard in problem.shard_bytes]
    alone = [int(r == root) for r in range(n)]
    others = [w * (r != root) for r, w in enumerate(weight)]
    if op == "all-gather":
        return [_cut_bound(problem, graph, worst_cut(graph, weight).inside)]
    if op == "reduce-scatter":
        # On the reversed graph data leaves what it enters here, so the set is turned inside out.
        return [_cut_bound(problem, graph, [not x for x in worst_cut(graph.reversed(), weight).inside])]
    if op == "broadcast":
        return [_cut_bound(problem, graph, worst_cut(graph, alone).inside)]
    if op == "reduce":
        return [_cut_bound(problem, graph, [not x for x in worst_cut(graph.reversed(), alone).inside])]
    if op == "gather" and any(others):
        return [_cut_bound(problem, graph, worst_cut(graph, others, sinks=[root]).inside)]
    if op == "scatter" and any(others):
        return [_cut_bound(problem, graph, [not x for x in worst_cut(graph.reversed(), others, sinks=[root]).inside])]
    if op == "all-reduce":
        cut, partitions = remember(fabric, ("cuts of sums", among), lambda: (_narrowest(graph), _partitions(graph)))
        found = [_cut_bound(problem, graph, cut)]
        found += [b for parts in partitions if (b := _partition_bound(problem, graph, parts, Fraction(problem.size_bytes)))]
        dual = all_reduce_dual_bound(problem) if len(graph.arcs) <= MAX_DUAL_ARCS else None
        return found + ([dual] if dual is not None else [])
    ranks = sinks_of_each_kind(graph, weight) if op == "all-to-all" else range(n)  # what leaves a server or its ranks leaves their images, too
    cuts = [cut for cut in _cuts_to_try(graph, ranks) if op == "all-to-all" or crossing_bytes(problem, cut)]
    found = [_cut_bound(problem, graph, cut) for cut in cuts]
    flow = flow_bound(problem, graph) if op in ("all-to-all", "permute") else None
    return found + ([flow] if flow is not None else [])


def _cuts_to_try(graph: RateGraph, ranks: Sequence[int]) -> list[list[bool]]:
    """Every one of these ranks alone and each of their servers with its switches, and all the rest; the narrowest cut."""
    found = [[v == r for v in range(graph.nodes)] for r in ranks]
    for server in sorted({graph.group[r] for r in ranks}):
        inside = [g == server for g in graph.group]
        if not all(inside[: graph.ranks]):
            found.append(inside)
    with suppress(Disconnected):  # of pairs' data (permute) some ranks may need no way to others
        found.append(list(_narrowest(graph)))
    cuts = [cut for inside in found for cut in (inside, [not x for x in inside])]
    return [cut for cut in cuts if graph.leaving(cut)]


def crossing_bytes(problem: CollectiveProblem, inside: Sequence[bool]) -> Fraction:
    """Bytes that must leave a set of actors, whatever the algorithm; `inside[i]` for rank i (more entries are ignored)."""
    n, size = len(problem.ranks), Fraction(problem.size_bytes)
    ranks_inside = sum(map(bool, inside[:n]))
    if problem.op in ("all-gather", "gather", "reduce-scatter", "scatter"):
        side = problem.op in ("all-gather", "gather")
        if problem.shard_bytes is None:
            return size / n * (ranks_inside if side else n - ranks_inside)
        return Fraction(sum(shard for shard, here in zip(problem.shard_bytes, inside, strict=False) if bool(here) == side))
    if problem.op == "all-to-all":
        return size / n * ranks_inside * (n - ranks_inside)
    if problem.op == "permute":
        return size * sum(1 for r, peer in enumerate(problem.peers) if peer >= 0 and inside[peer] and not inside[r])
    return size


def _cut_bound(problem: CollectiveProblem, graph: RateGraph, inside: Sequence[bool]) -> Bound:
    ranks_inside = sum(1 for r in range(graph.ranks) if inside[r])
    leaving = graph.leaving(inside) * graph.unit_Bps
    crossing = crossing_bytes(problem, inside)
    return Bound(
        quantity=f"{problem.op} time",
        value=str(crossing / leaving),
        unit="s",
        certificate=Certificate(
            kind="cut",
            data={
                "inside": [name for v, name in enumerate(graph.names) if inside[v]],
                "devices_inside": ranks_inside,
                "leaving_Bps": str(leaving),
                "demand": problem.op,
                "ranks": graph.ranks,
                "devices": list(problem.ranks),
                "root": problem.ranks[problem.root] if problem.op in ROOTED else "",
                "size_bytes": problem.size_bytes,
                "crossing_bytes": str(crossing),
                **({} if problem.shard_bytes is None else {"shard_bytes": list(problem.shard_bytes)}),
                **({"peers": [problem.ranks[p] if p >= 0 else "" for p in problem.peers]} if problem.peers else {}),
            },
        ),
    )


def _narrowest(graph: RateGraph) -> Sequence[bool]:
    """A set of nodes with a rank inside and a rank outside whose leaving rate is smallest (both directions are searched)."""
    alone = [int(r == 0) for r in range(graph.ranks)]
    # Every cut has rank 0 on one side: the narrowest is the worst for a broadcast from it, or for one to it on the reversed graph.
    forward, backward = worst_cut(graph, alone), worst_cut(graph.reversed(), alone)
    return forward.inside if forward.ratio >= backward.ratio else [not x for x in backward.inside]


def _partitions(graph: RateGraph) -> list[list[list[int]]]:
    """Partitions worth trying: every rank alone; one part per server with its switches; parts joined by the widest arcs."""
    singles = [[r] for r in range(graph.ranks)]
    servers: dict[int, list[int]] = {}
    for v in range(graph.nodes):
        servers.setdefault(graph.group[v], []).append(v)
    boxes = [part for part in servers.values() if any(v < graph.ranks for v in part)]
    widths = sorted(set(graph.arcs.values()))
    found = [singles, boxes] + [_joined(graph, rate) for rate in widths[:: -(-len(widths) // MAX_WIDTHS)]]
    return [parts for parts in found if len(parts) > 1]


def _joined(graph: RateGraph, rate: int) -> list[list[int]]:
    """Components of the arcs wider than `rate` that hold a rank."""
    label = list(range(graph.nodes))

    def find(v: int) -> int:
        while label[v] != v:
            label[v] = label[label[v]]
            v = label[v]
        return v

    for (u, v), width in graph.arcs.items():
        if width > rate:
            label[find(v)] = find(u)
    parts: dict[int, list[int]] = {}
    for v in range(graph.nodes):
        parts.setdefault(find(v), []).append(v)
    return [part for part in parts.values() if any(v < graph.ranks for v in part)]


def _partition_bound(problem: CollectiveProblem, graph: RateGraph, parts: list[list[int]], size: Fraction) -> Bound | None:
    """The bound of one partition; None where a switch that adds or copies lies outside the parts."""
    where = {v: i for i, part in enumerate(parts) for v in part}
    capable = {s.name for s in problem.fabric.switches if s.multicast or s.aggregate}
    if any(name in capable and v not in where for v, name in enumerate(graph.names)):
        return None
    entering = sum(rate for (u, v), rate in graph.arcs.items() if v in where and where.get(u) != where[v]) * graph.unit_Bps
    if not entering:
        return None
    return Bound(
        quantity="all-reduce time",
        value=str(2 * (len(parts) - 1) * size / entering),
        unit="s",
        certificate=Certificate(
            kind="partition",
            data={
                "parts": [[graph.names[v] for v in part] for part in parts],
                "entering_Bps": str(entering),
                "demand": "all-reduce",
                "ranks": graph.ranks,
                "devices": list(problem.ranks),
                "size_bytes": problem.size_bytes,
            },
        ),
    )
