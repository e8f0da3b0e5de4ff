"""Scatter and gather as forests: every rank's share goes to (or comes from) the root on paths of its own, at the exact optimum.

Nothing is copied, so the trees are paths, and packing them is one maximum flow: from all ranks, each giving as many units as it has shares,
to the root (gather); a scatter is the gather of the reversed graph. Ranks on the way forward. Source: textbook flow decomposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ....errors import CheckFailed
from ....kernels.effort import Deadline
from ....kernels.maxflow import FlowNetwork
from ..cuts import worst_cut
from ..rates import RateGraph
from ..trees.pack import DEFECT, Path, Tree
from .forest import Forest, choose_trees, require_loads, rounded_capacities

__all__ = ["gather_forest"]

Arc = tuple[int, int]


def gather_forest(
    graph: RateGraph, root: int, weight: Sequence[int], *, trees: int | None, max_trees: int, deadline: Deadline, turned: bool
) -> Forest:
    """Paths from every rank r to the root, k · weight[r] of them. `turned`: written from the root to r, over reversed arcs.

    Raises: Disconnected, Unsupported (rates beyond 63 bits), CheckFailed (a defect).
    """
    wanted = [0 if r == root else w for r, w in enumerate(weight)]
    optimum = worst_cut(graph, wanted, sinks=[root]).ratio
    k, stretch = choose_trees(graph, wanted, optimum, trees=trees, max_trees=max_trees, deadline=deadline, sinks=[root])
    arcs = dict(rounded_capacities(graph, stretch))
    arcs.update({(graph.nodes, r): k * w for r, w in enumerate(wanted) if w})
    # Nothing is copied, so one flow from all ranks to the root is the whole answer; integer capacities make it one of whole units.
    network = FlowNetwork.of(graph.nodes + 1, arcs)
    need = k * sum(wanted)
    if network.max_flow(graph.nodes, root, limit=need) < need:
        raise CheckFailed("the shares do not reach the root at the optimum", hint=DEFECT)
    flow = network.flows()
    out: dict[int, list[int]] = {}
    for u, v in sorted(flow, reverse=True):
        out.setdefault(u, []).append(v)
    found = []
    for r, w in enumerate(wanted):
        left = k * w
        while left:
            path, amount = _path(flow, out, r, root, left)
            left -= amount
            found.append(_tree(path, amount, graph.ranks, turned=turned))
    forest = Forest(graph.reversed() if turned else graph, tuple(wanted), k, stretch, optimum, tuple(found), method="paths")
    require_loads(forest)
    return forest


def _path(flow: dict[Arc, int], out: dict[int, list[int]], start: int, end: int, most: int) -> tuple[Path, int]:
    """A way along the flow without loops, taken off it; loops met are taken off and left out."""
    path = [start]
    while path[-1] != end:
        here = path[-1]
        ways = out[here]
        while not flow[here, ways[-1]]:  # flow only goes down: what is used up is not looked at again
            ways.pop()
        there = ways[-1]
        if there in path:  # a loop carries nothing to the root: without it the flow is still one
            loop = [*path[path.index(there) :], there]
            hops = list(pairwise(loop))
            amount = min(flow[hop] for hop in hops)
            for hop in hops:
                flow[hop] -= amount
            del path[path.index(there) + 1 :]
        else:
            path.append(there)
    hops = list(pairwise(path))
    amount = min(most, *(flow[hop] for hop in hops))
    for hop in hops:
        flow[hop] -= amount
    return tuple(path), amount


def _tree(path: Path, units: int, ranks: int, *, turned: bool) -> Tree:
    """A chain of ranks with the switches between them as paths; of the other ranks, which are most of very many, nothing is kept."""
    nodes = path[::-1] if turned else path
    stops = [i for i, v in enumerate(nodes) if v < ranks]
    parent, paths = {nodes[0]: -1}, {nodes[0]: ()}  # type: dict[int, int], dict[int, Path]
    for a, b in pairwise(stops):
        parent[nodes[b]], paths[nodes[b]] = nodes[a], nodes[a : b + 1]
    return Tree(nodes[0], units, parent, tuple(nodes[i] for i in stops), paths)

