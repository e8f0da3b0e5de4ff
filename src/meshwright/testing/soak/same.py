"""Does a mutant still do what the original does? Rules of their own, which share nothing with the checkers: they run things on integers.

Programs run in `testing.interpreter`, under several random timings; what every compute step consumed is compared, and what is left at the end. Steps
of memory plans run on integers too, arenas are compared storage by storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ...arena import ArenaPlan, ArenaProblem
from ...graph.step_graph import StepGraph, StepPlan
from ...program.calls import inline
from ...program.program import BUFFER_ROLES, Kind, Program
from ...simulate.step_memory import simulate_step
from ..interpreter import Deadlocked, Machine, collective_is_right

__all__ = ["arena_is_right", "fill_order", "is_collective", "same_use", "step_is_right"]

TIMINGS = 6  # random interleavings of a mutant that was accepted
Use = dict[tuple[object, ...], str]


def is_collective(p: Program) -> bool:
    return all(collective_is_right(p, seed) for seed in range(TIMINGS))


class _Recorder(Machine):
    """Remembers of every compute step what it read, and the order they ran in."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.use: Use = {}
        self.ran: list[tuple[int, str]] = []

    def compute(self, st: Any, turn: int) -> None:
        o = self.p.ops
        seen = [self.load(b, c, n, turn) for b, c, n in o.reads[st.op].reshape(-1, 3).tolist()]
        key: tuple[object, ...] = (st.actor, o.name[st.op], o.graph[st.op], int(o.microbatch[st.op]), int(o.part[st.op]))
        self.use[*key, sum(k[:5] == key for k in self.use)] = str(seen)
        self.ran.append((st.actor, _called(self.p, st.op)))
        super().compute(st, turn)


def _called(p: Program, op: int) -> str:
    return f"{p.ops.graph[op]}|{p.ops.name[op]}" + (f"|{int(p.ops.microbatch[op])}" if p.ops.stage[op] >= 0 else "")


def consumed(
    program: Program, programs: Mapping[str, Program], replica: Callable[[int], int], seed: int, before: Mapping[Any, Any] | None = None
) -> Use | None:
    """What every compute step of one run consumed, and what lasting buffers hold at the end; None where the run deadlocks, or other work ran before
    what it must follow. `before`: (rank, what is run) -> those that come first. `replica` of a rank: whose samples it has.
    """
    p = inline(program, programs).program
    m = _Recorder(p, seed=seed, replica=replica)
    try:
        m.run()
    except Deadlocked:
        return None
    at = {key: i for i, key in enumerate(m.ran)}
    for key, first in (before or {}).items():
        if key not in at or any(x not in at or at[x] > at[key] for x in first):
            return None
    lasting = [b for b in range(len(p.buffers)) if p.buffers.persistent[b] and BUFFER_ROLES[int(p.buffers.role[b])] != "input"]  # inputs come anew
    kept = {("kept", b): str(m.result(b, 0, int(p.buffers.chunks[b]), 0)) for b in lasting}
    return m.use | kept


def same_use(
    mutant: Program, original: Program, programs: Mapping[str, Program], *, replica: Callable[[int], int] = lambda rank: 0,
    before: Mapping[Any, Any] | None = None,
) -> bool:  # fmt: skip
    """The mutant's steps consume what the original's do, in every one of several timings, and leave the same behind."""
    want = consumed(original, programs, replica, 0, before)
    return want is not None and all(consumed(mutant, programs, replica, seed, before) == want for seed in range(1, 1 + TIMINGS))


# ---- memory: steps ----------------------------------------------------------------------------------------------------
def step_is_right(graph: StepGraph, plan: StepPlan) -> bool:
    """The plan's line of actions gives the results of the captured step, on integers, and its figures are those of the simulator."""
    captured = [(i, -1, ()) for i, n in enumerate(graph.nodes) if n.phase != "input" and not n.optional]
    want = _step_values(graph, captured)
    got = _step_values(graph, [(a.node, a.alternative, a.drops) for a in plan.actions])
    if want is None or got != want:
        return False
    run = simulate_step(graph, plan.actions, held_before=(plan.boundary,), boundary=plan.boundary)
    alive = run.peak_bytes == plan.peak_bytes and abs(run.time_s - plan.time_s) <= 1e-6 * max(run.time_s, 1e-6)
    within = plan.budget_bytes is None or run.peak_bytes <= plan.budget_bytes
    return alive and within and (plan.floor_s is None or run.time_s >= plan.floor_s * (1 - 1e-9))


