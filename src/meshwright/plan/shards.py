"""Which part of a split dimension a tensor-parallel rank holds: the one place where shares become index ranges.

A dimension consists of blocks; every block is cut at the running sums of the shares. A block of `groups` groups (key-value heads of
grouped-query attention) is cut between groups only: a part holds every group that its share of the block touches, so with fewer groups
than ranks several ranks hold the same one. Byte counts, parameter slices, checkpoints and dropout masks all read these ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import msgspec

from ..errors import Unsupported
from .context import neighbours
from .experts import of_experts
from .plan import ParamShard, PartialGradient, TrainingLayout, ValueInfo

__all__ = [
    "Cut", "Divided", "divided_parameters", "expert_shards", "in_parts", "least_part", "local_extent", "local_shape", "local_size", "local_value",
    "local_values", "part_ranges", "places", "replica_groups", "sequence_values", "sharing",
]  # fmt: skip

Ranges = tuple[tuple[int, int], ...]


class Cut(Protocol):
    """What `ParamShard` and `ValueSplit` say about a dimension."""

    @property
    def blocks(self) -> int: ...
    @property
    def shares(self) -> tuple[int, ...]: ...
    @property
    def groups(self) -> int: ...
    @property
    def mixed(self) -> tuple[tuple[int, int], ...]: ...


def part_ranges(extent: int, cut: Cut, part: int, parts: int) -> Ranges:
    """The [start, stop) ranges of a dimension of size `extent` that part `part` of `parts` holds, in order; adjacent ones are not merged.

    Raises: Unsupported when blocks do not make up the dimension, or shares would cut an element or a group's rank count is wrong.
    """
    shares = cut.shares or (1,) * parts
    if len(shares) != parts or min(shares) < 1:
        raise Unsupported(f"{len(shares)} shares {list(shares)} for {parts} tensor-parallel ranks", hint="one positive share per rank")
    blocks: Sequence[tuple[int, int]] = cut.mixed or ((extent // cut.blocks, cut.groups),) * cut.blocks
    if sum(size for size, _ in blocks) != extent:
        raise Unsupported(f"a dimension of size {extent} does not divide into {len(blocks)} blocks of {parts} parts")
    edges = [0, *accumulate(shares)]
    total = edges[-1]
    found, start = [], 0
    for size, groups in blocks:
        count = groups or size
        if groups:
            low, high = edges[part] * groups // total, -(-edges[part + 1] * groups // total)
        else:
            if any(e * size % total for e in edges):
                raise Unsupported(
                    f"a dimension of size {extent} does not divide into {len(blocks)} blocks of {parts} parts",
                    hint=f"shares that add up to a divisor of {size}",
                )
            low, high = edges[part] * size // total, edges[part + 1] * size // total
        if size % count:
            raise Unsupported(f"a block of {size} does not divide into {groups} groups")
        found.append((start + low * (size // count), start + high * (size // count)))
        start += size
    return tuple(found)


def local_extent(extent: int, cut: Cut, part: int, parts: int) -> int:
    return sum(b - a for a, b in part_ranges(extent, cut, part, parts))


def local_shape(shape: Sequence[int], dim: int, cut: Cut, part: int, parts: int) -> tuple[int, ...]:
    return tuple(local_extent(d, cut, part, parts) if i == dim else d for i, d in enumerate(shape))


def local_size(shape: Sequence[int], size_bytes: int, dim: int, cut: Cut, part: int, parts: int) -> int:
    """Bytes of a part of something of `size_bytes` bytes."""
    return size_bytes // max(1, shape[dim]) * local_extent(shape[dim], cut, part, parts)


def local_value(value: ValueInfo, part: int, parts: int) -> ValueInfo:
    """The value as one tensor-parallel rank holds it."""
    if value.split is None or parts == 1:
        return value
    shape = local_shape(value.shape, value.split.dim, value.split, part, parts)
    size = local_size(value.shape, value.size_bytes, value.split.dim, value.split, part, parts)
    return msgspec.structs.replace(value, shape=shape, size_bytes=size, split=None)


def local_values(layout: TrainingLayout, rank: int) -> dict[str, ValueInfo]:
    """Every border value as `rank` holds it, by name."""
    part = layout.coordinates(rank)[2]
    return {v.name: local_value(v, part, layout.tensor) for v in layout.values}


def sequence_values(layout: TrainingLayout) -> set[str]:
    """The border values that are split along the sequence: all that sequence segments share, and sums that are reduce-scattered."""
    split = {v.name for v in layout.values if v.split is not None}
    touched = {v for s in layout.segments for v in (*s.gathers, *s.sum_writes, *((*s.reads, *s.writes) if s.sequence else ()))}
    return split & touched


class Divided(NamedTuple):
    """Part `part` of `parts` of a parameter."""

    shard: ParamShard
    part: int
    parts: int


def expert_shards(layout: TrainingLayout) -> tuple[ParamShard, ...]:
    """Experts' parameters, which neighbouring data replicas divide."""
    return () if layout.expert_shards is msgspec.UNSET else layout.expert_shards


