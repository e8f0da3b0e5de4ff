"""Recomputation as part of the search over layouts: the same candidate with a rule in every layer, or with as little as makes it fit.

`auto` keeps everything where that fits. Where it does not, every stage that is over its devices' memory recomputes the cheapest choice
(`decide.memory.regions`) that saves what is missing under 1F1B's micro-batches in flight; the new layout is lowered and simulated, and what is
still missing in its worst order is asked for again, a few times at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .cost import Cost
from .decide.memory.regions import Chosen, RegionChooser
from .decide.pipeline import peak_in_flight
from .drive_stage_steps import StageSteps
from .errors import Infeasible, UsageError
from .fabric import Device
from .graph import OpGraph, OpNode
from .layout_recompute import LayoutRegions
from .plan import TrainingLayout

if TYPE_CHECKING:
    from .drive_layouts import Evaluated

__all__ = ["KEEP_ALL", "POLICIES", "Policy", "StageRecompute", "recompute_decision", "require_policy", "with_recomputation"]

POLICIES = ("auto", "none", "selective", "full", "optimal", "steps")
ROUNDS = 5  # of asking for more


@dataclass(frozen=True)
class Policy:
    """What a layout recomputes: the rule's name and the choice by stage; stages that recompute nothing are left out."""

    name: str = "none"
    stages: Mapping[int, Chosen] = field(default_factory=dict)
    why: str = ""

    def __str__(self) -> str:
        return f"recompute {self.name}" if self.name != "none" else ""


KEEP_ALL = Policy()


class StageRecompute:
    """The choosers of a layout's stages. `frontiers` may be shared between layouts."""

    def __init__(self, graph: OpGraph, layout: TrainingLayout, cost: Cost, device: Device, frontiers: dict[Any, Any] | None = None) -> None:
        self.layout, self.name = layout, "optimal"
        self.regions = LayoutRegions(graph, layout)
        stage_of = {s.key: s.stage for s in layout.segments}

        def time_s(node: OpNode, segment: str) -> float:
            return cost.roofline(self.regions.work(node, segment), device).time_s if node.forward.calls else 0.0

        shared = frontiers if frontiers is not None else {}
        self.choosers = [
            RegionChooser([r for r in self.regions.regions if stage_of[r.segment] == stage.index], time_s, shared) for stage in layout.stages
        ]

    def rule(self, name: str) -> dict[int, Chosen]:
        found = {i: c.rule(name) for i, c in enumerate(self.choosers)}
        return {i: c for i, c in found.items() if c.again}

    def saving(self, need_bytes: Mapping[int, int]) -> dict[int, Chosen]:
        """Per stage the cheapest choice that saves so many bytes; what saves most where none does."""
        found = {}
        for stage, need in need_bytes.items():
            if need > 0:
                lay = self.layout
                at = lay.placement[0][stage] if lay.placement else stage
                flight = peak_in_flight(lay.pipeline, lay.microbatches, at)  # of 1F1B; other schedules are corrected by the next round
                try:
                    found[stage] = self.choosers[stage].cheapest(need, flight)
                except Infeasible:
                    found[stage] = self.choosers[stage].most_saved()
        return {i: c for i, c in found.items() if c.again}

    def apply(self, chosen: Mapping[int, Chosen]) -> TrainingLayout:
        return self.regions.apply({place: names for c in chosen.values() for place, names in c.again.items()})


def with_recomputation(
    policy: str, first: Evaluated, stages: StageRecompute | StageSteps, evaluate: Callable[[TrainingLayout, Policy], Evaluated]
) -> list[Evaluated]:
    """`first` keeps everything; returns what the policy makes of it, all that count as candidates."""
    if policy == "none" or first.timeline is None or (policy in ("auto", "optimal", "steps") and first.excess_bytes <= 0):
        return [first]
    if policy in ("selective", "full") and isinstance(stages, StageRecompute):
        chosen = stages.rule(policy)
        if not chosen:
            return [replace(first, why=f"nothing to recompute by the rule {policy}")]
        return [evaluate(stages.apply(chosen), Policy(policy, chosen, f"asked for; every layer by the rule {policy}"))]
    need: dict[int, int] = {}
    found, best = first, first
    for _ in range(ROUNDS):
        missing: dict[int, int] = {}
        for rank, over in enumerate(found.over_bytes):
            held = found.layout.hosted(found.layout.coordinates(rank)[0])
            for stage, _ in held:
                missing[stage] = max(missing.get(stage, 0), -(-over // len(held)))
        need |= {stage: need.get(stage, 0) + over for stage, over in missing.items() if over > 0}
        chosen = stages.saving(need)
        if not chosen:
            break
        made = Policy(stages.name, chosen, "does not fit without; the cheapest choice per stage that does")
        tried = evaluate(stages.apply(chosen), made)
        if tried.timeline is None or tried.policy.stages == found.policy.stages:
            break
        found = tried
        if best is first or found.excess_bytes < best.excess_bytes:
            best = found
        if found.excess_bytes <= 0:
            break
    return [first, best] if best is not first else [first]


def recompute_decision(best: Evaluated, asked: str) -> dict[str, Any]:
    """What every stage recomputes: fewer bytes kept per micro-batch, seconds of running calls again, and how far that is from the linear bound."""
    from .decide.memory.selective import CITE

    chosen = best.policy.stages
    stages = [
        {"stage": i, "layers": len({layer for _, layer in c.again}), "calls": sum(map(len, c.again.values())), "saved_bytes": c.saved_bytes,
         "workspace_bytes": c.workspace_bytes, "time_s": c.time_s, "bound_s": c.bound_s}
        for i, c in sorted(chosen.items())
    ]  # fmt: skip
    why = best.policy.why or ("fits without" if best.excess_bytes <= 0 else "")
    cite = [CITE.key] if chosen else []
    return {"strategy": best.policy.name if chosen else "none", "options": {"policy": asked, "stages": stages}, "why": why, "cite": cite}


def require_policy(policy: str) -> None:
    """Raises: UsageError for an unknown policy."""
    if policy not in POLICIES:
        raise UsageError(f"no recomputation policy {policy!r}", hint=f"one of {', '.join(POLICIES)}")
