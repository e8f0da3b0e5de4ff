"""A segment as a planned step: its forward-and-backward graph of one micro-batch, and the segment run by a plan of it.

`trace_segment` runs the segment's calls and autograd's backward through them once on fakes and notes what is called; the same kernels in the same
order are what autograd would run, so results are equal to the last bit. Gradients of parameters are added to their buffers right after they are made.
Dropout's bits are a function of what is computed (`dropout.traced_mask`), given as one more tensor; other random calls that run again find the
generator as it was (`step`).
`PlannedSegment` takes the place of a `SegmentModule`: what a micro-batch holds between its passes is exactly what the plan says. Of weights that are
gathered for each pass, and reads that are gathered again for backward, references are held (`sharded_state`, `segment_module`).
Cost: tracing runs every call on fakes, some milliseconds each.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import fx

from ...capture.diagnose import quiet
from ...capture.split_convolutions import split_convolutions
from ...capture.step import step_graph_of
from ...capture.torch_private import fake_like, fake_mode, make_fx_graph
from ...errors import Unsupported
from ...graph.step_graph import StepGraph, plain_target
from ...plan.plan import Segment, SegmentStep
from ..steps.stand_in import StandIn, as_they_are, opened
from ..steps.step import StepRunner
from ..steps.variants import register
from .segment_module import SegmentModule, gathered_later

__all__ = ["PlannedSegment", "TracedSegment", "planned_segment", "same_calls", "trace_segment"]


def handed(*values: Any) -> tuple[Any, ...]:
    """What the segment writes, given away when its forward pass ends."""
    return values


@dataclass(frozen=True, kw_only=True)
class TracedSegment:
    """`graph_module(reads, inputs, constants[, draws], gradient buffers, gradients of writes)`, its graph without times, and its border by node
    number.

    `leads`: positions of the writes that carry a gradient.
    """

    graph_module: fx.GraphModule
    graph: StepGraph
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    gradients: tuple[int, ...]
    handed: int
    leads: tuple[int, ...]

    @property
    def step_graph(self) -> StepGraph:
        return self.graph


def trained(segment: SegmentModule) -> list[torch.nn.Parameter]:
    """Parameters whose gradients the segment's backward adds up, in the order of its constants."""
    return [x for x in segment.constants if isinstance(x, torch.nn.Parameter) and x.requires_grad]


def trace_segment(
    segment: SegmentModule, reads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]
) -> TracedSegment:
    """`reads`, `inputs`: tensors (real or fake) of the sizes and dtypes that one micro-batch brings; `constants`: of the segment's constants.

    Raises: Unsupported for a segment whose calls cannot be traced.
    """
    where = f"segment {segment.key}"
    mode, leaves = fake_mode(), trained(segment)
    given = [*reads, *inputs, *constants]
    values = [fake_like(mode, x) for x in given]
    differentiable = [i for i, d in enumerate(segment.differentiable) if d]
    positions = [len(reads) + len(inputs) + i for i, x in enumerate(segment.constants) if any(x is p for p in leaves)]
    for i in (*differentiable, *positions):
        values[i].requires_grad_()
    slots = [fake_like(mode, values[i]) for i in positions]
    draws = [] if segment.draws is None else [fake_like(mode, segment.draws.tensor())]

    def run(values: Sequence[Any], drawn: Sequence[torch.Tensor]) -> Any:
        if segment.draws is None:
            return segment.function(*values)
        (segment.draws.traced,) = drawn
        try:
            return segment.function(*values)
        finally:
            segment.draws.traced = None

    with quiet(), mode:
        outputs = run(values, draws)
        leads = tuple(i for i, y in enumerate(outputs) if y.requires_grad)
        tangents = [torch.empty_like(outputs[i]) for i in leads]

    def step(*everything: torch.Tensor) -> list[Any]:
        outputs = list(run(everything[: len(given)], everything[len(given) : len(given) + len(draws)]))
        wanted = [everything[i] for i in (*differentiable, *positions)]
        arriving = everything[len(given) + len(draws) + len(slots) :]
        found = torch.autograd.grad([outputs[i] for i in leads], wanted, arriving, allow_unused=True) if leads and wanted else [None] * len(wanted)
        return [*outputs, *found]

    try:
        with quiet(), mode:
            graph = make_fx_graph(step, [*values, *draws, *slots, *tangents])
            split_convolutions(graph)
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
    start = reads + inputs + _constants(segment)
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
    if i == len(segment.constants) and segment.draws is not None:
        return "input:draws"
    if i < len(segment.constants):
        return f"{'param' if isinstance(segment.constants[i], torch.nn.Parameter) else 'buffer'}:{i}"
    i -= _constants(segment)
    return f"buffer:gradient {i}" if i < slots else f"tangent:{i - slots}"


