"""Which operators to compute again: the least extra time that fits, as an integer programme, per layer and then per stage.

Cite: see CITE, which recomputes core attention by rule, and lets a stage keep some of its micro-batches whole (its appendix C).
Left open by the paper: which operators of another layer to choose, and how to mix choices over layers and micro-batches. Our answer:
1. for one layer, minimise the time of the operators computed again subject to the bytes kept, where computing again needs the inputs kept or
   computed again too (chains): the Pareto frontier of (bytes, time), from all sets of operators where these are few, else solved for every
   budget at which the answer changes;
2. per stage, how many of its layers x micro-batches in flight follow each point of the frontier: an integer programme again, whose
   workspace is that of the largest point used.
The linear relaxation bounds both from below; brute force over all sets is the oracle (tests/decide/memory).
Deviations: times of operators add up; what a recomputation makes is counted as held at once until its layer's backward is over.
Invariant: bytes kept are within budget, counted in whole numbers after the solver. Cost: O(frontier) integer programmes of one variable per operator
and storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

from ...cite import Cite
from ...errors import Infeasible, UsageError
from ...kernels.effort import count_work, remembered
from ...kernels.highs import require_optimal, solver, values
from .mix import SCALE, Members, fractional_mix, whole_mix
from .problem import Layer, LayerPolicy, RecomputePlan, RecomputeProblem, RecomputeStrategy, StageBudget, StageChoice, counted, policy_of, require_fit
from .rules import KORTHIKANTI

__all__ = ["CITE", "OptimalRecompute", "best_policy", "frontier", "relaxed_time_s", "stage_mix", "used_only"]

CITE = KORTHIKANTI
DEVIATIONS = ("an integer programme over operators instead of one rule", "micro-batches of a stage may follow different points of the frontier")

MAX_ENUMERATED = 16  # operators of a layer of which every set is looked at
SET_WORK_S = 2e-9  # counted work per set and storage


def _model(layer: Layer, budget_bytes: int, *, integer: bool) -> tuple[Any, float]:
    """Variables: one per operator (computed again), one per storage (kept). Returns the model and the unit of its objective."""
    import highspy

    lp = solver(mip_rel_gap=0.0, mip_abs_gap=1e-9) if integer else solver()
    n, makers = len(layer.operators), layer.makers
    time_unit = (sum(o.time_s for o in layer.operators) or 1.0) / SCALE
    byte_unit = (sum(layer.sizes) or 1) / SCALE
    used = sorted({*layer.needed} | {s for o in layer.operators for s in o.reads})
    kept_of = {s: n + k for k, s in enumerate(used)}
    for o in layer.operators:
        lp.addVar(0.0, 1.0)
        lp.changeColCost(lp.getNumCol() - 1, o.time_s / time_unit)
    for _ in used:
        lp.addVar(0.0, 1.0)
    if integer:
        for column in range(n):
            lp.changeColIntegrality(column, highspy.HighsVarType.kInteger)

    def row(lower: float, terms: dict[int, float], upper: float = float("inf")) -> None:
        lp.addRow(lower, upper, len(terms), list(terms), list(terms.values()))

    for s in used:
        again = {makers[s][0]: 1.0} if s in makers else {}
        if s in layer.needed:
            row(1.0, {kept_of[s]: 1.0, **again})
        for i, o in enumerate(layer.operators):
            if s in o.reads and i not in makers.get(s, ()):
                row(0.0, {kept_of[s]: 1.0, **again, i: -1.0})
    for members in makers.values():
        for other in members[1:]:
            row(0.0, {members[0]: 1.0, other: -1.0}, 0.0)
    row(-float("inf"), {kept_of[s]: layer.sizes[s] / byte_unit for s in used}, budget_bytes / byte_unit)
    return lp, time_unit


def best_policy(layer: Layer, budget_bytes: int) -> LayerPolicy:
    """The set of operators that takes least time to compute again while at most `budget_bytes` are kept.

    Raises: Infeasible when not even recomputing everything fits.
    """
    lp, _ = _model(layer, budget_bytes, integer=True)
    n = len(layer.operators)
    while True:
        require_optimal(lp, what="selection of operators to recompute")
        x = [round(v) for v in values(lp)[:n]]
        policy = policy_of(layer, [o.name for o, again in zip(layer.operators, x, strict=True) if again])
        if policy.kept_bytes <= budget_bytes:
            return policy
        # The solver's tolerance let a few bytes too many through: forbid this very set.
        lp.addRow(1.0 - sum(x), float("inf"), n, list(range(n)), [-1.0 if v else 1.0 for v in x])


def relaxed_time_s(layer: Layer, budget_bytes: int) -> float:
    """The linear relaxation's time: no selection within the budget takes less. Raises: Infeasible."""
    lp, unit = _model(layer, budget_bytes, integer=False)
    require_optimal(lp, what="relaxed selection of operators to recompute")
    return max(float(lp.getInfo().objective_function_value) * unit, 0.0)


