"""Stages of a layout planned as whole steps: the joint forward-and-backward graph of one micro-batch, with the others that are in flight beside it.

A stage that is over its devices' memory gets the fastest plan of its step graph that saves what is missing (`decide.memory`); the segment then runs
that plan, and its bytes and seconds in the training program are the plan's. Where nothing saves enough, it gets the plan of least memory.
Left out: stages in several segments (tensor parallelism), sharded training state, backward in two parts; those are recomputed by regions
(`drive_recompute`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import msgspec
import numpy as np

from .decide.memory.regions import Chosen
from .decide.memory.step import STEP_NAMES, keep_everything
from .decide.pipeline import peak_in_flight
from .errors import Infeasible, Unsupported
from .graph import Work
from .plan import Segment, SegmentStep, TrainingLayout
from .simulate.step_memory import simulate_step
from .step_graph import StepGraph, StepPlan

__all__ = ["StageGraph", "StageSteps", "StepSource", "with_step"]

EFFORT = 40_000  # of the search over a stage's schedules, per node of its graph
replace = msgspec.structs.replace


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """A stage's step graph with costs; the other fields as in `plan.SegmentStep`."""

    graph: StepGraph
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    gradients: tuple[int, ...]
    handed: int


class StepSource(Protocol):
    def __call__(self, layout: TrainingLayout, stage: int) -> StageGraph:
        """Raises: Unsupported for a stage that cannot be run as a planned step."""
        ...


@dataclass
class StageSteps:
    """As `drive_recompute.StageRecompute`, with a plan for the whole stage as its choice. Raises: Unsupported for a layout or stage left out."""

    layout: TrainingLayout
    source: StepSource
    effort: int | None = None  # of the search over a stage's schedules
    name: str = "steps"
    steps: dict[int, SegmentStep] = field(default_factory=dict)  # what `saving` chose last, by stage

    def __post_init__(self) -> None:
        lay = self.layout
        if lay.tensor > 1 or lay.zero_level or lay.split_backward or any(len(s.segments) != 1 for s in lay.stages):
            raise Unsupported("stages in parts, sharded state and split backwards are not planned as steps", hint="--tp 1 --zero 0")
        self.segment = {s.key: s for s in lay.segments}
        self.graphs = {stage.index: self._in_flight(stage.index, self.source(lay, stage.index)) for stage in lay.stages}

    def _in_flight(self, stage: int, found: StageGraph) -> StageGraph:
        lay = self.layout
        at = lay.placement[0][stage] if lay.placement else stage
        flight = peak_in_flight(lay.pipeline, lay.microbatches, at)  # of 1F1B; other schedules are corrected by the next round
        return StageGraph(**{**vars(found), "graph": replace(found.graph, in_flight=flight)})

    def saving(self, need_bytes: Mapping[int, int]) -> dict[int, Chosen]:
        """Per stage the fastest plan that needs so many bytes less than keeping everything; the leanest where none does."""
        self.steps = {}
        chosen = {}
        for stage, need in need_bytes.items():
            if need > 0:
                found = self.graphs[stage]
                plan = self.fastest(found.graph, keep_everything(found.graph).peak_bytes - need)
                segment = self.segment[self.layout.stages[stage].segments[0]]
                step = SegmentStep(
                    graph=found.graph, plan=plan, reads=found.reads, writes=found.writes, gradients=found.gradients, handed=found.handed,
                    kept=_kept(found, plan, segment),
                )  # fmt: skip
                self.steps[stage] = step
                chosen[stage] = _chosen(segment, step)
        return {i: c for i, c in chosen.items() if c.again}

    def fastest(self, graph: StepGraph, budget_bytes: int) -> StepPlan:
        strategy, rng = STEP_NAMES["fusionaware"](effort=self.effort or EFFORT * len(graph.nodes)), np.random.default_rng(0)
        try:
            return strategy.plan(graph, budget_bytes, rng=rng)
        except Infeasible:
            return strategy.plan(graph, None, rng=rng)

    def apply(self, chosen: Mapping[int, Chosen]) -> TrainingLayout:
        made = {self.layout.stages[i].segments[0]: self.steps[i] for i in chosen}
        return replace(self.layout, segments=tuple(with_step(s, made[s.key]) if s.key in made else s for s in self.layout.segments))


