"""The classical rules: keep everything, recompute core attention, checkpoint whole layers (uniform, block).

Cite: CITE (whole layers); Korthikanti et al., MLSys 2023 (core attention).
Left open by the papers: what a rule does where it does not fit. Our answer: it is refused with the stage and what is missing.
Deviation: what nobody needs again is not computed again (the product of probabilities and V, the last projections of a layer); frameworks
that re-run a region run it whole. Invariant: gradients are those of keeping everything. Cost: O(operators).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec
import numpy as np

from ...cite import FOLKLORE, Cite
from ...errors import Unsupported, UsageError
from .problem import LayerPolicy, RecomputePlan, RecomputeProblem, RecomputeStrategy, StageChoice, policy_of, require_fit

__all__ = ["CITE", "KORTHIKANTI", "FullBlock", "FullUniform", "KeepAll", "SelectiveAttention", "full_policy", "useful"]

CITE = Cite(key="chen2016training", title="Training Deep Nets with Sublinear Memory Cost", year=2016, venue="arXiv:1604.06174")
KORTHIKANTI = Cite(
    key="korthikanti2023reducing", title="Reducing Activation Recomputation in Large Transformer Models", year=2023,
    venue="MLSys, arXiv:2205.05198",
)  # fmt: skip


def useful(problem: RecomputeProblem, names: set[str]) -> set[str]:
    """Of these operators, those whose results backward needs, directly or through others of them."""
    layer, found = problem.layer, set[str]()
    wanted = {*layer.needed}
    for o in reversed(layer.operators):
        if o.name in names and wanted & {*o.makes}:
            found.add(o.name)
            wanted |= {*o.reads}
    return found


def full_policy(problem: RecomputeProblem) -> LayerPolicy:
    """Everything computed again: only the layer's inputs are kept."""
    policy = policy_of(problem.layer, useful(problem, {o.name for o in problem.layer.operators}))
    whole = sum(problem.layer.sizes[s] for s in problem.layer.boundary)
    return msgspec.structs.replace(policy, keep=tuple(sorted(problem.layer.boundary | {*policy.keep})), kept_bytes=max(whole, policy.kept_bytes))


def _planned(
    problem: RecomputeProblem, name: str, options: dict[str, int], policies: tuple[LayerPolicy, ...], counts: Sequence[tuple[int, ...]],
    extra_workspace: int = 0,
) -> RecomputePlan:  # fmt: skip
    stages = []
    for i, (budget, count) in enumerate(zip(problem.stages, counts, strict=True)):
        kept = sum(n * p.kept_bytes for n, p in zip(count, policies, strict=True))
        workspace = max((p.workspace_bytes for n, p in zip(count, policies, strict=True) if n), default=0)
        workspace += extra_workspace if workspace else 0
        require_fit(i, kept + workspace, budget, name)
        time_s = sum(n * p.time_s for n, p in zip(count, policies, strict=True)) / budget.in_flight
        stages.append(StageChoice(counts=count, kept_bytes=kept, workspace_bytes=workspace, time_s=time_s, bound_s=time_s))
    return RecomputePlan(strategy=name, options=options, policies=policies, stages=tuple(stages))


@dataclass(frozen=True, kw_only=True)
class KeepAll(RecomputeStrategy):
    """Nothing is computed again."""

    name: ClassVar[str] = "none"
    cite: ClassVar[Cite] = FOLKLORE

    def plan(self, problem: RecomputeProblem, *, rng: np.random.Generator) -> RecomputePlan:
        """Raises: Infeasible."""
        return _planned(problem, self.name, {}, (policy_of(problem.layer, ()),), [(s.layers * s.in_flight,) for s in problem.stages])


@dataclass(frozen=True, kw_only=True)
class SelectiveAttention(RecomputeStrategy):
    """The core attention of every layer."""

    name: ClassVar[str] = "selective"
    cite: ClassVar[Cite] = KORTHIKANTI

    def plan(self, problem: RecomputeProblem, *, rng: np.random.Generator) -> RecomputePlan:
        """Raises: Infeasible; Unsupported when the layer has no core attention of its own operators."""
        chosen = useful(problem, {*problem.core})
        if not chosen:
            raise Unsupported("the layer has no core attention to recompute", hint="fused attention keeps no scores; use optimal or uniform")
        return _planned(problem, self.name, {}, (policy_of(problem.layer, chosen),), [(s.layers * s.in_flight,) for s in problem.stages])


@dataclass(frozen=True, kw_only=True)
class FullUniform(RecomputeStrategy):
    """Every `every` layers of a stage one input is kept; their backward holds all `every` layers at once."""

    name: ClassVar[str] = "uniform"
    cite: ClassVar[Cite] = CITE

    every: int = 1

    @classmethod
    def variants(cls, problem: RecomputeProblem, *, every: int = 1) -> tuple[Self, ...]:
        return (cls(every=every),)

    def plan(self, problem: RecomputeProblem, *, rng: np.random.Generator) -> RecomputePlan:
        """Raises: Infeasible; UsageError for `every` below 1."""
        if self.every < 1:
            raise UsageError(f"must be at least 1, got {self.every}", where="every")
        first = full_policy(problem)
        inner = msgspec.structs.replace(first, keep=(), kept_bytes=0)  # its input comes out of recomputing the layer before
        counts = []
        for s in problem.stages:
            groups = -(-s.layers // self.every)
            counts.append((groups * s.in_flight, (s.layers - groups) * s.in_flight))
        extra = (min(self.every, max(s.layers for s in problem.stages)) - 1) * (first.workspace_bytes + first.kept_bytes)
        return _planned(problem, self.name, {"every": self.every}, (first, inner), counts, extra)


@dataclass(frozen=True, kw_only=True)
class FullBlock(RecomputeStrategy):
    """The first `layers` layers of every stage are computed again, the others kept whole."""

    name: ClassVar[str] = "block"
    cite: ClassVar[Cite] = CITE

    layers: int = 1

    @classmethod
    def variants(cls, problem: RecomputeProblem, *, every: int = 1) -> tuple[Self, ...]:
        return (cls(layers=every),)

    def plan(self, problem: RecomputeProblem, *, rng: np.random.Generator) -> RecomputePlan:
        """Raises: Infeasible; UsageError for `layers` below 0."""
        if self.layers < 0:
            raise UsageError(f"must be at least 0, got {self.layers}", where="layers")
        redone = [min(self.layers, s.layers) for s in problem.stages]
        counts = [(n * s.in_flight, (s.layers - n) * s.in_flight) for n, s in zip(redone, problem.stages, strict=True)]
        return _planned(problem, self.name, {"layers": self.layers}, (full_policy(problem), policy_of(problem.layer, ())), counts)
