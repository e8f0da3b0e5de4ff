"""Redistribution of a tensor's pieces by the steps of a plan, forward for the value and backward for its gradient.

A piece is described by the shape of the whole tensor, a state (one SBP type per mesh axis) and the rank's mesh coordinates. A step takes one axis
from one type to another. The pieces are those of DTensor's `Shard`: `torch.chunk`, nested in axis order; splits in blocks have no DTensor twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...decide.layout.autoddl.redistribute import kind_of
from ...decide.layout.autoddl.sbp import State, gradient_of, local_shape, local_slices, split_of, value_of
from .exchange import Wires

__all__ = ["Move", "Place", "apply_steps", "cut", "redistributed"]

Shape = tuple[int, ...]


@dataclass
class Place:
    """Where this rank is: mesh sizes, coordinates, and its wires."""

    sizes: tuple[int, ...]
    at: tuple[int, ...]
    wires: Wires

    def peer(self, axis: int, index: int) -> tuple[int, ...]:
        """Coordinates of the rank at `index` of this rank's group on an axis."""
        return (*self.at[:axis], index, *self.at[axis + 1 :])

    def local(self, shape: Shape, state: State, at: Sequence[int] | None = None) -> Shape:
        return local_shape(shape, state, self.sizes, self.at if at is None else at)


@dataclass(frozen=True)
class Move:
    """A redistribution: of a value of `shape` from state `source` to `target`, its gradient back. Steps are (axis, type)."""

    shape: Shape
    source: State
    target: State
    forward: tuple[tuple[int, str], ...]
    backward: tuple[tuple[int, str], ...]
    ahead: str  # what bytes of the forward are counted as
    back: str


def cut(whole: Tensor, state: State, place: Place) -> Tensor:
    """This rank's piece of a whole tensor (splits only; other types are the whole), a copy."""
    for dim, runs in enumerate(local_slices(tuple(whole.shape), state, place.sizes, place.at)):
        if runs != ((0, whole.shape[dim]),):
            whole = torch.cat([whole.narrow(dim, a, b - a) for a, b in runs], dim) if len(runs) > 1 else whole.narrow(dim, *_run(runs[0]))
    return whole.clone(memory_format=torch.contiguous_format)


def _run(run: tuple[int, int]) -> tuple[int, int]:
    return run[0], run[1] - run[0]


def _part(piece: Tensor, dim: int, blocks: int, parts: int, index: int) -> Tensor:
    """The `index`-th of `parts` pieces of dimension `dim`, block by block."""
    width = piece.shape[dim] // blocks
    step = -(-width // parts)
    start, stop = min(index * step, width), min((index + 1) * step, width)
    if blocks == 1:
        return piece.narrow(dim, start, stop - start)
    return torch.cat([piece.narrow(dim, b * width + start, stop - start) for b in range(blocks)], dim)


def _joined(pieces: Sequence[Tensor], dim: int, blocks: int) -> Tensor:
    """Pieces of dimension `dim` put together, block by block."""
    if blocks == 1:
        return torch.cat(list(pieces), dim)
    return torch.cat([p.chunk(blocks, dim)[b] for b in range(blocks) for p in pieces], dim)


def apply_steps(piece: Tensor, shape: Shape, state: State, steps: Sequence[tuple[int, str]], place: Place, reason: str) -> Tensor:
    """The rank's piece after the steps, starting in `state` (as a value: S, B, P, M)."""
    for axis, target in steps:
        after = (*state[:axis], target, *state[axis + 1 :])
        piece = _step(piece, shape, state, after, axis, place, reason)
        state = after
    return piece


def _step(piece: Tensor, shape: Shape, before: State, after: State, axis: int, place: Place, reason: str) -> Tensor:
    source, target = before[axis], after[axis]
    kind, count = kind_of(source, target), place.sizes[axis]
    maximum = source == "M"
    if kind == "local" or count == 1:
        return _local(piece, shape, before, after, axis, place)
    if kind == "all-reduce":
        return place.wires.all_reduce(axis, piece, reason, maximum=maximum)
    from_split, to_split = split_of(source), split_of(target)
    if kind == "reduce-scatter":
        assert to_split is not None
        parts = [_part(piece, *to_split, count, i) for i in range(count)]
        return place.wires.scatter_sum(axis, parts, reason, maximum=maximum)
    assert from_split is not None
    if kind == "all-gather":
        pieces = place.wires.gather(axis, piece, [place.local(shape, before, place.peer(axis, i)) for i in range(count)], reason)
        return _joined(pieces, *from_split)
    assert to_split is not None
    parts = [_part(piece, *to_split, count, i) for i in range(count)]
    shapes = []
    for i in range(count):
        theirs = list(place.local(shape, before, place.peer(axis, i)))
        theirs[to_split[0]] = parts[place.at[axis]].shape[to_split[0]]
        shapes.append(theirs)
    return _joined(place.wires.all_to_all(axis, parts, shapes, reason), *from_split)


def _local(piece: Tensor, shape: Shape, before: State, after: State, axis: int, place: Place) -> Tensor:
    """Steps that send nothing."""
    source, target, index = before[axis], after[axis], place.at[axis]
    split = split_of(target)
    if split is not None:
        return _part(piece, *split, place.sizes[axis], index).contiguous() if source == "B" else piece
    if target == "B":
        return piece  # an axis of one device
    if source == "B":
        if target == "M" or index == 0:
            return piece
        return torch.zeros_like(piece)
    from_split = split_of(source)
    assert from_split is not None
    empty = piece.new_zeros(place.local(shape, after))
    if target == "M":
        empty.fill_(float("-inf") if empty.is_floating_point() else torch.iinfo(empty.dtype).min)
    count = place.sizes[axis]
    return _joined([piece if i == index else _part(empty, *from_split, count, i) for i in range(count)], *from_split)


class _Redistribute(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, piece: Tensor, move: Move, place: Place) -> Tensor:
        ctx.move, ctx.place = move, place
        found = apply_steps(piece, move.shape, value_of(move.source), move.forward, place, move.ahead)
        return found.view_as(found) if found is piece else found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        move: Move = ctx.move
        return apply_steps(gradient.contiguous(), move.shape, gradient_of(move.target), move.backward, ctx.place, move.back), None, None


def redistributed(piece: Tensor, move: Move, place: Place) -> Tensor:
    """The piece in the target state; differentiable where the piece is."""
    if piece.requires_grad:
        found: Tensor = _Redistribute.apply(piece, move, place)
        return found
    return apply_steps(piece, move.shape, value_of(move.source), move.forward, place, move.ahead)
