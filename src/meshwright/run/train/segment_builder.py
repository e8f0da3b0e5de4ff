"""Builds the segments of one rank: traced calls, rewritten for the rank's shards, as compiled functions of real tensors.

With tensor parallelism the calls are rewritten for this rank's shards (`sharding`), a row-parallel linear leaves its bias out, and the segment that
reads the completed sum adds it. The rewritten calls are run on shapes alone, and each result must be the original's with the split dimension divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...capture.precision import casting
from ...capture.regions import REGION, run_region
from ...errors import Unsupported
from ...plan.context import layout_exchanges
from ...plan.experts import COUNTS, SLOTS
from ...plan.forward_again import run_again
from ...plan.plan import ParamShard, Segment, TrainingLayout, ValueInfo, ValueSplit
from ...plan.shards import expert_shards, local_value, sequence_values
from ...plan.vocabulary import base_node
from ..context.local import CONTEXT, Positions
from ..recording.module_clock import ModuleClock, ModuleMarks
from ..steps.forward_graph import OPAQUE, ForwardGraph, ForwardNode, decode_argument, resolve
from ..steps.replay import Replays
from ..tensor.sharding import PARTIAL, Member, Shard, check_gradients, local_shape, propagate
from ..tensor.vocabulary import FUNCTIONS, function_of
from .dropout import Draws, RandomPlace, draw_function, draws_bits, keep_mask, random_places, traced_mask
from .loss_counts import Awaited
from .loss_terms import LossTerm, counted_call
from .segment_module import SegmentModule
from .segment_step import planned_segment
from .sharded_state import ParameterGroup, ParameterShard

__all__ = ["SegmentBuilder", "example_tensors", "is_random"]


def example_tensors(
    graph: ForwardGraph, layout: TrainingLayout, segment: Segment, inputs: Sequence[int], part: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors without data, as one micro-batch brings them: what a segment reads on tensor index `part`, and the example inputs it takes."""
    value = {v.name: v if v.name in segment.gathers else local_value(v, part, layout.tensor) for v in layout.values}

    def empty(shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    return [empty(value[v].shape, value[v].dtype) for v in segment.reads], [empty(graph.inputs[i].shape, graph.inputs[i].dtype) for i in inputs]


def _shard(how: ParamShard | ValueSplit) -> Shard:
    return Shard(how.axis if isinstance(how, ParamShard) else how.dim, how.blocks, how.groups, how.mixed)


class SegmentBuilder:
    """Of one rank; `segment` makes one after the other. `terms`: of the loss, which the segments divide by `divisors`."""

    def __init__(
        self, graph: ForwardGraph, layout: TrainingLayout, tensor_index: int, held: Mapping[str, ParameterShard],
        buffers: Mapping[str, torch.Tensor], device: torch.device, opaque: Callable[..., Any] | None, clock: ModuleClock | None,
        groups: Mapping[str, ParameterGroup], precision: str, terms: Mapping[str, LossTerm], positions: Positions | None = None,
    ) -> None:  # fmt: skip
        self.positions = positions
        self.clock, self.groups, self.precision, self.terms = clock, groups, precision, terms
        self.divisors: dict[str, torch.Tensor] = {}  # of the terms that its segments divide by counts
        self.awaited = Awaited()  # until these are known
        self.run_again = run_again(layout)
        self.graph, self.layout, self.held, self.buffers, self.device, self.opaque = graph, layout, held, buffers, device, opaque
        self.tensor_index = tensor_index
        self.places = random_places(graph if positions is None else positions.traced)
        self.draws = Draws()
        self.value: dict[str, ValueInfo] = {v.name: v for v in layout.values}
        self.along = sequence_values(layout)
        self.shapes: dict[str, tuple[int, ...]] = {f"input:{i}": x.shape for i, x in enumerate(graph.inputs)}
        self.shapes |= {f"param:{p.name}": p.full_shape for p in held.values()}
        for s in expert_shards(layout):  # of them tensor indices divide what a replica has
            if s.param in held:  # by this stage
                self.shapes[f"param:{s.param}"] = local_shape(self.shapes[f"param:{s.param}"], Shard(0), layout.expert)
        self.shapes |= {f"buffer:{n}": tuple(b.shape) for n, b in buffers.items()} | {f"constant:{n}": c.shape for n, c in graph.constants.items()}
        for n in graph.nodes:
            if not n.many and n.outputs[0] is not None:
                self.shapes[n.name] = n.outputs[0].shape
        self.exchanged = {x.target: self.value[x.target] for x in layout_exchanges(layout)}  # no call makes them
        self.shapes |= {name: v.shape for name, v in self.exchanged.items()}
        self.differentiable = {v.name: v.differentiable for v in layout.values}
        self.constants = {n: c.tensor(device) for n, c in graph.constants.items()}

    def segment(self, segment: Segment) -> SegmentModule:
        nodes: Sequence[ForwardNode] = [self.graph.by_name[n] for n in segment.nodes]
        states: Mapping[str, Any] = {}
        member = self.member(segment)
        if segment.split:
            states = {f"param:{p.name}": _shard(p.shard) for p in self.held.values() if p.shard is not None}
            states |= {v: _shard(split) for v in segment.reads if v not in segment.gathers and (split := self.value[v].split) is not None}
            nodes, states = propagate(nodes, states, self.shapes, member)
            self.verify(segment, nodes, states, member)
        fixed = self.fixed(nodes, segment)
        replays = Replays(segment.computed_again())
        function = self.compile(segment, nodes, fixed, states, member, replays)
        values = [self.tensor(v) for v in fixed if not v.startswith("input:")]
        made = SegmentModule(
            key=segment.key,
            function=function,
            reads=segment.reads,
            writes=segment.writes,
            inputs=tuple(int(v[6:]) for v in fixed if v.startswith("input:")),
            constants=tuple(values),
            differentiable=tuple(self.differentiable.get(v, True) for v in segment.reads),
            random=any(is_random(n) and n.name not in self.places for n in nodes),
            draws=self.draws if any(n.name in self.places for n in nodes) else None,
            split=segment.split,
            twice=self.layout.split_backward,
            sum_grads=frozenset(segment.sum_grads) if segment.split else frozenset(),
            sum_writes=frozenset(segment.sum_writes) if segment.split else frozenset(),
            gathers=frozenset(segment.gathers),
            replays=replays,
        )
        if segment.step is None:
            return made
        return planned_segment(made, segment, *example_tensors(self.graph, self.layout, segment, made.inputs, self.tensor_index), self.whole(values))

    def whole(self, constants: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As they are while the segment runs: parameters that data replicas divide hold nothing in between."""
        shape = {id(p.tensor): shape for g in self.groups.values() for p, _, shape in g.places}
        return [torch.empty(shape[id(x)], dtype=x.dtype, device="meta") if id(x) in shape else x for x in constants]

    def member(self, segment: Segment) -> Member:
        return Member(self.tensor_index, segment.shares or (1,) * self.layout.tensor)

    def fixed(self, nodes: Sequence[ForwardNode], segment: Segment) -> list[str]:
        """Inputs first, then parameters, buffers and constants, each once."""
        used = dict.fromkeys(v for n in nodes for v in n.inputs if ":" in v)
        used |= dict.fromkeys(f"param:{b.bias}" for b in self.biases(segment))
        used |= dict.fromkeys(f"count:{n}" for n in segment.nodes if n in self.divisors)
        return [v for v in used if v.startswith("input:")] + [v for v in used if not v.startswith("input:")]

    def biases(self, segment: Segment) -> Sequence[Any]:
        return segment.row_biases if self.layout.tensor > 1 else ()

    def tensor(self, name: str) -> torch.Tensor:
        kind, _, rest = name.partition(":")
        if kind == "param":
            if rest not in self.held:
                raise Unsupported(
                    f"parameter {rest!r} is used by a segment of a stage that does not hold it",
                    hint="the plan is damaged: make it again",
                )  # fmt: skip
            return self.held[rest].tensor
        return {"buffer": self.buffers, "count": self.divisors}.get(kind, self.constants)[rest]

    def compile(
        self, segment: Segment, nodes: Sequence[ForwardNode], fixed: Sequence[str], states: Mapping[str, Any], member: Member, replays: Replays
    ) -> Callable[..., Any]:
        """Python source of the segment, by torch.fx: temporaries are freed after their last use."""
        graph = fx.Graph()
        known: dict[str, fx.Node] = {}
        for i, name in enumerate((*segment.reads, *fixed)):
            known[name] = graph.placeholder(f"a{i}")
        for bias in self.biases(segment):
            reader = next((n.name for n in nodes if n.name in replays.region and bias.value in n.inputs), None)
            add = replays.wrap(reader, torch.ops.aten.add.Tensor) if reader else torch.ops.aten.add.Tensor
            own = known[f"param:{bias.bias}"]
            if self.precision != "fp32":  # autocast would have cast it inside the operator that makes the value
                own = graph.call_function(torch.ops.aten.to.dtype, (own, getattr(torch, self.value[bias.value].dtype)))
            known[bias.value] = graph.call_function(add, (known[bias.value], own))
        modules = ModuleMarks(self.clock, self.graph.modules, segment.key, graph)
        for node in nodes:
            modules.before(node)
            missing = [v for v in node.inputs if v not in known]
            if missing:
                raise Unsupported(f"segment {segment.key!r} needs {missing[0]!r}, which it neither reads nor makes", where=f"node {node.name}")
            target = self.opaque if node.target == OPAQUE else run_region if node.target == REGION else _called(node.target)
            if target is None:
                raise Unsupported("the model could not be traced and no function was given to run it")
            if node.name in self.places:
                target = self.drawing(node, target, states.get(node.inputs[0]), member, replays)
            if node.name in replays.region:
                target = replays.wrap(node.name, target)
            if node.target.split(".")[1:2] and node.target.split(".")[1].endswith("_") and node.inputs and node.inputs[0] in segment.reads:
                known[node.inputs[0]] = graph.call_function(torch.ops.aten.clone.default, (known[node.inputs[0]],))  # what came in stays as it came
            args = tuple(decode_argument(a, known.__getitem__, self.device) for a in node.args)
            kwargs = {k: decode_argument(v, known.__getitem__, self.device) for k, v in node.kwargs.items()}
            divisor, divided = known.get(f"count:{node.name}"), False
            if divisor is not None:
                divisor = graph.call_function(self.awaited.function(), (divisor,))
                args, kwargs, divided = counted_call(self.terms[node.name], node, args, kwargs, divisor)
            known[node.name] = graph.call_function(target, args, kwargs)
            if divided:
                known[node.name] = graph.call_function(torch.ops.aten.div.Tensor, (known[node.name], divisor))
            modules.after(node, known[node.name])
            if self.clock is not None and node.target in (COUNTS, SLOTS):
                self.counted(segment.key, graph, node, target, args, known)
        modules.end()
        graph.output(tuple(known[w] for w in segment.writes))
        module = fx.GraphModule(torch.nn.Module(), graph)
        function: Callable[..., Any] = module.forward
        if self.precision == "fp32":
            return function

        def cast(*values: Any) -> Any:
            with casting(self.precision, self.device.type):
                return function(*values)

        return cast

    def counted(
        self, segment: str, graph: fx.Graph, node: ForwardNode, target: Callable[..., Any], args: Sequence[Any], known: Mapping[str, fx.Node]
    ) -> None:
        """Tells the clock how many tokens chose every expert of a layer: of those that other ranks have too, and of copies as of their experts."""
        if node.target == COUNTS and self.graph.by_name.get(node.inputs[0], node).target == SLOTS:
            return
        index = known[node.inputs[0]]
        if node.target == SLOTS:
            whole = graph.call_function(_called(COUNTS), (index, len(args[1]), 1 << 62))
        else:
            whole = known[node.name] if len(args) < 4 else graph.call_function(target, args[:3])
        assert self.clock is not None
        count = self.clock.counted(self.graph.modules.get(base_node(node.name), node.name))

        def first(rows: torch.Tensor, choices: torch.Tensor) -> None:  # a second forward pass, under autograd, has the same rows
            if not torch.is_grad_enabled():
                count(rows, choices)

        graph.call_function(first if segment in self.run_again else count, (whole, index))

    def drawing(self, node: ForwardNode, target: Callable[..., Any], state: Any, member: Member, replays: Replays) -> Callable[..., Any]:
        """The call with the serial run's bits for this rank's part of what it draws for."""

        value = node.inputs[0]
        held = self.positions.ranges(value) if self.positions is not None else None
        whole = self.positions.whole[value] if held is not None and self.positions is not None else self.shapes[value]

        def ranges(shape: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
            split = state if isinstance(state, Shard) else None
            found = [member.ranges(d, split) if split is not None and i == split.dim else ((0, d),) for i, d in enumerate(shape)]
            if held is None:
                return found
            return [mine if mine != ((0, d),) else other for mine, other, d in zip(held, found, shape, strict=True)]

        def mask(draws: Draws, place: RandomPlace, keep: float, shape: Sequence[int], parts: Any, device: torch.device) -> torch.Tensor:
            if draws.traced is not None:
                return traced_mask(draws.traced, place, keep, shape, parts)
            # as they are now: backward may draw again when another micro-batch has had its turn
            return drawn(replace(draws), place, keep, shape, parts, device)

        drawn = replays.whole(keep_mask)
        found: Callable[..., Any] = draw_function(node, target, self.places[node.name], self.draws, whole, ranges, mask)
        return found

    def verify(self, segment: Segment, nodes: Sequence[ForwardNode], states: Mapping[str, Any], member: Member) -> None:
        """Run the rewritten calls on shapes alone; every result must be the original's with the sharded dimension divided."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        reads = [v for v in segment.reads if self.differentiable.get(v, True)]
        whole = [f"param:{p}" for p in segment.params if f"param:{p}" not in states and self.held[p].gradient]
        biases = {b.bias for b in segment.row_biases}
        partial = {p.param for p in self.layout.partial_gradients if len(p.group_of(self.tensor_index)) == self.layout.tensor}
        if segment.sequence and (missing := [b for b in sorted(biases) if self.held[b].gradient and b not in partial]):
            raise Unsupported(
                f"the gradient of {missing[0]!r} is a partial sum over the tensor-parallel ranks, and the layout does not add it up",
                where=f"segment {segment.key}",
            )  # fmt: skip
        writes = [v for v in segment.writes if self.differentiable.get(v, True)]
        summed = (*segment.sum_grads, *(p for p in whole if p[6:] in partial))
        check_gradients(nodes, states, reads, [p for p in whole if p[6:] not in biases], writes, summed)
        for value in segment.writes:
            state, split = states.get(value), self.value[value].split
            scattered = state is PARTIAL and value in self.along
            if (state is PARTIAL) != (value in segment.sum_writes) or (
                not scattered and (_shard(split) if split else None) != (None if state is PARTIAL else state)
            ):
                raise Unsupported(f"segment {segment.key!r} leaves {value!r} as {state}, the layout says otherwise", where=f"node {value}")
        with FakeTensorMode() as mode, casting(self.precision):
            known: dict[str, Any] = {}

            def fake(name: str) -> Any:
                if name not in known:
                    shape = local_shape(self.shapes[name], states.get(name), member)
                    known[name] = torch.empty(shape, dtype=self.dtype(name))
                return known[name]

            for node in nodes:
                try:
                    args = [decode_argument(a, fake, torch.device("cpu")) for a in node.args]
                    kwargs = {k: decode_argument(v, fake, torch.device("cpu")) for k, v in node.kwargs.items()}
                    known[node.name] = _called(node.target)(*args, **kwargs)
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    raise Unsupported(f"rewritten call {node.target} does not run: {str(error).splitlines()[0]}", where=f"node {node.name}") from None
                self.compare(node, known[node.name], states.get(node.name), member)
            del mode

    def compare(self, node: ForwardNode, result: Any, state: Any, member: Member) -> None:
        for i, (info, got) in enumerate(zip(node.outputs, result if node.many else (result,), strict=True)):
            if info is None:
                continue
            own = state[i] if isinstance(state, tuple) else state
            expected = local_shape(info.shape, own, member)
            if tuple(got.shape) != expected:
                raise Unsupported(f"rewritten call {node.target} gives shape {tuple(got.shape)}, expected {expected}", where=f"node {node.name}")

    def dtype(self, name: str) -> torch.dtype:
        kind, _, rest = name.partition(":")
        if kind == "input":
            return getattr(torch, self.graph.inputs[int(rest)].dtype)
        if kind in ("param", "buffer", "constant") and ":" in name:
            return self.tensor(name).dtype
        if name in self.exchanged:
            return getattr(torch, self.exchanged[name].dtype)
        info = self.graph.by_name[name].outputs[0]
        if info is not None and not info.dtype:  # a rank's part of a parameter or a buffer
            return self.dtype(self.graph.by_name[name].inputs[0])
        return getattr(torch, info.dtype) if info else torch.float32


def _called(target: str) -> Callable[..., Any]:
    return CONTEXT.get(target) or function_of(target)


def is_random(node: ForwardNode) -> bool:
    """Whether a call draws random numbers, or may: a module that runs as it is."""
    if node.target == "getitem" or node.target in FUNCTIONS or node.target in CONTEXT:
        return False
    if node.target in (OPAQUE, REGION) or draws_bits(node):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(resolve(node.target), "tags", ()) and not node.target.startswith(
        ("aten.dropout", "aten.native_dropout", "aten.scaled_dot_product_attention")
    )
