"""Regions of tensors: which part of which tensor a rank of a layout holds, as boxes. Arithmetic of restarts and checkpoints, without torch.

A box is one [start, stop) per dimension; a region is disjoint boxes in the order in which the local tensor stacks them along one dimension
(`place`). What a rank holds follows from `plan.shards`, so uneven shares, packed blocks and shared key-value heads need no case of their own.
Where data replicas divide state (sharding levels), a rank holds a piece of the flattened local tensor: a `FlatRegion`, boxes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ..errors import UsageError
from ..graph.graph import OpGraph
from ..program.program import Program
from .optimizers import state_names
from .plan import TrainingLayout
from .shards import divided_parameters, part_ranges, places, sharing
from .sizes import gradient_names

__all__ = [
    "ITEM_BYTES", "Box", "FlatRegion", "Lying", "Region", "TensorSpec", "divided_bytes", "elements", "flat_region", "holdings", "intersection",
    "local_shape", "lying", "minus", "place", "region_along", "training_tensors", "whole_region",
]  # fmt: skip

Box = tuple[tuple[int, int], ...]
Region = tuple[Box, ...]

ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "uint16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex128": 16,
}  # fmt: skip


class Lying(NamedTuple):
    """Where something lies in the memory of a local tensor: from element `first` on, seen as an array of `shape`, its `box`."""

    first: int
    shape: tuple[int, ...]
    box: Box


class FlatRegion(tuple[Box, ...]):
    """A region whose local tensor has one dimension: a piece of a flattened part. `spots[i]`: where box i lies in it."""

    spots: tuple[Lying, ...]

    def __new__(cls, found: Iterable[tuple[Box, Lying]]) -> FlatRegion:
        pairs = list(found)
        made = super().__new__(cls, (box for box, _ in pairs))
        made.spots = tuple(spot for _, spot in pairs)
        return made


@dataclass(frozen=True)
class TensorSpec:
    """A whole tensor: its shape and the bytes of an element."""

    shape: tuple[int, ...]
    item_bytes: int


def whole_region(shape: Sequence[int]) -> Region:
    return (tuple((0, d) for d in shape),)


def region_along(shape: Sequence[int], axis: int, ranges: Iterable[tuple[int, int]]) -> Region:
    """The region that holds `ranges` of dimension `axis`, in their order; axis -1: all of it. Ranges that touch are joined."""
    if axis < 0:
        return whole_region(shape)
    joined: list[tuple[int, int]] = []
    for low, high in ranges:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        elif high > low:
            joined.append((low, high))
    return tuple(tuple(r if i == axis else (0, d) for i, d in enumerate(shape)) for r in joined)


def elements(region: Iterable[Box]) -> int:
    return sum(prod(b - a for a, b in box) for box in region)


def intersection(a: Box, b: Box) -> Box | None:
    """What both hold; None for nothing."""
    box = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return box if all(low < high for low, high in box) else None


def minus(region: Iterable[Box], cut: Box) -> list[Box]:
    """What the boxes hold that `cut` does not; disjoint boxes again."""
    left: list[Box] = []
    for box in region:
        common = intersection(box, cut)
        if common is None:
            left.append(box)
            continue
        rest = list(box)
        for i, (low, high) in enumerate(common):
            for piece in ((rest[i][0], low), (high, rest[i][1])):
                if piece[0] < piece[1]:
                    left.append((*rest[:i], piece, *rest[i + 1 :]))
            rest[i] = (low, high)
    return left


def place(region: Region, box: Box) -> Box:
    """Where `box`, a part of one box of the region, lies in the local tensor. Raises: UsageError when the region does not hold it."""
    axis = _stacked(region)
    offset = 0
    for held in region:
        if all(low <= a and b <= high for (low, high), (a, b) in zip(held, box, strict=True)):
            return tuple(
                (a - low + (offset if i == axis else 0), b - low + (offset if i == axis else 0))
                for i, ((low, _), (a, b)) in enumerate(zip(held, box, strict=True))
            )
        if axis >= 0:
            offset += held[axis][1] - held[axis][0]
    raise UsageError(f"{box} is in no box of {region}", where="region")


def local_shape(region: Region) -> tuple[int, ...]:
    """Shape of the local tensor that holds a region."""
    if isinstance(region, FlatRegion):
        return (elements(region),)
    if not region:
        return (0,)
    axis = _stacked(region)
    return tuple(sum(b[i][1] - b[i][0] for b in region) if i == axis else region[0][i][1] - region[0][i][0] for i in range(len(region[0])))


def lying(region: Region, box: Box) -> Lying:
    """Where `box`, a part of one box of the region, lies in the local tensor. Raises: UsageError when the region does not hold it."""
    if not isinstance(region, FlatRegion):
        return Lying(0, local_shape(region), place(region, box))
    for held, spot in zip(region, region.spots, strict=True):
        if all(low <= a and b <= high for (low, high), (a, b) in zip(held, box, strict=True)):
            inside = tuple((a - low + at, b - low + at) for (low, _), (at, _), (a, b) in zip(held, spot.box, box, strict=True))
            return Lying(spot.first, spot.shape, inside)
    raise UsageError(f"{box} is in no box of {region}", where="region")


def flat_region(region: Region, first: int, stop: int) -> FlatRegion:
    """Elements `first` up to `stop` of the local tensor that holds `region`, flattened row by row."""
    shape, axis = local_shape(region), _stacked(region)
    found: list[tuple[Box, Lying]] = []
    at = 0
    for local in _flat_boxes(shape, first, stop):
        extent = tuple(b - a for a, b in local)
        offset = 0
        for held in region:
            size = held[axis][1] - held[axis][0] if axis >= 0 else 0
            moved = [low - (offset if i == axis else 0) for i, (low, _) in enumerate(held)]  # local -> whole
            common = intersection(tuple((a + m, b + m) for (a, b), m in zip(local, moved, strict=True)), held)
            if common is not None:
                inside = tuple((a - m - low, b - m - low) for (a, b), m, (low, _) in zip(common, moved, local, strict=True))
                found.append((common, Lying(at, extent, inside)))
            offset += size
        at += prod(extent)
    return FlatRegion(found)


def _stacked(region: Region) -> int:
    """The dimension along which the local tensor stacks a region's boxes; -1: there is one box, or none."""
    return next((i for i in range(len(region[0])) if len({b[i] for b in region}) > 1), -1) if region else -1


