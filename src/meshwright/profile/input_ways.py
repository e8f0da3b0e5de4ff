"""Ways to feed training jobs, predicted from measured rates: files kept here or by several nodes, batches shared by jobs, more workers; and a bound.

Source: the limits of `input_rates`; J. Mohan et al. (VLDB 2021, arXiv 2007.06775), sections 5 and 6. The combination and the bound are ours.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from .input_rates import InputRates, Speed, lru_hits, speed_at

__all__ = ["Place", "Way", "least_item_s", "ways"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the jobs run. memory_bytes: files that fit into a node's memory; jobs: equal ones on each node; network_Bps: of a node, one way."""

    memory_bytes: int
    jobs: int = 1
    nodes: int = 1
    network_Bps: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Way:
    """kept: "" (a page cache that exchanges), "here", or "nodes"; shared: batches prepared once for all jobs; cached: bytes read from memory."""

    kept: str
    shared: bool
    workers: int
    cached: float
    speed: Speed

    @property
    def words(self) -> str:
        said = [{"": "files as they are", "here": "files kept", "nodes": "files kept by all nodes"}[self.kept]]
        said += ["batches shared"] * self.shared
        return ", ".join([*said, f"{self.workers} workers"])


def ways(m: InputRates, place: Place) -> list[Way]:
    """All that apply, fastest first; of equally fast ones those that change least."""
    share = min(place.memory_bytes / m.total_bytes, 1.0) if m.total_bytes else 1.0
    together = min(place.nodes * share, 1.0)
    kept = [("", lru_hits(share)), ("here", share), *[("nodes", together)] * (place.nodes > 1)]
    found = []
    hands = dict.fromkeys((m.workers, max(1, round(m.cores))))
    for (name, cached), shared, workers in itertools.product(kept, (False, *[True] * (place.jobs > 1)), hands):
        if shared and not workers:
            continue  # who shares needs a process that prepares
        found.append(Way(kept=name, shared=shared, workers=workers, cached=cached, speed=_speed(m, place, name, cached, shared, workers)))
    return sorted(found, key=lambda w: (-round(w.speed.items_per_s, 9), w.shared, w.workers != m.workers, ("", "here", "nodes").index(w.kept)))


def _speed(m: InputRates, place: Place, kept: str, cached: float, shared: bool, workers: int) -> Speed:
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
