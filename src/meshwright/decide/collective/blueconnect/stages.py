"""Stages: one exchange inside a group of ranks, by ring, by halving and doubling, or directly.

`pieces[i]` are the chunks that member i of the group owns after a scatter stage and before a gather stage; a chunk may be any list of
numbers. All stages leave the chunks where they are: only who holds the right value changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .flow import LANES_PER_MESSAGE, Flow, runs_of

__all__ = ["PRIMITIVES", "all_gather", "collect", "exchange_blocks", "halves", "hand_out", "reduce_scatter"]

PRIMITIVES = ("direct", "ring", "halving-doubling")
Pieces = Sequence[Sequence[int]]
Stage = tuple[object, ...]


def halves(k: int) -> bool:
    """Whether a group of k can halve and double."""
    return k >= 4 and k & (k - 1) == 0


def reduce_scatter(flow: Flow, group: Sequence[int], pieces: Pieces, primitive: str, stage: Stage) -> None:
    """Every member ends with the group's sum of its own piece."""
    k = len(group)
    if primitive == "ring" and k > 2:
        for step in range(k - 1):
            for i in range(k):
                # Piece p starts at rank p + 1 and goes round: after k - 1 steps it arrives at its owner p with everybody's share.
                out = pieces[(i - 1 - step) % k]
                flow.message(group[i], group[(i + 1) % k], out, out, stage=stage, peers=False, add=True)
    elif primitive == "halving-doubling" and halves(k):
        for bit in reversed(range(k.bit_length() - 1)):
            for i in range(k):
                other = i ^ (1 << bit)
                out = [c for m in range(k) if m >> bit == other >> bit for c in pieces[m]]
                flow.message(group[i], group[other], out, out, stage=stage, peers=False, add=True)
    else:
        for turn in range(1, k):
            for i in range(k):
                j = (i + turn) % k
                flow.message(group[i], group[j], pieces[j], pieces[j], stage=stage, peers=True, add=True)


def all_gather(flow: Flow, group: Sequence[int], pieces: Pieces, primitive: str, stage: Stage, *, reverse: bool) -> None:
    """Every member ends with all pieces. `reverse`: rings turn against those of `reduce_scatter`, so that the two use the links' two ways."""
    k, way = len(group), -1 if reverse else 1
    if primitive == "ring" and k > 2:
        for step in range(k - 1):
            for i in range(k):
                out = pieces[(i - way * step) % k]
                flow.message(group[i], group[(i + way) % k], out, out, stage=stage, peers=False)
    elif primitive == "halving-doubling" and halves(k):
        for bit in range(k.bit_length() - 1):
            for i in range(k):
                out = [c for m in range(k) if m >> bit == i >> bit for c in pieces[m]]
                flow.message(group[i], group[i ^ (1 << bit)], out, out, stage=stage, peers=False)
    else:
        for turn in range(1, k):
            for i in range(k):
                flow.message(group[i], group[(i + turn) % k], pieces[i], pieces[i], stage=stage, peers=True)


def hand_out(flow: Flow, group: Sequence[int], pieces: Pieces, holder: int, primitive: str, stage: Stage) -> None:
    """Member `holder` has all pieces; every member ends with its own."""
    k = len(group)
    if primitive == "halving-doubling" and halves(k):
        for bit in reversed(range(k.bit_length() - 1)):
            for i in range(k):
                # Those that have data before this round agree with the holder in all bits up to this one.
                if (i ^ holder) % (2 << bit) == 0:
                    other = i ^ (1 << bit)
                    out = [c for m in range(k) if m >> bit == other >> bit for c in pieces[m]]
                    flow.message(group[i], group[other], out, out, stage=stage, peers=False)
        return
    for turn in range(1, k):
        j = (holder + turn) % k
        flow.message(group[holder], group[j], pieces[j], pieces[j], stage=stage, peers=True)


def collect(flow: Flow, group: Sequence[int], pieces: Pieces, holder: int, primitive: str, stage: Stage) -> None:
    """Every member has its piece; member `holder` ends with all."""
    k = len(group)
    if primitive == "halving-doubling" and halves(k):
        for bit in range(k.bit_length() - 1):
            for i in range(k):
                if (i ^ holder) % (2 << bit) == 1 << bit:
                    out = [c for m in range(k) if m >> bit == i >> bit for c in pieces[m]]
                    flow.message(group[i], group[i ^ (1 << bit)], out, out, stage=stage, peers=False)
        return
    for turn in range(1, k):
        j = (holder + turn) % k
        flow.message(group[j], group[holder], pieces[j], pieces[j], stage=stage, peers=True)


def exchange_blocks(flow: Flow, group: Sequence[int], slots: Sequence[Sequence[int]], stage: Stage) -> None:
    """Transpose: member a's chunks slots[b] change places with member b's chunks slots[a]."""
    k = len(group)
    for turn in range(1, k):
        for a in range(k):
            b = (a + turn) % k
            for number, (start, _, count) in enumerate(runs_of(slots[b], slots[a])):
                strand = (*stage, number % LANES_PER_MESSAGE)
                flow.send(group[a], group[b], start, count, lane=(*strand, "out", group[b]), channel=strand)
    for turn in range(1, k):
        for a in range(k):
            b = (a + turn) % k
            for number, (_, target, count) in enumerate(runs_of(slots[b], slots[a])):
                strand = (*stage, number % LANES_PER_MESSAGE)
                flow.receive(group[a], group[b], target, count, lane=(*strand, "in", group[a]), channel=strand, add=False)
