"""Groups of parameters whose gradients a rank sums together, and where in its order their weights and gradients are in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .step import Position

__all__ = ["ADDING", "Group", "Residency", "last_steps"]

ADDING = ("B", "W")  # phases that add to gradients of parameters


@dataclass
class Group:
    name: str
    params: tuple[str, ...]
    size_bytes: int
    planned_bytes: int  # for which its collectives are planned: a stage's buckets share them, and what they need beside buffers is there once
    segments: frozenset[str]
    chunks: int = field(init=False)  # these three: once its collectives are planned
    chunk_bytes: int = field(init=False)
    part: tuple[int, int] = field(init=False)  # first chunk of this rank's part, and how many
    ratio: int = 1  # bytes of a gradient per byte of its weight; sizes above are of weights

    @property
    def message_bytes(self) -> int:
        """For which collectives of gradients are planned."""
        return self.planned_bytes * self.ratio

    @property
    def gradient_bytes(self) -> int:
        """Of a chunk of gradients."""
        return self.chunk_bytes * self.ratio


@dataclass
class Residency:
    """Compute steps `start` to `end`, all in a row, that use a group's gathered weights."""

    group: Group
    start: int
    end: int
    buffer: int = -1


def last_steps(g: Group, order: Sequence[Position], *, each: bool = False) -> list[int]:
    """Places in an order of the last steps that add to the group: one, or with `each` one per micro-batch."""
    ends: dict[int, int] = {}
    for i, at in enumerate(order):
        if at.phase in ADDING and at.segment in g.segments:
            ends[at.microbatch if each else 0] = i
    return [*ends.values()]
