"""Lower bounds on the time of a collective, with certificates that the fabric alone suffices to re-check.

Certificate `cut`: `inside` is a set S of actors. Some bytes must leave S, whatever the algorithm, and the links that leave S carry at
most `leaving_Bps`; so time >= crossing_bytes / leaving_Bps, where crossing_bytes follows from `demand`:
    all-gather      size · ranks inside / ranks      each shard in S must reach a rank outside
    reduce-scatter  size · ranks outside / ranks     each rank outside needs a sum that depends on the inputs inside
    all-reduce      size                             the ranks outside need the sum of the inputs inside
    broadcast       size, when the root is inside and some rank is outside
    reduce          size, when the root is outside and some rank is inside
These hold for every algorithm, with or without multicast or reduction in the network.

Certificate `partition` (all-reduce only): disjoint sets P_1..P_p of actors, each with a rank, together all ranks. For one element,
every part must send before any part can hold the full sum (p - 1 messages into other parts), and every part but the first to be
complete must receive afterwards (p - 1 more): 2 (p - 1) messages enter parts. So time >= 2 (p - 1) · size / entering_Bps, with
entering_Bps the rate of all links that enter a part from outside it. Here a message carries one partial sum per element, as in
`Program`; switches that add or copy must lie inside a part, where they count as part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ...bound import Bound, Certificate
from .problem import CollectiveProblem
from .rates import RateGraph, rate_graph, worst_cut

__all__ = ["collective_bound"]

MAX_WIDTHS = 16  # partitions tried by width; more distinct rates than this are sampled


def collective_bound(problem: CollectiveProblem) -> Bound:
    """The best lower bound we can certify. Exact optimum for all-gather, reduce-scatter, broadcast and reduce without in-network compute.

    Raises: Disconnected; Unsupported when rates need more than 63 bits.
    """
    graph = rate_graph(problem.fabric, problem.ranks)
    n = graph.ranks
    size = Fraction(problem.size_bytes)
    if problem.op == "all-gather":
        return _cut_bound(problem, graph, worst_cut(graph, [1] * n).inside)
    if problem.op == "reduce-scatter":
        return _cut_bound(problem, graph, [not x for x in worst_cut(graph.reversed(), [1] * n).inside])
    alone = [int(r == problem.root) for r in range(n)]
    if problem.op == "broadcast":
        return _cut_bound(problem, graph, worst_cut(graph, alone).inside)
    if problem.op == "reduce":
        return _cut_bound(problem, graph, [not x for x in worst_cut(graph.reversed(), alone).inside])
    candidates = [_cut_bound(problem, graph, _narrowest(graph))]
    candidates += [found for parts in _partitions(problem, graph) if (found := _partition_bound(problem, graph, parts, size)) is not None]
    return max(candidates, key=lambda b: b.exact)


def _crossing_bytes(problem: CollectiveProblem, inside: int, n: int) -> Fraction:
    size = Fraction(problem.size_bytes)
    if problem.op == "all-gather":
        return size * inside / n
    if problem.op == "reduce-scatter":
        return size * (n - inside) / n
    return size


def _cut_bound(problem: CollectiveProblem, graph: RateGraph, inside: Sequence[bool]) -> Bound:
    ranks_inside = sum(1 for r in range(graph.ranks) if inside[r])
    leaving = graph.leaving(inside) * graph.unit_Bps
    crossing = _crossing_bytes(problem, ranks_inside, graph.ranks)
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
                "root": problem.ranks[problem.root] if problem.op in ("broadcast", "reduce") else "",
                "size_bytes": problem.size_bytes,
                "crossing_bytes": str(crossing),
            },
        ),
    )


def _narrowest(graph: RateGraph) -> Sequence[bool]:
    """A set of nodes with a rank inside and a rank outside whose leaving rate is smallest (both directions are searched)."""
    alone = [int(r == 0) for r in range(graph.ranks)]
    forward, backward = worst_cut(graph, alone), worst_cut(graph.reversed(), alone)
    return forward.inside if forward.ratio >= backward.ratio else [not x for x in backward.inside]


def _partitions(problem: CollectiveProblem, graph: RateGraph) -> list[list[list[int]]]:
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