def with_step(segment: Segment, step: SegmentStep) -> Segment:
    """The segment run by a plan: what it keeps, its workspaces, and the work of running calls again (that share of forward by seconds)."""
    graph, plan = replace(step.graph, in_flight=1), step.plan
    run = simulate_step(graph, plan.actions, boundary=plan.boundary)
    alive = [b - graph.fixed_bytes() for b in run.bytes_at]
    held = _made(graph, plan.saved)
    given = {v: _made(graph, (n,)) for v, n in zip(segment.writes, step.writes, strict=True)}
    border: set[int] = set().union(*given.values())
    kept: set[int] = set().union(*(s for v, s in given.items() if v in step.kept))
    back = _made(graph, [n for n in step.gradients if n >= 0])
    saved = _bytes(graph, held - border)
    once_s = sum(graph.nodes[x].time_s for x in {a.node for a in plan.actions})
    forward_s = sum(graph.nodes[x].time_s for x in {a.node for a in plan.actions[: plan.boundary]})
    share = Fraction((plan.time_s - once_s) / forward_s) if forward_s > 0 else Fraction(0)
    return replace(
        segment, step=step, recompute=(), saved_bytes=saved,
        forward_workspace_bytes=max(0, max(alive[: plan.boundary], default=0) - saved - _bytes(graph, border)),
        backward_workspace_bytes=max(0, max(alive[plan.boundary :], default=0) - saved - _bytes(graph, kept | back)),
        again=Work(**{x: max(0, round(getattr(segment.forward, x) * share)) for x in ("flops", "bytes_read", "bytes_written", "calls")}),
    )  # fmt: skip


def _made(graph: StepGraph, nodes: tuple[int, ...] | list[int]) -> set[int]:
    """Storages of the step's own in which results of these nodes lie."""
    return {s for x in nodes for s in graph.nodes[x].storages if graph.storages[s].kind == "made"}


def _bytes(graph: StepGraph, storages: set[int]) -> int:
    return sum(graph.storages[s].size_bytes for s in storages)


def _kept(found: StageGraph, plan: StepPlan, segment: Segment) -> tuple[str, ...]:
    """Border values that backward needs: reads that lie where backward actions read or held results lie, writes of which something held is a part."""
    graph = found.graph
    asked = {*plan.saved, *(x for a in plan.actions[plan.boundary :] for x in graph.nodes[a.node].inputs)}
    there = {s for x in asked for s in graph.nodes[x].storages}
    reads = [v for v, n in zip(segment.reads, found.reads, strict=True) if there & {*graph.nodes[n].storages}]
    held = {s for x in plan.saved for s in graph.nodes[x].storages}
    writes = [v for v, n in zip(segment.writes, found.writes, strict=True) if held & _made(graph, (n,))]
    return tuple(dict.fromkeys([*reads, *writes]))


def _chosen(segment: Segment, step: SegmentStep) -> Chosen:
    made, plan = with_step(segment, step), step.plan
    ran = [a.node for a in plan.actions]
    nodes = step.graph.nodes
    again = tuple(nodes[x].name for x in sorted({*ran}) if ran.count(x) > 1 and nodes[x].makes)
    once_s = sum(nodes[x].time_s for x in {*ran})
    return Chosen(
        again={(segment.key, "step"): again} if again else {}, saved_bytes=segment.saved_bytes - made.saved_bytes,
        workspace_bytes=made.backward_workspace_bytes, time_s=max(0.0, plan.time_s - once_s), bound_s=max(0.0, (plan.floor_s or 0.0) - once_s),
    )  # fmt: skip
