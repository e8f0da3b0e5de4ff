"""Alike pipelines in step: which of them have to be simulated.

Where all pipelines are alike and every stage fills whole servers, moving all pipelines on by whole servers changes nothing but names: compute,
messages between stages and gradient rings of all of them run at the same instants. So the iteration of a few pipelines, their rings closed
over themselves, with the turns and the message sizes of the full rings, is the iteration of all: the same program up to that symmetry.
Invariant: times and memory are those of the whole layout (up to rounding in the simulator's order of equal events); the tests compare both.
"""

from __future__ import annotations

from math import lcm

import msgspec

from ....profile.network import ProfiledLayout, TrainingRuntime

__all__ = ["alike_part"]


def alike_part(layout: ProfiledLayout, runtime: TrainingRuntime) -> ProfiledLayout:
    """The layout with the fewest pipelines that stand for all; itself where they are not alike.

    A ring must still go between servers where the whole one does, so two servers of every stage stay where there are two.
    """
    data, size = layout.data, 1
    if len(set(layout.microbatches)) > 1:
        return layout
    for stage in layout.stages:
        first = stage.replicas[0]
        gpus = runtime.gpus_per_server.get(first.device, 0)
        if any(r is not first and r != first for r in stage.replicas) or first.server or not gpus or gpus % first.tensor:
            return layout
        seats = gpus // first.tensor  # replicas in a server
        if data % seats:
            return layout
        # whole servers of every stage, and two where there are two: else rings would not cross between servers any more
        size = lcm(size, seats if data == seats else 2 * seats)
    whole = next((n for n in range(size, data, size) if data % n == 0), data)
    if whole == data:
        return layout
    stages = tuple(msgspec.structs.replace(s, replicas=s.replicas[:whole]) for s in layout.stages)
    return msgspec.structs.replace(layout, stages=stages, microbatches=layout.microbatches[:whole], context=1)  # who shares samples is in the times
