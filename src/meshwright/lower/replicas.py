"""Collectives over the data replicas of a rank: one call; or, lowered folded, one for each axis that they lie on.

Neighbours (that divide positions or experts, or share a server) and replicas in the same place among theirs are two axes of alike ranks, and only
a collective along one axis treats its members alike. Replica r · n + c of n neighbours owns the r-th part of the c-th block of a whole buffer. So
an all-gather goes over `data` first, inside the rank's own block, a view of the buffer (`block:`), and then puts the neighbours' blocks together:
where these share a server, 1/n of the buffer travels over each NIC. A reduce-scatter goes the other way. An all-reduce goes over one axis and then
over the other. Where it is the replicas in one place that share a server (`TrainingLayout.copies_in_servers`), the axes change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from ..plan.context import neighbours
from ..program.builder import LaneBuilder, StepRef
from .step import RankLanes, StepLowering

__all__ = ["ALL_GATHER", "ALL_REDUCE", "REDUCE_SCATTER", "call_replicas", "replica_chunks"]

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"


def _axes(low: StepLowering, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first of `ranks` with its neighbours, and the ranks in its place among theirs, or the other way: those whose blocks are put together, then
    those who divide a block. Both empty where one call serves: not folded, or all on one axis, as those that have the same experts are."""
    near = neighbours(low.layout)[1]
    replica = {r: low.layout.coordinates(r)[1] for r in ranks}
    first = replica[ranks[0]]
    within, across = tuple(r for r in ranks if replica[r] // near == first // near), tuple(r for r in ranks if (replica[r] - first) % near == 0)
    if not low.folded or max(len(within), len(across)) == len(ranks):
        return (), ()
    return (across, within) if low.layout.copies_in_servers else (within, across)


def replica_chunks(low: StepLowering, purpose: str, ranks: tuple[int, ...], size: int, op: str = ALL_REDUCE) -> int:
    """Chunks that a buffer needs, or a multiple of them."""
    plan, how = low.plan_all_reduce, () if op == ALL_REDUCE else (op,)
    within, across = _axes(low, ranks)
    if not within:
        return int(plan(purpose, ranks, size, *how).chunks)
    blocks = 1 if op == ALL_REDUCE else len(within)
    return lcm(int(plan(purpose, within, size, *how).chunks), blocks * int(plan(purpose, across, -(-size // blocks), *how).chunks))


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
        inner = _block(low, r, buffer, len(within)), -(-size // len(within))
    names = (f"{label}/{neighbours(low.layout)[0]}", label)[:: -1 if low.layout.copies_in_servers else 1]
    calls = [(names[0], within, buffer, size), (names[1], across, *inner)]
    for name, members, where, each in calls[::-1] if op == ALL_GATHER else calls:
        after = (lane.call(low.call(purpose, name, members, r.number, where, each, *how), after=after),)
    return after[0]


def _block(low: StepLowering, r: RankLanes, buffer: int, blocks: int) -> int:
    """The view of a representative's block of a buffer, the first, made when first asked for."""
    name = f"block:{buffer}"
    if name not in r.buffers:
        r.buffers[name] = low.b.view(buffer, chunks=low.b.chunks_of(buffer) // blocks, role="scratch", name=name)
    return r.buffers[name]
