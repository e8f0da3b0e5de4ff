"""Small step graphs with views, tuples, extra nodes and other implementations, and the least time of any schedule of one, by exhaustive search."""

from __future__ import annotations

import heapq
from itertools import count

from hypothesis import strategies as st

from meshwright.graph.step_graph import Alternative, StepGraph, StepNode, StepStorage


@st.composite
def step_graphs(draw: st.DrawFn, *, most_operators: int = 6) -> StepGraph:
    """Forward operators over the last few results, each read by some backward node; results of forward and backward are the step's."""
    storages = [StepStorage(size_bytes=draw(st.integers(1, 9)), owner="x", kind="input")]
    nodes = [StepNode(name="x", target="placeholder", phase="input", storages=(0,))]
    small, time = st.integers(1, 12), st.integers(1, 9).map(float)

    def made(owner: str, size: int | None = None) -> int:
        storages.append(StepStorage(size_bytes=draw(small) if size is None else size, owner=owner))
        return len(storages) - 1

    def put(name: str, **fields: object) -> int:
        nodes.append(StepNode(name=name, **fields))
        return len(nodes) - 1

    readable, forward = [0], [0]
    n = draw(st.integers(1, most_operators))
    for i in range(n):
        before = sorted({readable[-1], *draw(st.lists(st.sampled_from(readable[-4:]), max_size=1))})
        kind = draw(st.sampled_from(["plain", "plain", "view", "tuple", "in place", "way", "extra"]))
        if kind == "tuple":
            a, b = made(f"f{i}"), made(f"f{i}")
            both = put(f"f{i}", target="op", phase="forward", inputs=tuple(before), storages=(a, b), makes=(a, b), time_s=draw(time))
            new = [put(f"f{i}.{k}", target="getitem", phase="forward", inputs=(both,), storages=(s,)) for k, s in enumerate((a, b))]
        else:
            last = nodes[readable[-1]]
            over = len(last.storages) == 1 and storages[last.storages[0]].kind == "made" and kind == "in place"
            s = made(f"f{i}", storages[last.storages[0]].size_bytes if over else None)
            ways = []
            if over:
                ways = [Alternative(name="in place", inputs=tuple(before), time_s=draw(time), over=readable[-1])]
            elif kind == "way":
                inputs = tuple(before[-1:])
                ways = [Alternative(name="other", inputs=inputs, time_s=draw(time), workspace_bytes=draw(small))]
            workspace = draw(st.sampled_from([0, 0, 5]))
            new = [put(
                f"f{i}", target="op", phase="forward", inputs=tuple(before), storages=(s,), makes=(s,), time_s=draw(time),
                workspace_bytes=workspace, alternatives=tuple(ways),
            )]  # fmt: skip
            if kind == "view":
                new = [put(f"f{i}.view", target="view", phase="forward", inputs=tuple(new), storages=(s,))]
            if kind == "extra":
                bits = made(f"f{i}.bits", 1)
                extra = put(
                    f"f{i}.bits", target="pack", phase="forward", inputs=tuple(new), storages=(bits,), makes=(bits,), time_s=draw(time), optional=True
                )
                forward.append(extra)
        readable += new
        forward += new
    boundary, loss = len(nodes), readable[-1]
    gradient, results = loss, [loss]
    for k in range(draw(st.integers(1, n + 1))):
        plain = [x for x in forward if not nodes[x].optional]
        reads = sorted({gradient, *draw(st.lists(st.sampled_from(plain), max_size=2))})
        ways = []
        if draw(st.booleans()):
            other = sorted({gradient, draw(st.sampled_from(forward))})
            ways = [Alternative(name="other", inputs=tuple(other), time_s=draw(time), workspace_bytes=draw(st.sampled_from([0, 3])))]
        s = made(f"b{k}")
        gradient = put(
            f"b{k}", target="op", phase="backward", inputs=tuple(reads), storages=(s,), makes=(s,), time_s=draw(time), alternatives=tuple(ways),
            workspace_bytes=draw(st.sampled_from([0, 4])),
        )  # fmt: skip
        if draw(st.booleans()):
            results.append(gradient)
    results.append(gradient)
    return StepGraph(
        name="drawn", nodes=tuple(nodes), storages=tuple(storages), boundary=boundary, results=tuple(dict.fromkeys(results)), resident_bytes=2
    )


