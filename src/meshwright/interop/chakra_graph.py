"""What a set of Chakra traces says as a graph: an order that keeps every dependency, and figures about it.

Cost: O(nodes + dependencies, with a heap).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from ..errors import FormatError
from .chakra import ChakraNode, ChakraSet, ChakraTrace, CollectiveType, NodeType

__all__ = ["RankSummary", "collective_of", "ordered", "summarise"]


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """One rank's trace. `longest_micros`: durations along its longest chain of dependencies, without what happens between ranks."""

    nodes: dict[str, int]  # by type
    compute_micros: int
    sent_bytes: int
    received_bytes: int
    collective_bytes: dict[str, int]  # by operation
    longest_micros: int


def ordered(trace: ChakraTrace, where: str) -> list[ChakraNode]:
    """The nodes, each after all it waits for; of those that may come next, the one that stands first in the file.

    Converters of PyTorch's traces write into `ctrl_deps` which operator called a node, and merge or leave out callers: such a trace's nodes wait for
    `data_deps` alone, as MLCommons' feeder has it. Raises: FormatError for an id that occurs twice, a node that waits for data of itself or of one
    that is not there, and for a cycle.
    """
    place: dict[int, int] = {}
    for i, node in enumerate(trace.nodes):
        if place.setdefault(node.id, i) != i:
            raise FormatError(f"nodes {place[node.id]} and {i} both have the id {node.id}", where=where)
    nodes = _meant(trace, place)
    followers: list[list[int]] = [[] for _ in nodes]
    waits = [0] * len(nodes)
    for i, node in enumerate(nodes):
        for dep in node.deps:
            if dep not in place or dep == node.id:
                what = "itself" if dep == node.id else f"node {dep}, which is not in the file"
                raise FormatError(f"node {node.id} ({node.name[:60]!r}) waits for {what}", where=where)
            followers[place[dep]].append(i)
            waits[i] += 1
    ready = [i for i, count in enumerate(waits) if not count]
    heapify(ready)
    out: list[ChakraNode] = []
    while ready:
        i = heappop(ready)
        out.append(nodes[i])
        for other in followers[i]:
            waits[other] -= 1
            if not waits[other]:
                heappush(ready, other)
    if len(out) < len(nodes):
        raise FormatError(f"nodes wait for each other: {_cycle(nodes, waits, place)}", where=where, hint="every chain of them must have an end")
    return out


def _meant(trace: ChakraTrace, place: dict[int, int]) -> list[ChakraNode]:
    """The nodes; `ctrl_deps` of none where one names the node itself or a node that is not there, and `data_deps` do not; calls of collectives on the
    processor, whose kernels are nodes of their own and move the bytes, as computing."""
    waits = all((dep in place and dep != node.id) or dep in node.data_deps for node in trace.nodes for dep in node.ctrl_deps)
    nodes = trace.nodes if waits else [replace(node, ctrl_deps=()) for node in trace.nodes]
    calls = [n.type is NodeType.COMM_COLL and n.get("is_cpu_op") is True and n.get("comm_type") is None for n in nodes]
    return [replace(node, type=NodeType.COMP) if call else node for node, call in zip(nodes, calls, strict=True)]


def _cycle(nodes: Sequence[ChakraNode], waits: Sequence[int], place: dict[int, int]) -> str:
    """The ids of one cycle among the nodes that still wait."""
    at = next(i for i, count in enumerate(waits) if count)
    seen: dict[int, int] = {}
    path: list[int] = []
    while at not in seen:
        seen[at] = len(path)
        path.append(nodes[at].id)
        at = next(place[dep] for dep in nodes[at].deps if waits[place[dep]])
    found = path[seen[at] :]
    shown = found if len(found) <= 8 else [*found[:8], "..."]
    return " -> ".join(map(str, [*shown, found[0]]))


def collective_of(node: ChakraNode) -> CollectiveType:
    """What a COMM_COLL node does. Raises: FormatError."""
    value = node.integer("comm_type")
    if value > max(CollectiveType):
        raise FormatError(f"comm_type {value} is no collective", where=f"node {node.id} ({node.name[:60]!r})")
    return CollectiveType(value)


def summarise(traces: ChakraSet) -> list[RankSummary]:
    """Per rank. Raises: what `ordered` raises, FormatError for communication without a size."""
    return [_summary(trace, traces.name(rank)) for rank, trace in enumerate(traces.traces)]


def _summary(trace: ChakraTrace, where: str) -> RankSummary:
    kinds: dict[str, int] = {}
    collectives: dict[str, int] = {}
    compute = sent = received = 0
    ends: dict[int, int] = {}
    for node in ordered(trace, where):
        kinds[node.type.name] = kinds.get(node.type.name, 0) + 1
        ends[node.id] = max((ends[dep] for dep in node.deps), default=0) + node.duration_micros
        if node.type is NodeType.COMP:
            compute += node.duration_micros
        elif node.type is NodeType.COMM_SEND:
            sent += node.integer("comm_size")
        elif node.type is NodeType.COMM_RECV:
            received += node.integer("comm_size")
        elif node.type is NodeType.COMM_COLL:
            name = collective_of(node).name
            collectives[name] = collectives.get(name, 0) + node.integer("comm_size", 0 if name == "BARRIER" else None)
    return RankSummary(
        nodes=kinds, compute_micros=compute, sent_bytes=sent, received_bytes=received, collective_bytes=collectives,
        longest_micros=max(ends.values(), default=0),
    )  # fmt: skip
