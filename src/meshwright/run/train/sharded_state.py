"""Weights, gradients and what the optimizer updates, where data replicas divide them: the tensors behind `lower.data`'s groups.

A group's parameters lie one after the other in a flat tensor, padded to the plan's chunks. Levels 1 and 2 keep the weights whole: every parameter is
a view of the flat tensor. At level 3 a rank keeps its own part; while whole weights exist (`attach`), parameters are views of them, in between they
hold nothing. What autograd saves of weights are references (`referring`): backward reads the weights that are gathered then. Weights are never
changed while a step reads them, so both gathers hold the same numbers.
The optimizer is given one-dimensional pieces: what of each parameter lies in the rank's part. Where parameters stay whole (`whole_parameters`) it
is given those that lie there, as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...codec.codec import parse_codec
from ...errors import Unsupported
from ...plan.plan import ParamShard, TrainingLayout
from ...plan.shards import places, sharing
from ...plan.sizes import gradient_names
from ..steps.stand_in import StandIn, as_they_are

__all__ = ["ParameterGroup", "ParameterShard", "Piece", "Reference", "build_groups", "referring", "sum_buffers"]


@dataclass
class ParameterShard:
    """A parameter as this rank holds it: part `part` of `parts`, as `shard` says, which is None where it is whole."""

    name: str
    tensor: torch.nn.Parameter
    full_shape: tuple[int, ...]
    shard: ParamShard | None = None
    gradient: str = ""  # name of the flat gradient buffer that its gradient lies in; "" if it is not trained
    offset: int = 0  # first element there
    part: int = 0
    parts: int = 1

    @property
    def numel(self) -> int:
        return int(self.tensor.numel())


@dataclass
class Piece:
    """Elements `first` to `stop` of the parameter as this rank's tensor-parallel index holds it, flattened; `tensor` is trained. `whole`: it is all
    of them, and has the parameter's shape."""

    of: ParameterShard
    first: int
    stop: int
    tensor: torch.nn.Parameter
    whole: bool = False


@dataclass
class ParameterGroup:
    """`places`: every parameter with its first element. `shard`, `gradient`: this rank's part of weights and of gradients."""

    name: str
    level: int
    places: list[tuple[ParameterShard, int, torch.Size]]
    shard: torch.Tensor
    gradient: torch.Tensor
    flats: dict[str, torch.Tensor]  # by the plan's buffer name
    pieces: list[Piece] = field(default_factory=list)
    whole: torch.Tensor | None = None  # attached weights

    def attach(self, whole: torch.Tensor) -> None:
        """Parameters become views of these weights."""
        self.whole = whole
        for p, first, shape in self.places:
            p.tensor.data = whole[first : first + shape.numel()].view(shape)

    def detach(self) -> None:
        """Parameters hold nothing any more."""
        self.whole = None
        for p, _, _ in self.places:
            p.tensor.data = p.tensor.data.new_empty(0)

    def collect(self, gradients: torch.Tensor) -> None:
        """Backward adds into these whole gradients. The weights are attached."""
        for p, first, shape in self.places:
            p.tensor.grad = gradients[first : first + shape.numel()].view(shape)

    def let_go(self) -> None:
        for p, _, _ in self.places:
            p.tensor.grad = None


def build_groups(
    layout: TrainingLayout, rank: int, held: Mapping[str, ParameterShard], gradient_bytes: Mapping[str, int], device: torch.device,
    read: Callable[[ParameterShard], torch.Tensor] = lambda p: p.tensor.detach(),
) -> dict[str, ParameterGroup]:  # fmt: skip
    """By group name. `gradient_bytes`: sizes of the plan's gradient buffers, padding included. `read`: values of a parameter as the rank holds it,
    asked for one by one: at level 3 the rank never has more than one group whole.

    Raises: Unsupported for a trained parameter in no bucket, for one group of several dtypes, and where the plan's buffers are too small.
    """
    stage, replica, tensor = layout.coordinates(rank)
    trained = {n for n, p in held.items() if p.tensor.requires_grad}
    found = {}
    for buffer, names in gradient_names(layout, layout.held(stage), trained, tensor).items():
        group = buffer.removeprefix("gradients")
        if not group:
            raise Unsupported(f"the plan has no bucket for the trained parameter {names[0]!r}", hint="make the plan again from this model")
        found[group] = _group(group, layout, replica, [held[n] for n in names], gradient_bytes, device, read)
    return found


