"""Ways of a server's ranks to and from the network, and how many trees or messages take each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....kernels.maxflow import FlowNetwork
from ..rates import RateGraph
from .pack import Path
from .symmetry import Boxes

__all__ = ["Port", "ports_of", "spread"]

Arc = tuple[int, int]


@dataclass(frozen=True)
class Port:
    """A way of a rank to or from the network: `rank`, the outside node `leaf`, the switch between them (-1: none)."""

    rank: int
    leaf: int
    via: int

    def leave(self) -> Path:
        return (self.rank, self.leaf) if self.via < 0 else (self.rank, self.via, self.leaf)

    def enter(self) -> Path:
        return self.leave()[::-1]


def ports_of(boxes: Boxes, x: int, graph: RateGraph, capacities: Mapping[Arc, int], *, inward: bool) -> tuple[list[Port], dict[Arc, int]]:
    """All ports of a box in one direction, and the capacities they use, written rank -> leaf."""
    own = set(boxes.members[x])
    outside = set(boxes.outside)
    near: dict[int, list[int]] = {}
    held: dict[Arc, int] = {}
    for (u, v), c in capacities.items():
        a, b = (v, u) if inward else (u, v)
        if a in own and (b in own or b in outside):
            near.setdefault(a, []).append(b)
            held[a, b] = c
    found = []
    for r in boxes.members[x][: boxes.ranks[x]]:
        for b in near.get(r, ()):
            if b in outside:
                found.append(Port(r, b, -1))
            elif b >= graph.ranks:
                found += [Port(r, leaf, b) for leaf in near.get(b, ()) if leaf in outside]
    used = {hop: held[hop] for port in found for hop in zip(port.leave(), port.leave()[1:], strict=False)}
    return found, used


def spread(ports: Sequence[Port], used: Mapping[Arc, int], need: int, per_leaf: Mapping[int, int] | None = None) -> dict[Port, int] | None:
    """`need` trees over the ports, as evenly over the ranks as the capacities allow; `per_leaf`: exactly so many at each leaf."""
    if not need:
        return {}
    if not ports:
        return None
    nodes = sorted({v for arc in used for v in arc})
    at = {v: i for i, v in enumerate(nodes)}
    source, sink = len(nodes), len(nodes) + 1
    ranks, leaves = sorted({p.rank for p in ports}), sorted({p.leaf for p in ports})

    def attempt(most: int) -> dict[Arc, int] | None:
        # One max-flow: source -> ranks (each at most `most`) -> ports -> leaves -> sink. Integer capacities give whole trees.
        arcs = {(at[u], at[v]): c for (u, v), c in used.items()}
        arcs.update({(source, at[r]): most for r in ranks})
        arcs.update({(at[x], sink): per_leaf.get(x, 0) if per_leaf is not None else need for x in leaves})
        network = FlowNetwork.of(len(nodes) + 2, arcs)
        return network.flows() if network.max_flow(source, sink, limit=need) >= need else None

    # The evenest spread is the least `most` that still lets all trees through: feasible stays feasible as it grows, so bisection finds it.
    low, high = -(-need // len(ranks)), need
    if attempt(high) is None:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if attempt(middle) is not None else (middle + 1, high)
    flow = attempt(low)
    assert flow is not None
    out: dict[Port, int] = {}
    for port in ports:
        hops = [(at[u], at[v]) for u, v in zip(port.leave(), port.leave()[1:], strict=False)]
        amount = min(flow.get(hop, 0) for hop in hops)
        if amount:
            out[port] = amount
            for hop in hops:  # ports that share a switch share its uplink: what one took, the next no longer has
                flow[hop] -= amount
    return out if sum(out.values()) == need else None
