"""Where the chunks of a program lie in one rank's tensors: what every compiler of a rank's part needs to know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...errors import Unsupported
from ...program.program import Part, Program
from ...program.tables import I32
from ..executor.lanes import channel_messages
from .chunks import ChunkMap, Region, Span, regions
from .instructions import Place

__all__ = ["Form", "Places", "paired", "viewer"]


@dataclass(frozen=True)
class Form:
    """A program with its repeats unrolled, all ranks' walks through it, and the buffers' places at their ranks. Shared by all lengths."""

    program: Program  # as planned
    unrolled: Program
    orders: Sequence[I32]


class Places:
    """The buffers of a form for one tensor length, seen from one rank."""

    def __init__(self, form: Form, rank: int, elements: int) -> None:
        self.form, self.rank = form, rank
        self.program = form.unrolled
        original = regions(form.program, elements)
        # Unrolling may give buffers other numbers, but keeps their order at a rank.
        at = {(r.rank, r.local): r for r in original.values()}
        seen: dict[int, int] = defaultdict(int)
        self.region: list[Region] = []
        for actor in self.program.buffers.actor.tolist():
            self.region.append(at[actor, seen[actor]])
            seen[actor] += 1
        self.mine = [r for r in self.region if r.rank == rank]
        self.sends, self.receives = channel_messages(self.program)
        self.sender: dict[int, int] = {}  # receiving step -> sending step
        for outs, ins in zip(self.sends, self.receives, strict=True):
            self.sender.update(zip(ins, outs, strict=True))
        s = self.program.steps
        self.parts = s.parts.tolist()
        self.cached: dict[tuple[int, int, int], tuple[Span, ...]] = {}
        self.src = list(zip(s.src_buffer.tolist(), s.src_chunk.tolist(), s.count.tolist(), strict=True))
        self.dst = list(zip(s.dst_buffer.tolist(), s.dst_chunk.tolist(), s.count.tolist(), strict=True))

    @property
    def full(self) -> ChunkMap:
        """The map of the largest buffer that is no scratch: the whole message."""
        return max((r.map for r in self.region if r.role != "scratch"), key=lambda m: m.blocks)

    def require_fitting(self) -> None:
        """What any rank takes in, adds or copies must have the size of its place: looked at for all ranks, so that all of them refuse or none."""
        for step, parts in enumerate(self.parts):
            place = self.dst[step] if parts & Part.STORE else self.src[step] if parts & Part.ADD else None
            if place is None or place[0] < 0:
                continue
            here = self.elements(place)
            both = [self.message(self.sender[step])] if step in self.sender else []
            if parts & Part.READ and self.src[step] != place:
                both.append(self.elements(self.src[step]))
            if any(size != here for size in both):
                raise Unsupported(
                    f"{max(both)} elements arrive where {here} belong", where=self.program.describe(step),
                    hint="plan for a size that the chunks divide", data={"step": step},
                )  # fmt: skip

    def elements(self, place: tuple[int, int, int]) -> int:
        return sum(high - low for low, high in self.spans(place))

    def spans(self, place: tuple[int, int, int]) -> tuple[Span, ...]:
        if place not in self.cached:
            self.cached[place] = self.region[place[0]].map.spans(place[1], place[2])
        return self.cached[place]

    def message(self, step: int) -> int:
        """Elements of what a sending step sends."""
        parts = self.parts[step]
        if not parts & (Part.STORE | Part.READ):
            return self.message(self.sender[step])  # passed on as it came
        return self.elements(self.dst[step] if parts & Part.STORE else self.src[step])

    def at(self, place: tuple[int, int, int]) -> list[Place]:
        """A rank's own chunks as places."""
        space = self.region[place[0]].local
        return [(space, low, high) for low, high in self.spans(place)]


def paired(into: Sequence[Place], source: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
    """Equally long pieces of both sides. Runs may be cut differently; together they are equally long (`Places.require_fitting`)."""
    # As stacks, the next piece on top; what is left of the longer one is put back.
    left, right = list(reversed(into)), list(reversed(source))
    while left and right:
        (s0, a0, b0), (s1, a1, b1) = left.pop(), right.pop()
        size = min(b0 - a0, b1 - a1)
        yield (s0, a0, a0 + size), (s1, a1, a1 + size)
        if a0 + size < b0:
            left.append((s0, a0 + size, b0))
        if a1 + size < b1:
            right.append((s1, a1 + size, b1))


def viewer(buffers: Sequence[torch.Tensor], staging: Sequence[torch.Tensor]) -> Callable[[Place], torch.Tensor]:
    """Places as views of a rank's flat buffers and staging slots."""

    def view(place: Place) -> torch.Tensor:
        space, low, high = place
        return (buffers[space] if space >= 0 else staging[-1 - space])[low:high]

    return view
