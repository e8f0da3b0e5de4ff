"""Pieces of a tensor on one rank: cut, brought from one state to another as far as nothing is sent, packed and unpacked around an exchange.

A piece is described by the shape of the whole tensor, a state (one SBP type per mesh axis) and the rank's mesh coordinates. The pieces are those of
DTensor's `Shard`: `torch.chunk`, nested in axis order; splits in blocks have no DTensor twin. A hop takes one axis from one type to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...plan.sbp import State, chunk_of, kind_of, local_shape, local_slices, split_of

__all__ = ["Place", "cut", "hop", "packer", "unpacker", "whole_of"]

Shape = tuple[int, ...]
Hop = tuple[int, State, State]  # axis, state before, state after


@dataclass(frozen=True)
class Place:
    """Where a rank is: mesh sizes and its coordinates."""

    sizes: tuple[int, ...]
    at: tuple[int, ...]

    def peer(self, axis: int, index: int) -> tuple[int, ...]:
        """Coordinates of the rank at `index` of this rank's group on an axis."""
        return (*self.at[:axis], index, *self.at[axis + 1 :])

    def local(self, shape: Shape, state: State, at: Sequence[int] | None = None) -> Shape:
        return local_shape(shape, state, self.sizes, self.at if at is None else at)


def cut(whole: Tensor, state: State, place: Place) -> Tensor:
    """This rank's piece of a whole tensor (splits only; other types are the whole), a copy."""
    for dim, runs in enumerate(local_slices(tuple(whole.shape), state, place.sizes, place.at)):
        parts = [whole.narrow(dim, a, b - a) for a, b in runs]
        whole = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    return whole.clone(memory_format=torch.contiguous_format)


def whole_of(pieces: Sequence[Tensor], shape: Shape, state: State, places: Sequence[Place]) -> Tensor:
    """The tensor that the pieces of all ranks stand for: splits put in place, summands added up, maxima taken, of copies the first."""
    found: Tensor | None = None
    for piece, place in zip(pieces, places, strict=True):
        if any(i and kind in ("B", "R") for i, kind in zip(place.at, state, strict=True)):
            continue
        part = piece.new_full(shape, _least(piece) if "M" in state else 0)
        where = [torch.cat([torch.arange(a, b) for a, b in runs]) for runs in local_slices(shape, state, place.sizes, place.at)]
        part[torch.meshgrid(*where, indexing="ij") if where else ()] = piece
        found = part if found is None else torch.maximum(found, part) if "M" in state else found + part
    assert found is not None
    return found


def _least(like: Tensor) -> float:
    return float("-inf") if like.is_floating_point() else torch.iinfo(like.dtype).min


def _part(piece: Tensor, dim: int, blocks: int, parts: int, index: int) -> Tensor:
    """The `index`-th of `parts` pieces of dimension `dim`, block by block."""
    width = piece.shape[dim] // blocks
    start, length = chunk_of(width, parts, index)
    if blocks == 1:
        return piece.narrow(dim, start, length)
    return torch.cat([piece.narrow(dim, b * width + start, length) for b in range(blocks)], dim)


def _joined(pieces: Sequence[Tensor], dim: int, blocks: int) -> Tensor:
    """Pieces of dimension `dim` put together, block by block."""
    if blocks == 1:
        return torch.cat(list(pieces), dim)
    return torch.cat([p.chunk(blocks, dim)[b] for b in range(blocks) for p in pieces], dim)


def packer(step: Hop, place: Place) -> Callable[[Tensor], Tensor]:
    """Makes of a piece what an exchange sends, flat: parts of the new split one after the other."""
    axis, _, after = step
    split, count = split_of(after[axis]), place.sizes[axis]
    if split in (None, (0, 1)):  # parts of the first dimension follow each other anyway
        return lambda piece: piece.reshape(-1)
    dim, blocks = split
    return lambda piece: torch.cat([_part(piece, dim, blocks, count, i).reshape(-1) for i in range(count)])


def unpacker(shape: Shape, step: Hop, place: Place) -> Callable[[Tensor], Tensor]:
    """Makes the new piece of what an exchange left, flat: all parts, of a reduce-scatter with this rank's summed up."""
    axis, before, after = step
    count, split, kind = place.sizes[axis], split_of(before[axis]), kind_of(before[axis], after[axis])
    mine = place.local(shape, after)
    if kind == "reduce-scatter":
        start = sum(prod(place.local(shape, after, place.peer(axis, i))) for i in range(place.at[axis]))
        end = start + prod(mine)
        return lambda flat: flat[start:end].view(mine)
    if kind == "all-reduce" or split == (0, 1):
        return lambda flat: flat.view(mine)
    assert split is not None
    dim, blocks = split
    shapes = []
    for i in range(count):
        theirs = list(place.local(shape, before, place.peer(axis, i)))
        if kind == "all-to-all":
            to = split_of(after[axis])
            assert to is not None
            theirs[to[0]] = mine[to[0]]
        shapes.append(theirs)
    sizes = [prod(s) for s in shapes]
    return lambda flat: _joined([p.view(s) for p, s in zip(flat.split(sizes), shapes, strict=True)], dim, blocks)


def hop(piece: Tensor, shape: Shape, step: Hop, place: Place) -> Tensor:
    """A step that sends nothing."""
    axis, before, after = step
    source, target, index = before[axis], after[axis], place.at[axis]
    split, count = split_of(target), place.sizes[axis]
    if split is not None:
        return _part(piece, *split, count, index).contiguous() if source == "B" else piece
    if target == "B":
        return piece  # an axis of one device
    if source == "B":
        return piece if target == "M" or index == 0 else torch.zeros_like(piece)
    from_split = split_of(source)
    assert from_split is not None
    empty = piece.new_full(place.local(shape, after), _least(piece) if target == "M" else 0)
    return _joined([piece if i == index else _part(empty, *from_split, count, i) for i in range(count)], *from_split)
