"""Seeded queues: sizes, durations and profiles of the Synergy evaluation (OSDI 2022), Poisson arrivals.

GPUs per job: 1 (70 %), 2 (10 %), 4 (15 %), 8 (5 %). Minutes: 10^U(1.5, 3) for four jobs of five, else 10^U(3, 4). Classes by split, uniform within a
class. The matrices are those that the authors published for ten models, at {1, 2, 3, 4, 5, 6, 9, 12, 24} cores per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ..errors import UsageError
from .queue import Queue, QueuedJob
from .sensitivity import Sensitivity

__all__ = ["CLASSES", "UNPROFILED", "published_profiles", "reprofiled", "synthetic"]

CORES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0, 12.0, 24.0)
MEMORY_BYTES = (20_830_000_000, 62_500_000_000, 125_000_000_000, 187_500_000_000, 250_000_000_000)
IMAGE = {  # at enough memory
    "alexnet": (0.3, 0.66, 1, 1.25, 1.53, 1.75, 2, 2.94, 2.94), "shufflenet": (0.3, 0.66, 1, 1.25, 1.53, 1.75, 2, 2.89, 2.89),
    "res18": (0.37, 0.72, 1, 1.3, 1.53, 1.75, 2.4, 2.4, 2.4), "mobilenet": (0.37, 0.72, 1, 1.3, 1.49, 1.55, 1.55, 1.55, 1.55),
    "res50": (0.4, 0.74, 1, 1.15, 1.15, 1.15, 1.15, 1.15, 1.15),
}  # fmt: skip
SPEECH = {"m5": (0.3, 0.66, 1, 1.2, 1.4, 2.5, 2.5, 2.5, 2.5), "deepspeech": (0.3, 0.66, 1, 1, 1, 1, 1, 1, 1)}
CAPS = {"alexnet": (2.0,), "shufflenet": (2.0,), "m5": (1.5, 2.0)}  # of the speed at 62.5 GB, 125 GB; none: the whole of it
STARVED = 0.1  # of image and speech models at 20.83 GB
CLASSES: Mapping[str, tuple[str, ...]] = {"image": tuple(IMAGE), "language": ("gnmt", "transformer", "lstm"), "speech": tuple(SPEECH)}
# Of jobs of which a trace says nothing but GPUs and times: any core and any memory will do.
UNPROFILED = Sensitivity(name="unprofiled", cores=(1.0,), memory_bytes=(1,), speed=((1.0,),))
SIZES = ((1, 0.7), (2, 0.1), (4, 0.15), (8, 0.05))


def published_profiles() -> tuple[Sensitivity, ...]:
    """The ten models' matrices; they are relative to 3 cores and 62.5 GB per GPU."""
    found = []
    for name, row in (IMAGE | SPEECH).items():
        caps = (*CAPS.get(name, ()), *(float("inf"),) * 4)[:4]
        speed = tuple((min(STARVED, w), *(float(min(w, cap)) for cap in caps)) for w in row)
        found.append(Sensitivity(name=name, cores=CORES, memory_bytes=MEMORY_BYTES, speed=speed))
    flat = ((1.0,) * len(MEMORY_BYTES),) * len(CORES)
    return (*found, *(Sensitivity(name=name, cores=CORES, memory_bytes=MEMORY_BYTES, speed=flat) for name in CLASSES["language"]))


def _models(split: Sequence[float], count: int, rng: np.random.Generator) -> list[str]:
    if len(split) != len(CLASSES) or min(split) < 0 or sum(split) <= 0:
        raise UsageError(f"{len(split)} shares: {list(split)}", where="split", hint=f"three, of {', '.join(CLASSES)}: 20,70,10")
    share = np.array(split, np.float64) / sum(split)
    classes = [list(CLASSES)[i] for i in rng.choice(len(share), count, p=share).tolist()]
    return [CLASSES[c][int(rng.integers(len(CLASSES[c])))] for c in classes]


def synthetic(jobs: int, *, per_hour: float, split: Sequence[float] = (20, 70, 10), seed: int = 0, most_gpus: int = 8) -> Queue:
    """Equal arguments give equal queues. Raises: UsageError."""
    if jobs < 1 or not 0 < per_hour < float("inf") or most_gpus < 1:
        raise UsageError(f"{jobs} jobs at {per_hour} an hour", where="queue", hint="at least one job, a rate above 0")
    rng = np.random.default_rng(seed)
    sizes = [s for s in SIZES if s[0] <= most_gpus]
    weights = np.array([w for _, w in sizes])
    arrival = np.cumsum(rng.exponential(3600 / per_hour, jobs))
    gpus = np.array([g for g, _ in sizes])[rng.choice(len(sizes), jobs, p=weights / weights.sum())]
    minutes = 10 ** np.where(rng.random(jobs) < 0.8, rng.uniform(1.5, 3, jobs), rng.uniform(3, 4, jobs))
    models = _models(split, jobs, rng)
    made = tuple(
        QueuedJob(name=f"j{i}", gpus=int(gpus[i]), profile=models[i], arrival_s=float(arrival[i]), duration_s=float(minutes[i] * 60))
        for i in range(jobs)
    )
    return Queue(name=f"synthetic {jobs} jobs, {per_hour:g} an hour, split {':'.join(f'{x:g}' for x in split)}, seed {seed}",
                 profiles=published_profiles(), jobs=made)  # fmt: skip


def reprofiled(queue: Queue, split: Sequence[float], *, seed: int = 0) -> Queue:
    """The queue with published profiles drawn at random: traces say nothing of cores and memory. Raises: UsageError."""
    models = _models(split, len(queue.jobs), np.random.default_rng(seed))
    jobs = tuple(msgspec.structs.replace(j, profile=m) for j, m in zip(queue.jobs, models, strict=True))
    return msgspec.structs.replace(queue, profiles=published_profiles(), jobs=jobs)