def _step_values(graph: StepGraph, line: list[tuple[int, int, Any]]) -> dict[str, int] | None:
    """Result of every node that the step gives, and what its other storages hold; None where something is read that is not there.

    Held results point to places, as tensors do; a place holds one number, which nodes that change it in place replace.
    """
    places: list[int] = []
    held: dict[int, dict[int, int]] = {}
    fixed = {s: len(places) + k for k, s in enumerate(s for s, x in enumerate(graph.storages) if x.kind != "made")}
    places += [hash(("given", s)) for s in fixed]
    for i, n in enumerate(graph.nodes):
        if n.phase == "input":
            held[i] = {s: fixed[s] for s in n.storages}
    draws = 0
    drawn: dict[int, int] = {}
    for node, alternative, drops in line:
        n = graph.nodes[node]
        way = n.alternatives[alternative] if alternative >= 0 else None
        reads = n.inputs if way is None else way.inputs
        if n.phase == "input" or any(x not in held for x in reads):
            return None
        seen = tuple(places[at] for x in n.inputs if x in held for _, at in sorted(held[x].items()))
        if n.random:
            drawn.setdefault(node, draws)
            draws += drawn[node] == draws
        value = hash((node, seen, drawn.get(node)))
        own: dict[int, int] = {}
        for s in n.storages:
            if s in n.makes:
                if way is not None and way.over >= 0:
                    at = next((p for t, p in held[way.over].items() if t not in fixed), -1)
                    if at < 0:
                        return None
                    places[at] = hash((value, s))
                    for x in [x for x, r in held.items() if at in r.values()]:
                        del held[x]
                    own[s] = at
                else:
                    own[s] = len(places)
                    places.append(hash((value, s)))
            else:
                found = [held[x][s] for x in reads if s in held[x]] if s not in fixed else [fixed[s]]
                if not found:
                    return None
                own[s] = found[0]
        for s in n.writes:
            changed = {held[x][s] for x in reads if x in held and s in held[x]}
            for at in changed:
                places[at] = hash(("changed", places[at], value))
        held[node] = own
        for x in drops:
            if graph.nodes[x].phase != "input":
                held.pop(x, None)
    if any(x not in held for x in graph.results):
        return None
    return {f"{x}:{s}": places[at] for x in graph.results for s, at in held[x].items()} | {f"given {s}": places[at] for s, at in fixed.items()}


# ---- memory: arenas ---------------------------------------------------------------------------------------------------
def arena_is_right(problem: ArenaProblem, plan: ArenaPlan) -> bool:
    """Every pair of storages that share a byte is never in use together; runs lie back to back; the bound is the clique's, and one."""
    ops, size, unit = len(problem.stream), problem.size_bytes.tolist(), problem.alignment_bytes
    offset = plan.offset_bytes.tolist()
    before: list[set[int]] = []
    for v in range(ops):
        first = {*problem.after[v].tolist(), *[u for u in range(v) if problem.stream[u] == problem.stream[v]]}
        before.append(first.union(*(before[u] for u in first)))

    def ends(a: int, b: int) -> bool:
        """Whether a is surely finished with before b begins."""
        users = {*problem.sources[a].tolist(), *problem.consumers[a].tolist()}
        lasting = a in problem.to_end or b in problem.from_start
        return not lasting and all(u in before[w] for u in users for w in problem.sources[b].tolist())

    for a in range(len(size)):
        if offset[a] < 0 or offset[a] % unit or offset[a] + size[a] > plan.arena_bytes:
            return False
        for b in range(a):
            share = max(offset[a], offset[b]) < min(offset[a] + size[a], offset[b] + size[b])
            if share and not ends(a, b) and not ends(b, a):
                return False
    for run in problem.runs:
        if any(offset[b] != offset[a] + -(-size[a] // unit) * unit for a, b in pairwise(run)):
            return False
    clique = list(plan.clique)
    if len(set(clique)) < len(clique) or any(not 0 <= t < len(size) for t in clique):
        return False
    together = not any(ends(a, b) or ends(b, a) for i, a in enumerate(clique) for b in clique[:i])
    return together and sum(-(-size[t] // unit) * unit for t in clique) == plan.bound_bytes <= plan.arena_bytes


def fill_order(document: Mapping[str, Any], step: int, p: Program) -> dict[tuple[int, str], list[tuple[int, str]]]:
    """(rank, op) of the other work of a cycle's step -> what must have run before it, by the document's placements: for `consumed`."""
    items = {i["name"]: i for i in document["items"]}
    rows: dict[tuple[str, int], list[str]] = {}
    whole: dict[tuple[str, int], int] = {}
    for x in document["placements"]:
        whole[x["item"], x["rank"]] = whole.get((x["item"], x["rank"]), 0) + 1
    seen: dict[tuple[str, int], int] = {}
    for x in document["placements"]:
        at = (x["item"], x["rank"])
        seen[at] = seen.get(at, 0) + 1
        if x["step"] == step:
            part = f":{seen[at]}/{whole[at]}" if whole[at] > 1 else ""
            rows.setdefault(at, []).append(f"fill:{x['item']}{part}|{items[x['item']]['kind']}")
    actions: dict[tuple[int, str], tuple[int, str]] = {}
    lane = p.lane_of_step()
    for s in np.flatnonzero(p.steps.kind == Kind.COMPUTE).tolist():
        rank, op = int(p.lanes.actor[lane[s]]), int(p.steps.op[s])
        actions[rank, f"{int(p.ops.stage[op])}{p.ops.name[op]}{int(p.ops.microbatch[op])}"] = (rank, _called(p, op))
    found: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for (name, rank), keys in rows.items():
        for n, key in enumerate(keys):
            first = [(rank, keys[n - 1])] if n else [actions[r, a] for r, a in items[name]["actions"] if r == rank and not step and (r, a) in actions]
            for other in items[name]["after"] if not n else ():
                places = [r for x, r in rows if x == other]
                first += [(r, rows[other, r][-1]) for r in places if rank not in places or r == rank]
            found[rank, key] = first
    return found
