"""Random step graphs and random legal plans of them, for property tests of planners, the simulator and the checker."""

from __future__ import annotations

import random

from ..graph.step_graph import Alternative, StepGraph, StepNode, StepStorage

__all__ = ["random_runs", "random_step_graph"]


def random_step_graph(rng: random.Random, *, forward: int = 6, alternatives: bool = True) -> StepGraph:
    """A net of `forward` operators (some views, some with two results, some random) and a backward node per maker, with sizes of 1 to 64 bytes.

    Gradients of the first parameter reads are results. With `alternatives`, some nodes have another implementation (over an input, or cheaper).
    """
    nodes: list[StepNode] = []
    storages: list[StepStorage] = []

    def storage(owner: str, kind: str = "made") -> int:
        storages.append(StepStorage(size_bytes=rng.randint(1, 64), owner=owner, kind=kind))  # type: ignore[arg-type]
        return len(storages) - 1

    for k, kind in enumerate(("parameter", "input", "tangent")):
        nodes.append(StepNode(name=f"p{k}", target="placeholder", phase="input", storages=(storage(f"p{k}", kind),)))
    values = [1]
    for k in range(forward):
        read = tuple(sorted({values[-1], rng.choice(values)} | ({0} if rng.random() < 0.4 else set())))
        name = f"f{k}"
        if rng.random() < 0.2:
            nodes.append(StepNode(name=name, target="view", phase="forward", inputs=(values[-1],), storages=nodes[values[-1]].storages))
        else:
            nodes.append(_maker(rng, name, "forward", read, [storage(name) for _ in range(rng.choice((1, 1, 2)))], nodes, storages, alternatives))
        values.append(len(nodes) - 1)
        if len(nodes[-1].makes) == 2:
            nodes.append(StepNode(name=f"{name}.0", target="getitem", phase="forward", inputs=(len(nodes) - 1,), storages=nodes[-1].storages[:1]))
            values.append(len(nodes) - 1)
    boundary, results, gradient = len(nodes), [len(nodes) - 1], 2
    for k, v in reversed([*enumerate(values[1:])]):
        read = tuple(sorted({gradient, v, *rng.sample(nodes[v].inputs, rng.randint(0, len(nodes[v].inputs)))}))
        nodes.append(_maker(rng, f"b{k}", "backward", read, [storage(f"b{k}")], nodes, storages, False))
        gradient = len(nodes) - 1
        if 0 in nodes[v].inputs:
            nodes.append(_maker(rng, f"g{k}", "backward", (gradient, v), [storage(f"g{k}")], nodes, storages, False))
            results.append(len(nodes) - 1)
    return StepGraph(name="random", nodes=tuple(nodes), storages=tuple(storages), boundary=boundary, results=(*results, gradient), resident_bytes=3)


def _maker(
    rng: random.Random, name: str, phase: str, read: tuple[int, ...], makes: list[int], nodes: list[StepNode], storages: list[StepStorage], more: bool
) -> StepNode:  # fmt: skip
    others: list[Alternative] = []
    if more and len(makes) == 1 and rng.random() < 0.5:
        big = [
            x for x in read
            if len(nodes[x].makes) == 1 and nodes[x].phase == "forward" and storages[nodes[x].makes[0]].size_bytes >= storages[makes[0]].size_bytes
        ]  # fmt: skip
        others.append(Alternative(name="other", inputs=read, time_s=rng.randint(1, 9), workspace_bytes=rng.randint(0, 9)))
        if big:
            others.append(Alternative(name="over", inputs=read, time_s=rng.randint(1, 9), over=rng.choice(big)))
    return StepNode(
        name=name, target="op", phase=phase, inputs=read, storages=tuple(makes), makes=tuple(makes), time_s=rng.randint(1, 9),  # type: ignore[arg-type]
        workspace_bytes=rng.choice((0, 0, rng.randint(1, 40))), random=phase == "forward" and rng.random() < 0.15, alternatives=tuple(others),
    )  # fmt: skip


def random_runs(graph: StepGraph, rng: random.Random, *, keep: float = 0.5) -> tuple[list[tuple[int, int]], int]:
    """(runs, boundary): the forward pass once; before each backward node, what it needs of the results not kept is run again, with what that needs.

    A forward result is kept with probability `keep`; one run again is kept from then on, also by chance.
    """
    inputs = {i for i, n in enumerate(graph.nodes) if n.phase == "input"}
    forward = [i for i, n in enumerate(graph.nodes) if n.phase == "forward" and not n.optional]
    held = {i for i in forward if rng.random() < keep or i in graph.results or graph.nodes[i].writes}
    runs = [(i, -1) for i in forward]

    def need(x: int, again: set[int]) -> None:
        if x in inputs or x in held or x in again or graph.nodes[x].phase == "backward":
            return
        for y in graph.nodes[x].inputs:
            need(y, again)
        again.add(x)

    for i, n in enumerate(graph.nodes):
        if n.phase != "backward":
            continue
        again: set[int] = set()
        for x in n.inputs:
            need(x, again)
        runs += [(x, rng.randint(-1, len(graph.nodes[x].alternatives) - 1) if not _overs(graph, x) else -1) for x in sorted(again)]
        held |= {x for x in again if rng.random() < keep}
        runs.append((i, -1))
    return runs, len(forward)


def _overs(graph: StepGraph, x: int) -> bool:
    return any(a.over >= 0 for a in graph.nodes[x].alternatives)
