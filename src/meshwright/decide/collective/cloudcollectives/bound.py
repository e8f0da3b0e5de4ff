"""Lower bounds on what any order of ranks can reach, from the cost matrix alone. They hold for every permutation, hosts kept together or not.

ring, slowest message: every endpoint is entered and left, and no single edge holds two parts together: the smallest threshold whose messages form a
strongly connected graph in which every part is entered by two of its (undirected) edges (n > 2).
A round in which every position sends to another: the smallest threshold at which a perfect matching of senders to receivers exists; k messages:
a matching of k.
ring, sum: the larger of the cheapest assignment of successors and the cheapest 1-tree of the symmetric part.
Trees: as many cheapest messages as the tree is deep. An uplink: whoever is alone with his group must be left, by a ring at least once per round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....kernels.rank_orders import cheapest
from .cost import CostMatrix, Model, Stage

__all__ = ["assignment_bound", "bottleneck_matching", "lower_bound", "one_tree_bound", "ring_bottleneck_bound", "ring_sum_bound", "sum_bound"]

F64 = NDArray[np.float64]


def lower_bound(model: Model) -> float:
    """Seconds that no order of ranks can beat in this model."""
    matrix, n = model.matrix, len(model.matrix)
    if model.trees:
        tree = model.trees[0]
        cost = matrix.message_s(tree.piece_bytes)
        cheapest = float(cost[~np.eye(n, dtype=bool)].min())
        # The deepest rank hears of the root after so many messages in a row, each at least as dear as the cheapest of all.
        height = max(_depth(tree.parents, v) for v in range(n))
        return height * (2 if tree.both else 1) * cheapest
    total = 0.0
    for stage in model.stages:
        size = float(stage.size_bytes.min())
        cost = matrix.message_s(size)
        at_least = ring_bottleneck_bound(cost) if model.algorithm == "ring" else _stage_bound(stage, cost)
        if model.algorithm == "ring":
            at_least = max(at_least, _uplink_bound(matrix, size))
        total += stage.times * at_least
    return total


def sum_bound(model: Model) -> float:
    """Seconds of all messages together that no order can beat: of a ring its tour's bound, else every message the cheapest of its size."""
    matrix = model.matrix
    if model.algorithm == "ring":
        stage = model.stages[0]
        return sum(s.times for s in model.stages) * ring_sum_bound(matrix.message_s(float(stage.size_bytes[0])))
    passes = model.passes
    return float((np.repeat(passes.times, np.diff(passes.start)) * cheapest(passes, matrix.alpha_s, matrix.beta_s_per_byte)).sum())


def _stage_bound(stage: Stage, cost: F64) -> float:
    """Slowest message of a round whose senders differ and whose receivers differ; else the cheapest message."""
    pairs = len(stage.src)
    # Whatever the order, the messages of such a round are a matching of so many pairs.
    if len(set(stage.src.tolist())) == pairs == len(set(stage.dst.tolist())):
        return bottleneck_matching(cost, pairs)
    return float(cost[~np.eye(len(cost), dtype=bool)].min())


def _uplink_bound(matrix: CostMatrix, size_bytes: float) -> float:
    """A ring leaves every group that is not everybody."""
    if len(set(matrix.group)) < 2:
        return 0.0
    present = np.array(sorted(set(matrix.group)))
    return float((size_bytes / matrix.capacity_Bps[present]).max())


def _depth(parents: Sequence[int], v: int) -> int:
    return 0 if parents[v] < 0 else 1 + _depth(parents, parents[v])


def _thresholds(cost: F64) -> F64:
    return np.unique(cost[~np.eye(len(cost), dtype=bool)])


def _least(values: F64, enough: object) -> float:
    """Smallest value for which `enough` holds; it holds for the last."""
    # `enough` stays true once it is: more messages under the threshold only add arcs.
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if enough(values[middle]):  # type: ignore[operator]
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def ring_bottleneck_bound(cost: F64) -> float:
    """Smallest threshold whose graph is strongly connected and, for more than two endpoints, has no bridge when directions are dropped."""
    n = len(cost)

    def enough(limit: float) -> bool:
        arcs = (cost <= limit) & ~np.eye(n, dtype=bool)
        if not _reaches_all(arcs) or not _reaches_all(arcs.T):
            return False
        # A ring passes every cut twice, out and back, by two edges unless there are two endpoints only.
        return n == 2 or not _has_bridge(arcs | arcs.T)

    return _least(_thresholds(cost), enough)


