"""Lower bound on the time of a collective from latency alone: data must get from one rank to another, whatever its size.

Certificate `latency`: `from` and `to` are ranks of which the second needs data of the first; every path between them takes at least
`latency_s`: the latencies of its links, and once what the library adds on the first link. Overheads of messages and launches (`Transport`)
are the runtime's, not the wire's, and are left out.
"""

from __future__ import annotations

import heapq
from fractions import Fraction
from math import lcm

from ....bound import Bound, Certificate
from ..memo import remember
from ..problem import ROOTED, CollectiveProblem

__all__ = ["latency_bound", "needs"]

# Pairs of ranks whose distances are computed: any choice gives a lower bound, and in a cluster the ranks are alike.
MAX_PAIRS = 1 << 14


def needs(problem: CollectiveProblem) -> list[tuple[int, list[int]]]:
    """(rank, ranks that need some of its data, itself perhaps among them)."""
    n, op, root = len(problem.ranks), problem.op, problem.root
    everyone = list(range(n))
    shards = problem.shard_bytes or (1,) * n
    if op == "permute":
        return [(r, [d for d in everyone if problem.peers[d] == r and d != r]) for r in everyone]
    if op in ("broadcast", "scatter"):
        return [(root, [d for d in everyone if d != root and (op == "broadcast" or shards[d])])]
    if op in ("reduce", "gather"):
        return [(r, [root]) for r in everyone if r != root and (op == "reduce" or shards[r])]
    targets = [d for d in everyone if shards[d]] if op == "reduce-scatter" else everyone
    sources = [s for s in everyone if shards[s]] if op == "all-gather" else everyone
    return [(s, targets) for s in sources]  # one list for all


def latency_bound(problem: CollectiveProblem) -> Bound:
    """Largest latency between a rank and one that needs its data; zero where no link states a latency. Pairs that are not joined do not count."""
    key = ("latency bound", problem.op, problem.ranks, problem.root, problem.shard_bytes, problem.peers)
    return remember(problem.fabric, key, lambda: _latency_bound(problem))


def _latency_bound(problem: CollectiveProblem) -> Bound:
    fabric = problem.fabric
    actor = [fabric.actor_of[name] for name in problem.ranks]
    links = fabric.links
    worst: tuple[Fraction, int, int] = (Fraction(0), 0, 0)
    if any(x.latency_s or x.library_latency_s for x in links):
        kinds = {(x.latency_s, x.library_latency_s) for x in links}  # few, of very many links
        exact = {kind: (Fraction(repr(kind[0])), Fraction(repr(kind[0])) + Fraction(repr(kind[1]))) for kind in kinds}
        scale = lcm(*(f.denominator for pair in exact.values() for f in pair))
        units = {kind: (int(hop * scale), int(first * scale)) for kind, (hop, first) in exact.items()}
        hop_units = [units[x.latency_s, x.library_latency_s][0] for x in links]
        first_units = [units[x.latency_s, x.library_latency_s][1] for x in links]
        wanted = [(source, targets) for source, targets in needs(problem) if targets]
        few = max(2, MAX_PAIRS // len(problem.ranks))
        for source, targets in wanted[:: -(-len(wanted) // few) or 1]:
            if targets:
                reach = _distances(problem, actor[source], hop_units, first_units)
                far = max(((reach[actor[t]], t) for t in targets if actor[t] in reach), default=(-1, 0))
                worst = max(worst, (Fraction(far[0], scale), source, far[1]), key=lambda w: w[0])
    return Bound(
        quantity=f"{problem.op} time",
        value=str(worst[0]),
        unit="s",
        certificate=Certificate(
            kind="latency",
            data={
                "from": problem.ranks[worst[1]], "to": problem.ranks[worst[2]], "latency_s": str(worst[0]), "demand": problem.op,
                "ranks": len(problem.ranks), "devices": list(problem.ranks), "root": problem.ranks[problem.root] if problem.op in ROOTED else "",
                **({} if problem.shard_bytes is None else {"shard_bytes": list(problem.shard_bytes)}),
                **({"peers": [problem.ranks[p] if p >= 0 else "" for p in problem.peers]} if problem.peers else {}),
            },
        ),
    )  # fmt: skip


def _distances(problem: CollectiveProblem, source: int, hop: list[int], first: list[int]) -> dict[int, int]:
    """Dijkstra from an actor over all links; the library's latency counts on the first link."""
    fabric = problem.fabric
    reach: dict[int, int] = {source: 0}
    settled: set[int] = set()
    heap = [(0, source)]
    while heap:
        d, u = heapq.heappop(heap)
        if u in settled:
            continue
        settled.add(u)
        for k in fabric.out_links[u]:
            v, there = fabric.link_ends[k][1], d + (first[k] if u == source else hop[k])
            if there < reach.get(v, there + 1):
                reach[v] = there
                heapq.heappush(heap, (there, v))
    return reach
