"""Links and memory of a folded program where a plan puts its ranks: routes of every member, bytes of every image, memory of the representatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from ...errors import MeshwrightError
from ...fabric.fabric import Fabric
from ...program.fold import image, members, require_folded
from ...program.fold_calls import inline_folded
from ...program.program import Program
from ..program.links import placed
from ..program.memory import WorstMemory, worst_order_memory
from ..program.order import Order, messages
from ..verdict import Finding
from .shadow import Shadow

__all__ = ["folded_link_time", "folded_memory"]


def folded_link_time(
    p: Program, programs: Mapping[str, Program], fabric: Fabric, placement: Sequence[str]
) -> tuple[dict[int, Fraction], list[Finding]]:
    """Seconds that every link used needs for the bytes of all members, and what is wrong with the places and routes."""
    found = placed(p, fabric, placement)
    if found:
        return {}, found
    flat = inline_folded(p, programs).program
    fold = require_folded(flat)
    m = messages(flat)
    total = np.zeros(len(flat.channels), np.int64)
    np.add.at(total, m.channel, flat.message_bytes()[m.send])
    on = np.array([fabric.actor_of[name] for name in placement], np.int64)
    load: dict[int, int] = {}
    used = np.flatnonzero(m.per_channel > 0)
    for member in members(fold):
        src, dst = on[image(fold, flat.channels.src[used], member)], on[image(fold, flat.channels.dst[used], member)]
        for a, b, size in zip(src.tolist(), dst.tolist(), total[used].tolist(), strict=True):
            try:
                path = fabric.route(a, b)
            except MeshwrightError as error:
                return {}, [Finding(check="links", message=str(error), witness={"member": list(member)})]
            for link in path:
                load[link] = load.get(link, 0) + size
    return {link: Fraction(amount, fabric.links[link].rate_Bps) for link, amount in sorted(load.items())}, []


def folded_memory(made: Shadow, order: Order) -> WorstMemory:
    """Worst-order memory per rank, members as their representatives; what callees need is in it."""
    p = made.program
    worst = worst_order_memory(p, order)
    rank = np.arange(p.ranks)
    for axis in made.axes:
        rank = rank - (rank // axis.stride) % axis.size * axis.stride
    of = rank.tolist()

    def spread(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[r] for r in of)

    peak = np.array(worst.peak_bytes, np.int64) + made.scratch_bytes
    staging = np.array(worst.staging_bytes, np.int64) + made.staging_bytes
    return WorstMemory(
        peak_bytes=spread(peak.tolist()), staging_bytes=spread(staging.tolist()), exact=spread(worst.exact), alive=spread(worst.alive),
        steps=spread(worst.steps),
    )  # fmt: skip
