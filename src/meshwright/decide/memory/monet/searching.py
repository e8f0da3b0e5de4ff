"""Plans of networks beyond one integer programme's reach: implementations from the knapsack, schedules from a search.

The knapsack (`closure`) says which implementations are worth their time at a budget, and bounds every schedule from below. With those
implementations fixed (`fixed`), and with only those that cost nothing, with and without writing over in the forward pass, schedules are searched
that may compute anything again any number of times (`fusionaware.frontier`: large changes, then small ones), beginning at minimum cuts, at Chen's,
Revolve's and Rotor's schedules, and at what the knapsack holds. The search first counts on small workspaces; of the schedule found, every run then
gets the fastest implementation that fits (`slack`), and the search goes on from there, by these implementations' times. Every choice of
implementations gets one short round, and the best get some more. The rest of the effort goes to the one that is ahead. One that gains nothing in a
round loses a little of its rank, and its next round is longer.
Source: the card of MONeT, section 3.8 (ii) to (iv). Deviation: a search over the whole network, beside the knapsack's floor, instead of an integer
programme per block and a table. Invariant: the plan's peak is within the budget. Cost: up to three knapsacks of one branch-and-bound node, and at
most `MAX_GLANCES` + the number of choices times a tenth of `effort` runs of every node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import Infeasible
from ....graph.step_graph import StepPlan
from ....kernels.step_search import DEFAULT_SEED
from ..fusionaware.frontier import cheapest_floor_s, fastest_within
from ..step import finished
from .closure import Closure, closure, floor_bytes
from .fixed import fixed, free_ways
from .merging import Merged
from .schedule import Decisions, Run, decisions_of
from .slack import hurried, lean, settled
from .solving import infeasible

__all__ = ["begun", "searched"]

I32 = NDArray[np.int32]
# Times the fastest alike that an implementation may take with which a schedule is searched at first, for its small workspace.
MAX_FIRST_SLOWDOWN = 1.5
# Times the one that fits, in later rounds.
MAX_LATER_SLOWDOWN = 1.05
# A glance is this part of the effort: what every choice of implementations gets at first, and the unit of all that follows.
GLANCES_PER_EFFORT = 10
# Glances for the best choices altogether.
MAX_GLANCES = 70
# Runs of nodes for the best choices altogether: on large graphs it ends the search before the glances do.
MAX_NODE_RUNS = 300_000_000
# Half of that on graphs of more nodes: of an LSTM of 5,971 nodes a plan takes 55 s of processor time then instead of 82, and is 0.04 % slower.
MAX_THOROUGH_NODES = 4_000
# (how many of the best, glances for each) before the one ahead gets all: a first glance tells too little to choose by.
FIRST_ROUNDS = ((5, 1), (3, 2))
# Share of its time, or its peak, that a round must gain; else it has failed.
MIN_GAIN_SHARE = 1e-3
# Share by which a choice falls back behind the others per failure, so that they get their turn.
FAILURE_PENALTY_SHARE = 0.005
# Glances in one round at most; what fails gets longer rounds, up to here.
MAX_ROUND_GLANCES = 4
# Share of the goal's bytes, once, twice or three times, less than which a search goes through that has failed.
GOAL_CUT_SHARE = 0.02
# Failures of the one ahead before the search ends.
MAX_FAILURES = 16
# Share above the floor at which a plan ends the search.
MAX_FLOOR_GAP_SHARE = 2e-3
# Branch-and-bound nodes of the knapsack: its root bounds nearly as well as minutes of branching do on a large network.
MAX_CLOSURE_NODES = 1
# Merged operators beyond which the knapsack is not asked: its linear programme took 1.3 s of 560 operators and more than 60 s of 1,130. Minimum cuts,
# whose time grows in proportion, bound such networks then.
MAX_CLOSURE_OPERATORS = 800


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A plan. `ways`: implementations by which it could run as well, one per node; `begin`: its schedule, to go on from. `value`: its peak where
    that is what counts (`late`: above the budget, or none was given), else its time."""

    plan: StepPlan
    ways: Mapping[int, int]
    begin: I32
    late: bool
    rounds: int = 0
    failed: int = 0

    @property
    def value(self) -> float:
        return self.plan.peak_bytes if self.late else self.plan.time_s

    @property
    def rank(self) -> tuple[bool, float, float]:
        return self.late, self.value, self.plan.time_s if self.late else self.plan.peak_bytes

    @property
    def behind(self) -> tuple[bool, float]:
        return self.late, self.value * (1 + FAILURE_PENALTY_SHARE * self.failed)

    def after(self, found: _Found) -> _Found:
        """The better of this and what a round from here found; it has failed where that is hardly better."""
        failed = found.late == self.late and found.value > self.value * (1 - MIN_GAIN_SHARE)
        best = min(self, found, key=lambda f: f.rank)
        return replace(best, rounds=self.rounds + 1, failed=self.failed + failed)


