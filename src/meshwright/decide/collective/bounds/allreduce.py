"""Lower bounds from the dual of joint packing: lengths of links at which every algorithm pays (certificate `packing`).

The duals of the rate rows of `trees.lp` are lengths. At any lengths, what a collective must pay is a cheapest spanning tree or arborescence over
the ranks, counted in whole numbers here and again by the checker (`check.packing` states the proof, for every algorithm). So the solver only
proposes; nothing of it is trusted.

For one all-reduce the lengths are made alike both ways, because the proof counts spanning trees without direction. Where every link has a twin of
equal rate that loses nothing: the bound is the optimum of joint packing. Elsewhere it is the optimum for the two directions' rates averaged,
which one-way links may keep out of reach.
Cost: one linear program with a few rounds of cuts, then a shortest-path tree per rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np

from ....bound import Bound, Certificate
from ....errors import Infeasible, TimeLimit, Unsupported
from ....kernels.effort import NEVER, Deadline
from ....kernels.treesearch import ARBORESCENCE, PathEdges, cheapest_trees
from ..problem import ROOTED, CollectiveProblem
from ..rates import whole_graph
from ..trees.lp import Arc, Demand, PackingProblem, solve_packing
from .flow import MAX_LENGTH

__all__ = ["all_reduce_dual_bound", "best_bound", "hosts_of", "packing_bound", "whole_lengths"]

MAX_ARCS = 3000  # a larger fabric's linear program is no longer cheap
SIMPLE_DENOMINATORS = (12, 100, 1000)  # largest denominators of lengths as parts of the largest, tried before plain rounding
TREES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")
Pair = tuple[str, str]


def all_reduce_dual_bound(problem: CollectiveProblem, deadline: Deadline = NEVER) -> Bound | None:
    """The bound of joint packing on an all-reduce; None where the fabric is too large for it or the solver does not finish by `deadline`.

    None too where rates differ by more than the solver's numbers take.
    """
    if problem.op != "all-reduce":
        raise Unsupported(f"joint packing bounds all-reduce, not {problem.op}", hint="use collective_bound")
    graph = whole_graph(problem.fabric, problem.ranks)
    if len(graph.arcs) > MAX_ARCS:
        return None
    hosts = hosts_of(problem)
    names, host = graph.names, {graph.names.index(s): graph.names.index(r) for s, r in hosts.items()}
    rate: dict[Arc, int] = {}
    for (u, v), b in graph.arcs.items():
        a, c = host.get(u, u), host.get(v, v)
        if a != c:
            # Both directions get the sum of both rates: then the dual has lengths alike both ways, as the proof by undirected trees needs them.
            for arc in ((a, c), (c, a)):
                rate[arc] = rate.get(arc, 0) + b
    both = PackingProblem(graph.nodes, rate, (Demand(tuple(range(graph.ranks)), collect=True),), True)
    try:
        price = solve_packing(both, what="the dual of joint packing", deadline=deadline, even=False).price
    except (TimeLimit, Unsupported, Infeasible):  # a bound is a help, not a must: cuts remain
        return None
    # Pairs of names, not arcs of the merged graph: links to a switch and to the rank it is merged with share a length.
    lengths: dict[Pair, float] = {}
    for u, v in graph.arcs:
        a, c = host.get(u, u), host.get(v, v)
        if a != c:
            # Alike both ways. Any lengths prove a bound, and only their proportions count.
            lengths[names[u], names[v]] = price.get((a, c), 0.0) + price.get((c, a), 0.0)
    return best_bound([problem], lengths, [hosts])


def hosts_of(problem: CollectiveProblem) -> dict[str, str]:
    """Switches that add or copy, each merged with a rank: the one that sends to it fastest (first in rank order), else the first rank."""
    fabric = problem.fabric
    hosts = {}
    for switch in fabric.switches:
        if switch.multicast or switch.aggregate:
            into = {x.src: x.rate_Bps for x in fabric.links if x.dst == switch.name}
            hosts[switch.name] = max(problem.ranks, key=lambda r: into.get(r, 0))
    return hosts


def whole_lengths(lengths: Mapping[Pair, float]) -> list[dict[Pair, int]]:
    """Whole-number lengths in nearly the same proportions: simple fractions of the largest, brought to one denominator, and plain roundings."""
    top = max(lengths.values(), default=0.0)
    if top <= 0:
        return []
    found: list[dict[Pair, int]] = []
    for limit in SIMPLE_DENOMINATORS:
        # Optimal duals are vertices, so often simple fractions: hitting them exactly gives the exact optimum, which plain rounding only comes near.
        near = {pair: Fraction(x / top).limit_denominator(limit) for pair, x in lengths.items()}
        scale = lcm(*(x.denominator for x in near.values()))
        if scale <= MAX_LENGTH:
            found.append({pair: int(x * scale) for pair, x in near.items() if x})
    found.append({pair: n for pair, x in lengths.items() if (n := round(x / top * MAX_LENGTH))})
    return [dict(sorted((pair, n // gcd(*whole.values())) for pair, n in whole.items())) for whole in found if whole]


def best_bound(problems: Sequence[CollectiveProblem], lengths: Mapping[Pair, float], hosts: Sequence[Mapping[str, str]]) -> Bound | None:
    """The best of the bounds that roundings of the lengths prove; None if none proves anything."""
    found = [packing_bound(problems, whole, hosts) for whole in whole_lengths(lengths)]
    return max(found, key=lambda b: b.exact, default=None)


def packing_bound(problems: Sequence[CollectiveProblem], lengths: Mapping[Pair, int], hosts: Sequence[Mapping[str, str]]) -> Bound:
    """The bound that whole-number lengths prove for collectives that run at once on one fabric."""
    fabric = problems[0].fabric
    offered = sum(x.rate_Bps * lengths.get((x.src, x.dst), 0) for x in fabric.links)
    paid = sum((_cost(p, lengths, h) for p, h in zip(problems, hosts, strict=True)), Fraction(0))
    what = f"{problems[0].op} time" if len(problems) == 1 else "time of all collectives together"
    data = {
        "lengths": [[u, v, n] for (u, v), n in lengths.items()],
        "groups": [_group(p, h) for p, h in zip(problems, hosts, strict=True)],
    }
    return Bound(quantity=what, value=str(paid / offered if offered else Fraction(0)), unit="s", certificate=Certificate(kind="packing", data=data))


def _group(problem: CollectiveProblem, hosts: Mapping[str, str]) -> dict[str, Any]:
    entry: dict[str, Any] = {"demand": problem.op, "devices": list(problem.ranks), "size_bytes": problem.size_bytes}
    if problem.op in ROOTED:
        entry["root"] = problem.ranks[problem.root]
    if problem.shard_bytes is not None:
        entry["shard_bytes"] = list(problem.shard_bytes)
    if problem.op == "permute":
        entry["peers"] = [problem.ranks[p] if p >= 0 else "" for p in problem.peers]
    return entry | ({"hosts": dict(hosts)} if hosts and problem.op in TREES else {})


# ---- what a collective pays at given lengths ---------------------------------------------------------------------
def _cost(problem: CollectiveProblem, lengths: Mapping[Pair, int], hosts: Mapping[str, str]) -> Fraction:
    """Bytes · length, exactly."""
    d = _distances(problem, lengths, hosts if problem.op in TREES else {})
    size, n, root, op = Fraction(problem.size_bytes), len(problem.ranks), problem.root, problem.op
    shards = [Fraction(b) for b in problem.shard_bytes] if problem.shard_bytes is not None else [size / n] * n
    if op == "all-reduce":  # a cheapest spanning tree twice, to collect and to spread; the proof is in `check.packing`
        return 2 * size * _spanning(np.minimum(d, d.T))
    if op in ("broadcast", "reduce"):
        return size * _arborescences(d if op == "broadcast" else d.T, [root])[0]
    if op in ("all-gather", "reduce-scatter"):
        trees = _arborescences(d if op == "all-gather" else d.T, list(range(n)))
        return sum((b * t for b, t in zip(shards, trees, strict=True)), Fraction(0))
    if op == "all-to-all":
        return size / n * int(d.sum())
    if op in ("scatter", "gather"):
        row = d[root] if op == "scatter" else d[:, root]
        return sum((b * int(x) for b, x in zip(shards, row, strict=True)), Fraction(0))
    return size * sum(int(d[p, r]) for r, p in enumerate(problem.peers) if p >= 0)


def _distances(problem: CollectiveProblem, lengths: Mapping[Pair, int], hosts: Mapping[str, str]) -> np.ndarray:
    out: dict[str, dict[str, int]] = {}
    for x in problem.fabric.links:
        a, b = hosts.get(x.src, x.src), hosts.get(x.dst, x.dst)
        if a != b:
            row, length = out.setdefault(a, {}), lengths.get((x.src, x.dst), 0)
            row[b] = min(row.get(b, length), length)
    rows = []
    for source in problem.ranks:
        reach: dict[str, int] = {}
        heap = [(0, source)]
        while heap:
            far, a = heapq.heappop(heap)
            if a in reach:
                continue
            reach[a] = far
            for b, length in out.get(a, {}).items():
                if b not in reach:
                    heapq.heappush(heap, (far + length, b))
        if any(r not in reach for r in problem.ranks):
            raise Infeasible(f"no path from {source} to every rank", hint="name a connected part of the devices")
        rows.append([reach[r] for r in problem.ranks])
    return np.array(rows, np.int64)


def _spanning(cost: np.ndarray) -> int:
    near, total = cost[0].copy(), 0
    left = np.ones(len(cost), bool)
    left[0] = False
    while left.any():
        v = int(np.argmin(np.where(left, near, np.iinfo(np.int64).max)))
        # Prim: the nearest node joins; the complete graph of distances is dense, so no heap is needed.
        total += int(near[v])
        left[v] = False
        near = np.minimum(near, cost[v])
    return total


def _arborescences(cost: np.ndarray, roots: Sequence[int]) -> list[int]:
    """Weight of the cheapest out-arborescence of every root. Whole numbers below 2^53 pass through the kernel's floats unchanged."""
    n = len(cost)
    src, dst = (np.array(x, np.int32) for x in zip(*[(u, v) for u in range(n) for v in range(n) if u != v], strict=True))
    edges = PathEdges(n, src, dst, np.arange(len(src) + 1, dtype=np.int32), np.arange(len(src), dtype=np.int32), np.ones(len(src)))
    found = cheapest_trees(edges, ARBORESCENCE, np.array(roots, np.int32), cost[src, dst].astype(np.float64))
    assert found is not None, "a complete graph has spanning trees"
    return [int(sum(cost[src[e], dst[e]] for e in row if e >= 0)) for row in found[0]]
