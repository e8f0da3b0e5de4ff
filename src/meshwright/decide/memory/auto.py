"""The fastest plan within a budget, and no more work than it takes to know that: what `memory plan` does without a strategy.

One frontier of schedules answers for `fusionaware` and for Chen's, Revolve's and Rotor's schedules, which it begins at. It is searched with little
effort first; when its plan is within 1 % of the bound of any plan, nothing else is tried. Else `monet` is asked, which proves more of a small step
and spends its search of a large one on this budget alone; where it does not plan (several micro-batches in flight), the search goes on.
Invariant: the plan given is no slower than any that is named beside it, and its floor is the highest that was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ...errors import Infeasible, MeshwrightError
from ...graph.step_graph import StepGraph, StepPlan
from . import strategies, strategy
from .fusionaware.frontier import MAX_PUBLISHED_NODES, Entry, Frontier, frontier_of
from .fusionaware.strategy import DEFAULT_EFFORT, FusionAware
from .monet.fixed import fixed, free_ways
from .monet.strategy import Monet
from .problem import StepStrategy
from .step import least_bound_bytes, nothing_fits, size_text

__all__ = ["Offer", "auto_plan", "best_plan", "offers", "some_plan"]

# How far above its bound a plan ends the search, as a share of the bound: nothing that is tried then can gain more.
MAX_BOUND_GAP_SHARE = 0.01
# Runs of nodes of the first search, per node of the graph: a tenth of what is spent where that does not end it, on a graph of a thousand nodes.
FIRST_EFFORT_PER_NODE = 10_000
# Effort of monet's search where any plan will do, a tenth of its own default: it counts runs of every node.
QUICK_EFFORT_PER_NODE = 4_000
# Other budgets that are offered: those at which so much remains of the time that the budget costs.
OFFERED_TIME_SHARES = (0.75, 0.5, 0.25, 0.0)
# Other budgets that are offered: so much of the bytes of the plan.
OFFERED_BYTES_SHARES = (0.95, 0.9, 0.8)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What other budgets would give: peak and time of a schedule."""

    peak_bytes: int
    time_s: float


def _first_effort(graph: StepGraph) -> int:
    return min(FIRST_EFFORT_PER_NODE * len(graph.nodes), DEFAULT_EFFORT)


def _frontier(graph: StepGraph) -> Frontier:
    return frontier_of(graph, _first_effort(graph), True, False)  # as `FusionAware` asks for it: what is kept is found by what it was asked with


def some_plan(graph: StepGraph, budget_bytes: int, *, rng: np.random.Generator) -> StepPlan:
    """Any plan within the budget: with a tenth of the effort, where that finds one. Raises: Infeasible as `auto_plan`."""
    try:
        if any(n.alternatives for n in graph.nodes):
            return Monet(effort=QUICK_EFFORT_PER_NODE).plan(graph, budget_bytes, rng=rng)
        return FusionAware(effort=_first_effort(graph)).plan(graph, budget_bytes, rng=rng)
    except MeshwrightError:
        return auto_plan(graph, budget_bytes, rng=rng)[0]