@dataclass(frozen=True, kw_only=True)
class _Search:
    """`kept`: sets of storages to begin with. `fields`: of the plans."""

    m: Merged
    budget_bytes: int | None
    goal_bytes: int
    kept: Sequence[frozenset[int]]
    lossy: bool
    seed: int
    fields: Mapping[str, Any]

    def glance(self, ways: Mapping[int, int], effort: int) -> _Found:
        """A first look. Where the fastest implementations that fit gain nothing, short rounds would not either: it has failed once."""
        found, searched = self._found(ways, effort)
        gained = found.plan.time_s < searched.time_s * (1 - MIN_GAIN_SHARE)
        return replace(found, failed=0 if gained else 1)

    def round(self, f: _Found, effort: int) -> _Found:
        """Goes on: by the implementations that fit, then by slightly slower ones of smaller workspace, in turns. After a failure also from above;
        after two through a schedule within fewer bytes, which leaves places where small changes find nothing."""
        ways = lean(self.m.graph, f.ways, lossy=self.lossy, slower=MAX_LATER_SLOWDOWN, own=True) if f.rounds % 2 == 0 else f.ways
        # every other failure also comes down from keeping everything: it was stuck where it was
        begin, down, seed = f.begin, f.failed % 2 == 1, self.seed + f.rounds + 1
        if f.failed > 1 and not f.late:
            effort //= 2
            fewer = int(self.goal_bytes * (1 - GOAL_CUT_SHARE * (1 + f.failed % 3)))
            through, _ = self._found(ways, effort, goal_bytes=fewer, begin=(begin,), down=down, seed=seed)
            ways, begin, down = through.ways, through.begin, False
        return f.after(self._found(ways, effort, begin=(begin,), down=down, seed=seed)[0])

    def _found(
        self, ways: Mapping[int, int], effort: int, *, goal_bytes: int | None = None, begin: Sequence[I32] = (), down: bool = True,
        seed: int | None = None,
    ) -> tuple[_Found, StepPlan]:  # fmt: skip
        """The plan, and as it was before its runs got the fastest implementations that fit."""
        graph, budget = self.m.graph, self.budget_bytes
        goal = self.goal_bytes if goal_bytes is None else goal_bytes
        runs, boundary, hold = _runs(self.m, ways, goal, effort, self.kept, begin, down=down, seed=self.seed if seed is None else seed)
        first = plan = finished(graph, runs, boundary, **self.fields)
        if self.m.has_ways:
            # where only the peak counts, faster ways may use what the searched schedule needs anyway
            runs = hurried(graph, runs, boundary, first.peak_bytes if budget is None else budget, lossy=self.lossy)
            plan = finished(graph, runs, boundary, **self.fields)
        fits = ways if budget is None else {**ways, **settled(graph, runs)}
        return _Found(plan=plan, ways=fits, begin=hold, late=budget is None or plan.peak_bytes > budget), first


