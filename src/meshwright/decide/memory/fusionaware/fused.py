"""What a fusing compiler makes of a plan: which results never reach memory, and the peak that is left.

A pointwise result is computed inside the kernels of its users, and takes no memory, when it is neither saved nor a result and every user in its part
(forward or backward) can be fused with it. Then its operands live until the last of those kernels. A pointwise kernel writes over an operand of the
same size that it is the last to read. Reductions, library kernels and what a library kernel reads are written out.
This is a model of TorchInductor's defaults, which decides by more than that; `torch_private.partition_saving` only fixes what is saved.
"""

from __future__ import annotations

import msgspec

from ....step_graph import StepGraph, StepNode, StepPlan
from .fusibility import POINTWISE, fusible, is_compute_intensive, is_fusible, is_view, operator_of

__all__ = ["fused_peak_bytes", "priced"]

INSIDE_SHARE = 0.2  # of its traffic: what computing a pointwise operator again costs inside a kernel that runs anyway


def priced(graph: StepGraph, flops: dict[str, float], *, flops_per_s: float, bytes_per_s: float) -> StepGraph:
    """The graph with seconds by roofline, fusion in mind: a fusible operator costs its reads and writes, a fifth if its users can take it in.

    `flops`: by node name, of library kernels.
    """
    users: list[list[StepNode]] = [[] for _ in graph.nodes]
    for n in graph.nodes:
        for x in n.inputs:
            users[x].append(n)
    nodes = []
    for i, n in enumerate(graph.nodes):
        time_s = 0.0
        if n.phase != "input" and not is_view(n):
            touched = {s for x in n.inputs for s in graph.nodes[x].storages} | {*n.storages}
            traffic = sum(graph.storages[s].size_bytes for s in touched) / bytes_per_s
            inside = is_fusible(n) and all(fusible(n, u) for u in users[i])
            time_s = max(flops.get(n.name, 0.0) / flops_per_s, traffic * (INSIDE_SHARE if inside else 1.0))
        nodes.append(msgspec.structs.replace(n, time_s=time_s))
    return msgspec.structs.replace(graph, nodes=tuple(nodes), evidence="roofline with fusion")


def fused_peak_bytes(graph: StepGraph, plan: StepPlan) -> int:
    """Most bytes alive in the two compiled graphs of a plan that runs nothing more than twice."""
    part = [0 if k < plan.boundary else 1 for k in range(len(plan.actions))]
    reads, readers, crossing = _dataflow(graph, plan, part)
    results = {*graph.results}
    virtual = [
        _inside(graph, plan, k, readers[k]) and k not in crossing and plan.actions[k].node not in results for k in range(len(plan.actions))
    ]
    place: dict[tuple[int, int], int] = {}  # (run, storage) -> the run that made it
    last: dict[tuple[int, int], int] = {}  # (making run, storage) -> last kernel that reads it
    for k, action in enumerate(plan.actions):
        node = graph.nodes[action.node]
        for s in node.storages:
            if graph.storages[s].kind == "made":
                place[k, s] = k if s in node.makes else next(place[r, s] for r in reads[k] if (r, s) in place)
        for r, s in _sources(graph, plan, k, reads, virtual):
            last[place[r, s], s] = k
        if action.node in results:
            last |= {(place[k, s], s): len(plan.actions) for s in node.storages if (k, s) in place}
    return _sweep(graph, plan, virtual, last)


def _dataflow(graph: StepGraph, plan: StepPlan, part: list[int]) -> tuple[list[list[int]], list[list[int]], set[int]]:
    """Runs that every run reads, runs that read it in its own part, and the runs that the other part reads."""
    latest: dict[int, int] = {}
    reads: list[list[int]] = []
    readers: list[list[int]] = [[] for _ in plan.actions]
    crossing: set[int] = set()
    for k, action in enumerate(plan.actions):
        reads.append([latest[x] for x in graph.nodes[action.node].inputs if x in latest])
        for r in reads[k]:
            if part[r] == part[k]:
                readers[r].append(k)
            else:
                crossing.add(r)
        latest[action.node] = k
    return reads, readers, crossing


def _inside(graph: StepGraph, plan: StepPlan, k: int, readers: list[int]) -> bool:
    node = graph.nodes[plan.actions[k].node]
    pointwise = operator_of(node) in POINTWISE or is_view(node)
    return bool(readers) and pointwise and all(fusible(node, graph.nodes[plan.actions[r].node]) for r in readers)


def _sources(graph: StepGraph, plan: StepPlan, k: int, reads: list[list[int]], virtual: list[bool]) -> list[tuple[int, int]]:
    """(run, storage) that the kernel of run k reads, through what is computed inside it."""
    found, stack, seen = [], [*reads[k]], set[int]()
    while stack:
        r = stack.pop()
        if r in seen:
            continue
        seen.add(r)
        if virtual[r]:
            stack += reads[r]
        node = graph.nodes[plan.actions[r].node]
        found += [(r, s) for s in node.storages if graph.storages[s].kind == "made"]
    return found


def _sweep(graph: StepGraph, plan: StepPlan, virtual: list[bool], last: dict[tuple[int, int], int]) -> int:
    live = peak = graph.fixed_bytes()
    ends: dict[int, list[int]] = {}
    for k, action in enumerate(plan.actions):
        node = graph.nodes[action.node]
        dying = ends.pop(k, [])
        for s in () if virtual[k] else node.makes:
            size = graph.storages[s].size_bytes
            if size in dying and not is_compute_intensive(node) and is_fusible(node):
                dying.remove(size)
            else:
                live += size
            ends.setdefault(last.get((k, s), k), []).append(size)
        peak = max(peak, live + node.workspace_bytes)
        live -= sum(dying) + sum(ends.pop(k, []))
    return peak