def auto_plan(graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> tuple[StepPlan, dict[str, str]]:
    """(the plan, what the other strategies give, or why they were not tried). None: the least peak of all strategies.

    Raises: Infeasible as `best_plan`.
    """
    if any(n.alternatives for n in graph.nodes):
        return _jointly(graph, budget_bytes, rng)
    if budget_bytes is None:
        return best_plan(graph, budget_bytes, rng=rng)
    frontier = _frontier(graph)
    if budget_bytes < least_bound_bytes(graph):  # proved for every strategy: none has to be asked
        raise nothing_fits(
            graph, budget_bytes, least_bytes=frontier.entries[-1].peak_bytes, proved=True, said=_published(frontier, budget_bytes)
        )
    floor, plans, said = frontier.floor_s(budget_bytes), dict[str, StepPlan](), _published(frontier, budget_bytes)
    others = {kind.name: kind() for kind in strategies("step") if kind.budgeted and not kind.in_frontier}
    quick, thorough = FusionAware(effort=_first_effort(graph)), FusionAware()
    tries: tuple[StepStrategy, ...] = (quick, *others.values(), thorough)
    for asked in tries:
        if asked is thorough and plans.keys() & others:
            break
        if plans and min(p.time_s for p in plans.values()) <= floor * (1 + MAX_BOUND_GAP_SHARE):
            for name in others:
                said.setdefault(name, f"not tried: nothing can be more than {MAX_BOUND_GAP_SHARE:.0%} faster")
            break
        name = asked.name
        try:
            found = asked.plan(graph, budget_bytes, rng=rng)
        except MeshwrightError as error:  # one strategy that cannot must not keep the others from answering
            said[name] = error.message
            if error.data.get("proved") and not plans:  # what another strategy has found stands
                least = min(frontier.entries[-1].peak_bytes, error.data.get("least_bytes") or frontier.entries[-1].peak_bytes)
                raise nothing_fits(graph, budget_bytes, least_bytes=least, proved=True, said=said) from None
            continue
        floor = max(floor, found.floor_s or 0.0)
        plans[name] = min([found, *([plans[name]] if name in plans else [])], key=lambda p: p.time_s)
        said[name] = f"{plans[name].time_s * 1e3:.4g} ms, peak {size_text(plans[name].peak_bytes)}"
    if not plans:
        return best_plan(graph, budget_bytes, rng=rng)
    name = min(plans, key=lambda n: (plans[n].time_s, plans[n].peak_bytes))
    said.pop(name)
    plan = plans[name]
    return msgspec.structs.replace(plan, floor_s=min(floor, plan.time_s), least_bytes=plan.least_bytes or frontier.least_bytes), said


def best_plan(
    graph: StepGraph, budget_bytes: int | None, names: Sequence[str] | None = None, *, rng: np.random.Generator
) -> tuple[StepPlan, dict[str, str]]:
    """(the plan of least time within the budget, of least peak among equals; the other strategies with what they give). None: the least peak.

    Raises: Infeasible when no strategy fits, with the least peak any of them knows and the bound that holds for all.
    """
    plans, said, least, proved = dict[str, StepPlan](), dict[str, str](), list[int](), False
    for name in [kind.name for kind in strategies("step")] if names is None else names:
        try:
            plans[name] = strategy(name, "step")().plan(graph, budget_bytes, rng=rng)
            said[name] = f"{plans[name].time_s * 1e3:.4g} ms, peak {size_text(plans[name].peak_bytes)}"
        except MeshwrightError as error:  # one strategy that cannot must not keep the others from answering
            said[name] = error.message
            least += [int(error.data["least_bytes"])] if error.data.get("least_bytes") is not None else []
            proved |= bool(error.data.get("proved"))
    if not plans:
        raise nothing_fits(graph, budget_bytes, least_bytes=min(least, default=None), proved=proved, said=said)
    name = min(plans, key=lambda n: (plans[n].peak_bytes, plans[n].time_s) if budget_bytes is None else (plans[n].time_s, plans[n].peak_bytes))
    said.pop(name)
    return plans[name], said


def _jointly(graph: StepGraph, budget_bytes: int | None, rng: np.random.Generator) -> tuple[StepPlan, dict[str, str]]:
    """With other implementations: `monet` chooses among them; where it does not come near its bound, plans of plain operators are made too."""
    nodes = tuple(msgspec.structs.replace(n, alternatives=()) for n in graph.nodes)
    plain = msgspec.structs.replace(graph, nodes=nodes)
    refused: MeshwrightError | None = None
    try:
        joint = Monet().plan(graph, budget_bytes, rng=rng)
    except MeshwrightError as error:
        if error.data.get("proved"):  # of all implementations, so of the plain ones too
            said = {"monet": error.message}
            raise nothing_fits(graph, budget_bytes, least_bytes=error.data.get("least_bytes"), proved=True, said=said) from None
        refused = error
    else:
        if budget_bytes is not None and joint.floor_s is not None and joint.time_s <= joint.floor_s * (1 + MAX_BOUND_GAP_SHARE):
            return joint, {}
        if budget_bytes is not None and len(graph.nodes) > MAX_PUBLISHED_NODES:  # plain operators are among its choices
            return joint, {"fusionaware": f"not tried: the step has more than {MAX_PUBLISHED_NODES:,} nodes"}
    try:
        found, said = auto_plan(plain, budget_bytes, rng=rng)
    except Infeasible as error:
        if refused is None:
            return joint, {}
        least = [int(e.data["least_bytes"]) for e in (refused, error) if e.data.get("least_bytes") is not None]
        said = {"monet": refused.message, "plain": error.message}
        raise nothing_fits(graph, budget_bytes, least_bytes=min(least, default=None), proved=False, said=said) from None
    if refused is not None:
        return found, said | {"monet": refused.message}
    said.pop("monet", None)  # of plain operators
    better = joint if _rank(joint, budget_bytes) <= _rank(found, budget_bytes) else found
    other = found if better is joint else joint
    said[f"{other.strategy}, plain" if better is joint else other.strategy] = f"{other.time_s * 1e3:.4g} ms, peak {size_text(other.peak_bytes)}"
    # a floor of plain operators only says nothing of the others
    return msgspec.structs.replace(better, floor_s=joint.floor_s, least_bytes=joint.least_bytes, optimal=joint.optimal and better is joint), said


def _rank(plan: StepPlan, budget_bytes: int | None) -> tuple[float, float]:
    return (plan.peak_bytes, plan.time_s) if budget_bytes is None else (plan.time_s, plan.peak_bytes)


def _published(frontier: Frontier, budget_bytes: int) -> dict[str, str]:
    said = {}
    for name in dict.fromkeys(e.origin for e in frontier.published):
        own = [e for e in frontier.published if e.origin == name]
        fits = [e for e in own if e.peak_bytes <= budget_bytes]
        if fits:
            best = min(fits, key=lambda e: (e.time_s, e.peak_bytes))
            said[name] = f"{best.time_s * 1e3:.4g} ms, peak {size_text(best.peak_bytes)}"
        elif own:
            said[name] = f"{name} needs {size_text(min(e.peak_bytes for e in own))} at least, the budget is {size_text(budget_bytes)}"
    return said


def offers(graph: StepGraph, plan: StepPlan) -> tuple[tuple[Offer, ...], tuple[Offer, ...]]:
    """(with more bytes, fewest first: three quarters, half, a quarter, nothing of the plan's extra time; with fewer bytes, most first, down to the
    least known). From the frontier that `auto_plan` searches first; of other implementations only those that cost nothing."""
    if any(n.alternatives for n in graph.nodes):
        graph = fixed(graph, free_ways(graph)).graph
    frontier = _frontier(graph)
    extra = plan.time_s - frontier.plain_s
    entries = frontier.entries
    faster = [e for share in OFFERED_TIME_SHARES for e in _leanest(entries, frontier.plain_s + share * extra)] if extra > 0 else []
    more = [e for e in faster if e.peak_bytes > plan.peak_bytes and e.time_s < plan.time_s]
    less = [e for share in OFFERED_BYTES_SHARES if (e := frontier.within(int(share * plan.peak_bytes))) is not None]
    if entries[-1].peak_bytes < plan.peak_bytes:
        less.append(entries[-1])
    return _offers(more), _offers([e for e in less if e.time_s > plan.time_s])


def _leanest(entries: Sequence[Entry], time_s: float) -> list[Entry]:
    """The entry of fewest bytes that takes no longer; none where there is none."""
    fast = [e for e in entries if e.time_s <= time_s * (1 + 1e-9)]
    return fast[-1:]


def _offers(entries: Sequence[Entry]) -> tuple[Offer, ...]:
    return tuple(dict.fromkeys(Offer(peak_bytes=e.peak_bytes, time_s=e.time_s) for e in entries))
