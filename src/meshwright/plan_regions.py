"""Regions of tensors: which part of which tensor a rank of a layout holds, as boxes. Arithmetic of restarts and checkpoints, without torch.

A box is one [start, stop) per dimension; a region is disjoint boxes in the order in which the local tensor stacks them along one dimension
(`place`). What a rank holds follows from `plan_shards`, so uneven shares, packed blocks and shared key-value heads need no case of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .errors import Unsupported, UsageError
from .graph import OpGraph
from .plan import TrainingLayout
from .plan_shards import part_ranges

__all__ = [
    "ITEM_BYTES", "Box", "Region", "TensorSpec", "elements", "holdings", "intersection", "minus", "place", "region_along", "training_tensors",
    "whole_region",
]  # fmt: skip

Box = tuple[tuple[int, int], ...]
Region = tuple[Box, ...]

ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "uint16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex128": 16,
}  # fmt: skip


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
    axis = next((i for i in range(len(box)) if len({b[i] for b in region}) > 1), -1)
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


def holdings(layout: TrainingLayout, rank: int, tensors: Mapping[str, TensorSpec]) -> dict[str, Region]:
    """What a rank of the layout holds of `param:<name>`, `optimizer:<name>:<state>` and `buffer:<name>` tensors.

    Optimizer state of a parameter's shape is split as the parameter is, any other is whole; buffers are whole on every rank.
    Raises: Unsupported where data replicas divide the state among them.
    """
    if layout.zero_level:
        raise Unsupported(
            f"shards of sharding level {layout.zero_level} cannot be reused by another layout", where="layout", hint="plan with sharding level 0"
        )
    pipeline, _, part = layout.coordinates(rank)
    held = set(layout.stages[pipeline].params)
    shard_of = {s.param: s for s in layout.shards} if layout.tensor > 1 else {}
    found: dict[str, Region] = {}
    for name, spec in tensors.items():
        kind, _, rest = name.partition(":")
        parameter = rest if kind == "param" else rest.rpartition(":")[0] if kind == "optimizer" else ""
        if kind != "buffer" and parameter not in held:
            continue
        shard, full = shard_of.get(parameter), tensors.get(f"param:{parameter}")
        if shard is not None and full is not None and spec.shape == full.shape:
            found[name] = region_along(spec.shape, shard.axis, part_ranges(spec.shape[shard.axis], shard, part, layout.tensor))
        else:
            found[name] = whole_region(spec.shape)
    return found


def training_tensors(graph: OpGraph, optimizer: str) -> dict[str, TensorSpec]:
    """Everything that a training run keeps between steps, by the names that checkpoints use.

    Raises: UsageError for an optimizer whose state only a checkpoint can tell.
    """
    if optimizer not in ("adamw", "sgd"):
        raise UsageError(
            f"the state of optimizer {optimizer!r} is not known before it has run", where="--checkpoint", hint="name a checkpoint: its index lists it"
        )
    found: dict[str, TensorSpec] = {}
    for p in graph.parameters:
        spec = TensorSpec(tuple(p.shape), ITEM_BYTES[p.dtype])
        found[f"param:{p.name}"] = spec
        if p.trainable and optimizer == "adamw":
            found |= {f"optimizer:{p.name}:exp_avg": spec, f"optimizer:{p.name}:exp_avg_sq": spec, f"optimizer:{p.name}:step": TensorSpec((), 4)}
    return found | {f"buffer:{b.name}": TensorSpec(tuple(b.shape), ITEM_BYTES[b.dtype]) for b in graph.buffers}
