"""The recomputation problem: the operators of one layer, what their backward needs, and how much each pipeline stage can keep.

Storages are numbered. An operator reads storages and makes storages; `needed` are those that some backward reads. If the set R of
operators is computed again, what must be kept follows: everything that backward needs or R reads, except what R makes. A storage that
several operators write (in place) is made by all of them: they are computed again together or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

import msgspec
import numpy as np

from ...arena import ArenaPlan, ArenaProblem
from ...errors import Infeasible, UsageError
from ...graph.step_graph import StepGraph, StepPlan
from ..strategies import Listed

__all__ = [
    "ArenaStrategy", "Layer", "LayerPolicy", "MemoryStrategy", "Operator", "RecomputePlan", "RecomputeProblem", "RecomputeStrategy", "StageBudget",
    "StageChoice", "StepStrategy", "counted", "policy_of", "require_fit",
]  # fmt: skip


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    pass


class Operator(_Record, frozen=True, kw_only=True):
    name: str
    time_s: float  # of computing it again
    reads: tuple[int, ...]
    makes: tuple[int, ...]


class Layer(_Record, frozen=True, kw_only=True):
    """`operators` in execution order; `sizes[storage]` in bytes (0: held anyway, e.g. parameters); `boundary`: storages that come from outside.

    Raises: UsageError for a storage that does not exist, a negative size or time, or an operator name used twice.
    """

    operators: tuple[Operator, ...]
    sizes: tuple[int, ...]
    needed: tuple[int, ...]

    def __post_init__(self) -> None:
        names = [o.name for o in self.operators]
        if len(set(names)) < len(names):
            raise UsageError(f"operator {next(n for n in names if names.count(n) > 1)!r} is there twice", where="layer")
        for o in self.operators:
            if not o.time_s >= 0:
                raise UsageError(f"takes {o.time_s} s", where=o.name)
            if any(not 0 <= s < len(self.sizes) for s in (*o.reads, *o.makes)):
                raise UsageError(f"names a storage beyond {len(self.sizes)}", where=o.name)
        if any(not 0 <= s < len(self.sizes) for s in self.needed) or any(size < 0 for size in self.sizes):
            raise UsageError("a needed storage does not exist, or a size is negative", where="layer")

    @property
    def makers(self) -> Mapping[int, tuple[int, ...]]:
        """Storage -> the operators that write it."""
        found: dict[int, list[int]] = {}
        for i, o in enumerate(self.operators):
            for s in o.makes:
                found.setdefault(s, []).append(i)
        return {s: tuple(members) for s, members in found.items()}

    @property
    def boundary(self) -> frozenset[int]:
        """Storages of some size that come from outside: the layer's inputs."""
        made = self.makers
        return frozenset(s for s in (*self.needed, *(x for o in self.operators for x in o.reads)) if s not in made and self.sizes[s])


class LayerPolicy(_Record, frozen=True, kw_only=True):
    """`recompute`: operators computed again, in execution order; `keep`: storages kept. `workspace_bytes`: made again, at once at most."""

    recompute: tuple[str, ...]
    keep: tuple[int, ...]
    kept_bytes: int
    workspace_bytes: int
    time_s: float


class StageBudget(_Record, frozen=True, kw_only=True):
    """`in_flight` micro-batches of `layers` layers at once may keep `budget_bytes` together, workspace included."""

    layers: int
    in_flight: int
    budget_bytes: int


class RecomputeProblem(_Record, frozen=True, kw_only=True):
    """`core`: operators of the core attention, for the rule that recomputes it."""

    layer: Layer
    stages: tuple[StageBudget, ...]
    core: tuple[str, ...] = ()


class StageChoice(_Record, frozen=True, kw_only=True):
    """`counts[i]`: of the stage's layers x micro-batches in flight, how many follow policy i. `time_s`: recomputing per micro-batch, on average.

    `bound_s`: no choice can take less (linear relaxation); equal to `time_s` for rules, which choose nothing.
    """

    counts: tuple[int, ...]
    kept_bytes: int
    workspace_bytes: int
    time_s: float
    bound_s: float


class RecomputePlan(_Record, frozen=True, kw_only=True):
    strategy: str
    options: dict[str, Any]
    policies: tuple[LayerPolicy, ...]
    stages: tuple[StageChoice, ...]

    @property
    def slowest_s(self) -> float:
        """Recomputing per micro-batch on the stage that does most of it."""
        return max(s.time_s for s in self.stages)


