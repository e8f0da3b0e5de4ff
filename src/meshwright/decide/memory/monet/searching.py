"""Plans of networks beyond one integer programme's reach: implementations from the knapsack, schedules from a search.

The knapsack (`closure`) says which implementations are worth their time at a budget, and bounds every schedule from below. With those
implementations fixed (`fixed`), and with only those that cost nothing, with and without writing over in the forward pass, schedules are searched
that may compute anything again any number of times (`fusionaware.frontier`); the search begins at minimum cuts, at Chen's, Revolve's and Rotor's
schedules, and at what the knapsack holds.
Source: the card of MONeT, section 3.8 (ii) to (iv). Deviation: a search over the whole network, beside the knapsack's floor, instead of an integer
programme per block and a table. Invariant: the plan's peak is within the budget. Cost: one knapsack, and `effort` runs of every node per search.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ....errors import Infeasible
from ....step_graph import StepPlan
from ..fusionaware.frontier import fastest_within
from ..step import finished
from .closure import Closure, closure, floor_bytes
from .fixed import fixed, free_ways
from .merging import Merged
from .schedule import Decisions, Run, decisions_of
from .solving import infeasible

__all__ = ["begun", "searched"]

NODES = 1  # of branch and bound: the root bounds nearly as well as minutes of branching do on a large network


def searched(m: Merged, budget_bytes: int | None, *, nodes: int, effort: int, seed: int, options: dict[str, Any]) -> StepPlan:
    """`budget_bytes` None: the least peak that is found. Raises: Infeasible."""
    least = floor_bytes(m)
    free = free_ways(m.graph) if m.has_ways else {}
    tried, kept, floor_s = [free, _without_forward(m, free)], list[frozenset[int]](), None
    if budget_bytes is not None:
        try:
            answer = closure(m, budget_bytes, nodes=min(nodes, NODES), seed=seed)
        except Infeasible:
            pass  # of the relaxation that chooses implementations: the other choices are still searched
        else:
            floor_s, kept = answer.floor_s, [answer.held]
            ways = {**free, **chosen_ways(m, answer)}
            tried = [ways, {**ways, **dict.fromkeys(free.keys() - _without_forward(m, free).keys(), -1)}, *tried]
    fields: dict[str, Any] = {"strategy": "monet", "options": options, "budget_bytes": budget_bytes, "floor_s": floor_s, "least_bytes": least}
    found: list[StepPlan] = []
    for items in dict.fromkeys(tuple(sorted((n, a) for n, a in w.items() if a >= 0)) for w in tried):
        runs, boundary = _runs(m, dict(items), least if budget_bytes is None else budget_bytes, effort, kept)
        found.append(finished(m.graph, runs, boundary, **fields))
    within = [p for p in found if budget_bytes is None or p.peak_bytes <= budget_bytes]
    if budget_bytes is not None and within:
        return min(within, key=lambda p: (p.time_s, p.peak_bytes))
    leanest = min(found, key=lambda p: (p.peak_bytes, p.time_s))
    if budget_bytes is not None:
        raise infeasible(m, budget_bytes, leanest.peak_bytes, proved=budget_bytes < least, floor_s=floor_s)
    return leanest


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
