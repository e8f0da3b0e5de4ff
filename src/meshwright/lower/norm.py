"""The norm of all gradients, before the optimizer: every rank's own sum of squares, gathered axis by axis.

A `norm` step on the compute lane squares what the rank answers for and writes one number into its slot of `norm:<axis>`; the slots are all-gathered
over the axis; the next `norm` step adds them up and writes the next axis's slot; the optimizer reads the last axis's. Axes: `data` where replicas
divide gradients, else they hold them alike, but for those that divide experts (`experts`); `tensor`; `pipeline`, of the indices that train something.
Where none of them has two members, there is one slot, `norm:own`. Numbers are gathered, not summed on the way: each rank adds them up in the order
of its members, so all get the same bits whatever the collectives' schedules are, and scale alike, or skip a step alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from ..plan.plan import TrainingLayout
from ..plan.shards import in_parts
from ..program.builder import StepRef
from .replicas import ALL_GATHER, call_replicas, replica_chunks
from .step import RankLanes, StepLowering

__all__ = ["NUMBER_BYTES", "lower_norm", "norm_axes"]

NUMBER_BYTES = 8  # a sum of squares travels as a float64


def norm_axes(layout: TrainingLayout, rank: int) -> list[tuple[str, tuple[int, ...]]]:
    """(axis, its ranks) in the order in which a rank's sum is completed."""
    p, d, t = layout.coordinates(rank)
    axes = []
    if layout.zero_level and layout.data > 1:
        axes.append(("data", tuple(layout.rank(p, i, t) for i in in_parts(layout))))
    elif layout.expert > 1:
        first = d - d % layout.expert
        axes.append(("experts", tuple(layout.rank(p, i, t) for i in range(first, first + layout.expert))))
    if layout.tensor > 1:
        axes.append(("tensor", tuple(layout.rank(p, d, i) for i in range(layout.tensor))))
    training = [i for i in range(layout.pipeline) if not set(layout.held(i).params) <= set(layout.frozen)]
    if len(training) > 1:
        axes.append(("pipeline", tuple(layout.rank(i, d, t) for i in training)))
    return axes or [("own", (rank,))]


def lower_norm(low: StepLowering, r: RankLanes, gradients: Sequence[tuple[int, int, int]], waits: Sequence[StepRef]) -> tuple[list[StepRef], int]:
    """Steps of one rank, after `waits`: (what the optimizer waits for, the buffer whose slots it adds up)."""
    p, d, t = low.layout.coordinates(r.number)
    label = {"data": f"norm:{p}.{t}", "experts": f"norm:{p}.{t}e{d // low.layout.expert}", "tensor": f"norm:{p}.{d}", "pipeline": f"norm:{d}.{t}"}
    reads, after, buffer = list(gradients), list(waits), -1
    for i, (axis, ranks) in enumerate(norm_axes(low.layout, r.number)):
        size = NUMBER_BYTES * len(ranks)
        chunks = lcm(len(ranks), replica_chunks(low, "norm", ranks, size, ALL_GATHER)) if len(ranks) > 1 else 1
        buffer = low.b.buffer(r.number, chunks=chunks, chunk_bytes=NUMBER_BYTES, role="scratch", persistent=True, name=f"norm:{axis}")
        own = chunks // len(ranks)
        op = low.b.op(
            "norm", graph=f"opt{r.stage.index}{f':{axis}' if i else ''}", stage=r.stage.index, reads=reads,
            writes=[(buffer, ranks.index(r.number) * own, own)],
        )  # fmt: skip
        done = r.compute.compute(op, after=after)
        if len(ranks) > 1:
            done = call_replicas(low, r, r.sync, "norm", label[axis], ranks, buffer, size, ALL_GATHER, after=[done])
        reads, after = [(buffer, 0, chunks)], [done]
    return after, buffer
