"""Certificates of kind `packing`: lengths of links, and what collectives must pay at those lengths, whatever the algorithm.

Let d(s, t) be the shortest path under the lengths. All links together offer sum of rate · length per second, and a message from s to t uses at
least bytes · d(s, t) of it. Counted for one element of the message (partial sums are messages of one element's size):
    broadcast   messages that carry it from the root to all ranks contain an out-arborescence: at least the cheapest one under d
    reduce      the mirror image: the cheapest in-arborescence of the root
    all-gather  the cheapest out-arborescence of the element's owner;  reduce-scatter: the cheapest in-arborescence of its owner
    all-reduce  two edge-disjoint spanning trees under min(d(s, t), d(t, s)): at least twice the cheapest one. For: put the ranks into p groups. When
                the first group holds the whole sum, at least p - 1 messages have gone between groups, since every other group's part had to
                leave it; and each other group must receive one more. So 2 (p - 1) messages join different groups, whatever the p groups, which
                by Nash-Williams and Tutte means that the messages contain two edge-disjoint spanning trees.
    all-to-all, scatter, gather, permute   each byte travels from its source to its destination
A switch that copies or adds could be part of a tree; `hosts` merges each with a rank (distance 0), which only makes trees cheaper, so the
bound holds for it. Devices that are no ranks of a collective are taken to forward its data only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ...fabric.fabric import Fabric

__all__ = ["packing_time"]

Matrix = list[list[int]]
TREES = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")


def packing_time(data: Mapping[str, Any], fabric: Fabric) -> Fraction:
    """The time that the certificate proves. Raises ValueError, KeyError or TypeError saying what is wrong with it."""
    lengths = _lengths(data["lengths"], fabric)
    offered = sum(x.rate_Bps * lengths.get((x.src, x.dst), 0) for x in fabric.links)
    if not offered:
        raise ValueError("no link has a length")
    if not data["groups"]:
        raise ValueError("no collective is named")
    return sum((_cost(group, lengths, fabric) for group in data["groups"]), Fraction(0)) / offered


def _lengths(stated: Sequence[Sequence[Any]], fabric: Fabric) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    joined = {(x.src, x.dst) for x in fabric.links}
    for src, dst, length in stated:
        if type(length) is not int or length < 0 or (src, dst) in found:
            raise ValueError(f"the length of {src} -> {dst} is no whole number >= 0, or stated twice")
        if (src, dst) not in joined:
            raise ValueError(f"fabric {fabric.name!r} has no link {src} -> {dst}")
        found[src, dst] = length
    return found


def _cost(group: Mapping[str, Any], lengths: Mapping[tuple[str, str], int], fabric: Fabric) -> Fraction:
    """Bytes · length that one collective uses at least."""
    ranks, op = list(group["devices"]), group["demand"]
    if len(set(ranks)) < len(ranks) or not set(ranks) <= {d.name for d in fabric.devices} or len(ranks) < 2:
        raise ValueError(f"its ranks are not two or more different devices of fabric {fabric.name!r}")
    size = Fraction(int(group["size_bytes"]))
    if size < 0:
        raise ValueError("a negative size")
    d = _distances(ranks, lengths, fabric, _hosts(group, ranks, fabric) if op in TREES else {})
    turned = [list(column) for column in zip(*d, strict=True)]
    n = len(ranks)
    shards = [Fraction(int(b)) for b in group["shard_bytes"]] if "shard_bytes" in group else [size / n] * n
    if len(shards) != n or sum(shards) != size or min(shards) < 0:
        raise ValueError("the shards do not add up to the size")
    root = ranks.index(group["root"]) if op in ("broadcast", "reduce", "scatter", "gather") else -1
    rules: dict[str, Callable[[], Fraction]] = {
        # Sums need a tree of some direction for every byte, and the result one back: no less than a spanning tree under the cheaper way of
        # each pair, twice.
        "all-reduce": lambda: 2 * size * _spanning([[min(a, b) for a, b in zip(r, c, strict=True)] for r, c in zip(d, turned, strict=True)]),
        "broadcast": lambda: size * _arborescence(d, root),
        "reduce": lambda: size * _arborescence(turned, root),
        "all-gather": lambda: sum((shards[r] * _arborescence(d, r) for r in range(n)), Fraction(0)),
        "reduce-scatter": lambda: sum((shards[r] * _arborescence(turned, r) for r in range(n)), Fraction(0)),
        "all-to-all": lambda: size / n * sum(map(sum, d)),
        "scatter": lambda: sum((shards[r] * d[root][r] for r in range(n)), Fraction(0)),
        "gather": lambda: sum((shards[r] * d[r][root] for r in range(n)), Fraction(0)),
        "permute": lambda: size * sum(d[ranks.index(p)][r] for r, p in enumerate(group["peers"]) if p),
    }
    if op not in rules:
        raise ValueError(f"no rule for {op!r}")
    if op == "permute" and len(group["peers"]) != n:
        raise ValueError("a permutation needs a peer for every rank")
    return Fraction(rules[op]())


def _hosts(group: Mapping[str, Any], ranks: Sequence[str], fabric: Fabric) -> dict[str, str]:
    hosts = dict(group.get("hosts", {}))
    capable = {s.name for s in fabric.switches if s.multicast or s.aggregate}
    lacking = sorted(capable - set(hosts))
    if lacking:
        raise ValueError(f"switch {lacking[0]!r} can add or copy and is merged with no rank")
    if not set(hosts) <= {s.name for s in fabric.switches} or not set(hosts.values()) <= set(ranks):
        raise ValueError("hosts must merge switches with ranks")
    return hosts


def _distances(ranks: Sequence[str], lengths: Mapping[tuple[str, str], int], fabric: Fabric, hosts: Mapping[str, str]) -> Matrix:
    """Shortest paths between ranks; a merged switch is its rank."""
    out: dict[str, list[tuple[str, int]]] = {}
    for x in fabric.links:
        a, b = hosts.get(x.src, x.src), hosts.get(x.dst, x.dst)
        if a != b:
            out.setdefault(a, []).append((b, lengths.get((x.src, x.dst), 0)))
    rows = []
    for source in ranks:
        reach = {source: 0}
        waiting = [source]
        # Lengths are whole numbers >= 0, so every round shortens something and it ends.
        while waiting:  # relaxation until nothing improves
            later: dict[str, None] = {}
            for a in waiting:
                for b, length in out.get(a, ()):
                    there = reach[a] + length
                    if b not in reach or there < reach[b]:
                        reach[b] = there
                        later[b] = None
            waiting = list(later)
        missing = [r for r in ranks if r not in reach]
        if missing:
            raise ValueError(f"no path from {source} to {missing[0]}")
        rows.append([reach[r] for r in ranks])
    return rows


def _spanning(cost: Matrix) -> int:
    """Cheapest spanning tree (Prim)."""
    near = {v: cost[0][v] for v in range(1, len(cost))}
    total = 0
    while near:
        v = min(near, key=lambda u: (near[u], u))
        total += near.pop(v)
        for u in near:
            near[u] = min(near[u], cost[v][u])
    return total


def _arborescence(cost: Matrix, root: int) -> int:
    """Cheapest spanning out-tree of `root` (Chu and Liu, Edmonds): cheapest entries, cycles shrunk to one node, until none is left."""
    total, size = 0, len(cost)
    edges = [(u, v, cost[u][v]) for u in range(size) for v in range(size) if u != v]
    while True:
        # Every node but the root needs one entry; the cheapest of each is a lower bound, and a solution unless they close cycles.
        best: list[tuple[int, int] | None] = [None] * size  # cheapest entry: (length, from)
        for u, v, length in edges:
            entry = best[v]
            if v != root and (entry is None or length < entry[0]):
                best[v] = (length, u)
        label, mark = [-1] * size, [-1] * size
        cycles = 0
        for start in range(size):
            v = start
            # Walk back along entries, marking by start: meeting one's own mark closes a cycle, another's leads where was already looked.
            while v != root and mark[v] == -1 and label[v] == -1:
                mark[v] = start
                v = _entry(best, v)[1]
            if v != root and mark[v] == start and label[v] == -1:  # a new cycle
                while label[v] == -1:
                    label[v] = cycles
                    v = _entry(best, v)[1]
                cycles += 1
        # Entries are paid for now; later rounds pay only what another entry costs more.
        total += sum(_entry(best, v)[0] for v in range(size) if v != root)
        if not cycles:
            return total
        count = cycles
        for v in range(size):
            if label[v] == -1:
                label[v] = count
                count += 1
        edges = [
            # Entering a cycle at v replaces v's entry, which was paid for above.
            (label[u], label[v], length - (_entry(best, v)[0] if v != root else 0)) for u, v, length in edges if label[u] != label[v]
        ]  # fmt: skip
        size, root = count, label[root]


def _entry(best: Sequence[tuple[int, int] | None], v: int) -> tuple[int, int]:
    found = best[v]
    if found is None:
        raise ValueError("some rank cannot be reached")
    return found
