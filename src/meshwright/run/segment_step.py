"""A segment as a planned step: its forward-and-backward graph of one micro-batch, and the segment run by a plan of it.

`trace_segment` runs the segment's calls and autograd's backward through them once on fakes and notes what is called; the same kernels in the same
order are what autograd would run, so results are equal to the last bit. Gradients of parameters are added to their buffers right after they are made.
`PlannedSegment` takes the place of a `SegmentModule`: what a micro-batch holds between its passes is exactly what the plan says.
Cost: tracing runs every call on fakes, some milliseconds each.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import fx

from ..capture.diagnose import quiet
from ..capture.step import step_graph_of
from ..capture.torch_private import fake_like, fake_mode, make_fx_graph
from ..errors import Unsupported
from ..plan import Segment, SegmentStep
from ..step_graph import StepGraph
from .segment_module import SegmentModule
from .step import StepRunner

__all__ = ["PlannedSegment", "TracedSegment", "planned_segment", "trace_segment"]


def handed(*values: Any) -> tuple[Any, ...]:
    """What the segment writes, given away when its forward pass ends."""
    return values


@dataclass(frozen=True, kw_only=True)
class TracedSegment:
    """`graph_module(reads, inputs, constants, gradient buffers, gradients of writes)`, its graph without times, and its border by node number.

    `leads`: positions of the writes that carry a gradient.
    """

    graph_module: fx.GraphModule
    graph: StepGraph
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    gradients: tuple[int, ...]
    handed: int
    leads: tuple[int, ...]


def trained(segment: SegmentModule) -> list[torch.nn.Parameter]:
    """Parameters whose gradients the segment's backward adds up, in the order of its constants."""
    return [x for x in segment.constants if isinstance(x, torch.nn.Parameter) and x.requires_grad]


