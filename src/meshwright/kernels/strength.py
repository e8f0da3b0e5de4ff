"""Strength of a capacitated undirected graph, exactly, and integral packings of spanning trees that reach it.

Source: C. Nash-Williams, W. Tutte (1961): the most spanning trees that can be packed is min over partitions P of cut(P) / (|P| - 1), rounded
down when trees are whole; W. Cunningham, "Optimal attack and reinforcement of a network" (J. ACM 32(3), 1985) for finding the partition by
minimum cuts; J. Edmonds' matroid union for the trees.
Deviations: the attack problem is solved by merging parts of a Dilworth truncation one node at a time, inside Newton's iteration on the
ratio; parallel copies of an edge are one element of the union search, since copies are interchangeable.
Invariant: the packing's forests are acyclic after every augmentation and no edge lies in more of them than its capacity.
Cost: O(nodes) max-flows per round of Newton, few rounds; O(trees · nodes · edges · trees) steps for the packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckFailed, Disconnected, TimeLimit
from .compile import allocating, helper
from .effort import NEVER, Deadline
from .maxflow import FlowNetwork

__all__ = ["Strength", "pack_spanning_trees", "strength"]

Edges = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class Strength:
    """`ratio` = cut(parts) / (|parts| - 1) of the partition `parts` that makes it least."""

    ratio: Fraction
    parts: tuple[tuple[int, ...], ...]


def strength(nodes: int, edges: Edges) -> Strength:
    """Exact strength of the graph with capacity `edges[u, v]`, u < v, and a partition that attains it.

    Raises: Disconnected when the graph is not connected (or has fewer than two nodes); Unsupported for capacities beyond 62 bits.
    """
    parts: tuple[tuple[int, ...], ...] = tuple((v,) for v in range(nodes))
    best = _ratio(edges, parts)
    while True:
        if not best:
            raise Disconnected("the graph is not connected: no spanning tree", hint="add links", data={"parts": [list(p) for p in parts]})
        found = _attack(nodes, edges, best)
        # Newton on a concave function: the partition that is best at the present ratio has a smaller ratio of its own, until none has.
        ratio = _ratio(edges, found) if len(found) > 1 else best
        if ratio >= best:
            return Strength(best, parts)
        best, parts = ratio, found


def _ratio(edges: Edges, parts: tuple[tuple[int, ...], ...]) -> Fraction:
    if len(parts) < 2:
        return Fraction(0)
    label = {v: i for i, part in enumerate(parts) for v in part}
    return Fraction(sum(c for (u, v), c in edges.items() if label[u] != label[v]), len(parts) - 1)


def _attack(nodes: int, edges: Edges, ratio: Fraction) -> tuple[tuple[int, ...], ...]:
    """The partition that minimises cut - ratio · parts, i.e. sum over parts of f(S) = cut(S) / 2 - ratio.

    Greedy of Dilworth truncation: y(v) = min over S with v in S, S within the nodes so far, of f(S) - y(S - v); the minimiser is tight, and
    tight sets that meet are joined. Everything is scaled by 2 · denominator to stay integral.
    """
    p, q = 2 * ratio.numerator, ratio.denominator
    source, sink = nodes, nodes + 1
    both = {arc: q * c for (u, v), c in edges.items() for arc in ((u, v), (v, u))}
    arcs = dict(both)
    for v in range(nodes):
        arcs[source, v] = arcs[v, sink] = 0
    network = FlowNetwork.of(nodes + 2, arcs)
    into = network.slots([source] * nodes, list(range(nodes)))
    out = network.slots(list(range(nodes)), [sink] * nodes)
    # More than any cut and all of y together: an arc of this capacity is never cut.
    forbid = 2 * sum(both.values()) + (p + 1) * (nodes + 1)
    y = [0] * nodes
    tight: list[set[int]] = []
    for v in range(nodes):
        # minimise q·cut(S) - y(S - v) over v in S, S within 0..v: nodes of negative y want out, of positive y want in
        network.capacity[into] = [forbid if u == v else max(y[u], 0) if u < v else 0 for u in range(nodes)]
        network.capacity[out] = [0 if u == v else max(-y[u], 0) if u < v else forbid for u in range(nodes)]
        if v < nodes - 1 or any(y[u] < 0 for u in range(v)):
            network.max_flow(source, sink)
            inside = {u for u in np.flatnonzero(network.source_side()[:nodes]).tolist() if u <= v} | {v}
        else:
            inside = set(range(v + 1))
        # y(v) is what is left of f(S) when the others of S have theirs: then S is tight, its y adds up to f(S).
        cut = q * sum(c for (a, b), c in edges.items() if (a in inside) != (b in inside))
        y[v] = cut - p - sum(y[u] for u in inside if u != v)
        # f is submodular on sets that meet, so the union of two tight sets that meet is tight too.
        for other in [part for part in tight if part & inside]:
            inside |= other
            tight.remove(other)
        tight.append(inside)
    return tuple(tuple(sorted(part)) for part in tight)


# ---- whole trees by matroid union ------------------------------------------------------------------------------------
@helper
def _tree_path(held, us, vs, forest, start, goal, by, seen):  # type: ignore[no-untyped-def]
    """Edges of the path from start to goal inside a forest, walked back through `by`; False if they are not joined."""
    seen[:] = False
    seen[start] = True
    stack = np.empty(len(seen), np.int64)
    stack[0], top = start, 1
    while top:
        top -= 1
        x = stack[top]
        if x == goal:
            return True
        for e in range(len(us)):
            if held[forest, e] and (us[e] == x or vs[e] == x):
                z = us[e] + vs[e] - x
                if not seen[z]:
                    seen[z] = True
                    by[z] = e
                    stack[top] = z
                    top += 1
    return False


@allocating
def _augment(held, us, vs, nodes, first):  # type: ignore[no-untyped-def]
    """Put one more copy of edge `first` into the forests, moving others along a shortest exchange path; False if impossible."""
    edges, trees = len(us), len(held)
    before, place = np.full(edges, -1, np.int64), np.full(edges, -1, np.int64)
    reached = np.zeros(edges, np.bool_)
    by, seen = np.empty(nodes, np.int64), np.empty(nodes, np.bool_)
    queue = np.empty(edges, np.int64)
    queue[0], done, found = first, 0, 1
    reached[first] = True
    while done < found:
        e = queue[done]
        done += 1
        for forest in range(trees):
            if held[forest, e]:
                continue
            # The ends of e are not joined in this forest: e goes in, and on the way back each edge goes to
                # where the one after it was.
            if not _tree_path(held, us, vs, forest, us[e], vs[e], by, seen):
                while e >= 0:
                    held[forest, e] = True
                    if before[e] >= 0:
                        held[place[e], e] = False
                        forest = place[e]
                    e = before[e]
                return True
            # Otherwise e closes a cycle; each other edge of it could leave this forest for another, so they are tried next. Breadth first:
            # along a shortest exchange path no cycle can arise.
            x = vs[e]
            while x != us[e]:
                c = by[x]
                if not reached[c]:
                    reached[c] = True
                    before[c], place[c] = e, forest
                    queue[found] = c
                    found += 1
                x = us[c] + vs[c] - x
    return False


def pack_spanning_trees(nodes: int, edges: Edges, trees: int, *, deadline: Deadline = NEVER) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """`trees` whole spanning trees in which no edge is used more often than its capacity: [(edges of a tree, copies)].

    Raises: CheckFailed when so many do not fit (trees > strength: a defect of the caller); TimeLimit past `deadline`.
    """
    pairs = [edge for edge, capacity in sorted(edges.items()) if capacity > 0]
    us, vs = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    held: NDArray[np.bool_] = np.zeros((trees, len(pairs)), np.bool_)
    wanted = trees * (nodes - 1)
    placed = 0
    for e, pair in enumerate(pairs):
        for _ in range(min(edges[pair], trees)):
            if placed == wanted or not _augment(held, us, vs, nodes, e):
                break
            placed += 1
        if deadline.past:
            raise TimeLimit(
                "the time limit was reached before all spanning trees were packed",
                hint="raise the time limit, or do not ask for the exact packing",
            )  # fmt: skip
    if placed < wanted:
        raise CheckFailed(f"only {placed} of the {wanted} edges of {trees} spanning trees fit", hint="please report the graph", data={"trees": trees})
    rows: dict[bytes, int] = {}
    for row in held:
        rows[row.tobytes()] = rows.get(row.tobytes(), 0) + 1
    return [(tuple(pairs[e] for e in np.flatnonzero(np.frombuffer(key, np.bool_))), count) for key, count in rows.items()]
