"""Packing spanning out-trees into a capacitated digraph (Edmonds' branchings), with multiplicities.

Source: J. Edmonds, "Edge-disjoint branchings" (1973); K. Bérczi, A. Frank, "Packing arborescences" (2009) for the form with
multiplicities; ForestColl (arXiv 2402.06787) for its use.
Deviations: one batch of equal trees is finished before the next is begun, so that every unfinished batch still consists of its root
alone and the test network has one node per device plus the source. When only part of a batch can take an edge, the rest
gives its edges back and returns to its root.
Invariant: in-capacity(X) >= number of trees that have not entered X, for every non-empty set X of devices, after every step.
Cost: one flow per tried edge, at most (devices - 1) accepted edges per batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckFailed, TimeLimit
from .compile import allocating
from .effort import NEVER, Deadline, count_work
from .maxflow import FLOW_WORK_S, MAX_CAPACITY, FlowNetwork, dinic

__all__ = ["TreeBatch", "pack_trees"]


@dataclass(frozen=True)
class TreeBatch:
    """`count` equal trees: `parent[v]` of every device (root: -1), `order` the devices in the order they joined."""

    root: int
    count: int
    parent: NDArray[np.int32]
    order: NDArray[np.int32]


@allocating
def _grow(  # type: ignore[no-untyped-def]
    ptr, head, rev, capacity, residual, source, source_slot, pending, root, count, unlimited, parent, order, level, cursor, queue, path
):
    """Grow one batch of trees from `root`; returns how many of the wanted `count` it became, or -1 when stuck."""
    nodes = len(pending)
    for v in range(nodes):
        parent[v] = -1
    entry = np.full(nodes, -1, np.int64)  # slot of the edge by which a node joined
    joined = np.zeros(nodes, np.bool_)
    scan = np.empty(nodes, np.int64)
    for v in range(nodes):
        scan[v] = ptr[v]
    pending[root] -= count
    joined[root], order[0] = True, root
    size, others = 1, np.int64(0)
    for v in range(nodes):
        # Trees that are still to be packed hang on the source: everything of `pending` must fit beside the tree that grows.
        others += pending[v]
        capacity[source_slot[v]] = pending[v]
    at = 0
    while size < nodes:
        if at >= size:
            return -1
        x = order[at]
        gave_back = False
        while scan[x] < ptr[x + 1] and size < nodes:
            a = scan[x]
            y = head[a]
            if y == source or joined[y] or capacity[a] == 0:
                scan[x] += 1
                continue
            # Edmonds: edge x -> y may be taken by as many trees as leave every cut outside enough for the trees that are pending. The worst
            # such cut separates y from the source and from x, so one flow from both to y finds it.
            want = min(capacity[a], count)
            capacity[source_slot[x]] = unlimited
            for i in range(len(head)):
                residual[i] = capacity[i]
            capacity[source_slot[x]] = pending[x]
            # The flow beyond `others` is what the edge may give away.
            room = dinic(ptr, head, rev, residual, source, np.int64(y), others + want, level, cursor, queue, path) - others
            if room <= 0:
                scan[x] += 1
                continue
            # Fewer trees than begun can go on this way: the batch shrinks, and what it holds too much of is given back.
            if room < count:
                gave_back = True
                back = count - room
                for v in range(nodes):
                    if entry[v] >= 0:
                        capacity[entry[v]] += back
                pending[root] += back
                others += back
                capacity[source_slot[root]] = pending[root]
                count = room
                for i in range(size):
                    scan[order[i]] = ptr[order[i]]
            # Taken for good; the invariant holds for the smaller capacities.
            capacity[a] -= count
            entry[y] = a
            parent[y] = x
            joined[y] = True
            order[size] = y
            size += 1
            if gave_back:
                break  # nodes that had no edge left may have one again: look from the root
        at = 0 if gave_back else at + 1
    return count


def pack_trees(
    nodes: int, arcs: Mapping[tuple[int, int], int], demand: Mapping[int, int], *, deadline: Deadline = NEVER
) -> list[TreeBatch]:
    """Pack `demand[r]` spanning out-trees rooted at each r so that no arc carries more trees than its capacity.

    Nodes are 0..nodes-1, all to be spanned. Trees grow breadth first, to keep them low.
    Raises: TimeLimit past `deadline`.
    CheckFailed when an edge cannot be found (the demand exceeds some cut: a defect of the caller).
    """
    wide = dict(arcs)
    for v in range(nodes):
        wide[nodes, v] = 0
    network = FlowNetwork.of(nodes + 1, wide)
    source_slot = network.slots([nodes] * nodes, list(range(nodes)))
    pending = np.zeros(nodes, np.int64)
    for r, count in demand.items():
        pending[r] = count
    # As good as infinite: no flow in this network can be as large.
    unlimited = min(int(network.capacity.sum() + pending.sum()) + 1, MAX_CAPACITY)
    residual, level = np.empty_like(network.capacity), np.empty(nodes + 1, np.int32)
    work = tuple(np.empty(nodes + 2, np.int32) for _ in range(3))
    batches: list[TreeBatch] = []
    while pending.any():
        if deadline.past:
            raise TimeLimit("the time limit was reached before all trees were packed", hint="raise the time limit, or use --strategy ring")
        root = int(np.argmax(pending > 0))
        parent, order = np.empty(nodes, np.int32), np.empty(nodes, np.int32)
        count = _grow(
            network.ptr, network.head, network.rev, network.capacity, residual, nodes, source_slot, pending, root, pending[root], unlimited,
            parent, order, level, *work,
        )  # fmt: skip
        if count <= 0:
            raise CheckFailed(
                f"tree packing is stuck at root {root} with {int(pending.sum())} trees left",
                hint="this is a defect of the planner: please report it with the fabric file",
                data={"root": root, "batches": len(batches)},
            )
        count_work(FLOW_WORK_S * len(network.head) * nodes)
        batches.append(TreeBatch(root, int(count), parent, order))
    return batches
