"""Cheapest trees on a small dense graph: out-arborescences, undirected spanning trees, shortest-path trees; and packing by them.

Source: Y. Chu, T. Liu, "On the shortest arborescence of a directed graph" (1965); J. Edmonds, "Optimum branchings" (1967); N. Garg,
J. Könemann, "Faster and simpler algorithms for multicommodity flow and other fractional packing problems" (SIAM J. Comput. 37(2), 2007).
Deviations: Chu-Liu/Edmonds contracts all cycles of a round at once. Packing keeps lengths relative to their start (the published start
((1 + eps) m)^(-1/eps) leaves the range of floats for small eps) and scales them down when they grow large; it may also stop at a target.
Ties go to the smallest node number, so equal inputs give equal trees.
Cost: O(n^2) per round of contraction, at most n rounds; O(m log m / eps^2) trees per packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .compile import allocating, copy_into, fill, helper

__all__ = ["ARBORESCENCE", "SHORTEST", "SPANNING", "PathEdges", "cheapest_trees", "pack_by_weights"]

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

ARBORESCENCE, SPANNING, SHORTEST = 0, 1, 2  # what a tree costs: each edge once; each edge in both directions; each edge per node below it


@dataclass(frozen=True)
class PathEdges:
    """Edges between `nodes` nodes, each a path over capacitated arcs: edge e is `src[e] -> dst[e]` over `arc[ptr[e]:ptr[e + 1]]`."""

    nodes: int
    src: I32
    dst: I32
    ptr: I32
    arc: I32
    capacity: F64  # of every arc


@allocating
def _pair_costs(src, dst, ptr, arc, length, cost, via):  # type: ignore[no-untyped-def]
    """Cheapest edge of every ordered pair."""
    # Of parallel edges the cheapest counts; `via` remembers which.
    for v in range(len(cost)):
        fill(cost[v], np.inf)
        fill(via[v], -1)
    for e in range(len(src)):
        total = 0.0
        for i in range(ptr[e], ptr[e + 1]):
            total += length[arc[i]]
        if total < cost[src[e], dst[e]]:
            cost[src[e], dst[e]] = total
            via[src[e], dst[e]] = e


@helper
def _arborescence(cost, root, parent, work, origin, best, comp, in_cycle, size, chosen):  # type: ignore[no-untyped-def]
    """Cheapest spanning out-tree of `root` into `parent` (-1 for the root); False if some node cannot be reached."""
    k, r, level = len(cost), root, 0
    for v in range(k):
        copy_into(work[0, v], cost[v])
    walk = np.empty(k, np.int64)
    while True:
        size[level] = k
        for v in range(k):
            best[level, v] = -1
            comp[level, v] = -1
            in_cycle[level, v] = False
            walk[v] = -1
            if v != r:
                least = np.inf
                for u in range(k):
                    if u != v and work[level, u, v] < least:
                        least = work[level, u, v]
                        best[level, v] = u
                if best[level, v] < 0:
                    return False
        groups = 0
        for start in range(k):
            v = start
            # Along cheapest entries, marked by where the walk began: coming back to the own mark closes a cycle.
            while v >= 0 and walk[v] < 0:
                walk[v] = start
                v = best[level, v]
            if v >= 0 and walk[v] == start and comp[level, v] < 0:
                while comp[level, v] < 0:
                    comp[level, v] = groups
                    in_cycle[level, v] = True
                    v = best[level, v]
                groups += 1
        if groups == 0:
            break
        for v in range(k):
            if comp[level, v] < 0:
                comp[level, v] = groups
                groups += 1
        # Cycles become nodes. Entering one at v replaces v's own entry, so that is subtracted; `origin` remembers the edge for the way back.
        for a in range(groups):
            fill(work[level + 1, a, :groups], np.inf)
        for u in range(k):
            for v in range(k):
                a, b = comp[level, u], comp[level, v]
                if a != b:
                    c = work[level, u, v]
                    if in_cycle[level, v]:
                        c -= work[level, best[level, v], v]
                    if c < work[level + 1, a, b]:
                        work[level + 1, a, b] = c
                        origin[level + 1, a, b] = u * k + v
        r, k, level = comp[level, r], groups, level + 1
    for v in range(k):
        chosen[v] = best[level, v]
    while level > 0:
        below = size[level - 1]
        for v in range(below):
            parent[v] = best[level - 1, v]
        for b in range(size[level]):
            if chosen[b] >= 0:
                # Where a cycle was entered, the entering edge replaces that node's edge of the cycle; all others stay.
                pair = origin[level, chosen[b], b]
                parent[pair % below] = pair // below
        level -= 1
        for v in range(below):
            chosen[v] = parent[v]
    for v in range(size[0]):
        parent[v] = chosen[v]
    return True


@helper
def _grown(cost, root, parent, spanning):  # type: ignore[no-untyped-def]
    """Prim (spanning: an edge costs both directions) or Dijkstra; False if some node cannot be reached."""
    n = len(cost)
    near = np.empty(n)
    fill(near, np.inf)
    done = np.zeros(n, np.bool_)
    for v in range(n):
        parent[v] = -1
    near[root] = 0.0
    for _ in range(n):
        u = -1
        for v in range(n):
            if not done[v] and near[v] < np.inf and (u < 0 or near[v] < near[u]):
                u = v
        if u < 0:
            return False
        done[u] = True
        for v in range(n):
            if not done[v]:
                c = cost[u, v] + cost[v, u] if spanning else near[u] + cost[u, v]
                if c < near[v]:
                    near[v] = c
                    parent[v] = u
    return True


@helper
def _below(parent, count):  # type: ignore[no-untyped-def]
    """Nodes in the subtree of every node, itself included."""
    n = len(parent)
    for v in range(n):
        count[v] = 0
    for v in range(n):
        u = v
        while u >= 0:
            count[u] += 1
            u = parent[u]


@allocating
def _one_column(mode, roots, cost, via, ptr, arc, parent, count, chosen, usage, work):  # type: ignore[no-untyped-def]
    """Cheapest tree for every root, edges into `chosen`, what they use of every arc into `usage`; returns False if there is none."""
    n = len(cost)
    fill(usage, 0.0)
    for g in range(len(roots)):
        if mode == 0:
            ok = _arborescence(cost, roots[g], parent, work[0], work[1], work[2], work[3], work[4], work[5], work[6])
        else:
            ok = _grown(cost, roots[g], parent, mode == 1)
        if not ok:
            return False
        if mode == 2:
            _below(parent, count)
        for v in range(n):
            chosen[g, v] = -1
            if mode == 1:
                chosen[1, v] = -1
            if parent[v] < 0:
                continue
            e = via[parent[v], v]
            chosen[g, v] = e
            share = count[v] / n if mode == 2 else 1.0
            for i in range(ptr[e], ptr[e + 1]):
                usage[arc[i]] += share
            if mode == 1:
                e = via[v, parent[v]]
                chosen[1, v] = e
                for i in range(ptr[e], ptr[e + 1]):
                    usage[arc[i]] += 1.0
    return True


@allocating
def _workspace(n):  # type: ignore[no-untyped-def]
    return (
        np.empty((n, n, n)), np.empty((n, n, n), np.int64), np.empty((n, n), np.int64), np.empty((n, n), np.int64),
        np.zeros((n, n), np.bool_), np.empty(n, np.int64), np.empty(n, np.int64),
    )  # fmt: skip


@allocating
def _pack(mode, roots, src, dst, ptr, arc, capacity, epsilon, limit, target, chosen, amount):  # type: ignore[no-untyped-def]
    """Fill `chosen` and `amount`, one entry per round; returns the number of rounds (-1: some node cannot be reached)."""
    n, arcs, most = chosen.shape[2], len(capacity), len(amount)
    cost, via = np.empty((n, n)), np.empty((n, n), np.int64)
    parent, count = np.empty(n, np.int64), np.zeros(n, np.int64)
    usage, load, length = np.zeros(arcs), np.zeros(arcs), np.empty(arcs)
    work = _workspace(n)
    for a in range(arcs):
        # Garg and Könemann: what is used gets longer, the cheapest trees avoid it.
        length[a] = 1.0 / capacity[a]
    scaled, total = 0.0, 0.0
    for step in range(most):
        _pair_costs(src, dst, ptr, arc, length, cost, via)
        if not _one_column(mode, roots, cost, via, ptr, arc, parent, count, chosen[step], usage, work):
            return -1
        tree = 0.0
        room = np.inf
        for a in range(arcs):
            if usage[a] > 0:
                tree += usage[a] * length[a]
                # As much as the narrowest arc of the trees carries at once.
                room = min(room, capacity[a] / usage[a])
        # In logarithms: lengths were scaled down whenever they grew too large, by `scaled` in all.
        if np.log(tree) + scaled >= limit and step > 0:
            return step
        amount[step] = room
        total += room
        largest, busiest = 0.0, 0.0
        for a in range(arcs):
            if usage[a] > 0:
                length[a] *= 1.0 + epsilon * room * usage[a] / capacity[a]
                load[a] += room * usage[a]
            largest = max(largest, length[a])
            busiest = max(busiest, load[a] / capacity[a])
        if largest > 1e150:
            for a in range(arcs):
                length[a] *= 1e-150
            scaled += 150 * 2.302585092994046
        # Divided by the largest load the amounts are feasible.
        if total / busiest >= target:
            return step + 1
    return most


def cheapest_trees(edges: PathEdges, mode: int, roots: I32, length: F64) -> tuple[I32, F64] | None:
    """(edges chosen, use of every arc) of the cheapest trees under `length`, one per root; None if a root does not reach some node.

    Edges: row g, column v: the edge into v in the tree of `roots[g]`, -1 for the root. SPANNING has one root and two rows: the edges
    down and those up. Use: 1 per passage, or in SHORTEST the share of all nodes that lie below.
    """
    n = edges.nodes
    cost, via = np.empty((n, n)), np.empty((n, n), np.int64)
    chosen = np.full((2 if mode == SPANNING else len(roots), n), -1, np.int32)
    usage = np.zeros(len(edges.capacity))
    _pair_costs(edges.src, edges.dst, edges.ptr, edges.arc, length, cost, via)
    parent, count = np.empty(n, np.int64), np.zeros(n, np.int64)
    ok = _one_column(mode, roots, cost, via, edges.ptr, edges.arc, parent, count, chosen, usage, _workspace(n))
    return (chosen, usage) if ok else None


def pack_by_weights(
    edges: PathEdges, mode: int, roots: I32, *, epsilon: float, most: int, target: float = float("inf")
) -> tuple[NDArray[np.int32], F64] | None:
    """Multiplicative weights: rounds of (trees as in `cheapest_trees`, raw amount). None if a root does not reach some node.

    Amounts are not yet feasible: divide by the largest load over capacity. Then the total is at least about (1 - 2 epsilon) of the optimum
    unless `most` rounds stopped it. Stops early once the feasible total reaches `target`.
    Raises: UsageError unless 0 < epsilon < 1.
    """
    if not 0 < epsilon < 1:
        raise UsageError(f"epsilon must lie between 0 and 1, got {epsilon}", where="epsilon")
    rows = 2 if mode == SPANNING else len(roots)
    chosen, amount = np.full((most, rows, edges.nodes), -1, np.int32), np.zeros(most)
    limit = log((1 + epsilon) * max(len(edges.capacity), 1)) / epsilon
    done = _pack(mode, roots, edges.src, edges.dst, edges.ptr, edges.arc, edges.capacity, epsilon, limit, target, chosen, amount)
    return None if done < 0 else (chosen[:done], amount[:done])
