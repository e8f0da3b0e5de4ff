"""Ways to feed training jobs, predicted from measured rates: files kept here or by several nodes, batches shared by jobs, more workers; and a bound.

Source: the limits of `input_rates`; J. Mohan et al. (VLDB 2021, arXiv 2007.06775), sections 5 and 6. The combination and the bound are ours.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction

from ...bound import Bound, Certificate
from ...profile.input_plan import MIN_HELD_SHARE, Kept, Medium, Place
from ...profile.input_rates import InputRates, Speed, lru_hits, speed_at

__all__ = ["Way", "cached_share", "epoch_bound", "least_item_s", "speed_of", "ways"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """kept, medium, shared, workers, staged: as `InputPlan` has them; room_bytes: files that fit; cached: share of bytes read from memory."""

    kept: Kept
    medium: Medium
    shared: bool
    workers: int
    staged: int
    room_bytes: int
    cached: float
    speed: Speed

    @property
    def words(self) -> str:
        said = [{"": "files as they are", "here": "files kept", "nodes": "files kept by all nodes"}[self.kept]]
        said += ["batches shared"] * self.shared
        return ", ".join([*said, f"{self.workers} workers"])


def ways(m: InputRates, place: Place) -> list[Way]:
    """All that apply, fastest first; of equally fast ones those that change least."""
    kinds: list[Kept] = ["", "here", *["nodes"] * (place.nodes > 1)]  # type: ignore[list-item]
    found = []
    hands = dict.fromkeys((m.workers, max(1, round(m.cores))))
    for kept, shared, workers in itertools.product(kinds, (False, *[True] * (place.jobs > 1)), hands):
        if shared and not workers:
            continue  # who shares needs a process that prepares
        staged = _staged(m, place, workers) if shared else 0
        if shared and not staged:
            continue  # not one batch fits
        waiting = staged * m.batch_bytes
        held = m.held >= MIN_HELD_SHARE
        medium: Medium = "" if not kept else "page-cache" if held else "shared-memory"
        room = place.memory_bytes - waiting
        if medium == "shared-memory":
            room = min(room, place.shared_bytes - waiting)
        cached = cached_share(m, place, kept, room)
        speed = speed_of(m, place, kept, cached, shared, workers)
        found.append(Way(kept=kept, medium=medium, shared=shared, workers=workers, staged=staged, room_bytes=room, cached=cached, speed=speed))
    return sorted(found, key=lambda w: (-round(w.speed.items_per_s, 9), w.shared, w.workers != m.workers, ("", "here", "nodes").index(w.kept)))


def _staged(m: InputRates, place: Place, workers: int) -> int:
    """Batches that wait: two for each job and worker where they fit into half of the memory and of shared memory, else as many as do."""
    fit = min(place.memory_bytes, place.shared_bytes) // 2 // m.batch_bytes if m.batch_bytes else 1 << 20
    return min(2 * (place.jobs + workers), fit)


def cached_share(m: InputRates, place: Place, kept: Kept, room_bytes: int) -> float:
    """Of the bytes of an epoch those that come from memory, with room for so many on each node."""
    share = min(max(room_bytes, 0) / m.total_bytes, 1.0) if m.total_bytes else 1.0
    if not kept:
        return lru_hits(share) if m.held >= MIN_HELD_SHARE else 0.0
    return share if kept == "here" else min(place.nodes * share, 1.0)


def speed_of(m: InputRates, place: Place, kept: Kept, cached: float, shared: bool, workers: int) -> Speed:
    """Of each job. More workers prepare faster as far as there are cores; shared batches are prepared by all jobs' workers, once."""
    readers = 1 if shared else place.jobs
    hands = workers * place.jobs if shared else workers
    prepare_s = m.prepare_s * min(max(m.workers, 1), m.cores) / min(max(hands, 1), m.cores)
    found = speed_at(replace(m, workers=hands, prepare_s=max(prepare_s, m.cpu_s / m.cores)), cached, jobs=readers)
    network_s = readers * (1 - 1 / place.nodes) * cached * m.item_bytes / place.network_Bps if kept == "nodes" else 0.0
    return found if network_s <= 1 / found.items_per_s else Speed(1 / network_s, "network")


def least_item_s(m: InputRates, place: Place) -> tuple[float, str]:
    """No way is faster than this, per item and job, and why: the device; each item prepared once on all cores; what no memory holds, read once.

    Of one node's memory or of all nodes', whichever is asked for by `place.nodes`; preparing costs at least the processor time of one item.
    """
    missing = 1 - min(place.nodes * place.memory_bytes / m.total_bytes, 1.0) if m.total_bytes else 0.0
    limits = {"device": m.device_s, "preparation": m.cpu_s / m.cores, "storage": missing * m.item_bytes / m.storage_Bps}
    worst = max(limits, key=lambda name: limits[name])
    return limits[worst], worst


def epoch_bound(m: InputRates, place: Place) -> Bound:
    """`least_item_s` for all items, with its certificate: the limit that proves it."""
    least_s, why = least_item_s(m, place)
    value = m.items * Fraction(least_s)
    return Bound(quantity="epoch time", value=f"{value.numerator}/{value.denominator}", unit="s",
                 certificate=Certificate(kind="feeding", data={"limit": why}))  # fmt: skip
