"""Links and memory of a folded program where a plan puts its ranks: bytes of every image, memory of the representatives.

Where the fabric has the program's symmetry and routes keep it (`fabric.symmetry`), the links of an orbit carry the same: what all members send over
it, divided among its links. Else every member's routes are looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MeshwrightError, Unsupported
from ...fabric.fabric import Fabric
from ...fabric.symmetry import link_orbits, routing_symmetry
from ...program.fold import generators, image, members, representative, require_folded
from ...program.fold_calls import inline_folded
from ...program.program import Fold, Program
from ..program.links import placed
from ..program.memory import WorstMemory, worst_order_memory
from ..program.order import Order, messages
from ..verdict import Finding
from .shadow import Shadow
from .trips import with_round_trips

__all__ = ["folded_link_time", "folded_memory"]

Ints = NDArray[np.int64]
MAX_LISTED_ROUTES = 400_000  # of (stored channel, member), where no symmetry of the fabric shows


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
    np.add.at(total, m.channel, flat.message_bytes()[m.send] * flat.lanes.repeat[flat.lane_of_step()[m.send]])
    on = np.array([fabric.actor_of[name] for name in placement], np.int64)
    used = np.flatnonzero(m.per_channel > 0)
    try:
        load = _by_symmetry(fold, fabric, on, flat, used, total) or _by_listing(fold, fabric, on, flat, used, total)
    except MeshwrightError as error:
        return {}, [Finding(check="links", message=str(error), witness={"placement": list(placement)})]
    alike: dict[tuple[int, int], Fraction] = {}  # by (which number, rate): links of an orbit share one
    time: dict[int, Fraction] = {}
    for link in sorted(load):
        amount, rate = load[link], fabric.links[link].rate_Bps
        if (id(amount), rate) not in alike:
            alike[id(amount), rate] = amount / rate
        time[link] = alike[id(amount), rate]
    return time, []


def _by_symmetry(fold: Fold, fabric: Fabric, on: Ints, p: Program, used: Ints, total: Ints) -> dict[int, Fraction]:
    """Bytes of every link, from the representatives' routes; empty where the fabric does not show the symmetry."""
    pairs = list(zip(on[p.channels.src[used]].tolist(), on[p.channels.dst[used]].tolist(), strict=True))
    known = {pair: fabric.route(*pair) for pair in set(pairs)}  # many channels join the same two
    paths = [known[pair] for pair in pairs]
    ranks, moves = np.arange(len(on)), []
    kind = dict(zip(on.tolist(), on[representative(fold, ranks)].tolist(), strict=True))
    for step in generators(fold):
        moved = routing_symmetry(fabric, dict(zip(on.tolist(), on[image(fold, ranks, step)].tolist(), strict=True)), known.values(), kind)
        if moved is None:
            return {}
        moves.append(moved)
    first = link_orbits(moves, len(fabric.links)).tolist()
    carried: dict[int, int] = {}
    for path, size in zip(paths, total[used].tolist(), strict=True):
        for link in path:
            carried[first[link]] = carried.get(first[link], 0) + size
    links = Counter(first)
    each = {orbit: Fraction(amount * fold.members, links[orbit]) for orbit, amount in carried.items()}
    return {link: each[orbit] for link, orbit in enumerate(first) if orbit in each}


def _by_listing(fold: Fold, fabric: Fabric, on: Ints, p: Program, used: Ints, total: Ints) -> dict[int, Fraction]:
    load: dict[int, int] = {}
    if len(used) * fold.members > MAX_LISTED_ROUTES:
        raise Unsupported(f"{len(used)} routes of {fold.members} members are too many to look at, and the fabric shows no symmetry")
    ranks = len(on)
    pairs, of = np.unique(p.channels.src[used].astype(np.int64) * ranks + p.channels.dst[used], return_inverse=True)  # many join the same
    sizes = np.zeros(len(pairs), np.int64)
    np.add.at(sizes, of, total[used])
    for member in members(fold):
        src, dst = on[image(fold, pairs // ranks, member)], on[image(fold, pairs % ranks, member)]
        for a, b, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            for link in fabric.route(a, b):
                load[link] = load.get(link, 0) + size
    return {link: Fraction(size) for link, size in load.items()}


def folded_memory(made: Shadow) -> WorstMemory:
    """Worst-order memory per rank, members as their representatives, in the order that a rank knows of (`trips`); what callees need is in it."""
    p = with_round_trips(made)
    worst = worst_order_memory(p, Order(p))
    rank = np.arange(p.ranks)
    for axis in made.axes:  # no rank stays: such a fold has no calls
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
