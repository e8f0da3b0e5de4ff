"""A step graph in which every node runs by one chosen implementation, so that what plans plain operators plans these.

An implementation that writes over its input becomes a node whose result lies in that input's storage. That is the same step only where nobody else
wants the input: in the forward pass, where nodes run again, nobody else at all; in the backward pass, where they do not, nobody after it. Where that
does not hold, the node keeps its plain implementation. Optional nodes that a chosen implementation reads are ordinary nodes.
Invariant: `runs` makes of a schedule of the fixed graph one of the graph itself, which takes as long and peaks no higher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ....graph.step_graph import Alternative, StepGraph, StepNode
from .merging import is_view
from .schedule import Run

__all__ = ["Fixed", "fixed", "free_ways"]


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """`alternative[i]`: by which of its alternatives node i of the original graph runs, -1: plainly. `place[s]`: where its storage s lies here."""

    graph: StepGraph
    alternative: tuple[int, ...]
    place: tuple[int, ...]

    def runs(self, nodes: Sequence[int], boundary: int) -> tuple[list[Run], int]:
        """Runs of the original graph for nodes that run in this order, the first `boundary` of them in the forward pass, and how many of them are.

        The parts of a tuple are taken at once: when one of them is written over, the tuple is gone.
        """
        made: dict[int, int] = {}
        parts: dict[int, list[int]] = {}
        moved = set[int]()
        for at, x in enumerate(nodes):
            made[x] = at
            whole = next((y for y in self.graph.nodes[x].inputs if is_part(self.graph, x, y)), -1)
            if whole >= 0:
                parts.setdefault(made[whole], []).append(x)
                moved.add(at)
        line: list[Run] = []
        begin = 0
        for at, x in enumerate(nodes):
            if at == boundary:
                begin = len(line)
            if at not in moved:
                line += [(y, self.alternative[y]) for y in (x, *dict.fromkeys(parts.get(at, ())))]
        return line, begin if boundary < len(nodes) else len(line)


def free_ways(graph: StepGraph) -> dict[int, int]:
    """Implementations that cost nothing: exact ones that write over an input and are no slower."""
    found = {}
    for i, n in enumerate(graph.nodes):
        free = [a for a, way in enumerate(n.alternatives) if way.over >= 0 and way.lossless and way.time_s <= n.time_s]
        if free:
            found[i] = min(free, key=lambda a: (n.alternatives[a].time_s, n.alternatives[a].workspace_bytes))
    return found


def fixed(graph: StepGraph, ways: Mapping[int, int]) -> Fixed:
    """`ways`: the alternative of each node that does not run plainly."""
    chosen = {i: w for i, w in ways.items() if w >= 0}
    readers, written = _readers(graph, chosen), {s for n in graph.nodes for s in n.writes}
    places = [n.storages for n in graph.nodes]
    lying: dict[int, list[int]] = {}  # storage -> nodes so far whose results lie in it
    moved: dict[int, int] = {}
    for i, n in enumerate(graph.nodes):
        # where an earlier node wrote over something, its readers find the result in that place
        places[i] = tuple(moved.get(s, s) for s in n.storages)
        over = n.alternatives[chosen[i]].over if i in chosen else -1
        if over >= 0:
            if places[over][:1] and places[over][0] not in written and _may_write_over(graph, i, places[over], readers, lying):
                moved[n.makes[0]] = places[over][0]
                places[i] = places[over]
            else:
                del chosen[i]
        for s in places[i]:
            lying.setdefault(s, []).append(i)
    read = {x for i in range(len(graph.nodes)) for x in _way(graph, i, chosen).inputs if not graph.nodes[i].optional}
    nodes = [_plain(graph, i, chosen, places[i], i in read) for i in range(len(graph.nodes))]
    return Fixed(
        graph=msgspec.structs.replace(graph, nodes=tuple(nodes)), alternative=tuple(chosen.get(i, -1) for i in range(len(graph.nodes))),
        place=tuple(moved.get(s, s) for s in range(len(graph.storages))),
    )  # fmt: skip


def _way(graph: StepGraph, i: int, chosen: Mapping[int, int]) -> StepNode | Alternative:
    node = graph.nodes[i]
    return node.alternatives[chosen[i]] if i in chosen else node


def _readers(graph: StepGraph, chosen: Mapping[int, int]) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in graph.nodes]
    for i in range(len(graph.nodes)):
        for x in _way(graph, i, chosen).inputs:
            found[x].add(i)
    return found


def is_part(graph: StepGraph, x: int, whole: int) -> bool:
    """x shows one of the storages that another node of its pass makes."""
    node = graph.nodes[x]
    return is_view(node) and len(graph.nodes[whole].makes) > 1 and node.phase == graph.nodes[whole].phase


def _may_write_over(graph: StepGraph, i: int, place: tuple[int, ...], readers: list[set[int]], lying: Mapping[int, list[int]]) -> bool:
    """`place`: where the input that would be written over lies."""
    node = graph.nodes[i]
    if len(place) != 1 or len(node.makes) != 1 or node.storages != node.makes or graph.storages[place[0]].kind != "made":
        return False
    there = lying.get(place[0], [])
    if graph.storages[place[0]].size_bytes != graph.storages[node.makes[0]].size_bytes or {*there} & {*graph.results}:
        return False
    if len({graph.nodes[x].phase for x in (*there, i)}) > 1:
        return False
    # nobody else may read what lies there: in backward, which runs once and in order, nobody later
    others = {r for x in there for r in readers[x]} - {*there, i}
    others = {r for r in others if not any(is_part(graph, r, x) for x in there)}
    return not others if node.phase == "forward" else all(r < i for r in others)


def _plain(graph: StepGraph, i: int, chosen: Mapping[int, int], place: tuple[int, ...], read: bool) -> StepNode:
    node, way = graph.nodes[i], _way(graph, i, chosen)
    makes = () if isinstance(way, Alternative) and way.over >= 0 else node.makes
    return msgspec.structs.replace(
        node, inputs=way.inputs, storages=place, makes=makes, time_s=way.time_s, workspace_bytes=way.workspace_bytes, alternatives=(),
        optional=node.optional and not read,
    )  # fmt: skip