def least_time_s(graph: StepGraph, budget_bytes: int, *, alternatives: bool = True) -> float | None:
    """The least seconds of any schedule within the budget; None when there is none.

    The schedules: forward nodes in order, then before every backward node that may read forward results any forward nodes in order again; any
    result may go at any moment. Dijkstra's search over (position, storages held); views are there whenever their storage is.
    """
    nodes, storages = graph.nodes, graph.storages
    needed = _needed(graph, alternatives)
    forward = [i for i, n in enumerate(nodes) if n.phase == "forward" and n.makes and i in needed]
    mine = {s for i in forward for s in nodes[i].makes}
    must = _ancestors(graph, [r for r in graph.results if nodes[r].phase == "forward"], alternatives, sure=True)
    line: list[tuple[int, bool]] = [(i, i in must) for i in forward]
    for i, n in enumerate(nodes):
        if n.phase == "backward" and i in needed and n.makes:
            if any(s in mine for way in _ways(graph, i, alternatives) for x in way.inputs for s in nodes[x].storages):
                line += [(j, False) for j in forward]
            line.append((i, True))
    kept = {s for r in graph.results for s in nodes[r].storages} & mine
    besides = _besides(graph, needed, [i for i, _ in line], alternatives)
    ids = count()
    queue: list[tuple[float, int, int, frozenset[int]]] = [(0.0, next(ids), 0, frozenset())]
    seen: set[tuple[int, frozenset[int]]] = set()
    while queue:
        time_s, _, at, held = heapq.heappop(queue)
        if at == len(line):
            return time_s
        if (at, held) in seen:
            continue
        seen.add((at, held))
        for s in held - kept:
            heapq.heappush(queue, (time_s, next(ids), at, held - {s}))
        i, required = line[at]
        if not required:
            heapq.heappush(queue, (time_s, next(ids), at + 1, held))
        made = {s for s in nodes[i].makes if s in mine}
        if made & held:
            continue
        for way in _ways(graph, i, alternatives):
            reads = {s for x in way.inputs for s in nodes[x].storages if s in mine}
            over = getattr(way, "over", -1)
            gone = {*nodes[over].storages} if over >= 0 else set()
            if not reads <= held or gone & kept:
                continue
            alive = besides[at] + sum(storages[s].size_bytes for s in held | made) - sum(storages[s].size_bytes for s in gone)
            if alive + way.workspace_bytes <= budget_bytes:
                heapq.heappush(queue, (time_s + way.time_s, next(ids), at + 1, (held | made) - gone))
    return None


def _ways(graph: StepGraph, i: int, alternatives: bool) -> tuple[StepNode | Alternative, ...]:
    return (graph.nodes[i], *(graph.nodes[i].alternatives if alternatives else ()))


def _ancestors(graph: StepGraph, roots: list[int], alternatives: bool, *, sure: bool = False) -> set[int]:
    """`sure`: that every implementation reads, not just any."""
    found, todo = set[int](), [*roots]
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            reads = [{*way.inputs} for way in _ways(graph, i, alternatives)]
            todo += set.intersection(*reads) if sure else set.union(*reads)
    return found


def _needed(graph: StepGraph, alternatives: bool) -> set[int]:
    return _ancestors(graph, [*graph.results], alternatives)


def _besides(graph: StepGraph, needed: set[int], line: list[int], alternatives: bool) -> list[int]:
    """Bytes alive besides forward results while each position runs, backward results of that position included."""
    backward = [i for i in line if graph.nodes[i].phase == "backward"]
    last = {s: i for i in backward for way in _ways(graph, i, True) for x in way.inputs for s in graph.nodes[x].storages}
    endless = {s for r in graph.results for s in graph.nodes[r].storages}
    found, alive, done = [], graph.fixed_bytes(), [*backward]
    for i in line:
        if graph.nodes[i].phase == "backward":
            alive += sum(graph.storages[s].size_bytes for s in graph.nodes[i].makes)
            found.append(alive)
            done.pop(0)
            makers = [b for b in backward if b <= i]
            for b in makers:
                for s in graph.nodes[b].makes:
                    if s not in endless and last.get(s, b) == i:
                        alive -= graph.storages[s].size_bytes
        else:
            found.append(alive)
    return found