def frontier(layer: Layer, *, points: int = 64) -> tuple[LayerPolicy, ...]:
    """Pareto-optimal policies, most bytes (nothing recomputed) first; at most `points`, then those of least bytes are missing."""
    called = {str(i): o.name for i, o in enumerate(layer.operators)}
    unnamed = tuple(msgspec.structs.replace(o, name=str(i)) for i, o in enumerate(layer.operators))
    found = _frontier(msgspec.structs.replace(layer, operators=unnamed), points)
    return tuple(msgspec.structs.replace(p, recompute=tuple(called[x] for x in p.recompute)) for p in found)


@remembered  # layouts that differ elsewhere have equal layers, and so has a model: what they are called is left out
def _frontier(layer: Layer, points: int) -> tuple[LayerPolicy, ...]:
    return _of_all_sets(layer)[:points] if len(layer.operators) <= MAX_ENUMERATED else _by_programmes(layer, points)


def _of_all_sets(layer: Layer) -> tuple[LayerPolicy, ...]:
    """Of every set of operators its bytes and seconds: 65,536 sets of sixteen take 0.02 s, an integer programme 0.1 s for each point."""
    n, makers = len(layer.operators), layer.makers
    sets = np.arange(1 << n)
    count_work(SET_WORK_S * len(sets) * len(layer.sizes))
    time_s, kept, torn = np.zeros(len(sets)), np.zeros(len(sets), np.int64), np.zeros(len(sets), bool)
    for i, o in enumerate(layer.operators):
        time_s += np.where(sets >> i & 1, o.time_s, 0.0)
    for s, size in enumerate(layer.sizes):
        make = sum(1 << i for i in makers.get(s, ()))
        read = sum(1 << i for i, o in enumerate(layer.operators) if s in o.reads)
        torn |= (sets & make != 0) & (sets & make != make)
        if size:
            kept += np.where(((s in layer.needed) | (sets & read != 0)) & (sets & make == 0), size, 0)
    whole = np.flatnonzero(~torn)
    many = sum((sets >> i & 1 for i in range(n)), np.zeros_like(sets))
    found: list[LayerPolicy] = []
    best_s = float("inf")
    for k in whole[np.lexsort((sets[whole], many[whole], time_s[whole], kept[whole]))].tolist():
        if time_s[k] * (1 + 1e-12) < best_s:
            best_s = time_s[k]
            found.append(policy_of(layer, [o.name for i, o in enumerate(layer.operators) if k >> i & 1]))
    return tuple(reversed(found))


def _by_programmes(layer: Layer, points: int) -> tuple[LayerPolicy, ...]:
    found = [policy_of(layer, ())]
    while len(found) < points:
        try:
            policy = best_policy(layer, found[-1].kept_bytes - 1)
        except Infeasible:
            break
        if policy.time_s <= found[-1].time_s * (1 + 1e-12):  # the same time with fewer bytes: the one before was not Pareto-optimal
            found.pop()
        found.append(policy)
    return tuple(found)


def stage_mix(policies: tuple[LayerPolicy, ...], budget: StageBudget, stage: int = 0) -> StageChoice:
    """How many of the stage's layers x micro-batches follow each policy, least time first. Raises: Infeasible."""
    slots = budget.layers * budget.in_flight
    least = min(slots * p.kept_bytes + p.workspace_bytes for p in policies)
    require_fit(stage, least, budget, "the leanest policy")
    if slots == 0:
        return counted(policies, (0,) * len(policies), budget)
    members = [Members(count=slots, policies=policies)]
    (bound,) = fractional_mix(members, budget.budget_bytes)
    (whole,) = whole_mix(members, budget.budget_bytes)
    return counted(policies, whole, budget, sum(n * p.time_s for n, p in zip(bound, policies, strict=True)) / budget.in_flight)


def used_only(plan: RecomputePlan) -> RecomputePlan:
    """The plan without policies that no stage follows."""
    live = [i for i in range(len(plan.policies)) if any(s.counts[i] for s in plan.stages)]
    stages = tuple(msgspec.structs.replace(s, counts=tuple(s.counts[i] for i in live)) for s in plan.stages)
    return msgspec.structs.replace(plan, policies=tuple(plan.policies[i] for i in live), stages=stages)


@dataclass(frozen=True, kw_only=True)
class OptimalRecompute(RecomputeStrategy):
    """Options. points: of the frontier at most; layer_budget_bytes: if > 0, one policy for all layers, the best within that many bytes per layer."""

    name: ClassVar[str] = "optimal"
    cite: ClassVar[Cite] = CITE

    points: int = 64
    layer_budget_bytes: int = 0

    def plan(self, problem: RecomputeProblem, *, rng: np.random.Generator) -> RecomputePlan:
        """Raises: Infeasible (names the stage and what is missing); UsageError for fewer than 2 points."""
        if self.points < 2:
            raise UsageError(f"must be at least 2, got {self.points}", where="points")
        if self.layer_budget_bytes:
            policies: tuple[LayerPolicy, ...] = (best_policy(problem.layer, self.layer_budget_bytes),)
        else:
            policies = frontier(problem.layer, points=self.points)
        chosen = tuple(stage_mix(policies, budget, i) for i, budget in enumerate(problem.stages))
        options = {"points": self.points, "layer_budget_bytes": self.layer_budget_bytes}
        return used_only(RecomputePlan(strategy=self.name, options=options, policies=policies, stages=chosen))
