"""Step graphs of a layout's segments, from the model itself: what `train plan --memory` plans and `train run` runs.

The model is traced once per micro-batch size, without memory; of a split segment the tensor-parallel rank with the largest part is planned. Where the
fabric's devices are processors like this one, every operator is measured here (times, inner workspaces, true sizes of results); elsewhere times are
the roofline's and workspaces are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx

from ...capture.precision import trace_job
from ...capture.work import work_of
from ...cost import Cost
from ...drive.training.stage_steps import SegmentGraph
from ...errors import Unsupported
from ...fabric.fabric import Device
from ...graph.step_graph import StepGraph
from ...job import Training
from ...plan.plan import Segment, TrainingLayout
from ...run.steps.forward_graph import ForwardGraph, from_traced
from ...run.train.segment_step import TracedSegment, same_calls, trace_segment
from ...run.train.segments import RankModule, build_rank_module, example_tensors
from .choices import with_variants
from .costs import StepCosts, costs_file, measure_step

__all__ = ["StageSource"]


@dataclass
class StageSource:
    """A `StepSource`. `device`: of the fabric; `costs`: file of measured costs (default: the user's cache)."""

    job: Training
    device: Device
    cost: Cost
    costs: Path | None = None
    _models: dict[int, tuple[Any, ForwardGraph]] = field(default_factory=dict)
    _found: dict[tuple[object, ...], SegmentGraph] = field(default_factory=dict)
    _ranks: dict[int, RankModule] = field(default_factory=dict)  # of the layout that was asked about last
    _layout: TrainingLayout | None = None

    def __call__(self, layout: TrainingLayout, key: str) -> SegmentGraph:
        """Raises: Unsupported where the segment cannot be run as a planned step, CaptureError where the model cannot be traced."""
        s = next(s for s in layout.segments if s.key == key)
        asked = (layout.microbatch_size, layout.tensor, s.nodes, s.reads, s.writes, s.split, s.gathers, s.sequence, s.shares)
        if asked not in self._found:
            self._found[asked] = self._graph(layout, s)
        return self._found[asked]

    def _graph(self, layout: TrainingLayout, segment: Segment) -> SegmentGraph:
        shares = segment.shares or (1,)
        parts = [shares.index(max(shares)), *(shares.index(x) for x in {*shares} if x < max(shares))]
        found, *others = (self._traced(layout, segment, part) for part in parts)
        if any(not same_calls(x, found) for x in others):
            raise Unsupported("tensor-parallel ranks of unequal shares make other calls", where=f"segment {segment.key}", hint="equal shares")
        if self.device.kind == "cpu":
            costs = StepCosts(self.costs or costs_file())
            plain = measure_step(found.graph_module, found.graph, costs=costs)
            graph = with_variants(found, plain, costs=costs, workspaces_only=True)
        else:
            plain = graph = self._priced(found.graph_module, found.graph)
        number = {n.name: i for i, n in enumerate(graph.nodes)}

        def moved(nodes: Sequence[int]) -> tuple[int, ...]:
            return tuple(number[plain.nodes[x].name] if x >= 0 else -1 for x in nodes)

        (handed,) = moved([found.handed])
        return SegmentGraph(
            graph=graph, reads=moved(found.reads), writes=moved(found.writes), gradients=moved(found.gradients), handed=handed, plain=plain,
        )  # fmt: skip

    def _traced(self, layout: TrainingLayout, segment: Segment, part: int) -> TracedSegment:
        traced, graph = self._model(layout.microbatch_size)
        at = layout.placement[0][segment.stage] if layout.placement else segment.stage
        rank = layout.rank(at, 0, part)
        if self._layout is not layout:
            self._layout, self._ranks = layout, {}
        if rank not in self._ranks:
            whole = msgspec.structs.replace(layout, zero_level=0)  # calls are the same; a micro-batch sees whole weights
            with traced.mode:
                self._ranks[rank] = build_rank_module(
                    graph, whole, rank, traced.parameters, traced.buffers, device=torch.device("cpu"), gradient_bytes={},
                    precision=self.job.asked.autocast, counted=False,
                )
        module = self._ranks[rank].segments[segment.key]
        return trace_segment(module, *example_tensors(graph, layout, segment, module.inputs, part), module.constants)

    def _model(self, batch: int) -> tuple[Any, ForwardGraph]:
        if batch not in self._models:
            traced = trace_job(self.job, batch_size=batch)
            if traced.method == "opaque":
                raise Unsupported("the model cannot be traced: its stages cannot be planned as steps", where=self.job.model)
            self._models[batch] = traced, from_traced(traced)
        return self._models[batch]

    def _priced(self, module: fx.GraphModule, graph: StepGraph) -> StepGraph:
        calls = {n.name: n for n in module.graph.nodes if n.op == "call_function"}

        def seconds(name: str) -> float:
            n = calls[name]
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda x: x.meta.get("val"))
            work = work_of(n.target, args, kwargs, n.meta.get("val"))
            return self.cost.roofline(work, self.device).time_s if work.calls else 0.0

        nodes = tuple(msgspec.structs.replace(n, time_s=seconds(n.name)) if n.makes or n.writes else n for n in graph.nodes)
        return msgspec.structs.replace(graph, nodes=nodes, evidence="roofline; workspaces are not counted")