def _reaches_all(arcs: NDArray[np.bool_]) -> bool:
    seen = np.zeros(len(arcs), bool)
    seen[0] = True
    front = seen.copy()
    while front.any():
        front = arcs[front].any(axis=0) & ~seen
        seen |= front
    return bool(seen.all())


def _has_bridge(edges: NDArray[np.bool_]) -> bool:
    """Whether some edge holds two parts of a connected graph together (lowest-reach numbers, without recursion)."""
    n = len(edges)
    neighbours = [np.flatnonzero(row).tolist() for row in edges]
    number, low, parent = [-1] * n, [0] * n, [-1] * n
    number[0] = clock = 0
    stack = [(0, 0)]
    while stack:
        v, at = stack.pop()
        if at < len(neighbours[v]):
            stack.append((v, at + 1))
            w = neighbours[v][at]
            if number[w] < 0:
                clock += 1
                number[w] = low[w] = clock
                parent[w] = v
                stack.append((w, 0))
            elif w != parent[v]:
                low[v] = min(low[v], number[w])
        elif parent[v] >= 0:
            low[parent[v]] = min(low[parent[v]], low[v])
            if low[v] > number[parent[v]]:
                return True
    return False


def bottleneck_matching(cost: F64, pairs: int) -> float:
    """Smallest threshold at which `pairs` senders can be given receivers of their own, nobody himself."""
    others = ~np.eye(len(cost), dtype=bool)
    return _least(_thresholds(cost), lambda limit: _matched((cost <= limit) & others) >= pairs)


def _matched(allowed: NDArray[np.bool_]) -> int:
    """How many senders can be given receivers of their own: one augmenting path after the other (Kuhn), which may be as long as there are ends."""
    n = len(allowed)
    receiver, sender = np.full(n, -1), np.full(n, -1)
    for first in range(n):
        free, came, end, todo = np.ones(n, bool), np.full(n, -1), -1, [first]
        while todo and end < 0:
            one = todo.pop()
            fresh = np.flatnonzero(allowed[one] & free)
            free[fresh], came[fresh] = False, one
            open_ = fresh[sender[fresh] < 0]
            end = int(open_[0]) if len(open_) else -1
            todo += sender[fresh].tolist()
        while end >= 0:  # whoever holds the way's receivers is moved on by one
            one = int(came[end])
            sender[end], receiver[one], end = one, end, int(receiver[one])
    return int((sender >= 0).sum())


def ring_sum_bound(cost: F64) -> float:
    """No ring through all endpoints costs less in sum."""
    return max(assignment_bound(cost), one_tree_bound(cost))


def one_tree_bound(cost: F64) -> float:
    """Cheapest spanning tree of all but endpoint 0, and the two cheapest edges at 0, on the cheaper of both directions (n > 2)."""
    n = len(cost)
    both = np.minimum(cost, cost.T)
    if n < 3:
        return float(cost[0, 1] + cost[1, 0])
    # A ring without endpoint 0 is a path, which is a spanning tree of the others; with both edges at 0 it costs no less than this.
    distance, left, total = both[1].copy(), set(range(2, n)), 0.0
    while left:
        v = min(left, key=lambda x: (distance[x], x))
        total += float(distance[v])
        left.remove(v)
        distance = np.minimum(distance, both[v])
    return total + float(np.sort(both[0, 1:])[:2].sum())


def assignment_bound(cost: F64) -> float:
    """Cheapest way to give every endpoint a successor other than itself (shortest augmenting paths, O(n³))."""
    n = len(cost)
    price = np.where(np.eye(n, dtype=bool), np.inf, cost)
    u, v = np.zeros(n + 1), np.zeros(n + 1)
    match = np.full(n + 1, n)  # column -> row; column n is the start
    for row in range(n):
        match[n] = row
        column, slack, way = n, np.full(n + 1, np.inf), np.full(n + 1, n)
        used = np.zeros(n + 1, bool)
        while True:
            used[column] = True
            here = match[column]
            reduced = price[here] - u[here] - v[:n]
            better = ~used[:n] & (reduced < slack[:n])
            slack[:n][better], way[:n][better] = reduced[better], column
            free = np.where(used[:n], np.inf, slack[:n])
            nearest = int(free.argmin())
            # Prices change so that the nearest column gets reduced cost 0 and all used ones keep theirs: the duals stay feasible.
            delta = free[nearest]
            u[match[used]] += delta
            v[used] -= delta
            slack[~used] -= delta
            column = nearest
            if match[column] == n:
                break
        while column != n:
            match[column] = match[way[column]]
            column = int(way[column])
    return float(sum(cost[match[j], j] for j in range(n)))
