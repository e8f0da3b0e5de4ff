"""What one rank executes: the segments of its stage as functions of real tensors, forward and backward.

A segment runs its traced calls under autograd (`forward`), and later autograd's own backward through them (`backward`). Three things keep memory
to what autograd saves: values enter through `_Entry`, a node that hands its gradient over and does not hold the value; results leave as
gradient edges, not tensors; parameter gradients are added in place into one flat buffer by autograd itself.
The functions themselves are made by `segment_builder`. A value that was gathered along the sequence is not kept: what autograd would keep of it is
looked up in the value gathered again for the backward pass (`segment_module`).
Random calls: dropout in every form draws the bits that the serial run draws (`dropout`). Before other random calls the generator is seeded from
(seed, step, replica, micro-batch, segment, and the tensor index where the segment is split), so that a run does not depend on the order of
micro-batches; those differ from a serial run's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...capture.drawn import DrawnWeights
from ...capture.weight_files import WeightFiles
from ...errors import PlanMismatch, Unsupported
from ...plan.plan import ParamShard, TrainingLayout
from ...plan.shards import divided_parameters, part_ranges
from ...plan.sizes import gradient_names
from ..context.experts import with_exchanges
from ..context.local import Positions, local_graph
from ..recording.module_clock import ModuleClock
from ..steps.forward_graph import ForwardGraph
from ..tensor.sharding import take_part
from ..tensor.vocabulary import expand_forward
from ..tensor.whole_batch import of_whole_batch
from .changed_buffers import buffers_once
from .dropout import Draws
from .evaluation_graph import evaluation_layout
from .loss_counts import LossCounts, divisors_of
from .loss_terms import LossTerm, loss_terms
from .segment_builder import SegmentBuilder, example_tensors
from .segment_module import SegmentModule
from .sharded_state import ParameterGroup, ParameterShard, Piece, build_groups, sum_buffers

__all__ = ["RankModule", "SegmentModule", "build_rank_module", "example_tensors", "module_of_shape", "random_seed"]

TRAINED = (torch.float32, torch.float64, torch.bfloat16)


@dataclass
class RankModule:
    """Everything one rank computes with. Every trained parameter's `.grad` is a view of one of the flat `gradients` buffers."""

    segments: dict[str, SegmentModule]
    parameters: dict[str, ParameterShard]
    buffers: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]  # by the plan's buffer name: `gradients`, `gradients:<parameter>` for parameters of several stages
    loss: str  # value name of the loss
    draws: Draws = field(default_factory=Draws)  # what its dropout draws for; set before a segment runs
    groups: dict[str, ParameterGroup] = field(default_factory=dict)  # where data replicas divide training state, by group name
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # encoded gradients that replicas add up, by the plan's buffer name
    norms: dict[str, torch.Tensor] = field(default_factory=dict)  # what the ranks' sums of squares are gathered in, likewise
    positions: Positions | None = None  # its calls, where it has a part of the positions
    counts: LossCounts | None = None  # what sums in the loss are divided by, where it is not a mean over samples; set before a step
    weighted: bool = False  # micro-batches' losses count for so much, not sums inside them
    once: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by segment, buffers that every micro-batch finds as they were

    @property
    def flats(self) -> dict[str, torch.Tensor]:
        """Flat tensors of the plan's persistent buffers, by name."""
        return self.gradients | self.sums | self.norms | {name: flat for g in self.groups.values() for name, flat in g.flats.items()}

    def kept(self) -> list[tuple[ParameterShard, torch.Tensor, Piece | None]]:
        """What this rank keeps of each parameter between steps: the whole of it, or a piece."""
        pieces = [x for g in self.groups.values() if g.level == 3 for x in g.pieces]
        gathered = {p.name for g in self.groups.values() if g.level == 3 for p, _, _ in g.places}
        whole: list[tuple[ParameterShard, torch.Tensor, Piece | None]] = [
            (p, p.tensor, None) for p in self.parameters.values() if p.name not in gathered
        ]
        return whole + [(x.of, x.tensor, x) for x in pieces]

    def updated(self) -> list[tuple[ParameterShard, torch.nn.Parameter, Piece | None]]:
        """What this rank's optimizer updates."""
        if not self.groups:
            return [(p, p.tensor, None) for p in self.trained()]
        return [(x.of, x.tensor, x) for g in self.groups.values() for x in g.pieces]

    def trained(self) -> list[ParameterShard]:
        return [p for p in self.parameters.values() if p.gradient]