def _constants(segment: SegmentModule) -> int:
    """Placeholders between the inputs and the gradient buffers."""
    return len(segment.constants) + (segment.draws is not None)


@dataclass
class PlannedSegment(SegmentModule):
    """`runner` runs the plan; `step` says where the border is in its graph."""

    runner: StepRunner | None = None
    step: SegmentStep | None = None
    leads: tuple[int, ...] = ()  # positions of the writes that carry a gradient
    _held: dict[int, tuple[list[Any], dict[int, Any], dict[int, torch.Tensor]]] = field(default_factory=dict)
    _left_over: dict[int, tuple[list[Any], dict[int, Any]]] = field(default_factory=dict)

    def forward(
        self, microbatch: int, reads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], again: Container[int] = ()
    ) -> list[torch.Tensor]:
        """As `SegmentModule.forward`."""
        assert self.runner is not None and self.step is not None
        values: list[Any] = [None] * len(self.runner.graph.nodes)
        read = [x.contiguous() for x in reads]
        later: dict[int, torch.Tensor] = {}
        refer = gathered_later(read, again, later, self.refer)
        arguments = [*read, *inputs, *(x.detach() for x in self.constants), *([] if self.draws is None else [self.draws.tensor()])]
        for i, x in zip(self.runner.placeholders, arguments, strict=False):
            values[i] = x
        x = None
        arguments.clear()
        read.clear()
        states: dict[int, Any] = {}
        self.runner.run_actions(values, states, 0, self.step.plan.boundary)
        outputs, values[self.step.handed] = list(values[self.step.handed]), None
        for node, name in zip(self.step.reads, self.reads, strict=True):
            if name not in self.step.kept:
                values[node] = None
        if self.meter is not None:
            self.meter(self.key, _held_bytes(self.step, values))
        self._held[microbatch] = [_each(v, refer) for v in values] if refer is not as_they_are else values, states, later
        return outputs

    def backward(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None], again: Mapping[int, torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        """As `SegmentModule.backward`."""
        assert self.step is not None
        values, states = self._arrive(microbatch, gradients, again or {})
        self._add(values, states, self.step.plan.boundary)
        return {i: values[n] for i, n in enumerate(self.step.gradients) if n >= 0}

    def _arrive(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None], again: Mapping[int, torch.Tensor]
    ) -> tuple[list[Any], dict[int, Any]]:
        """What is held of a micro-batch, with the gradients of the writes."""
        assert self.runner is not None
        values, states, later = self._held.pop(microbatch)
        later.update({i: x.contiguous() for i, x in again.items()})
        values = [_each(v, opened) for v in values]
        later.clear()
        fakes = self.runner.module.graph.find_nodes(op="placeholder")
        start = len(self.reads) + len(self.inputs) + _constants(self) + len(trained(self))
        for j, k in enumerate(self.leads):
            values[self.runner.placeholders[start + j]] = _arrived(gradients[k], fakes[start + j].meta["val"])
        return values, states

    def _add(self, values: list[Any], states: dict[int, Any], first: int) -> None:
        """Runs the actions from `first` to the last, which add to the gradients of parameters."""
        assert self.runner is not None
        start = len(self.reads) + len(self.inputs) + _constants(self)
        slots = [p.grad for p in trained(self)]
        for i, x in zip(self.runner.placeholders[start : start + len(slots)], slots, strict=True):
            values[i] = x
        self.runner.run_actions(values, states, first, len(self.runner.actions))

    def backward_input(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None], again: Mapping[int, torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        """As `SegmentModule.backward_input`. Raises: Unsupported where the plan's backward is one."""
        assert self.runner is not None and self.step is not None
        if self.step.weights < 0:
            raise Unsupported("is planned with whole backward passes", where=f"segment {self.key}", hint="a schedule with whole B, or plan again")
        values, states = self._arrive(microbatch, gradients, again or {})
        self.runner.run_actions(values, states, self.step.plan.boundary, self.step.weights)
        found = {i: values[n] for i, n in enumerate(self.step.gradients) if n >= 0}
        read = {x for a in self.step.plan.actions[self.step.weights :] for x in self.step.graph.nodes[a.node].inputs}
        self._left_over[microbatch] = [_each(v, self.refer) if i in read else None for i, v in enumerate(values)], states
        return found

    def backward_weight(self, microbatch: int) -> None:
        """As `SegmentModule.backward_weight`."""
        assert self.step is not None
        values, states = self._left_over.pop(microbatch)
        self._add([_each(v, opened) for v in values], states, self.step.weights)

    def forget(self) -> None:
        self._held.clear()
        self._left_over.clear()


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """A node's result with `change` made to each of its tensors, or to what is held instead of one."""
    if isinstance(value, (tuple, list)):
        return [_each(x, change) for x in value]
    return change(value) if isinstance(value, (torch.Tensor, StandIn)) else value


def _arrived(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A gradient in the form in which it was traced: autograd takes the loss's seed in the loss's own precision, and nothing for zero."""
    if gradient is None:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    gradient = gradient if gradient.dtype == like.dtype else gradient.to(like.dtype)
    if gradient.stride() == like.stride():
        return gradient
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(gradient)


def _held_bytes(step: SegmentStep, values: Sequence[Any]) -> int:
    """Bytes of results that are held for backward, those in the storages of border values left out."""
    border = {s for x in (*step.reads, *step.writes) for s in step.graph.nodes[x].storages}
    made = {s for i, v in enumerate(values) if v is not None for s in step.graph.nodes[i].storages if step.graph.storages[s].kind == "made"}
    return sum(step.graph.storages[s].size_bytes for s in made - border)


def planned_segment(
    module: SegmentModule, segment: Segment, reads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]
) -> PlannedSegment:
    """`module` run by the plan that `segment.step` holds. Raises: Unsupported when it is not the segment that was planned; as `trace_segment`."""
    assert segment.step is not None
    found = trace_segment(module, reads, inputs, constants)
    step = segment.step
    if not same_calls(found, step):
        raise Unsupported(
            f"its {len(found.graph.nodes)} operators are not the {len(step.graph.nodes)} that were planned", where=f"segment {segment.key}",
            hint="make the plan again, with this torch and on this kind of device",
        )  # fmt: skip
    register(step.graph)
    own = {f.name: getattr(module, f.name) for f in fields(SegmentModule)}
    return PlannedSegment(**own, runner=StepRunner(found.graph_module, step.graph, step.plan), step=step, leads=found.leads)


def same_calls(found: TracedSegment, step: SegmentStep | TracedSegment) -> bool:
    """Whether a plan of one is one of the other: what is called on what, and the border. Where another implementation has taken an operator's place,
    only which operator it is."""
    other = {n.name: n for n in found.graph.nodes}
    if len(other) != len(step.graph.nodes) or len(found.graph.storages) != len(step.graph.storages) or _border(found) != _border(step):
        return False
    for n in step.graph.nodes:
        o = other.get(n.name)
        if o is None or o.phase != n.phase or plain_target(o.target) != plain_target(n.target):
            return False
        plain = o.target == n.target
        if plain and (_names(step.graph, n.inputs), n.storages, n.makes, n.writes) != (_names(found.graph, o.inputs), o.storages, o.makes, o.writes):
            return False
    return True


def _border(found: TracedSegment | SegmentStep) -> tuple[object, ...]:
    graph = found.graph
    first = sum(n.phase == "forward" for n in graph.nodes)
    gradients = tuple("" if x < 0 else graph.nodes[x].name for x in found.gradients)
    return first, *(_names(graph, x) for x in (graph.results, found.reads, found.writes, (found.handed,))), gradients


def _names(graph: StepGraph, nodes: Sequence[int]) -> tuple[str, ...]:
    return tuple(graph.nodes[x].name for x in nodes)
