"""When a forest's data has arrived everywhere, latency and bytes together: what links must carry, between the time to reach them and the time to go.

A link of rate b carries b bytes a second from when the first data reaches it until so long before the end as its last data still travels. So for
every link, and every pair of a time h and a time q: what trees bring to it no earlier than h, and take on from it for no less than q,
needs h + bytes / b + q in all. That is the one-machine bound of scheduling with heads and tails (J. Carlier, "The one-machine sequencing problem",
European Journal of Operational Research 11, 1982), for every link alone, with trees cut so fine that pieces do not count.
Why it matters: a link that is full only because its trees take a long way (a network's) makes all wait for that way; with a little less on it, the
way is hidden behind what other links still carry.
Cost: entries of all trees, sorted per link.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..trees.pack import Tree
from .arrival import HopTimes
from .forest import Forest

__all__ = ["finish_s"]


def finish_s(forest: Forest, seconds: HopTimes, size_bytes: float) -> float:
    """No run of the forest for so many bytes in all ends earlier, and one with small pieces in the right order hardly later."""
    graph = forest.graph
    per_unit = size_bytes / (sum(forest.weight) * forest.k) / graph.unit_Bps
    uses: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for tree in forest.every_tree():
        _add_uses(uses, tree, seconds)
    return max(_needed_s(np.array(rows), per_unit / graph.arcs[arc]) for arc, rows in uses.items())


def _add_uses(uses: dict[tuple[int, int], list[tuple[float, float, float]]], tree: Tree, seconds: HopTimes) -> None:
    """(seconds until data reaches it, seconds from its first byte on the way to the last device below, units) of every link of the tree."""
    hop = [seconds(path) if path else 0.0 for path in tree.every_path]
    at, below = [0.0] * len(hop), [0.0] * len(hop)
    for v in tree.order[1:]:
        at[v] = at[tree.parent[v]] + hop[v]
    for v in reversed(tree.order[1:]):
        up = tree.parent[v]
        below[up] = max(below[up], below[v] + hop[v])
    for v in tree.order[1:]:
        for arc in pairwise(tree.paths[v]):
            uses.setdefault(arc, []).append((at[tree.parent[v]], below[v] + hop[v], tree.units))


def _needed_s(rows: np.ndarray, per_unit_s: float) -> float:
    """Most of head + bytes + tail over all sets of one link's uses."""
    # Of all sets only those matter that hold every use with head >= h and tail >= q: others have the same least head and tail, and fewer bytes.
    # Rows by falling tail, so a cumulative sum over those with head >= h is the bytes of every q at once.
    rows = rows[np.argsort(-rows[:, 1], kind="stable")]
    head, tail, units = rows.T
    return max(float((first + np.cumsum(units * (head >= first)) * per_unit_s + tail)[head >= first].max()) for first in np.unique(head))