def _group(
    name: str, layout: TrainingLayout, replica: int, params: Sequence[ParameterShard], gradient_bytes: Mapping[str, int], device: torch.device,
    read: Callable[[ParameterShard], torch.Tensor],
) -> ParameterGroup:  # fmt: skip
    level, (me, n) = layout.zero_level, sharing(layout, replica, name)
    dtypes = {p.tensor.dtype for p in params}
    if len(dtypes) > 1:
        raise Unsupported(f"parameters of one bucket are {sorted(map(str, dtypes))}", hint="give all trained parameters one dtype")
    (dtype,) = dtypes
    size = gradient_bytes.get(f"gradients{name}", 0) if level == 1 else n * gradient_bytes.get(f"gradshard{name}", 0)
    total, counts = size // dtype.itemsize, [p.numel for p in params]
    starts = places(counts, total // n if layout.whole_parameters else 0)
    needed = starts[-1] + counts[-1]
    if total < needed or total % n:
        raise Unsupported(f"the plan's buffers of group {name!r} hold {total} elements, its {len(params)} parameters have {needed}")
    flat = torch.zeros(total, dtype=dtype, device=device)
    low, high = me * (total // n), (me + 1) * (total // n)
    lying = []
    for p, at in zip(params, starts, strict=True):
        shape = p.tensor.shape
        flat[at : at + p.numel].view(shape).copy_(read(p))
        p.gradient, p.offset = f"gradients{name}", at
        lying.append((p, at, shape))
        if p.tensor.is_meta and not flat.is_meta:
            p.tensor = torch.nn.Parameter(flat.new_empty(0))
    gradients = torch.zeros(total if level == 1 else high - low, dtype=dtype, device=device)
    flats = {f"gradients{name}" if level == 1 else f"gradshard{name}": gradients}
    if folds := gradient_bytes.get(f"folds{name}", 0) if level > 1 else 0:
        flats[f"folds{name}"] = gradients.new_empty(folds // dtype.itemsize)
    shard = flat[low:high] if level < 3 else flat[low:high].clone()
    flats[f"weights{name}" if level < 3 else f"shard{name}"] = flat if level < 3 else shard
    group = ParameterGroup(name, level, lying, shard, gradients[low:high] if level == 1 else gradients, flats)
    for p, first, shape in lying:
        a, b = max(low, first), min(high, first + shape.numel())
        if a < b:
            form = shape if layout.whole_parameters else torch.Size([b - a])
            piece = torch.nn.Parameter(shard[a - low : b - low].view(form))
            piece.grad = group.gradient[a - low : b - low].view(form)
            group.pieces.append(Piece(p, a - first, b - first, piece, bool(layout.whole_parameters)))
    if level < 3:
        group.attach(flat)
        if level == 1:
            group.collect(gradients)
    else:
        group.detach()
    return group


def sum_buffers(layout: TrainingLayout, rank: int, sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
    """What encoded gradients are summed in, by the plan's buffer name and size, in the type that the group's codec sums."""
    found = {}
    for number, bucket in enumerate(layout.buckets_of(layout.coordinates(rank)[0])):
        for name in [n for n in sizes if bucket.codec and n.startswith("sum") and n.partition("@")[2] == str(number)]:
            dtype: torch.dtype = getattr(torch, parse_codec(bucket.codec).kind.summand)
            found[name] = torch.zeros(sizes[name] // dtype.itemsize, dtype=dtype, device=device)
    return found


@dataclass(frozen=True)
class Reference(StandIn):
    """A tensor that lies in a group's gathered weights, by its place."""

    group: ParameterGroup
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        assert self.group.whole is not None, "backward of a segment runs while its weights are gathered"
        return self.group.whole.as_strided(self.size, self.stride, self.offset)


def referring(groups: Sequence[ParameterGroup]) -> Callable[[torch.Tensor], Any]:
    """What to keep instead of a tensor: a `Reference` where it lies in the attached weights, else itself."""
    of = {g.whole.untyped_storage().data_ptr(): g for g in groups if g.whole is not None and g.whole.numel()}
    if not of:
        return as_they_are

    def refer(tensor: torch.Tensor) -> Any:
        group = of.get(tensor.untyped_storage().data_ptr())
        if group is None or group.whole is None or tensor.dtype != group.whole.dtype:
            return tensor
        return Reference(group, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    return refer
