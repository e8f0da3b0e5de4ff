"""Step graphs of a layout's stages, from the model itself: what `train plan --memory` plans and `train run` runs.

The model is traced once per micro-batch size, without memory. Where the fabric's devices are processors like this one, every operator is measured
here (times, inner workspaces, true sizes of results); elsewhere times are the roofline's and workspaces are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx

from ..capture.forward import trace_forward
from ..capture.work import work_of
from ..cost import Cost
from ..drive_stage_steps import StageGraph
from ..errors import Unsupported
from ..fabric import Device
from ..job import Training
from ..plan import TrainingLayout
from ..probe.step_costs import StepCosts, costs_file, measure_step
from ..step_graph import StepGraph
from .forward_graph import ForwardGraph, from_traced
from .segment_step import trace_segment
from .segments import build_rank_module, example_tensors

__all__ = ["StageSource"]


@dataclass
class StageSource:
    """A `StepSource`. `device`: of the fabric; `costs`: file of measured costs (default: the user's cache)."""

    job: Training
    device: Device
    cost: Cost
    costs: Path | None = None
    _models: dict[int, tuple[Any, ForwardGraph]] = field(default_factory=dict)
    _found: dict[tuple[int, tuple[str, ...]], StageGraph] = field(default_factory=dict)

    def __call__(self, layout: TrainingLayout, stage: int) -> StageGraph:
        """Raises: Unsupported where the stage cannot be run as a planned step, CaptureError where the model cannot be traced."""
        (key,) = layout.stages[stage].segments
        nodes = next(s.nodes for s in layout.segments if s.key == key)
        if (layout.microbatch_size, nodes) not in self._found:
            self._found[layout.microbatch_size, nodes] = self._graph(layout, stage, key)
        return self._found[layout.microbatch_size, nodes]

    def _graph(self, layout: TrainingLayout, stage: int, key: str) -> StageGraph:
        traced, graph = self._model(layout.microbatch_size)
        at = layout.placement[0][stage] if layout.placement else stage
        with traced.mode:
            module = build_rank_module(
                graph, layout, layout.rank(at, 0, 0), traced.parameters, traced.buffers, device=torch.device("cpu"), gradient_bytes={}
            )
        segment = next(s for s in layout.segments if s.key == key)
        found = trace_segment(module.segments[key], *example_tensors(graph, layout, segment, module.segments[key].inputs))
        priced = self._measured(found.graph_module, found.graph) if self.device.kind == "cpu" else self._priced(found.graph_module, found.graph)
        return StageGraph(graph=priced, reads=found.reads, writes=found.writes, gradients=found.gradients, handed=found.handed)

    def _model(self, batch: int) -> tuple[Any, ForwardGraph]:
        if batch not in self._models:
            traced = trace_forward(self.job.model, loss=self.job.loss, batch_size=batch, seed=self.job.seed)
            if traced.method == "opaque":
                raise Unsupported("the model cannot be traced: its stages cannot be planned as steps", where=self.job.model)
            self._models[batch] = traced, from_traced(traced)
        return self._models[batch]

    def _measured(self, module: fx.GraphModule, graph: StepGraph) -> StepGraph:
        return measure_step(module, graph, costs=StepCosts(self.costs or costs_file()))

    def _priced(self, module: fx.GraphModule, graph: StepGraph) -> StepGraph:
        calls = {n.name: n for n in module.graph.nodes if n.op == "call_function"}

        def seconds(name: str) -> float:
            n = calls[name]
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda x: x.meta.get("val"))
            work = work_of(n.target, args, kwargs, n.meta.get("val"))
            return self.cost.roofline(work, self.device).time_s if work.calls else 0.0

        nodes = tuple(msgspec.structs.replace(n, time_s=seconds(n.name)) if n.makes or n.writes else n for n in graph.nodes)
        return msgspec.structs.replace(graph, nodes=nodes, evidence="roofline; workspaces are not counted")
