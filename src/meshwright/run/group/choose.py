"""The program that this executor runs fastest, among all strategies' plans, and whether the built-in backend would be as fast.

Planners rank by what the links could do. Here every plan is predicted as it will be walked (`predict`), the best few are cut finer and coarser as
long as that gains, and the winner is held against a model of what gloo does: a ring in rank order (all-reduce, all-gather, reduce-scatter,
reduce), a binomial tree of whole messages (broadcast), everybody at once (the rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ...cost import Transport
from ...decide.collective import CollectiveProblem, CollectiveStrategy, Ring, auto, default_candidates, strategy
from ...decide.collective.classic.direct import Direct
from ...decide.collective.classic.rooted_tree import RootedTree
from ...decide.collective.problem import Ranked
from ...errors import Infeasible, MeshwrightError, TimeLimit, UsageError
from ...fabric.fabric import Fabric
from ...kernels.effort import Deadline
from .predict import MAX_SIMULATED_STEPS, quickest_walk

__all__ = ["Executed", "builtin", "executed"]

MAX_RECUT_PLANS = 3  # the best plans that are cut finer and coarser: each try is a plan and a simulation more
CUTS = ("pieces", "slices", "chunks")
TREE_LIMITS_TRIED = (8, 2)  # limits on the trees of a packing: each tree sends messages of its own, so one with fewer may be as good
MAX_RECUT_TIME_SHARE = 0.99  # a cut is kept if it takes at most this share of the time of the one before: less is within what predictions miss
RECUT_EFFORT_SHARE = 0.5  # of the problem's effort may go into cutting; the rest is for planning


@dataclass(frozen=True)
class Executed:
    """One candidate: its strategy with every option filled in, the predicted time of its walk, and the time it is judged by (`predict.Walked`)."""

    strategy: str
    candidate: CollectiveStrategy
    ranked: Ranked
    time_s: float
    judged_s: float
    walk: str  # see `predict.WALKS`


def executed(
    problem: CollectiveProblem, candidates: Sequence[CollectiveStrategy] | None = None, *, each_s: float = float("inf"), fabric: Fabric | None = None,
    shared: bool = False,
) -> list[Executed]:  # fmt: skip
    """All candidates that can be walked, best judged first; equal ones in the planners' order.

    `fabric`: the problem's, with the token buckets that predictions honour and planners do not. `shared`: ranks share cores.

    Raises: what `decide.collective.auto` raises; Infeasible when no plan can be walked.
    """
    deadline = problem.deadline(RECUT_EFFORT_SHARE)
    found = []
    for ranked in auto(problem, candidates=candidates or default_candidates(problem), each_s=each_s):
        if ranked.plan is not None and (one := _predicted(problem, ranked, fabric, shared)) is not None:
            found.append(one)
    if not found:
        raise Infeasible(f"no plan for this {problem.op} can be executed", where=problem.fabric.name, hint="`collective compare` shows why not")
    found.sort(key=lambda e: e.judged_s)
    best = [_tuned(problem, one, deadline, fabric, shared) for one in found[:MAX_RECUT_PLANS]]
    return sorted([*best, *found[MAX_RECUT_PLANS:]], key=lambda e: e.judged_s)


def _predicted(problem: CollectiveProblem, ranked: Ranked, fabric: Fabric | None, shared: bool) -> Executed | None:
    assert ranked.plan is not None
    if ranked.plan.program.switches or ranked.plan.program.executed_steps > MAX_SIMULATED_STEPS:
        return None
    program, fabric, transport = ranked.plan.program, fabric or problem.fabric, problem.transport or Transport()
    try:
        found = quickest_walk(program, fabric, problem.ranks, transport, shared=shared)
    except MeshwrightError:
        return None  # folded, or not executable
    made = _with_options(ranked.plan.strategy, ranked.plan.options)
    return Executed(ranked.strategy, made, ranked, found.time_s, found.judged_s, found.walk)


def _with_options(name: str, options: Any) -> CollectiveStrategy:
    kind = strategy(name)
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items() if k in known})


def _tuned(problem: CollectiveProblem, first: Executed, deadline: Deadline, fabric: Fabric | None, shared: bool) -> Executed:
    """As many trees and fewer; twice and half as many pieces, as long as that gains."""
    found = [first, *_with_fewer_trees(problem, first, deadline, fabric, shared)]
    return min((_in_pieces(problem, one, deadline, fabric, shared) for one in found), key=lambda e: e.judged_s)


def _in_pieces(problem: CollectiveProblem, first: Executed, deadline: Deadline, fabric: Fabric | None, shared: bool) -> Executed:
    assert first.ranked.plan is not None
    option = next((o for o in CUTS if isinstance(first.ranked.plan.options.get(o), int)), "")
    best = first
    for factor in (2.0, 0.5):
        here = best
        while option and not deadline.past:
            pieces = int(getattr(here.candidate, option) * factor)
            if pieces < 1:
                break
            candidate = replace(here.candidate, **{option: pieces})  # type: ignore[type-var]
            after = _tried(problem, candidate, fabric, shared)
            if after is None or after.judged_s > here.judged_s * MAX_RECUT_TIME_SHARE:
                break
            here = after
        best = min(best, here, key=lambda e: e.judged_s)
    return best


def _with_fewer_trees(problem: CollectiveProblem, first: Executed, deadline: Deadline, fabric: Fabric | None, shared: bool) -> list[Executed]:
    """How many trees are best depends on the pieces: fewer trees may have more."""
    found: list[Executed] = []
    plan = first.ranked.plan
    assert plan is not None
    for most in TREE_LIMITS_TRIED:
        trees = plan.notes.get("trees", 0)
        if not isinstance(trees, int) or trees <= most or "max_trees" not in plan.options or deadline.past:
            continue
        free: dict[str, Any] = {name: None for name in ("pieces", "quantum") if name in plan.options}
        after = _tried(problem, replace(first.candidate, max_trees=most, **free), fabric, shared)  # type: ignore[type-var]
        if after is not None:
            found.append(after)
    return found


def _tried(problem: CollectiveProblem, candidate: CollectiveStrategy, fabric: Fabric | None, shared: bool) -> Executed | None:
    try:
        ranked = auto(problem, candidates=[candidate])[0]
    except (Infeasible, TimeLimit, UsageError):  # a UsageError: options of the plan at hand that do not go with other pieces
        return None
    return _predicted(problem, ranked, fabric, shared) if ranked.plan is not None else None


def builtin(problem: CollectiveProblem, fabric: Fabric | None = None, *, shared: bool = False) -> Executed | None:
    """The prediction of gloo's own algorithm; None where nothing like it can be planned."""
    n = len(problem.ranks)
    order = tuple(range(n))
    model: CollectiveStrategy
    if problem.op in ("all-reduce", "all-gather", "reduce-scatter", "reduce"):
        model = Ring(order=order, rings=1, slices=2 if problem.op in ("all-reduce", "reduce") else 1)
    elif problem.op == "broadcast":
        model = RootedTree(shape="binomial", pieces=1)
    else:
        model = Direct()
    try:
        ranked = auto(problem, candidates=[model])[0]
    except MeshwrightError:
        return None
    return _predicted(problem, ranked, fabric, shared) if ranked.plan is not None else None
