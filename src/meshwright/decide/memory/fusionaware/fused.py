"""What a fusing compiler makes of a plan: which results never reach memory, and the peak that is left.

A pointwise result is computed inside the kernels of its users, and takes no memory, when it is neither saved nor a result and every user in its part
(forward or backward) can be fused with it. Then its operands live until the last of those kernels. What is written out fuses with its neighbours
(`kernels`); all that a kernel makes is allocated before it runs, and a result is written over an operand of the same size only where nothing else, in
the same kernel neither, still reads that. Reductions, library kernels and what a library kernel reads are written out.
This is a model of TorchInductor's defaults, which decides by more than that; `torch_private.partition_saving` only fixes what is saved.
"""

from __future__ import annotations

import msgspec

from ....graph.step_graph import StepGraph, StepNode, StepPlan
from .fusibility import POINTWISE, REDUCTIONS, fusible, is_compute_intensive, is_fusible, is_view, operator_of
from .kernels import kernels_of

__all__ = ["fused_peak_bytes", "priced"]

# Share of its traffic that a pointwise operator costs again inside a kernel that runs anyway: its operands are mostly there already.
INSIDE_TRAFFIC_SHARE = 0.2


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
        time_s = 0.0  # views cost nothing
        if n.phase != "input" and not is_view(n):
            touched = {s for x in n.inputs for s in graph.nodes[x].storages} | {*n.storages}
            traffic = sum(graph.storages[s].size_bytes for s in touched) / bytes_per_s
            inside = is_fusible(n) and all(fusible(n, u) for u in users[i])
            time_s = max(flops.get(n.name, 0.0) / flops_per_s, traffic * (INSIDE_TRAFFIC_SHARE if inside else 1.0))
        nodes.append(msgspec.structs.replace(n, time_s=time_s))
    return msgspec.structs.replace(graph, nodes=tuple(nodes), evidence="roofline with fusion")


def fused_peak_bytes(graph: StepGraph, plan: StepPlan) -> int:
    """Most bytes alive in the two compiled graphs of a plan that runs nothing more than twice."""
    part = [0 if k < plan.boundary else 1 for k in range(len(plan.actions))]
    reads, readers, crossing = _dataflow(graph, plan, part)
    results = {*graph.results}
    virtual = [False] * len(plan.actions)
    for k in range(len(plan.actions) - 1, -1, -1):
        virtual[k] = k not in crossing and plan.actions[k].node not in results and _inside(graph, plan, k, readers[k], virtual)
    place: dict[tuple[int, int], int] = {}  # (run, storage) -> the run that made it
    sources: list[set[tuple[int, int]]] = []  # (making run, storage) that a run's kernel reads
    for k, action in enumerate(plan.actions):
        node = graph.nodes[action.node]
        for s in node.storages:
            if graph.storages[s].kind == "made":
                place[k, s] = k if s in node.makes else next(place[r, s] for r in reads[k] if (r, s) in place)
        found = () if virtual[k] else _sources(graph, plan, k, reads, virtual)
        sources.append({(place[r, s], s) for r, s in found if not virtual[place[r, s]]})
    ends = {(place[k, s], s) for k, a in enumerate(plan.actions) if a.node in results for s in graph.nodes[a.node].storages if (k, s) in place}
    given = [_given(graph, plan, k, reads, virtual) for k in range(len(plan.actions))]
    real = [k for k, inside in enumerate(virtual) if not inside]
    number = {k: i for i, k in enumerate(real)}
    kernels = kernels_of(
        [sorted({number[r] for r, _ in sources[k]}) for k in real], [part[k] for k in real], [_loop_bytes(graph, plan, k, sources[k]) for k in real],
        [frozenset({*sources[k], *given[k], *((k, s) for s in graph.nodes[plan.actions[k].node].makes)}) for k in real],
    )  # fmt: skip
    return _sweep(graph, plan, [[real[i] for i in kernel] for kernel in kernels], sources, ends)


def _loop_bytes(graph: StepGraph, plan: StepPlan, k: int, sources: set[tuple[int, int]]) -> int:
    """What the loop of a run goes over, in bytes of what it makes or reduces; 0 for what fuses with nothing."""
    node = graph.nodes[plan.actions[k].node]
    if is_view(node) or is_compute_intensive(node) or not is_fusible(node):
        return 0
    if operator_of(node) not in REDUCTIONS:
        return max((graph.storages[s].size_bytes for s in node.makes), default=0)
    given = {s for x in node.inputs for s in graph.nodes[x].storages}
    return max((graph.storages[s].size_bytes for s in given | {s for _, s in sources}), default=0)


def _given(graph: StepGraph, plan: StepPlan, k: int, reads: list[list[int]], virtual: list[bool]) -> set[int]:
    """Storages that are there from the start and that the kernel of run k reads, through what is computed inside it."""
    found, stack = set[int](), [k]
    while stack:
        r = stack.pop()
        found |= {s for x in graph.nodes[plan.actions[r].node].inputs for s in graph.nodes[x].storages if graph.storages[s].kind != "made"}
        stack += [x for x in reads[r] if virtual[x]]
    return found


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


def _inside(graph: StepGraph, plan: StepPlan, k: int, readers: list[int], virtual: list[bool]) -> bool:
    """Computed inside every kernel that reads it, also through views: a view that has to be there is one of something that is."""
    node = graph.nodes[plan.actions[k].node]
    pointwise = operator_of(node) in POINTWISE or is_view(node)
    nodes = [graph.nodes[plan.actions[r].node] for r in readers]
    return bool(readers) and pointwise and all(virtual[r] if is_view(n) else fusible(node, n) for r, n in zip(readers, nodes, strict=True))


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


def _sweep(graph: StepGraph, plan: StepPlan, kernels: list[list[int]], sources: list[set[tuple[int, int]]], ends: set[tuple[int, int]]) -> int:
    """Every kernel allocates all its results before it runs; a result may lie where an operand lay that only its own run still reads."""
    live = peak = graph.fixed_bytes()
    readers: dict[tuple[int, int], set[int]] = {}
    for kernel in kernels:
        for k in kernel:
            for x in sources[k]:
                readers.setdefault(x, set()).add(k)
    for kernel in kernels:
        workspace = 0
        for k in kernel:
            node = graph.nodes[plan.actions[k].node]
            workspace = max(workspace, node.workspace_bytes)
            pointwise = is_fusible(node) and not is_compute_intensive(node) and operator_of(node) not in REDUCTIONS
            free = [x for x in sources[k] if pointwise and x not in ends and readers[x] == {k}]
            for s in node.makes:
                size = graph.storages[s].size_bytes
                over = next((x for x in free if graph.storages[x[1]].size_bytes == size), None)
                if over is not None:
                    free.remove(over)
                    readers[over] = set()  # its bytes are the result's now
                else:
                    live += size
        peak = max(peak, live + workspace)
        made = [(k, s) for k in kernel for s in graph.nodes[plan.actions[k].node].makes]
        for k in kernel:
            for x in sources[k]:
                if readers[x]:
                    readers[x].discard(k)
                    live -= 0 if readers[x] or x in ends else graph.storages[x[1]].size_bytes
        live -= sum(graph.storages[s].size_bytes for k, s in made if (k, s) not in readers and (k, s) not in ends)
    return peak
