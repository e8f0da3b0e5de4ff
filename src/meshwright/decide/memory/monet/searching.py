"""Plans of networks beyond one integer programme's reach: implementations from the knapsack, schedules from a search.

The knapsack (`closure`) says which implementations are worth their time at a budget, and bounds every schedule from below. With those
implementations fixed (`fixed`), and with only those that cost nothing, with and without writing over in the forward pass, schedules are searched
that may compute anything again any number of times (`fusionaware.frontier`), each time with small workspaces first and the time back where there is
room for large ones (`slack`); the search begins at minimum cuts, at Chen's, Revolve's and Rotor's
schedules, and at what the knapsack holds.
Source: the card of MONeT, section 3.8 (ii) to (iv). Deviation: a search over the whole network, beside the knapsack's floor, instead of an integer
programme per block and a table. Invariant: the plan's peak is within the budget. Cost: one knapsack, and `effort` runs of every node per search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from ....errors import Infeasible
from ....step_graph import StepPlan
from ..fusionaware.frontier import fastest_within
from ..step import finished
from .closure import Closure, closure, floor_bytes
from .fixed import fixed, free_ways
from .merging import Merged
from .schedule import Decisions, Run, decisions_of
from .slack import hurried, lean
from .solving import infeasible

__all__ = ["begun", "searched"]

SLOWER = (1.5, inf)  # than the fastest alike may be what a schedule is searched with, for its small workspace
GLANCE = 10  # of the effort of a search: what every choice of implementations gets,
FINISHED = 2  # before the best of them get all of it
NODES = 1  # of branch and bound: the root bounds nearly as well as minutes of branching do on a large network


def searched(
    m: Merged, budget_bytes: int | None, *, others: Sequence[Merged] = (), nodes: int, effort: int, seed: int, options: dict[str, Any]
) -> StepPlan:
    """`budget_bytes` None: the least peak that is found. `others`: the step with fewer implementations allowed, whose choices are tried too.

    Raises: Infeasible.
    """
    least = floor_bytes(m)
    goal = least if budget_bytes is None else budget_bytes
    free = free_ways(m.graph) if m.has_ways else {}
    plain = _without_forward(m, free)
    tried, kept, floor_s = list[dict[int, int]](), list[frozenset[int]](), None
    for one in (m, *others) if budget_bytes is not None else ():
        try:
            answer = closure(one, goal, nodes=min(nodes, NODES), seed=seed)
        except Infeasible:
            continue  # of the relaxation that chooses implementations: the other choices are still searched
        floor_s = answer.floor_s if one is m else floor_s
        kept.append(answer.held)
        ways = {**free, **chosen_ways(one, answer)}
        tried += [ways, {**ways, **dict.fromkeys(free.keys() - plain.keys(), -1)}]
    lossy = bool(options.get("lossy"))
    slower = SLOWER if budget_bytes is not None else (inf,)
    tried = [lean(m.graph, w, lossy=lossy, slower=s) for w in (*tried, free, plain) for s in slower] + [{}]
    fields: dict[str, Any] = {"strategy": "monet", "options": options, "budget_bytes": budget_bytes, "floor_s": floor_s, "least_bytes": least}

    def found(ways: Mapping[int, int], effort: int) -> StepPlan:
        runs, boundary = _runs(m, ways, goal, effort, kept)
        if m.has_ways:
            peak = finished(m.graph, runs, boundary, **fields).peak_bytes
            runs = hurried(m.graph, runs, boundary, peak if budget_bytes is None else budget_bytes, lossy=lossy)
        return finished(m.graph, runs, boundary, **fields)

    def rank(plan: StepPlan) -> tuple[bool, float, float]:
        late = budget_bytes is None or plan.peak_bytes > budget_bytes
        return late, *((plan.peak_bytes, plan.time_s) if late else (plan.time_s, plan.peak_bytes))

    choices = [dict(x) for x in dict.fromkeys(tuple(sorted((n, a) for n, a in w.items() if a >= 0)) for w in tried)]
    plans: list[StepPlan] = []
    if len(choices) > FINISHED:
        first = [found(w, max(effort // GLANCE, 1)) for w in choices]
        order = sorted(range(len(choices)), key=lambda k: rank(first[k]))[:FINISHED]
        choices = [choices[k] for k in order]
        kept += [frozenset(s for x in first[k].saved for s in m.graph.nodes[x].storages if s in m.size) for k in order]
        plans = first
    plans += [found(w, effort) for w in choices]
    best = min(plans, key=rank)
    if budget_bytes is not None and best.peak_bytes > budget_bytes:
        raise infeasible(m, budget_bytes, best.peak_bytes, proved=budget_bytes < least, floor_s=floor_s)
    return best


def _without_forward(m: Merged, ways: Mapping[int, int]) -> dict[int, int]:
    """Without what a forward operator writes over: run again by itself, it needs its input once more."""
    return {n: a for n, a in ways.items() if m.graph.nodes[n].phase == "backward"}


def chosen_ways(m: Merged, answer: Closure) -> dict[int, int]:
    """The alternative of every node that does not run plainly."""
    backward = {b.node: b for s in m.stages for b in (s.first, *s.rest)}
    found = {m.operators[i].nodes[0]: m.operators[i].ways[w].alternative for i, w in answer.forward if len(m.operators[i].ways) > 1}
    found |= {n: backward[n].ways[w].alternative for n, w in answer.backward.items()}
    return {n: a for n, a in found.items() if a >= 0}


def begun(m: Merged, budget_bytes: int, *, effort: int) -> tuple[Decisions, StepPlan] | None:
    """Where an exact programme begins: a schedule by free implementations; None where none is found within the budget."""
    runs, boundary = _runs(m, free_ways(m.graph) if m.has_ways else {}, budget_bytes, effort, ())
    plan = finished(m.graph, runs, boundary, strategy="monet")
    return (decisions_of(m, runs, boundary), plan) if plan.peak_bytes <= budget_bytes else None


def _runs(m: Merged, ways: Mapping[int, int], budget_bytes: int, effort: int, kept: Iterable[frozenset[int]]) -> tuple[list[Run], int]:
    """The runs of the fastest schedule found within the budget (else of least peak), and how many of them are in forward."""
    one = fixed(m.graph, ways)
    lives, entry = fastest_within(one.graph, budget_bytes, effort * len(one.graph.nodes), kept=[[one.place[s] for s in sorted(k)] for k in kept])
    line = lives.runs(entry.hold_from, entry.hold_to, entry.ahead)
    assert line is not None
    return one.runs(*line)