def _flat_boxes(shape: tuple[int, ...], first: int, stop: int) -> list[Box]:
    """Boxes that elements `first` up to `stop` of a row-major array make up, in order; each is contiguous. At most 2 per dimension."""
    if first >= stop:
        return []
    if not shape:
        return [()]
    inner = prod(shape[1:])
    (a, x), (b, y) = divmod(first, inner), divmod(stop, inner)
    if a == b:
        return [((a, a + 1), *box) for box in _flat_boxes(shape[1:], x, y)]
    found: list[Box] = []
    if x:
        found += [((a, a + 1), *box) for box in _flat_boxes(shape[1:], x, inner)]
        a += 1
    if a < b:
        found.append(((a, b), *((0, d) for d in shape[1:])))
    return found + [((b, b + 1), *box) for box in _flat_boxes(shape[1:], 0, y)]


def divided_bytes(program: Program, layout: TrainingLayout) -> tuple[dict[str, int], ...]:
    """Of every rank: bytes of the whole of each group that data replicas divide (docs/formats.md), by its name, padding included."""
    found: list[dict[str, int]] = [{} for _ in range(layout.ranks)]
    b = program.buffers
    kind = "gradients" if layout.zero_level == 1 else "gradshard"
    for i, name in enumerate(b.name if layout.zero_level else ()):
        if name.startswith(kind):
            times = 1 if layout.zero_level == 1 else sharing(layout, 0, name)[1]
            found[int(b.actor[i])][name.removeprefix(kind)] = times * int(b.chunks[i]) * int(b.chunk_bytes[i])
    return tuple(found)


