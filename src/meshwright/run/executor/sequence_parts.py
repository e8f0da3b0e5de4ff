"""Values split along the sequence, as a rank holds them around a split segment: its own part, and all ranks' parts in one buffer.

A buffer of all parts has a slot per rank in the order of their tensor indices, each padded to the largest part: so a rank's part is one run of bytes,
as reduce-scatter and all-gather need it, whichever dimension is split. `PartsForm` puts a whole tensor into that form and takes it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ...plan.plan import TrainingLayout, ValueInfo
from ...plan.shards import local_shape, part_ranges, sequence_values

__all__ = ["ALL_PARTS", "PartsForm", "own_part", "parts_forms"]

ALL_PARTS = ("actsum", "actall", "actagain", "remadesum", "remadeall", "gradall", "gradpart")  # kinds of buffers that hold all parts of such values


def own_part(x: torch.Tensor, dim: int, ranges: Sequence[Sequence[int]]) -> torch.Tensor:
    """The positions of `ranges` of a tensor that is whole on this rank."""
    pieces = [x.narrow(dim, low, high - low) for low, high in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


class PartsForm:
    """The parts of one value: `ranges[t]` are the positions of rank t along `dim`."""

    def __init__(self, value: ValueInfo, parts: int) -> None:
        assert value.split is not None
        self.whole, self.dim, self.parts = value.shape, value.split.dim, parts
        self.ranges = [part_ranges(value.shape[self.dim], value.split, t, parts) for t in range(parts)]
        self.shapes = [local_shape(value.shape, self.dim, value.split, t, parts) for t in range(parts)]
        # with one sequence, parts follow each other in memory anyway
        self.in_order = math.prod(value.shape[: self.dim]) == 1 and value.split.blocks == 1 and len(set(self.shapes)) == 1

    def put(self, tensor: torch.Tensor, elements: int) -> torch.Tensor:
        """A whole tensor as a flat one of `elements` elements, slot by slot; the same memory where it is in that form already."""
        if self.in_order and tensor.numel() == elements:
            return tensor.contiguous().view(-1)
        flat = tensor.new_zeros(elements)
        for in_slot, in_whole in self._pairs(flat, tensor):
            in_slot.copy_(in_whole)
        return flat

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """The whole tensor, contiguous; the same memory where it is in that form already."""
        if self.in_order and flat.numel() == math.prod(self.whole):
            return flat.view(self.whole)
        whole = flat.new_empty(self.whole)
        for in_slot, in_whole in self._pairs(flat, whole):
            in_whole.copy_(in_slot)
        return whole

    def _pairs(self, flat: torch.Tensor, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the same positions, in a rank's slot of the flat form and in the whole tensor."""
        slot = flat.numel() // self.parts
        for t, (ranges, shape) in enumerate(zip(self.ranges, self.shapes, strict=True)):
            part = flat[t * slot : t * slot + math.prod(shape)].view(shape)
            at = 0
            for low, high in ranges:
                yield part.narrow(self.dim, at, high - low), whole.narrow(self.dim, low, high - low)
                at += high - low


def parts_forms(layout: TrainingLayout | None) -> dict[str, PartsForm]:
    """The form of every value of a layout that is split along the sequence."""
    if layout is None or not layout.sequence:
        return {}
    along = sequence_values(layout)
    return {v.name: PartsForm(v, layout.tensor) for v in layout.values if v.name in along}
