"""Collectives over the data replicas of a rank: one call; or, lowered folded, one for each axis that they lie on.

Replicas that divide positions (`context`) and those that have other samples are two axes of alike ranks, and only a collective along one axis treats
its members alike. Replica d = r · context + c owns the d-th part of a whole buffer: the c-th part of its r-th block. So a reduce-scatter goes over
`data` first, then over `context` inside the block that the rank was given, which is a view of the buffer (`block:`); an all-gather goes the other
way. An all-reduce goes over one axis and then over the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from ..program.builder import LaneBuilder, StepRef
from .step import RankLanes, StepLowering

__all__ = ["ALL_GATHER", "ALL_REDUCE", "REDUCE_SCATTER", "call_replicas", "replica_chunks"]

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"


def _axes(low: StepLowering, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The neighbours that divide positions with the first of `ranks`, and those with the same positions; both empty where one call serves."""
    context = low.layout.context
    if not low.folded or len(ranks) in (1, context) or context == 1:
        return (), ()
    return ranks[:context], ranks[::context]


def replica_chunks(low: StepLowering, purpose: str, ranks: tuple[int, ...], size: int, op: str = ALL_REDUCE) -> int:
    """Chunks that a buffer needs, or a multiple of them."""
    plan, how = low.plan_all_reduce, () if op == ALL_REDUCE else (op,)
    within, across = _axes(low, ranks)
    if not within:
        return int(plan(purpose, ranks, size, *how).chunks)
    blocks = 1 if op == ALL_REDUCE else len(across)
    return lcm(int(plan(purpose, across, size, *how).chunks), blocks * int(plan(purpose, within, -(-size // blocks), *how).chunks))


def call_replicas(
    low: StepLowering, r: RankLanes, lane: LaneBuilder, purpose: str, label: str, ranks: tuple[int, ...], buffer: int, size: int,
    op: str = ALL_REDUCE, *, after: Sequence[StepRef] = (),
) -> StepRef:  # fmt: skip
    """The last step of the collective of `op` over `ranks` on a whole buffer."""
    how = () if op == ALL_REDUCE else (op,)
    within, across = _axes(low, ranks)
    if not within:
        return lane.call(low.call(purpose, label, ranks, r.number, buffer, size, *how), after=after)
    inner = buffer, size
    if op != ALL_REDUCE:
        inner = _block(low, r, buffer, len(across)), -(-size // len(across))
    calls = [(f"{label}/context", within, *inner), (label, across, buffer, size)]
    for name, members, where, each in calls[::-1] if op == REDUCE_SCATTER else calls:
        after = (lane.call(low.call(purpose, name, members, r.number, where, each, *how), after=after),)
    return after[0]


def _block(low: StepLowering, r: RankLanes, buffer: int, blocks: int) -> int:
    """The view of a representative's block of a buffer, the first, made when first asked for."""
    name = f"block:{buffer}"
    if name not in r.buffers:
        r.buffers[name] = low.b.view(buffer, chunks=low.b.chunks_of(buffer) // blocks, role="scratch", name=name)
    return r.buffers[name]
