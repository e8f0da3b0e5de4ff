"""What keeping less would cost: the optimal recomputation of the model's repeated layer, and per stage what its memory would demand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ..cost import Cost
from ..decide.memory import OptimalRecompute, RecomputeProblem, StageBudget
from ..decide.memory.captured import core_attention, layer_nodes, layer_of, repeated_layers
from ..decide.memory.problem import policy_of
from ..decide.memory.rules import useful_policy
from ..decide.memory.selective import best_policy, frontier, relaxed_time_s
from ..decide.pipeline import peak_in_flight
from ..errors import Infeasible
from ..fabric.fabric import Device
from ..graph.graph import OpGraph
from ..plan.plan import TrainingLayout
from .breakdown import StageShare

__all__ = ["RecomputeAdvice", "RecomputePoint", "RecomputeStage", "recompute_advice"]

KEPT_SHARES = (0.75, 0.5, 0.25)  # of what a layer keeps, for which advice is given


class RecomputePoint(msgspec.Struct, frozen=True, kw_only=True):
    """`share` of the layer's bytes and forward time; `gap`: time over the linear relaxation's, at most this far above the optimum."""

    what: str
    kept_bytes: int
    kept_share: float
    time_share: float
    gap: float
    recompute: tuple[str, ...]


class RecomputeStage(msgspec.Struct, frozen=True, kw_only=True):
    """`slots`: layers x micro-batches in flight, of which `recomputed` follow a policy that computes something again."""

    stage: int
    layers: int
    slots: int
    recomputed: int
    kept_bytes: int
    budget_bytes: int
    time_share: float  # extra, of the stage's forward layers
    why: str = ""


class RecomputeAdvice(msgspec.Struct, frozen=True, kw_only=True):
    layer: str
    layers: int
    layer_bytes: int
    points: tuple[RecomputePoint, ...]
    stages: tuple[RecomputeStage, ...]


def recompute_advice(
    graph: OpGraph, layout: TrainingLayout, stages: Sequence[StageShare], cost: Cost, device: Device
) -> RecomputeAdvice | None:
    """`graph` at the plan's micro-batch size, whole layers on one rank. None when no layer repeats.

    A stage's budget is its device's memory less everything that is not a kept activation of these layers; stages are left out under tensor
    parallelism, where a rank keeps a part of a layer only, and with other schedules than 1F1B, which keep other numbers of micro-batches.
    """
    paths = repeated_layers(graph)
    if not paths:
        return None
    layer = layer_of(graph, paths[0], lambda n: cost.roofline(n.forward, device).time_s if n.forward.calls else 0.0)
    core = core_attention(layer_nodes(graph, paths[0]))
    problem = RecomputeProblem(layer=layer, core=core, stages=())
    chosen = []
    for s in stages:
        nodes = {n for seg in layout.segments if seg.stage == s.stage for n in seg.nodes}
        count = sum(layer_nodes(graph, path)[0].name in nodes for path in paths)
        if s.limit_bytes and count and layout.tensor == 1 and layout.schedule == "1f1b":
            chosen.append(_stage(problem, s, count, peak_in_flight(layout.pipeline, layout.microbatches, s.stage)))
    kept = policy_of(layer, ()).kept_bytes
    return RecomputeAdvice(layer=paths[0], layers=len(paths), layer_bytes=kept, points=_points(problem), stages=tuple(chosen))


def _points(problem: RecomputeProblem) -> tuple[RecomputePoint, ...]:
    layer = problem.layer
    whole, forward_s = policy_of(layer, ()), sum(o.time_s for o in layer.operators) or 1.0
    points = [RecomputePoint(what="none", kept_bytes=whole.kept_bytes, kept_share=1.0, time_share=0.0, gap=0.0, recompute=())]
    core = useful_policy(layer, problem.core)
    named = [("core attention", core)] if core.recompute else []
    for share in KEPT_SHARES:
        try:
            named.append((f"optimal at {share:.0%}", best_policy(layer, int(share * whole.kept_bytes))))
        except Infeasible:
            break
    named.append(("least memory", frontier(layer)[-1]))
    for what, policy in named:
        bound = relaxed_time_s(layer, policy.kept_bytes)
        points.append(
            RecomputePoint(
                what=what, kept_bytes=policy.kept_bytes, kept_share=policy.kept_bytes / max(whole.kept_bytes, 1),
                time_share=policy.time_s / forward_s, gap=max(policy.time_s / bound - 1, 0.0) if bound > 0 else 0.0, recompute=policy.recompute,
            )
        )  # fmt: skip
    return tuple(points)


def _stage(problem: RecomputeProblem, share: StageShare, count: int, flight: int) -> RecomputeStage:
    whole, forward_s = policy_of(problem.layer, ()), sum(o.time_s for o in problem.layer.operators) or 1.0
    budget = share.limit_bytes - share.memory_bytes["peak"] + count * flight * whole.kept_bytes
    one = msgspec.structs.replace(problem, stages=(StageBudget(layers=count, in_flight=flight, budget_bytes=budget),))
    slots = count * flight
    try:
        plan = OptimalRecompute().plan(one, rng=np.random.default_rng(0))
    except Infeasible as error:
        return RecomputeStage(
            stage=share.stage, layers=count, slots=slots, recomputed=slots, kept_bytes=0, budget_bytes=budget, time_share=0.0, why=error.message
        )
    choice = plan.stages[0]
    again = sum(n for n, p in zip(choice.counts, plan.policies, strict=True) if p.recompute)
    return RecomputeStage(
        stage=share.stage, layers=count, slots=slots, recomputed=again, kept_bytes=choice.kept_bytes, budget_bytes=budget,
        time_share=choice.time_s / (count * forward_s),
    )  # fmt: skip
