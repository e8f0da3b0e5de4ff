"""Cuts a forward graph into pipeline stages and the segments that are executed as one step each.

The forward nodes are first put into an order in which every tensor-parallel region is contiguous (a region is one *unit*, a
node outside regions another; a node with several results and the nodes that pick from them stay together). Stages are
contiguous runs of units that minimise the largest stage time, border traffic included: exact dynamic programme over cut positions.
Segments are the regions and the maximal runs of other nodes between them.

Cost: O(P · C²) for P stages and C cut positions (at most MAX_CUTS, those with the least traffic in every stretch of the graph).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import Infeasible
from ...graph.graph import OpGraph, OpNode
from ...plan.context import HEADS, KINDS, RING_BLOCK, RING_END, UNITE
from .megatron import Region

__all__ = ["STARTS", "Unit", "around_exchanges", "border_values", "cut_stages", "dtype_bytes", "order_units"]

STARTS = (RING_BLOCK, RING_END, HEADS, UNITE)  # steps that wait for an exchange, or before which nothing must
# Positions at which stages may be cut: the programme's work grows with their square, and of near ones the one with least traffic is kept.
MAX_CUTS = 240

_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Unit:
    nodes: tuple[OpNode, ...]
    region: Region | None = None


def around_exchanges(unit: Unit) -> list[Unit]:
    """A region in steps, between which blocks travel."""
    found: list[list[OpNode]] = [[]]
    came = {n.name for n in unit.nodes if n.target in KINDS}
    for n in unit.nodes:
        if (n.target in STARTS or not came.isdisjoint(n.inputs)) and found[-1]:
            found.append([])
        if n.target not in KINDS:
            found[-1].append(n)
    return [Unit(tuple(nodes), unit.region) for nodes in found]


def dtype_bytes(dtype: str) -> int:
    return _BYTES.get(dtype, 4)


def order_units(graph: OpGraph, regions: Sequence[Region]) -> list[Unit]:
    """Units in a topological order, earliest node first. Regions that would close a cycle are dissolved."""
    live = list(regions)
    while True:
        owner, members = _owners(graph, live)
        order = _kahn(graph, owner, members)
        if order is not None:
            node = {n.name: n for n in graph.nodes}
            return [Unit(tuple(node[x] for x in members[u]), live[u] if u < len(live) else None) for u in order]
        live.pop()  # contracting this region closed a cycle: leave it whole


def _owners(graph: OpGraph, regions: Sequence[Region]) -> tuple[dict[str, int], list[list[str]]]:
    owner = {name: i for i, region in enumerate(regions) for name in region.nodes}
    members: list[list[str]] = [list(region.nodes) for region in regions]
    for n in graph.nodes:
        if n.name in owner:
            continue
        picks = [owner[v] for v in n.inputs if v in owner and owner[v] >= len(regions)] if n.target.endswith("getitem") else []
        if picks:  # stays with the node it picks from
            owner[n.name] = picks[0]
            members[picks[0]].append(n.name)
        else:
            owner[n.name] = len(members)
            members.append([n.name])
    return owner, members


def _kahn(graph: OpGraph, owner: Mapping[str, int], members: Sequence[Sequence[str]]) -> list[int] | None:
    position = {n.name: i for i, n in enumerate(graph.nodes)}
    waits: list[set[int]] = [set() for _ in members]
    after: list[set[int]] = [set() for _ in members]
    for n in graph.nodes:
        me = owner[n.name]
        for v in n.inputs:
            if v in owner and owner[v] != me:
                waits[me].add(owner[v])
                after[owner[v]].add(me)
    first = [min(position[x] for x in names) for names in members]
    ready = [(first[u], u) for u in range(len(members)) if not waits[u]]
    heapq.heapify(ready)
    done: list[int] = []
    while ready:
        _, u = heapq.heappop(ready)
        done.append(u)
        for later in after[u]:
            waits[later].discard(u)
            if not waits[later]:
                heapq.heappush(ready, (first[later], later))
    return done if len(done) == len(members) else None


def border_values(units: Sequence[Unit]) -> list[list[str]]:
    """For every position i in 0..len(units): the values made before unit i and read in or after it."""
    born, dies = {}, {}
    for i, unit in enumerate(units):
        for n in unit.nodes:
            born[n.name] = i
            for v in n.inputs:
                if v in born:
                    dies[v] = i
    borders: list[list[str]] = [[] for _ in range(len(units) + 1)]
    for v, end in dies.items():
        for i in range(born[v] + 1, end + 1):
            borders[i].append(v)
    return borders


def cut_stages(
    units: Sequence[Unit], stages: int, time_of: Sequence[float], border_s: Sequence[float], allowed: Sequence[bool], speeds: Sequence[float] = (),
    why: str = "",
) -> list[int]:  # fmt: skip
    """Start positions of each stage (the first is 0), minimising the largest stage time + its outgoing border time.

    `time_of[u]`: seconds of unit u forward and backward; `border_s[i]`: seconds to move border i both ways; `allowed[i]`: may be cut;
    `speeds`: of every stage's devices, relative to those that the times are for; `why`: what capture says of what it kept whole.
    Raises: Infeasible when there are fewer allowed cuts than stages need.
    """
    n = len(units)
    positions = [0, *_fewest_traffic([i for i in range(1, n) if allowed[i]], border_s), n]
    if len(positions) - 1 < stages:
        raise Infeasible(
            f"the graph can be cut into at most {len(positions) - 1} pipeline stages, {stages} wanted{f': {why}' if why else ''}",
            hint="use a smaller pipeline degree",
            data={"limit": len(positions) - 1, "wanted": stages},
        )
    prefix = [0.0]
    for t in time_of:
        prefix.append(prefix[-1] + t)
    slow = [1 / x for x in speeds] or [1.0] * stages
    best = [(prefix[p] * slow[0] + border_s[p], -1) for p in positions]
    back: list[list[int]] = []
    for stage in range(1, stages):
        nxt: list[tuple[float, int]] = []
        for j, end in enumerate(positions):
            choice = (float("inf"), -1)
            for i in range(1, j):
                value = max(best[i][0], (prefix[end] - prefix[positions[i]]) * slow[stage] + (border_s[end] if end < n else 0.0))
                if value < choice[0]:
                    choice = (value, i)
            nxt.append(choice)
        back.append([c[1] for c in nxt])
        best = nxt
    at, starts = len(positions) - 1, []
    for row in reversed(back):
        at = row[at]
        starts.append(positions[at])
    return [0, *reversed(starts)]


def _fewest_traffic(positions: list[int], border_s: Sequence[float]) -> list[int]:
    if len(positions) <= MAX_CUTS:
        return positions
    stretch = -(-len(positions) // MAX_CUTS)
    return [min(positions[i : i + stretch], key=lambda p: (border_s[p], p)) for i in range(0, len(positions), stretch)]