def searched(
    m: Merged, budget_bytes: int | None, *, others: Sequence[Merged] = (), nodes: int, effort: int, seed: int, options: dict[str, Any]
) -> StepPlan:
    """`budget_bytes` None: the least peak that is found. `others`: the step with fewer implementations allowed, whose choices are tried too.

    Raises: Infeasible.
    """
    least = floor_bytes(m)
    goal = least if budget_bytes is None else budget_bytes
    choices, kept, floor_s = _choices(m, budget_bytes, goal, others, nodes=nodes, seed=seed, lossy=bool(options.get("lossy")))
    fields = {"strategy": "monet", "options": options, "budget_bytes": budget_bytes, "floor_s": floor_s, "least_bytes": least}
    search = _Search(
        m=m, budget_bytes=budget_bytes, goal_bytes=goal, kept=kept, lossy=bool(options.get("lossy")), seed=seed, fields=fields
    )  # fmt: skip
    # on the largest graphs all first glances together get what the best choices get after them
    runs = MAX_NODE_RUNS if len(m.graph.nodes) <= MAX_THOROUGH_NODES else MAX_NODE_RUNS // 2
    glance = max(min(effort // GLANCES_PER_EFFORT, runs // (len(choices) * len(m.graph.nodes))), 1)
    found = sorted((search.glance(w, glance) for w in choices), key=lambda f: f.rank)
    left = min(MAX_GLANCES, runs // (glance * len(m.graph.nodes)))
    for count, length in FIRST_ROUNDS:
        found = found[:count]
        for k, f in enumerate(found):
            if not f.failed and left >= length:
                left -= length
                found[k] = search.round(f, length * glance)
        found.sort(key=lambda f: f.rank)
    while left > 0:
        ahead = min(range(len(found)), key=lambda k: found[k].behind)
        f = found[ahead]
        if f.failed > MAX_FAILURES or (not f.late and floor_s is not None and f.plan.time_s <= floor_s * (1 + MAX_FLOOR_GAP_SHARE)):
            break
        # longer the more often it failed: short rounds from there find nothing any more
        length = min(2 << f.failed, MAX_ROUND_GLANCES, left)
        left -= length
        found[ahead] = search.round(f, length * glance)
    best = min(found, key=lambda f: f.rank).plan
    if budget_bytes is not None and best.peak_bytes > budget_bytes:
        raise infeasible(m, budget_bytes, best.peak_bytes, proved=budget_bytes < least, floor_s=floor_s)
    return best


def _choices(
    m: Merged, budget_bytes: int | None, goal_bytes: int, others: Sequence[Merged], *, nodes: int, seed: int, lossy: bool
) -> tuple[list[dict[int, int]], list[frozenset[int]], float | None]:
    """(alternatives by node, each to be searched; what knapsacks hold; the floor of m, None: unknown)."""
    free = free_ways(m.graph) if m.has_ways else {}
    plain = _without_forward(m, free)
    tried, kept, floor_s = list[dict[int, int]](), list[frozenset[int]](), None
    large = len(m.operators) > MAX_CLOSURE_OPERATORS
    if large and budget_bytes is not None:
        floor_s = cheapest_floor_s(m.graph, budget_bytes)
    for one in (m, *others) if budget_bytes is not None and not large else ():
        try:
            answer = closure(one, goal_bytes, nodes=min(nodes, MAX_CLOSURE_NODES), seed=seed)
        except Infeasible:
            continue  # of the relaxation that chooses implementations: the other choices are still searched
        floor_s = answer.floor_s if one is m else floor_s
        kept.append(answer.held)
        ways = {**free, **chosen_ways(one, answer)}
        tried += [ways, {**ways, **dict.fromkeys(free.keys() - plain.keys(), -1)}]
    small = partial(lean, m.graph, lossy=lossy, slower=inf if budget_bytes is None else MAX_FIRST_SLOWDOWN)
    tried = [small(w) for w in (*tried, free, plain)] + [{}]
    distinct = dict.fromkeys(tuple(sorted((n, a) for n, a in w.items() if a >= 0)) for w in tried)
    return [dict(x) for x in distinct], kept, floor_s


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
    runs, boundary, _ = _runs(m, free_ways(m.graph) if m.has_ways else {}, budget_bytes, effort, ())
    plan = finished(m.graph, runs, boundary, strategy="monet")
    return (decisions_of(m, runs, boundary), plan) if plan.peak_bytes <= budget_bytes else None


def _runs(
    m: Merged, ways: Mapping[int, int], budget_bytes: int, effort: int, kept: Iterable[frozenset[int]], begin: Sequence[I32] = (), *,
    down: bool = True, seed: int = DEFAULT_SEED,
) -> tuple[list[Run], int, I32]:  # fmt: skip
    """The runs of the fastest schedule found within the budget (else of least peak), how many of them are in forward, and the schedule."""
    one = fixed(m.graph, ways)
    held = [[one.place[s] for s in sorted(k)] for k in kept]
    lives, entry = fastest_within(
        one.graph, budget_bytes, effort * len(one.graph.nodes), kept=held, begin=begin, down=down, seed=seed
    )  # fmt: skip
    line = lives.runs(entry.hold_from, entry.hold_to, entry.ahead)
    assert line is not None
    return *one.runs(*line), entry.hold_from