def build_rank_module(
    graph: ForwardGraph, layout: TrainingLayout, rank: int, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], *,
    device: torch.device, gradient_bytes: Mapping[str, int], opaque: Callable[..., Any] | None = None, clock: ModuleClock | None = None,
    precision: str = "fp32", adopt: bool = False, counted: bool = True, values: WeightFiles | DrawnWeights | None = None,
) -> RankModule:  # fmt: skip
    """The segments, shards and gradient buffers of `rank`.

    `parameters`, `buffers`: whole tensors by name, equal on all ranks. `gradient_bytes`: sizes of the plan's gradient buffers (padding included).
    `opaque` is what the one node of an untraced model calls. `clock`: is told when which module runs. `precision`: see `capture.precision`. `adopt`:
    what the rank holds whole is the given parameters and buffers themselves, which are on `device`, no copies. `counted`: losses as in one process.
    `values`: where parameters are on the meta device, the files or draws that this rank reads its part of them from.
    Raises: Unsupported when a segment cannot be split as the layout says (names the node), or a trained parameter is of no type in TRAINED;
    PlanMismatch for one that the plan does not train.
    """
    stage = layout.held(layout.coordinates(rank)[0])
    divided = divided_parameters(layout, rank)
    held: dict[str, ParameterShard] = {}
    for name in stage.params:
        if name not in parameters:
            raise Unsupported(f"the plan holds a parameter {name!r} that the model does not have", hint="make the plan again from this model")
        whole = parameters[name]
        if whole.requires_grad and name in layout.frozen:
            raise PlanMismatch(f"the plan does not train parameter {name!r}, the model does", hint="make the plan again from this model")
        shard, part, parts = divided.get(name, (None, 0, 1))
        local = take_part(whole.detach(), shard.axis, shard, part, parts) if shard else whole.detach() if adopt else whole.detach().clone()
        if whole.requires_grad and local.dtype not in TRAINED:
            raise Unsupported(
                f"parameter {name!r} is {local.dtype}; only float32, float64 and bfloat16 parameters can be trained so far",
                where=f"parameter {name}", hint="two real parameters, and torch.view_as_complex in forward" if local.is_complex() else
                "float32 weights (--dtype float32), with --precision fp16-autocast where float16 is wanted",
            )  # fmt: skip
        if values is not None and not (layout.zero_level and whole.requires_grad):
            local = _read(values, name, whole, shard, part, parts)
        own = adopt and shard is None and isinstance(whole, torch.nn.Parameter)
        p = whole if own else torch.nn.Parameter(local if local.is_meta else local.to(device), requires_grad=whole.requires_grad)
        held[name] = ParameterShard(name, p, tuple(whole.shape), shard, part=part, parts=parts)

    def read(p: ParameterShard) -> torch.Tensor:
        return p.tensor.detach() if values is None else _read(values, p.name, parameters[p.name], p.shard, p.part, p.parts)

    groups = build_groups(layout, rank, held, gradient_bytes, device, read) if layout.zero_level else {}
    gradients = {} if groups else _gradient_buffers(layout, rank, held, device, gradient_bytes)
    for g in groups.values():
        gradients |= {name: flat for name, flat in g.flats.items() if name.startswith("grad")}
    kept = dict(buffers) if adopt else {name: b.detach().clone().to(device) for name, b in buffers.items()}
    state = RankModule({}, held, kept, gradients, graph.outputs[0], groups=groups, sums=sum_buffers(layout, rank, gradient_bytes, device))
    shapes = {n: tuple(p.shape) for n, p in parameters.items()}
    return _with_segments(state, graph, layout, rank, shapes, device, gradient_bytes, opaque, clock, precision, counted)


