"""The classical rules: keep everything, recompute core attention, checkpoint whole layers (uniform, block).

Cite: CITE (whole layers); Korthikanti et al., MLSys 2023 (core attention).
Left open by the papers: what a rule does where it does not fit. Our answer: it is refused with the stage and what is missing.
Deviation: what nobody needs again is not computed again (the product of probabilities and V, the last projections of a layer); frameworks
that re-run a region run it whole. Invariant: gradients are those of keeping everything. Cost: O(operators).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec
import numpy as np

from ...cite import FOLKLORE, Cite
from ...errors import Unsupported, UsageError
from .problem import Layer, LayerPolicy, RecomputePlan, RecomputeProblem, RecomputeStrategy, counted, policy_of, require_fit

__all__ = ["CITE", "KORTHIKANTI", "FullBlock", "FullUniform", "KeepAll", "SelectiveAttention", "full_policy", "useful_policy"]

CITE = Cite(key="chen2016training", title="Training Deep Nets with Sublinear Memory Cost", year=2016, venue="arXiv:1604.06174")
KORTHIKANTI = Cite(
    key="korthikanti2023reducing", title="Reducing Activation Recomputation in Large Transformer Models", year=2023,
    venue="MLSys, arXiv:2205.05198",
)  # fmt: skip


def useful_policy(layer: Layer, names: Collection[str]) -> LayerPolicy:
    """Of these operators, those are computed again whose results backward needs, directly or through others of them. Raises: as `policy_of`."""
    found, wanted = set[str](), {*layer.needed}
    for o in reversed(layer.operators):
        if o.name in names and wanted & {*o.makes}:
            found.add(o.name)
            wanted |= {*o.reads}
    return policy_of(layer, found)


def full_policy(layer: Layer) -> LayerPolicy:
    """Everything computed again: only the layer's inputs are kept."""
    policy = useful_policy(layer, {o.name for o in layer.operators})
    whole = sum(layer.sizes[s] for s in layer.boundary)
    return msgspec.structs.replace(policy, keep=tuple(sorted(layer.boundary | {*policy.keep})), kept_bytes=max(whole, policy.kept_bytes))


def _planned(
    problem: RecomputeProblem, name: str, options: dict[str, int], policies: tuple[LayerPolicy, ...], counts: Sequence[tuple[int, ...]],
    extra_workspace: int = 0,
) -> RecomputePlan:  # fmt: skip
    stages = []
    for i, (budget, count) in enumerate(zip(problem.stages, counts, strict=True)):
        found = counted(policies, count, budget)
        if found.workspace_bytes:
            found = msgspec.structs.replace(found, workspace_bytes=found.workspace_bytes + extra_workspace)
        require_fit(i, found.kept_bytes + found.workspace_bytes, budget, name)
        stages.append(found)
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
        policy = useful_policy(problem.layer, problem.core)
        if not policy.recompute:
            raise Unsupported("the layer has no core attention to recompute", hint="fused attention keeps no scores; use optimal or uniform")
        return _planned(problem, self.name, {}, (policy,), [(s.layers * s.in_flight,) for s in problem.stages])


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
        first = full_policy(problem.layer)
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
        return _planned(problem, self.name, {"layers": self.layers}, (full_policy(problem.layer), policy_of(problem.layer, ())), counts)
