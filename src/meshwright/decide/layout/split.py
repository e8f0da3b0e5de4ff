"""What a tensor-parallel split of a value is, what a rule answers where it cannot carry one, and how a reshape moves it.

A value is either whole on every tensor-parallel rank (`None`) or `Split(dim, blocks)`: its dimension `dim` consists of `blocks`
equal blocks, each cut over the ranks in the region's shares (packed q, k, v is one dimension of 3 blocks; a fused gate-and-up projection
of 2), or of the unequal blocks of `mixed` (packed q, k, v of grouped-query attention). A block of `groups` key-value heads is cut between
heads only: each rank holds those that its query heads use.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import NamedTuple

from ...graph.graph import OpGraph, operator_name

__all__ = ["Grouped", "Needs", "Pieces", "Refused", "Split", "made_from", "reshape_split"]


class Split(NamedTuple):
    """`repeated`: the dimension behind holds the copies of each group that its query heads read; it is as long as they are many."""

    dim: int
    blocks: int = 1
    groups: int = 0
    mixed: tuple[tuple[int, int], ...] = ()
    repeated: bool = False

    def at(self, dim: int) -> Split:
        return self._replace(dim=dim)


class Pieces(list["Split"]):
    """What the results of an operator with several results are, where they differ."""


class Refused(Exception):
    """The operator cannot run on shards."""


class Needs(Exception):
    """The operator could run on shards if `value`, which is whole, were split too, as `split` says: by the linear that makes it, or by each rank
    taking its part."""

    def __init__(self, value: str, split: Split) -> None:
        super().__init__(value)
        self.value, self.split = value, split


class Grouped(Exception):
    """The operator could run on shards if `value` were split by its `groups` key-value heads instead of by its elements.

    `otherwise`: the result where the ranks' shares divide the key-value heads anyway.
    """

    def __init__(self, value: str, groups: int, otherwise: Split | None = None) -> None:
        super().__init__(value)
        self.value, self.groups, self.otherwise = value, groups, otherwise


def reshape_split(old: Sequence[int], new: Sequence[int], split: Split) -> Split:
    """Where the split dimension lies after a reshape from `old` to `new`; Refused if it is torn apart."""
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0, a, b = i, j, 1, 1
        while True:  # grow the smaller side until both groups hold equally many elements
            if a == b and i > i0 and j > j0:
                break
            if (a <= b and i < len(old)) or j >= len(new):
                if i >= len(old):
                    break
                a *= old[i]
                i += 1
            else:
                b *= new[j]
                j += 1
        while i < len(old) and old[i] == 1 and i not in (split.dim,):
            i += 1
        if i0 <= split.dim < i:
            group_new = list(range(j0, j))
            before = 1
            for d in range(i0, split.dim):
                before *= old[d]
            return _place(old[split.dim], before, [(d, new[d]) for d in group_new], split)
    raise Refused("the split dimension vanished")


def _place(size: int, before: int, group: list[tuple[int, int]], split: Split) -> Split:
    """`before` elements of the old group lie in front of the split dimension; find the new dimension that carries it."""
    blocks = before * split.blocks  # as seen from the front of the group, this many equal blocks are each cut
    unit = size // split.blocks
    front = 1
    for dim, extent in group:
        # this dimension starts after `front` whole blocks-worth of outer index
        if extent == 1:
            continue
        if blocks % front == 0 and extent % max(blocks // front, 1) == 0:
            own = blocks // front
            if extent > own:  # the cut falls inside this dimension
                if unit % (extent // own) and (extent // own) % unit:
                    break
                return Split(dim, own)
        front *= extent
    raise Refused("a reshape tears the split dimension apart")


def made_from(graph: OpGraph, params: Collection[str], *, without: Container[str] = ()) -> set[str]:
    """Floating-point results that depend on one of `params` (value names): no other carries them a gradient. `without`: operators that carry none."""
    found: set[str] = set()
    for n in graph.nodes:
        floats = n.outputs and n.outputs[0].dtype.startswith(("float", "bfloat", "complex"))
        if floats and operator_name(n.target) not in without and any(v in params or v in found for v in n.inputs):
            found.add(n.name)
    return found
