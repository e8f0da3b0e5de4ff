"""One weight layout for all degrees: each rank's slices as flat vectors, and what several slices together are.

Cite: Tutel (arXiv 2206.03382), section 3.1. Left open by the paper: parameters without the inner dimension, checkpoints for other numbers of ranks.
Our answer: such parameters are cut into equal runs of elements; a checkpoint holds whole experts (`full`, `part`).
Deviations: none. Invariant: `part(full(parts of all ranks), rank)` is the rank's part, for any number of ranks that divides.
Cost: copies of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from ...decide.experts.problem import shares_of
from ...errors import FormatError

__all__ = ["WeightLayout"]

Shapes = Mapping[str, tuple[int, ...]]


class WeightLayout:
    """Of a layer's parameters: `sliced` shapes begin with the inner dimension, `whole` ones do not; of one expert each."""

    def __init__(self, ranks: int, experts: int, sliced: Shapes, whole: Shapes) -> None:
        self.ranks, self.experts, self.sliced, self.whole = ranks, experts, dict(sliced), dict(whole)
        self.shares, self.local = shares_of(ranks, experts)
        self.slice_elements = self.local * sum(prod(s) for s in self.sliced.values()) // self.shares
        self.whole_elements = sum(prod(s) for s in self.whole.values())  # of an expert
        self.whole_part = -(-self.local * self.whole_elements // self.shares)  # of a rank, the last one's padded with zeros

    def sliced_of(self, gathered: torch.Tensor, experts: int) -> dict[str, torch.Tensor]:
        """Parameters of `experts` experts, stacked, out of the slices [ranks, slice_elements] of neighbours; gradients flow back."""
        rows, start, found = gathered.view(-1, self.slice_elements), 0, {}
        for name, shape in self.sliced.items():
            each = (shape[0] // self.shares, *shape[1:])
            size = self.local * prod(each)
            found[name] = rows[:, start : start + size].reshape(experts, -1, *shape[1:])
            start += size
        return found

    def whole_of(self, gathered: torch.Tensor, experts: int) -> dict[str, torch.Tensor]:
        """The same of what is not sliced, out of the parts [ranks, whole_part]."""
        used = self.local * self.whole_elements  # per set of ranks that share
        rows = gathered.view(-1, self.shares * self.whole_part)[:, :used].reshape(experts, self.whole_elements)
        start, found = 0, {}
        for name, shape in self.whole.items():
            found[name] = rows[:, start : start + prod(shape)].reshape(experts, *shape)
            start += prod(shape)
        return found

    def part(self, full: Mapping[str, torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(slices, part of what is whole) of a rank, flat, out of the parameters of all experts, stacked.

        Raises: FormatError for parameters of other names or shapes, naming the first.
        """
        for name, shape in {**self.sliced, **self.whole}.items():
            if name not in full:
                raise FormatError("is missing", where=f"experts.{name}", hint="a state of another kind of expert?")
            wanted = (self.experts, *shape)
            if tuple(full[name].shape) != wanted:
                raise FormatError(f"must be {list(wanted)}, got {list(full[name].shape)}", where=f"experts.{name}", hint="another number of experts?")
        first, share = rank // self.shares * self.local, rank % self.shares
        own = slice(first, first + self.local)
        cut = [full[n][own].reshape(self.local, self.shares, -1)[:, share].reshape(-1) for n in self.sliced]
        rest = [torch.cat([full[n][e].reshape(-1) for n in self.whole]) for e in range(first, first + self.local)] if self.whole else []
        flat = torch.cat(rest) if rest else torch.zeros(0)
        padded = torch.cat([flat, flat.new_zeros(self.shares * self.whole_part - len(flat))])
        return torch.cat(cut) if cut else flat.new_zeros(0), padded[share * self.whole_part : (share + 1) * self.whole_part].clone()

    def full(self, slices: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters of all experts, stacked, out of all ranks' parts."""
        found = self.sliced_of(torch.stack(list(slices)), self.experts) if self.sliced else {}
        return found | (self.whole_of(torch.stack(list(whole)), self.experts) if self.whole else {})