class MemoryStrategy(Listed, Protocol):
    """A frozen dataclass of options. answers: which of the decision's questions its `plan` takes: "regions" (what the layers of pipeline stages
    compute again), "step" (what a whole step keeps and computes again, and how operators run) or "arena" (where storages lie)."""

    answers: ClassVar[Literal["regions", "step", "arena"]]


class RecomputeStrategy(MemoryStrategy, Protocol):
    answers: ClassVar[Literal["regions", "step", "arena"]] = "regions"

    @classmethod
    def variants(cls, problem: RecomputeProblem, *, every: int = 1) -> tuple[Self, ...]:
        """What is worth comparing. every: what rules that count layers are to count to."""
        return (cls(),)

    def plan(self, problem: RecomputeProblem, *, rng: np.random.Generator) -> RecomputePlan:
        """Raises: Infeasible (names the stage), Unsupported, UsageError."""
        ...


class StepStrategy(MemoryStrategy, Protocol):
    """budgeted: it plans for a budget; the others have one plan that fits or does not. in_frontier: its schedules are among those of `fusionaware`'s
    frontier, so `auto` does not ask it again. chooses_ways: it chooses among implementations of operators; the others run them as they are.
    """

    answers: ClassVar[Literal["regions", "step", "arena"]] = "step"
    budgeted: ClassVar[bool] = True
    in_frontier: ClassVar[bool] = False
    chooses_ways: ClassVar[bool] = False

    def plan(self, graph: StepGraph, budget_bytes: int | None, *, rng: np.random.Generator) -> StepPlan:
        """Raises: Infeasible when it finds nothing within the budget; `data["least_bytes"]` is the least peak it knows to reach."""
        ...


class ArenaStrategy(MemoryStrategy, Protocol):
    answers: ClassVar[Literal["regions", "step", "arena"]] = "arena"

    def plan(self, problem: ArenaProblem, *, rng: np.random.Generator) -> ArenaPlan:
        """Raises: Infeasible for a capacity that is not met, Unsupported for too many pairs, UsageError."""
        ...


def policy_of(layer: Layer, recompute: Collection[str]) -> LayerPolicy:
    """What recomputing exactly these operators keeps and takes. Raises: UsageError for unknown names or part of an in-place group."""
    unknown = set(recompute) - {o.name for o in layer.operators}
    if unknown:
        raise UsageError(f"the layer has no operator {sorted(unknown)[0]!r}", where="recompute")
    chosen = [o for o in layer.operators if o.name in recompute]
    made = {s for o in chosen for s in o.makes}
    rest = {s for o in layer.operators if o.name not in recompute for s in o.makes}
    if made & rest:
        torn = next(o.name for o in chosen if set(o.makes) & rest)
        raise UsageError(f"{torn!r} writes in place what an operator that is kept writes too", where="recompute", hint="recompute both or neither")
    keep = ({*layer.needed} | {s for o in chosen for s in o.reads}) - made
    return LayerPolicy(
        recompute=tuple(o.name for o in chosen), keep=tuple(sorted(keep)), kept_bytes=sum(layer.sizes[s] for s in keep),
        workspace_bytes=sum(layer.sizes[s] for s in made), time_s=sum(o.time_s for o in chosen),
    )  # fmt: skip


def counted(policies: Sequence[LayerPolicy], counts: Sequence[int], budget: StageBudget, bound_s: float = float("inf")) -> StageChoice:
    """What a stage keeps and takes when so many of its layers x micro-batches follow each policy."""
    followed = [(n, p) for n, p in zip(counts, policies, strict=True) if n]
    time_s = sum(n * p.time_s for n, p in followed) / max(budget.in_flight, 1)
    return StageChoice(
        counts=tuple(counts), kept_bytes=sum(n * p.kept_bytes for n, p in followed),
        workspace_bytes=max((p.workspace_bytes for _, p in followed), default=0), time_s=time_s, bound_s=min(bound_s, time_s),
    )  # fmt: skip


def require_fit(stage: int, needed_bytes: int, budget: StageBudget, what: str) -> None:
    """Raises: Infeasible that names the stage and what is missing."""
    if needed_bytes > budget.budget_bytes:
        raise Infeasible(
            f"keeps {needed_bytes} bytes for {budget.layers} layers x {budget.in_flight} micro-batches with {what}, "
            f"and may keep {budget.budget_bytes}",
            where=f"stage {stage}", hint=f"{needed_bytes - budget.budget_bytes} bytes more, fewer layers, or a smaller micro-batch",
            data={"stage": stage, "needed_bytes": needed_bytes, "limit_bytes": budget.budget_bytes},
        )  # fmt: skip
