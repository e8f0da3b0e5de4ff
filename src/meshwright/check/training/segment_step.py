"""Segments that run a planned step: the plan is right, its border is the segment's, and bytes are those that the layout says.

The step's own graph is in the plan (`SegmentStep.graph`); that the model's is the same is for whoever runs it to see. Shown here: everything that
`check_step_plan` shows; reads are placeholders; the forward pass ends by giving away the writes; nothing but the kept border values, and what is
counted in `saved_bytes`, is held from F to B; workspaces are no smaller than what is alive while either pass runs. Where backward is split, its first
part makes all gradients of reads and adds to none of parameters, and what it leaves to the second is counted in `left_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...graph.step_graph import StepAction
from ...plan.plan import Segment, SegmentStep, TrainingLayout
from ..verdict import Finding
from .step_memory import check_step_plan

__all__ = ["check_segment_steps"]


def check_segment_steps(layout: TrainingLayout) -> list[Finding]:
    return [f for s in layout.segments if s.step is not None for f in _segment(layout, s, s.step)]


def _wrong(s: Segment, text: str, **facts: Any) -> Finding:
    return Finding(check="values", message=f"segment {s.key} runs a planned step: {text}", witness={"segment": s.key, "stage": s.stage, **facts})


def _segment(layout: TrainingLayout, s: Segment, step: SegmentStep) -> list[Finding]:
    if s.recompute:
        return [_wrong(s, "it recomputes by regions as well")]
    nodes = len(step.graph.nodes)
    if (len(step.reads), len(step.writes), len(step.gradients)) != (len(s.reads), len(s.writes), len(s.reads)):
        return [_wrong(s, f"its border has {len(step.reads)} reads and {len(step.writes)} writes, the segment {len(s.reads)} and {len(s.writes)}")]
    named = [*step.reads, *step.writes, step.handed, *(n for n in step.gradients if n != -1)]
    if (odd := next((n for n in named if not 0 <= n < nodes), None)) is not None:
        return [_wrong(s, f"node {odd} of {nodes}", node=odd)]
    verdict = check_step_plan(step.graph, step.plan, split=step.weights)
    if verdict.findings:
        return [_wrong(s, f.message, **(f.witness or {})) for f in verdict.findings]
    if foreign := [v for v in step.kept if v not in s.reads and v not in s.writes]:
        return [_wrong(s, f"keeps {foreign[0]!r}, which does not cross its border", value=foreign[0])]
    return [*_split(layout, s, step), *_border(layout, s, step), *_bytes(s, step, verdict.facts)]


def _split(layout: TrainingLayout, s: Segment, step: SegmentStep) -> list[Finding]:
    graph, plan = step.graph, step.plan
    if layout.split_backward != (step.weights >= 0):
        return [_wrong(s, f"its backward is {'split' if step.weights >= 0 else 'whole'}, the layout's is not")]
    if step.weights < 0:
        return []
    if not plan.boundary <= step.weights <= len(plan.actions):
        return [_wrong(s, f"its second part of backward begins at action {step.weights} of {len(plan.actions)}")]
    for i, a in enumerate(plan.actions[plan.boundary :], plan.boundary):
        if (a.node in step.gradients) and i >= step.weights:
            return [_wrong(s, "makes the gradient of a read in the second part of its backward", action=i)]
        if i < step.weights and any(graph.storages[x].kind == "buffer" for x in graph.nodes[a.node].writes):
            return [_wrong(s, "adds to the gradient of a parameter in the first part of its backward", action=i)]
    return []


def _border(layout: TrainingLayout, s: Segment, step: SegmentStep) -> list[Finding]:
    graph, plan = step.graph, step.plan
    for v, n in zip(s.reads, step.reads, strict=True):
        if graph.nodes[n].phase != "input":
            return [_wrong(s, f"its read {v!r} is no placeholder", value=v)]
    last = next((i for i in range(plan.boundary - 1, -1, -1) if plan.actions[i].node == step.handed), None)
    if last is None or {*graph.nodes[step.handed].inputs} != {*step.writes} or step.handed not in graph.results:
        return [_wrong(s, "its forward pass does not give away exactly what the segment writes")]
    differentiable = {v.name: v.differentiable for v in layout.values}
    for v, n in zip(s.reads, step.gradients, strict=True):
        if n >= 0 and (n not in graph.results or not differentiable.get(v, True)):
            return [_wrong(s, f"the gradient of {v!r} is no result of it, or the value carries none", value=v)]
    later = {x for a in plan.actions[plan.boundary :] for x in _inputs(step, a)} | {*plan.saved}
    needed = _storages(graph.nodes[x].storages for x in later)
    for v, n in zip(s.reads, step.reads, strict=True):
        if v not in step.kept and needed & {*graph.nodes[n].storages}:
            return [_wrong(s, f"backward reads {v!r}, which is not kept", value=v)]
    return []


def _bytes(s: Segment, step: SegmentStep, facts: Mapping[str, Any]) -> list[Finding]:
    graph = step.graph

    def made(nodes: Iterable[int]) -> set[int]:
        return {x for x in _storages(graph.nodes[n].storages for n in nodes) if graph.storages[x].kind == "made"}

    def size(storages: set[int]) -> int:
        return sum(graph.storages[x].size_bytes for x in storages)

    writes = made(step.writes)
    held = made(step.plan.saved)
    saved = size(held - writes)
    hidden = [v for v, n in zip(s.writes, step.writes, strict=True) if v not in step.kept and held & made((n,))]
    if hidden:
        return [_wrong(s, f"something is held in the storage of {hidden[0]!r}, which is not kept", value=hidden[0])]
    if summed := [v for v in s.sum_writes if v in step.kept]:
        return [_wrong(s, f"backward reads {summed[0]!r} as it was before other ranks' parts were added in its place", value=summed[0])]
    kept = made(n for v, n in zip(s.writes, step.writes, strict=True) if v in step.kept)
    back = made(n for n in step.gradients if n >= 0)
    forward = int(facts["forward_bytes"]) - saved - size(writes)
    arrived = _arrived_bytes(step)
    left = arrived + sum(bytes for x, bytes in facts.get("split_bytes", {}).items() if x not in kept) - saved
    backward = int(facts["backward_bytes"]) + arrived - saved - s.left_bytes - size(kept | back)
    for what, said, least in (
        ("saved_bytes", s.saved_bytes, saved), ("forward_workspace_bytes", s.forward_workspace_bytes, forward),
        ("backward_workspace_bytes", s.backward_workspace_bytes, backward), ("left_bytes", s.left_bytes if step.weights >= 0 else 0, left),
    ):  # fmt: skip
        if said < least:
            return [_wrong(s, f"its {what} are {least}, the layout says {said}", bytes=least)]
    return []


def _arrived_bytes(step: SegmentStep) -> int:
    """Gradients that arrive for the first part of backward and that the second reads too."""
    graph, later = step.graph, step.plan.actions[step.weights :] if step.weights >= 0 else ()
    read = _storages(graph.nodes[x].storages for a in later for x in _inputs(step, a))
    return sum(graph.storages[x].size_bytes for x in read if graph.storages[x].kind == "tangent")


def _inputs(step: SegmentStep, action: StepAction) -> tuple[int, ...]:
    node = step.graph.nodes[action.node]
    return node.inputs if action.alternative < 0 else node.alternatives[action.alternative].inputs


def _storages(rows: Iterable[tuple[int, ...]]) -> set[int]:
    return {x for row in rows for x in row}