def trace_segment(segment: SegmentModule, reads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> TracedSegment:
    """`reads`, `inputs`: tensors (real or fake) of the sizes and dtypes that one micro-batch brings.

    Raises: Unsupported for a segment that is split, draws random numbers, or whose calls cannot be traced.
    """
    where = f"segment {segment.key}"
    if segment.split or segment.gathers:
        raise Unsupported("is split over tensor-parallel ranks: only whole segments are planned as steps", where=where, hint="--tp 1")
    if segment.random or segment.draws:
        raise Unsupported("draws random numbers (dropout): it cannot be planned as a step", where=where, hint="--recompute auto plans it by rules")
    mode, leaves = fake_mode(), trained(segment)
    given = [*reads, *inputs, *segment.constants]
    values = [fake_like(mode, x) for x in given]
    differentiable = [i for i, d in enumerate(segment.differentiable) if d]
    positions = [i for i, x in enumerate(given) if any(x is p for p in leaves)]
    for i in (*differentiable, *positions):
        values[i].requires_grad_()
    slots = [fake_like(mode, p) for p in leaves]
    with quiet(), mode:
        outputs = segment.function(*values)
        leads = tuple(i for i, y in enumerate(outputs) if y.requires_grad)
        tangents = [torch.empty_like(outputs[i]) for i in leads]

    def step(*everything: torch.Tensor) -> list[Any]:
        outputs = list(segment.function(*everything[: len(given)]))
        wanted = [everything[i] for i in (*differentiable, *positions)]
        arriving = everything[len(given) + len(slots) :]
        found = torch.autograd.grad([outputs[i] for i in leads], wanted, arriving, allow_unused=True) if leads and wanted else [None] * len(wanted)
        return [*outputs, *found]

    try:
        with quiet(), mode:
            graph = make_fx_graph(step, [*values, *slots, *tangents])
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise Unsupported(f"cannot be traced: {type(error).__name__}: {reason}", where=where) from error
    return _described(segment, graph, len(reads), len(inputs), differentiable, positions, leads)


def _described(
    segment: SegmentModule, graph: fx.Graph, reads: int, inputs: int, differentiable: Sequence[int], positions: Sequence[int], leads: tuple[int, ...]
) -> TracedSegment:  # fmt: skip
    """The traced calls told apart into forward and backward, with the end of forward and the sums of gradients written in."""
    places, slots = graph.find_nodes(op="placeholder"), len(positions)
    output = graph.output_node()
    results = list(output.args[0])
    writes, grads = results[: len(segment.writes)], results[len(segment.writes) :]
    order = {n: i for i, n in enumerate(graph.nodes)}
    last = max(writes, key=order.__getitem__, default=places[-1])
    last = last if last.op == "call_function" else places[-1]
    for n in graph.nodes:
        if n.op == "call_function":
            n.meta["partitioner_tag"] = "is_backward" if order[n] > order[last] else "is_forward"
    with graph.inserting_after(last):
        given_away = graph.call_function(handed, tuple(writes))
    given_away.meta.update(val=(), partitioner_tag="is_forward")
    start = reads + inputs + len(segment.constants)
    slot_of = dict(zip(positions, places[start : start + slots], strict=True))
    for i, g in zip(positions, grads[len(differentiable) :], strict=True):
        if g is not None:
            with graph.inserting_after(g if g.op == "call_function" and order[g] > order[last] else given_away):
                added = graph.call_function(torch.ops.aten.add_.Tensor, (slot_of[i], g))
            added.meta.update(val=slot_of[i].meta["val"], partitioner_tag="is_backward")
    handing = [given_away, *(g for g in grads[: len(differentiable)] if g is not None)]
    output.args = (handing,)
    module = fx.GraphModule(torch.nn.Module(), graph)
    names = {n: _owner(segment, i, reads, inputs, slots) for i, n in enumerate(places)}
    found = step_graph_of(module, name=segment.key, names=names)
    number = {n.name: i for i, n in enumerate(found.nodes)}
    of = dict(zip(differentiable, grads[: len(differentiable)], strict=True))
    return TracedSegment(
        graph_module=module, graph=found, reads=tuple(number[places[i].name] for i in range(reads)),
        writes=tuple(number[n.name] for n in writes), gradients=tuple(-1 if of.get(i) is None else number[of[i].name] for i in range(reads)),
        handed=number[given_away.name], leads=leads,
    )  # fmt: skip


def _owner(segment: SegmentModule, i: int, reads: int, inputs: int, slots: int) -> str:
    if i < reads:
        return f"input:{segment.reads[i]}"
    if i < reads + inputs:
        return f"input:{segment.inputs[i - reads]}"
    i -= reads + inputs
    if i < len(segment.constants):
        return f"{'param' if isinstance(segment.constants[i], torch.nn.Parameter) else 'buffer'}:{i}"
    i -= len(segment.constants)
    return f"buffer:gradient {i}" if i < slots else f"tangent:{i - slots}"


@dataclass
class PlannedSegment(SegmentModule):
    """`runner` runs the plan; `step` says where the border is in its graph."""

    runner: StepRunner | None = None
    step: SegmentStep | None = None
    leads: tuple[int, ...] = ()  # positions of the writes that carry a gradient
    _held: dict[int, tuple[list[Any], dict[int, Any]]] = field(default_factory=dict)

    def forward(
        self, microbatch: int, reads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], again: Container[int] = ()
    ) -> list[torch.Tensor]:
        """As `SegmentModule.forward`; `again` is empty, because nothing is gathered."""
        assert self.runner is not None and self.step is not None
        values: list[Any] = [None] * len(self.runner.graph.nodes)
        arguments = [*(x.contiguous() for x in reads), *inputs, *(x.detach() for x in self.constants)]
        for i, x in zip(self.runner.placeholders, arguments, strict=False):
            values[i] = x
        x = None
        arguments.clear()
        states: dict[int, Any] = {}
        self.runner.run_actions(values, states, 0, self.step.plan.boundary)
        outputs, values[self.step.handed] = list(values[self.step.handed]), None
        for node, name in zip(self.step.reads, self.reads, strict=True):
            if name not in self.step.kept:
                values[node] = None
        if self.meter is not None:
            self.meter(self.key, _held_bytes(self.step, values))
        self._held[microbatch] = values, states
        return outputs

    def backward(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None], again: Mapping[int, torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        """As `SegmentModule.backward`."""
        assert self.runner is not None and self.step is not None
        values, states = self._held.pop(microbatch)
        slots = [p.grad for p in trained(self)]
        fakes = self.runner.module.graph.find_nodes(op="placeholder")
        start = len(self.reads) + len(self.inputs) + len(self.constants)
        arriving = [_arrived(gradients[k], fakes[start + len(slots) + j].meta["val"]) for j, k in enumerate(self.leads)]
        for i, x in zip(self.runner.placeholders[start:], [*slots, *arriving], strict=True):
            values[i] = x
        arriving.clear()
        x = None
        self.runner.run_actions(values, states, self.step.plan.boundary, len(self.step.plan.actions))
        return {i: values[n] for i, n in enumerate(self.step.gradients) if n >= 0}

    def backward_input(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None], again: Mapping[int, torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        """Raises: Unsupported, always: a planned step's backward is one."""
        raise Unsupported("is run as a planned step, and its backward is split in two", where=f"segment {self.key}", hint="a schedule with whole B")

    def forget(self) -> None:
        self._held.clear()


def _arrived(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A gradient in the form in which it was traced: autograd takes the loss's seed in the loss's own precision, and nothing for zero."""
    if gradient is None:
        return torch.zeros(like.shape, dtype=like.dtype)
    gradient = gradient if gradient.dtype == like.dtype else gradient.to(like.dtype)
    return gradient if gradient.stride() == like.stride() else torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(gradient)


def _held_bytes(step: SegmentStep, values: Sequence[Any]) -> int:
    """Bytes of results that are held for backward, those in the storages of border values left out."""
    border = {s for x in (*step.reads, *step.writes) for s in step.graph.nodes[x].storages}
    made = {s for i, v in enumerate(values) if v is not None for s in step.graph.nodes[i].storages if step.graph.storages[s].kind == "made"}
    return sum(step.graph.storages[s].size_bytes for s in made - border)


def planned_segment(module: SegmentModule, segment: Segment, reads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> PlannedSegment:
    """`module` run by the plan that `segment.step` holds. Raises: Unsupported when it is not the segment that was planned; as `trace_segment`."""
    assert segment.step is not None
    found = trace_segment(module, reads, inputs)
    step = segment.step
    if _shape(found.graph) != _shape(step.graph) or (found.reads, found.writes, found.gradients, found.handed) != (
        step.reads, step.writes, step.gradients, step.handed,
    ):  # fmt: skip
        raise Unsupported(
            f"its {len(found.graph.nodes)} operators are not the {len(step.graph.nodes)} that were planned", where=f"segment {segment.key}",
            hint="make the plan again, with this torch and on this kind of device",
        )  # fmt: skip
    own = {f.name: getattr(module, f.name) for f in fields(SegmentModule)}
    return PlannedSegment(**own, runner=StepRunner(found.graph_module, step.graph, step.plan), step=step, leads=found.leads)


def _shape(graph: StepGraph) -> tuple[object, ...]:
    """Of two graphs equal exactly if one's plan is one of the other."""
    nodes = tuple((n.target, n.phase, n.inputs, n.storages, n.makes, n.writes) for n in graph.nodes)
    return nodes, graph.boundary, graph.results
