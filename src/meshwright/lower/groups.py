"""Groups of parameters whose gradients a rank sums together, and where in its order their weights and gradients are in use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..profile.layer_messages import MAX_WHOLE
from .step import Position

__all__ = ["ADDING", "Group", "Residency", "last_steps", "must_be_summed", "must_end"]

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

    @property
    def whole_bytes(self) -> int:
        return self.chunks * self.chunk_bytes

    @property
    def whole_gradient_bytes(self) -> int:
        return self.chunks * self.gradient_bytes


@dataclass
class Residency:
    """Compute steps `start` to `end`, in a row or from a second forward pass to its backward, in which a group's gathered weights are there."""

    group: Group
    start: int
    end: int
    buffer: int = -1


def must_end(k: int, residencies: Sequence[Residency], groups: Collection[Group]) -> int:
    """After which compute step the gather of residency `k` may start, where messages run beside computation; -1: at once.

    When all but the one before it are gone that go earlier than it begins; sooner where what is then whole fits (MAX_WHOLE).
    """
    x, count, room = residencies[k], len(groups), MAX_WHOLE * max(g.whole_bytes for g in groups)
    behind = residencies[max(0, k - count - 2) : k]  # of each group the last, and more
    least = max((y.end for y in behind[:-1] if y.end < x.start), default=-1)
    oldest = residencies[k - count - 3].end if k > count + 2 else -1
    held = x.group.whole_bytes + sum(y.group.whole_bytes for y in behind if y.end >= x.start)
    for y in sorted((y for y in behind if y.end < x.start), key=lambda y: -y.end):
        held += y.group.whole_bytes
        if held > room:
            return min(least, y.end)
    return min(least, oldest)


def must_be_summed(opened: Sequence[Group], closed: Sequence[Group], groups: Collection[Group]) -> int:
    """Which of the sums `closed`, in order, must be over before all that is `opened` is whole; -1: none. The last may always still run, and those
    before it as long as all that is whole fits."""
    held, room = sum(g.whole_gradient_bytes for g in opened), MAX_WHOLE * max(g.whole_gradient_bytes for g in groups)
    for i in reversed(range(len(closed))):
        held += closed[i].whole_gradient_bytes
        if held > room and i < len(closed) - 1:
            return i
    return -1


def last_steps(g: Group, order: Sequence[Position], *, each: bool = False) -> list[int]:
    """Places in an order of the last steps that add to the group: one, or with `each` one per micro-batch."""
    ends: dict[int, int] = {}
    for i, at in enumerate(order):
        if at.phase in ADDING and at.segment in g.segments:
            ends[at.microbatch if each else 0] = i
    return [*ends.values()]
