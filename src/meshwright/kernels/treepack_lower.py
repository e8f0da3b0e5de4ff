"""Lower trees by exchange: two trees that enter a device from different parents may swap them, which no link notices.

Every device is entered by as many arcs as there are trees, and any assignment of those arcs to the trees has the same loads, as long as no
tree closes a circle. So exchanges go on while the sum of squared depths falls: late devices move up first, and it ends.
Source: ours (local search; the packing itself is Edmonds', see `treepack`).
Invariant: the multiset of (parent, device) arcs, and with it every load; every tree spans from its root.
Cost: trees² · devices per round, at most MAX_ROUNDS rounds; trees of unlike multiplicity do not exchange.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import allocating, helper
from .effort import count_work
from .tree_order import breadth_first

__all__ = ["exchange_parents"]

I32 = NDArray[np.int32]
MAX_ROUNDS = 64  # rounds of exchanges, each of which lowers the sum of squared depths
PAIR_WORK_S = 1e-9  # work of a round per pair of trees and device: about the seconds of a quiet core


@allocating
def _measure(parent, depth, size, total, order, child, beside):  # type: ignore[no-untyped-def]
    """Depth of every device of one tree, and devices and sum of depths of every subtree."""
    n = breadth_first(parent, order, child, beside)
    depth[order[0]] = 0
    for i in range(1, n):
        depth[order[i]] = depth[parent[order[i]]] + 1
    for v in range(n):
        size[v], total[v] = 1, depth[v]
    for i in range(n - 1, 0, -1):
        v = order[i]
        size[parent[v]] += size[v]
        total[parent[v]] += total[v]


@helper
def _under(parent, v, u):  # type: ignore[no-untyped-def]
    """Whether u is in the subtree of v."""
    while u >= 0:
        if u == v:
            return True
        u = parent[u]
    return False


@allocating
def _round(parent, donor, units, depth, size, total, order, child, beside):  # type: ignore[no-untyped-def]
    """One pass over all devices and trees: the best exchange of each, if any gains. Returns how many there were."""
    trees, n = parent.shape
    swaps = 0
    for v in range(n):
        for i in range(trees):
            p = parent[i, v]
            if p < 0 or depth[i, p] == 0:
                continue
            best, with_whom = 0, -1
            for j in range(trees):
                u = parent[j, v]
                if u < 0 or u == p or units[i] != units[j]:
                    continue
                # By how much v and all below it sink in either tree if they exchange parents.
                mine, theirs = depth[i, u] - depth[i, p], depth[j, p] - depth[j, u]
                if mine >= 0 and theirs >= 0:
                    continue
                # Sum of (d + m)^2 - d^2 over a subtree = m (2 sum of d + m size): the change of squared depths without a walk.
                gain = -mine * (2 * total[i, v] + mine * size[i, v]) - theirs * (2 * total[j, v] + theirs * size[j, v])
                # A new parent below v itself would close a circle.
                if gain > best and not _under(parent[i], v, u) and not _under(parent[j], v, p):
                    best, with_whom = gain, j
            if with_whom >= 0:
                j = with_whom
                parent[i, v], parent[j, v] = parent[j, v], parent[i, v]
                donor[i, v], donor[j, v] = donor[j, v], donor[i, v]
                _measure(parent[i], depth[i], size[i], total[i], order, child, beside)
                _measure(parent[j], depth[j], size[j], total[j], order, child, beside)
                swaps += 1
    return swaps


def exchange_parents(parent: I32, units: I32) -> tuple[I32, I32, I32]:
    """Trees with the same arcs in all, lower.

    Args: `parent[t, v]` of device v in tree t, -1 at its root; `units[t]` its multiplicity.
    Returns: new parents; `donor[t, v]`, the tree whose arc into v tree t has now; depths.
    """
    trees, n = parent.shape
    parent = parent.astype(np.int32, copy=True)
    donor = np.repeat(np.arange(trees, dtype=np.int32)[:, None], n, axis=1)
    depth, size, total = (np.zeros((trees, n), np.int64) for _ in range(3))
    work = tuple(np.zeros(n, np.int32) for _ in range(3))
    for t in range(trees):
        _measure(parent[t], depth[t], size[t], total[t], *work)
    for _ in range(MAX_ROUNDS):
        count_work(PAIR_WORK_S * trees * trees * n)
        if not _round(parent, donor, units, depth, size, total, *work):
            break
    return parent, donor, depth.astype(np.int32)