def divided_parameters(layout: TrainingLayout, rank: int) -> dict[str, Divided]:
    """Which part a rank holds of every parameter that is divided, by name. Experts may be divided twice: a replica's part among tensor indices."""
    _, data, tensor = layout.coordinates(rank)
    found = {s.param: Divided(s, tensor, layout.tensor) for s in layout.shards} if layout.tensor > 1 else {}
    for s in expert_shards(layout):
        member, again = data % layout.expert, found.get(s.param)
        found[s.param] = Divided(s, member, layout.expert)
        if again is not None:
            shares = (again.shard.shares or (1,) * layout.tensor) * layout.expert
            found[s.param] = Divided(msgspec.structs.replace(s, shares=shares), member * layout.tensor + tensor, layout.expert * layout.tensor)
    return found


def sharing(layout: TrainingLayout, replica: int, group: str) -> tuple[int, int]:
    """(which, of how many) parts of a group a data replica owns: one of all; of experts, one of those with the same.

    Neighbours come first: replica r · n + c of n neighbours owns the r-th part of the c-th of n blocks. So a gather goes between servers while it has
    one block, and puts blocks together in the server. Where replicas with the same experts share a server (`copies_in_servers`), parts are in rank
    order: a block is that of n neighbours, in as many servers, and is put together with those of their copies.
    """
    if of_experts(group):
        return replica // layout.expert, layout.data // layout.expert
    near = 1 if layout.copies_in_servers else neighbours(layout)[1]
    return replica % near * (layout.data // near) + replica // near, layout.data


def in_parts(layout: TrainingLayout) -> list[int]:
    """Data replicas in the order of the parts that they own of a group that all divide."""
    return sorted(range(layout.data), key=lambda d: sharing(layout, d, ""))


def least_part(sizes: Sequence[int], parts: int) -> int:
    """The least size of `parts` equal parts in which `places` finds room for all of these."""
    low, high = max(max(sizes, default=0), -(-sum(sizes) // parts)), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        fits = places(sizes, middle)[-1] + sizes[-1] <= parts * middle
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


def places(sizes: Sequence[int], part: int) -> list[int]:
    """Where each of these begins, one after the other; what would cross a multiple of `part` begins there. With `part` 0 nothing is left out."""
    found, at = [], 0
    for size in sizes:
        if part and at % part + size > part and at % part:
            at += part - at % part
        found.append(at)
        at += size
    return found


def replica_groups(shape: Sequence[int], shard: ParamShard, parts: int) -> PartialGradient | None:
    """The tensor indices that hold the same groups of a parameter, where some do; None if every part is held once.

    Raises: Unsupported where two parts overlap without being equal: shares must keep a rank inside one group or give it whole groups.
    """
    held = [part_ranges(shape[shard.axis], shard, i, parts) for i in range(parts)]
    groups: list[list[int]] = []
    for i, mine in enumerate(held):
        same = next((g for g in groups if held[g[0]] == mine), None)
        if same is not None:
            same.append(i)
            continue
        for j in range(i):
            if any(a < d and c < b for (a, b), (c, d) in zip(mine, held[j], strict=True)):
                raise Unsupported(
                    f"{shard.param!r}: ranks {j} and {i} would share some groups and not others",
                    hint="give each rank whole groups, or a part of one group; packed projections need whole groups",
                )
        groups.append([i])
    if all(len(g) == 1 for g in groups):
        return None
    return PartialGradient(param=shard.param, groups=tuple(tuple(g) for g in groups))
