"""Loops of graph partitioning: heavy-edge matching, an order by breadth, and moves of boundary nodes.

Graphs are symmetric compressed rows with whole weights of edges and nodes.
"""

from __future__ import annotations

from .compile import kernel

__all__ = ["breadth_order", "matched", "refined"]


@kernel
def matched(ptr, idx, weight, mass, order, heaviest, mate):  # type: ignore[no-untyped-def]
    """mate[v]: the free neighbour over the heaviest edge, v itself where there is none or the two would weigh more than `heaviest`."""
    mate[:] = -1
    for k in range(len(order)):
        v = order[k]
        if mate[v] >= 0:
            continue
        best, most = v, 0
        for e in range(ptr[v], ptr[v + 1]):
            u = idx[e]
            if mate[u] < 0 and u != v and weight[e] > most and mass[u] + mass[v] <= heaviest:
                best, most = u, weight[e]
        mate[v] = best
        mate[best] = v


@kernel
def breadth_order(ptr, idx, order, seen, out):  # type: ignore[no-untyped-def]
    """out: all nodes in breadth-first order, starts in the order of `order`; `seen` is all False."""
    head, tail = 0, 0
    for k in range(len(order)):
        if seen[order[k]]:
            continue
        seen[order[k]] = True
        out[tail] = order[k]
        tail += 1
        while head < tail:
            v = out[head]
            head += 1
            for e in range(ptr[v], ptr[v + 1]):
                u = idx[e]
                if not seen[u]:
                    seen[u] = True
                    out[tail] = u
                    tail += 1


@kernel
def refined(ptr, idx, weight, mass, order, cap, part, load, link, passes):  # type: ignore[no-untyped-def]
    """Moves nodes to the part that they have most edges into, while that cuts less (or as much, and balances) and no part exceeds `cap`.

    `load` [parts]: mass of each, kept up to date; `link` [parts]: scratch, 0. Returns the moves of the last pass.
    """
    moved = 0
    for _ in range(passes):
        moved = 0
        for k in range(len(order)):
            v = order[k]
            home = part[v]
            for e in range(ptr[v], ptr[v + 1]):
                link[part[idx[e]]] += weight[e]
            best, gain = home, 0
            over = load[home] > cap
            for p in range(len(load)):
                if p == home or load[p] + mass[v] > cap:
                    continue
                more = link[p] - link[home]
                lighter = load[p] + mass[v] < load[home]
                if more > gain or (more == gain and lighter and (best == home or load[p] < load[best])) or (over and best == home):
                    best, gain = p, more
            for e in range(ptr[v], ptr[v + 1]):
                link[part[idx[e]]] = 0
            if best != home:
                part[v] = best
                load[home] -= mass[v]
                load[best] += mass[v]
                moved += 1
        if moved == 0:
            break
    return moved
