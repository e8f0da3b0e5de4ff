"""What a training loop waits for: the rates of device, preparation and storage, and the speed that follows for any share of cached bytes.

Cite: J. Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training (VLDB 2021, arXiv 2007.06775), section 6.
Deviations: reading and decoding take turns inside a worker, which is a limit of its own (`waiting`); the paper's formula has them overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import UsageError

__all__ = ["InputRates", "Speed", "cache_for_no_fetch_stall", "lru_hits", "speed_at"]


@dataclass(frozen=True, kw_only=True)
class InputRates:
    """Seconds are per item unless said.

    device_s: the training step's, 0 if none was given; prepare_s: wall time between items of a loader whose bytes are all in memory, all workers
    together; cpu_s: processor time of one item; miss_s, hit_s: reading an item's bytes from storage and from memory, one stream; storage_Bps: reading
    from storage with as many streams as workers; cores: what control groups and affinity leave. held: share of what was read that the page cache
    holds right after; batch_bytes: a prepared batch as jobs would share it, 0 where it was not measured or cannot be shared.

    Raises: UsageError naming the field.
    """

    items: int
    total_bytes: int
    workers: int
    cores: float
    device_s: float
    prepare_s: float
    cpu_s: float
    miss_s: float
    hit_s: float
    storage_Bps: float
    sampled: int
    rounds: int
    held: float = 1.0
    batch_bytes: int = 0

    def __post_init__(self) -> None:
        for what, least in (("items", 1), ("total_bytes", 0), ("workers", 0), ("sampled", 1), ("rounds", 1), ("batch_bytes", 0)):
            if getattr(self, what) < least:
                raise UsageError(f"{getattr(self, what)}", where=what, hint=f"at least {least}")
        for what in ("device_s", "prepare_s", "cpu_s", "miss_s", "hit_s", "storage_Bps", "cores", "held"):
            value = getattr(self, what)
            if not math.isfinite(value) or value < 0 or (value == 0 and what in ("storage_Bps", "cores")):
                raise UsageError(f"{value}", where=what, hint="a finite number, not negative; rates and cores are above 0")

    @property
    def item_bytes(self) -> float:
        return self.total_bytes / self.items


@dataclass(frozen=True)
class Speed:
    """Items per second, and what limits them: device, preparation, storage, waiting (workers that wait for reads), or in turn (no workers)."""

    items_per_s: float
    limit: str


def speed_at(m: InputRates, cached: float, *, device: float = 1, cores: float = 1, disk: float = 1, jobs: int = 1) -> Speed:
    """The speed of each of `jobs` equal jobs when a share `cached` of the bytes is read from memory, with a device, cores or a disk so many times as
    fast. Sources: section 6 of the paper for device, preparation and storage; the other two limits are ours."""
    missing = 1 - cached
    fetch_s = cached * m.hit_s + missing * m.miss_s / disk
    storage_s = jobs * missing * m.item_bytes / (m.storage_Bps * disk)
    prepare_s = jobs * m.prepare_s / cores
    if not m.workers:  # one thread does everything; what preparation was measured with includes reads from memory
        return Speed(1 / (m.device_s / device + max(prepare_s + max(fetch_s - m.hit_s, 0), storage_s)), "in turn")
    limits = {
        "device": m.device_s / device, "preparation": prepare_s, "storage": storage_s, "waiting": (m.cpu_s + fetch_s) / m.workers,
    }  # fmt: skip
    worst = max(limits, key=lambda name: limits[name])
    return Speed(1 / limits[worst] if limits[worst] > 0 else math.inf, worst)


def lru_hits(share: float) -> float:
    """Of items that are read once an epoch in random order, those that an LRU cache for a share of them finds: c + (1 - c) ln(1 - c)."""
    return 1.0 if share >= 1 else share + (1 - share) * math.log1p(-share)


def cache_for_no_fetch_stall(m: InputRates) -> float:
    """The smallest share of the bytes that must come from memory for fetching to limit nothing: bisection, as `speed_at` never falls with it."""
    best = speed_at(m, 1).items_per_s
    low, high = 0.0, 1.0
    if speed_at(m, 0).items_per_s >= best * (1 - 1e-9):
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if speed_at(m, middle).items_per_s >= best * (1 - 1e-9) else (middle, high)
    return high