def holdings(
    layout: TrainingLayout, rank: int, tensors: Mapping[str, TensorSpec], divided: Mapping[str, int] | None = None
) -> dict[str, Region]:
    """What a rank of the layout holds of `param:<name>`, `optimizer:<name>:<state>` and `buffer:<name>` tensors.

    Optimizer state of a parameter's shape is split as the parameter is, any other is whole; buffers are whole on every rank.
    `divided`: the rank's `divided_bytes`, which layouts of sharding levels above 0 need. Raises: UsageError where they are missing.
    """
    if layout.zero_level and divided is None:
        raise UsageError(f"what a rank holds at sharding level {layout.zero_level} follows from the plan's program too", where="layout")
    pipeline = layout.coordinates(rank)[0]
    held = set(layout.held(pipeline).params)
    divided_of = divided_parameters(layout, rank)

    def region_of(parameter: str, shape: tuple[int, ...]) -> Region:
        if parameter not in divided_of:
            return whole_region(shape)
        shard, part, parts = divided_of[parameter]
        return region_along(shape, shard.axis, part_ranges(shape[shard.axis], shard, part, parts))

    pieces: dict[str, tuple[int, int]] = {}
    if layout.zero_level and divided:
        regions = {p: region_of(p, tensors[f"param:{p}"].shape) for p in held if f"param:{p}" in tensors}
        pieces = _pieces(layout, rank, {p: (elements(r), tensors[f"param:{p}"].item_bytes) for p, r in regions.items()}, divided)
    found: dict[str, Region] = {}
    for name, spec in tensors.items():
        kind, _, rest = name.partition(":")
        parameter = rest if kind == "param" else rest.rpartition(":")[0] if kind == "optimizer" else ""
        if kind != "buffer" and parameter not in held:
            continue
        full = tensors.get(f"param:{parameter}")
        region = region_of(parameter, spec.shape) if full is not None and spec.shape == full.shape else whole_region(spec.shape)
        first, stop = pieces.get(parameter, (0, -1)) if kind == "optimizer" or layout.zero_level == 3 else (0, -1)
        if stop < 0:
            found[name] = region
        elif first < stop:
            cut = full is not None and spec.shape == full.shape and not layout.whole_parameters
            found[name] = flat_region(region, first, stop) if cut else region
    return found


def _pieces(
    layout: TrainingLayout, rank: int, sizes: Mapping[str, tuple[int, int]], divided: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """(first, stop) of every divided parameter's flattened local elements that are the rank's; `sizes`: (elements, bytes of one)."""
    stage, replica, tensor = layout.coordinates(rank)
    trained = {p for b in layout.buckets for p in b.params} | {group.partition(":")[2] for group in divided}
    found: dict[str, tuple[int, int]] = {}
    for buffer, names in gradient_names(layout, layout.held(stage), trained, tensor).items():
        known = [p for p in names if p in sizes]
        if not known:
            continue
        me, members = sharing(layout, replica, buffer)
        own = divided.get(buffer.removeprefix("gradients"), 0) // sizes[known[0]][1] // members
        counts = [sizes[p][0] for p in known]
        for p, count, at in zip(known, counts, places(counts, own if layout.whole_parameters else 0), strict=True):
            first, stop = max(me * own - at, 0), min((me + 1) * own - at, count)
            found[p] = (first, max(first, stop))
    return found


def training_tensors(graph: OpGraph, optimizer: str, ema: float = 0.0) -> dict[str, TensorSpec]:
    """Everything that a training run keeps between steps, by the names that checkpoints use.

    Raises: UsageError for an optimizer whose state only a checkpoint can tell.
    """
    names = state_names(optimizer, ema)
    if names is None:
        raise UsageError(
            f"the state of optimizer {optimizer!r} is not known before it has run", where="--checkpoint", hint="name a checkpoint: its index lists it"
        )
    found: dict[str, TensorSpec] = {}
    for p in graph.parameters:
        spec = TensorSpec(tuple(p.shape), ITEM_BYTES[p.dtype])
        found[f"param:{p.name}"] = spec
        if p.trainable:
            found |= {f"optimizer:{p.name}:{x}": spec for x in names}
            found |= {f"optimizer:{p.name}:step": TensorSpec((), 4)} if "exp_avg" in names else {}
    return found | {f"buffer:{b.name}": TensorSpec(tuple(b.shape), ITEM_BYTES[b.dtype]) for b in graph.buffers}
