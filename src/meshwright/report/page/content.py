"""What a page is made from: the plan, the step simulated from it, and the run where there is one; and a few answers about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...bottleneck.breakdown import Breakdown as MeasuredBreakdown
from ...explain.assumptions import ErrorBars
from ...explain.breakdown import Breakdown
from ...fabric.fabric import Fabric
from ...plan.plan import Plan
from ...program.calls import InlinedProgram
from ...timeline import Timeline
from ..compare import Comparison

__all__ = ["PageContent", "RunFacts"]


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run beside its prediction. `document`: fields of `run.json` that say where and how it ran; `measured`: None where no step was undisturbed."""

    folder: str
    comparison: Comparison
    inlined: InlinedProgram
    document: Mapping[str, Any]
    measured: MeasuredBreakdown | None = None
    expert_loads: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)  # by layer: of a step, of an expert


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """`timeline`: the plan's step simulated on the fabric that it was made for, with step ids of `inlined`; `checked`: by which checkers."""

    plan: Plan
    plan_file: str
    fabric: Fabric
    inlined: InlinedProgram
    timeline: Timeline
    breakdown: Breakdown | None = None  # of training plans
    bars: ErrorBars | None = None  # of training plans: how far the step may be off
    run: RunFacts | None = None
    entry: int = 0  # of the plan's cycle
    checked: bool = True

    @property
    def ranks(self) -> int:
        return self.plan.main.ranks

    @property
    def title(self) -> str:
        job = self.plan.job
        if self.plan.kind == "training":
            return str(job["training"]["model"])
        if self.plan.kind == "collective":
            return str(job.get("collective", {}).get("op", "collective")) if isinstance(job.get("collective"), dict) else "collective"
        if self.plan.kind == "experts":
            return "expert layer"
        return f"pipeline {self.plan.decisions.get('pipeline', {}).get('strategy', '')}".strip()

    def rank_name(self, rank: int) -> str:
        """`rank 3 on box0/gpu3, stage 1`; of a folded plan also how many ranks it stands for."""
        layout, fold = self.plan.layout, self.plan.main.fold
        where = f" on {self.plan.placement[rank]}" if rank < len(self.plan.placement) else ""
        where += f" and {fold.members - 1} alike" if fold is not None else ""
        if layout is None or layout.pipeline == 1 or rank >= layout.ranks:
            return f"rank {rank}{where}"
        held = "+".join(str(stage) for stage, _ in layout.hosted(layout.coordinates(rank)[0]))
        return f"rank {rank}{where}, stage {held}"