def module_of_shape(
    graph: ForwardGraph, layout: TrainingLayout, rank: int, trained: RankModule, *, device: torch.device, gradient_bytes: Mapping[str, int],
    opaque: Callable[..., Any] | None = None, precision: str = "fp32",
) -> RankModule:  # fmt: skip
    """The segments of `rank` for batches of another shape, on the very parameters, gradients and buffers of `trained`. `graph`, `layout`,
    `gradient_bytes`: that shape's; its layout keeps the state that `trained` has (`check.training.shapes`). Raises: as `build_rank_module`."""
    state = RankModule({}, trained.parameters, trained.buffers, trained.gradients, graph.outputs[0], groups=trained.groups, sums=trained.sums)
    known = trained.positions.whole if trained.positions is not None else {}
    shapes = {v.removeprefix("param:"): s for v, s in known.items() if v.startswith("param:")}
    return _with_segments(state, graph, layout, rank, shapes, device, gradient_bytes, opaque, None, precision, True)


def _with_segments(
    state: RankModule, graph: ForwardGraph, layout: TrainingLayout, rank: int, shapes: Mapping[str, tuple[int, ...]], device: torch.device,
    gradient_bytes: Mapping[str, int], opaque: Callable[..., Any] | None, clock: ModuleClock | None, precision: str, counted: bool,
) -> RankModule:  # fmt: skip
    """`state` with the calls of `graph`. `shapes`: of whole parameters."""
    pipeline, _, tensor = layout.coordinates(rank)
    held, kept = state.parameters, state.buffers
    terms = own_terms(graph) if counted else {}
    positions = _positions(graph, layout, rank, shapes, kept)
    own_calls = expand_forward(with_exchanges(graph if positions is None else positions.graph, layout, rank), layout, rank)
    builder = SegmentBuilder(own_calls, layout, tensor, held, kept, device, opaque, clock, state.groups, precision, terms, positions)
    mine = [s for s in layout.segments if s.key in layout.held(pipeline).segments]  # forward order, over all stages that the rank holds
    divisors, weighted = divisors_of(mine, graph, terms, device)
    builder.divisors = {} if weighted else divisors
    segments = {s.key: builder.segment(s) for s in mine}
    norms = {n: torch.zeros(size // 8, dtype=torch.float64, device=device) for n, size in gradient_bytes.items() if n.startswith("norm:")}
    counts = LossCounts(graph, {n: terms[n] for n in divisors}, divisors, builder.constants, kept, builder.awaited) if divisors else None
    return replace(
        state, segments=segments, draws=builder.draws, norms=norms, positions=positions, counts=counts, weighted=weighted,
        once=buffers_once(graph, layout),
    )  # fmt: skip


def own_terms(graph: ForwardGraph) -> dict[str, LossTerm]:
    """Terms of the loss that a replica computes of its own samples."""
    of_all = of_whole_batch(graph)
    return {n: t for n, t in loss_terms(graph).items() if n not in of_all}


def _positions(
    graph: ForwardGraph, layout: TrainingLayout, rank: int, parameters: Mapping[str, tuple[int, ...]], buffers: Mapping[str, torch.Tensor]
) -> Positions | None:
    """The calls on a rank's positions; None where it has all."""
    if layout.context == 1:
        return None
    shapes = {f"param:{n}": x for n, x in parameters.items()} | {f"buffer:{n}": tuple(b.shape) for n, b in buffers.items()}
    return local_graph(graph, layout, rank, shapes | {f"constant:{n}": tuple(c.shape) for n, c in graph.constants.items()})


def _read(values: WeightFiles | DrawnWeights, name: str, whole: torch.Tensor, shard: ParamShard | None, part: int, parts: int) -> torch.Tensor:
    """A rank's part of a parameter, of which nothing else is read."""
    if shard is None:
        return values.part(name, whole.dtype)
    return values.part(name, whole.dtype, shard.axis, part_ranges(whole.shape[shard.axis], shard, part, parts))


def evaluation_module(
    graph: ForwardGraph, layout: TrainingLayout, rank: int, trained: RankModule, *, device: torch.device, opaque: Callable[..., Any] | None = None,
    precision: str = "fp32",
) -> tuple[RankModule, TrainingLayout]:  # fmt: skip
    """The segments of `rank` in evaluation mode, on the very parameters and buffers of `trained`, and their layout. `graph`: of `evaluation_graph`;
    `layout`: the plan's.

    Raises: Unsupported where a call cannot be split, or a segment needs what it neither reads nor makes; PlanMismatch where positions cannot be
    followed as in training.
    """
    positions = None
    if trained.positions is not None:
        fixed = {v: s for v, s in trained.positions.whole.items() if v.startswith(("param:", "buffer:"))}
        fixed |= {f"constant:{n}": tuple(c.shape) for n, c in graph.constants.items()}
        positions = local_graph(graph, layout, rank, fixed, evaluated=True)
    layout = evaluation_layout(layout, graph if positions is None else positions.graph)
    stage, terms = layout.held(layout.coordinates(rank)[0]), own_terms(graph)
    own_calls = expand_forward(with_exchanges(graph if positions is None else positions.graph, layout, rank), layout, rank)
    builder = SegmentBuilder(
        own_calls, layout, layout.coordinates(rank)[2], trained.parameters, trained.buffers, device, opaque, None, trained.groups, precision, terms,
        positions,
    )  # fmt: skip
    mine = [s for s in layout.segments if s.key in stage.segments]
    builder.divisors, _ = divisors_of(mine, graph, terms, device)
    segments = {s.key: builder.segment(s) for s in mine}
    counts = None
    if builder.divisors:
        counts = LossCounts(graph, {n: terms[n] for n in builder.divisors}, builder.divisors, builder.constants, trained.buffers, builder.awaited)
    made = RankModule(segments, trained.parameters, trained.buffers, {}, graph.outputs[0], builder.draws, trained.groups, counts=counts)
    return replace(made, once=buffers_once(graph, layout)), layout


def _gradient_buffers(
    layout: TrainingLayout, rank: int, held: Mapping[str, ParameterShard], device: torch.device, gradient_bytes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """The plan's flat gradient buffers; every trained parameter's `.grad` becomes a view of its place in one."""
    pipeline, _, tensor = layout.coordinates(rank)
    gradients: dict[str, torch.Tensor] = {}
    trained = {n for n, p in held.items() if p.tensor.requires_grad}
    for buffer, names in gradient_names(layout, layout.held(pipeline), trained, tensor).items():
        dtypes = {held[n].tensor.dtype for n in names}
        if len(dtypes) > 1:
            first = {str(held[n].tensor.dtype).removeprefix("torch."): n for n in reversed(names)}
            raise Unsupported(
                f"parameters of one stage have gradients of several types: {', '.join(f'{n!r} of {t}' for t, n in sorted(first.items()))}",
                where=f"parameter {first[min(first)]}", hint="give all trained parameters one dtype",
            )  # fmt: skip
        (dtype,) = dtypes
        needed = sum(held[n].numel for n in names)
        flat = torch.zeros(max(needed, -(-gradient_bytes.get(buffer, 0) // dtype.itemsize)), dtype=dtype, device=device)
        gradients[buffer] = flat
        offset = 0
        for n in names:
            held[n].gradient, held[n].offset = buffer, offset
            held[n].tensor.grad = flat[offset : offset + held[n].numel].view(held[n].tensor.shape)
            offset += held[n].numel
    return gradients


def random_seed(seed: int, *coordinates: int | str) -> int:
    """A 63-bit seed for the given coordinates (step, replica, micro-batch, segment, ...)."""
    digest = hashlib.sha256(repr((seed, *coordinates)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
