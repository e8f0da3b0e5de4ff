"""A queue of jobs that want GPUs."""

from __future__ import annotations

import math
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .sensitivity import Sensitivity

__all__ = ["MAX_JOBS", "Queue", "QueuedJob"]

MAX_JOBS = 1_000_000
MAX_GPUS = 1 << 20  # of one job
MAX_S = 1e12


class QueuedJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """`duration_s`: at its proportional share. `together`: all its GPUs on one server. `types`: of GPU that it may have, empty: any. Higher
    `priority` goes first, whatever the order of the queue is. `command`: what it runs, once per GPU; `plan`: path of a plan that travels with it.
    Both matter to `cluster run` alone."""

    name: str
    gpus: int
    profile: str
    arrival_s: float
    duration_s: float
    priority: int = 0
    together: bool = False
    types: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    plan: str = ""


class Queue(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, dict=True):
    """Jobs, and the profiles that they name. Raises: UsageError naming the job."""

    name: str = "queue"
    profiles: tuple[Sensitivity, ...] = ()
    jobs: tuple[QueuedJob, ...] = ()

    def __post_init__(self) -> None:
        if len(self.jobs) > MAX_JOBS:
            raise UsageError(f"{len(self.jobs)} jobs, more than {MAX_JOBS}", where="jobs")
        if len(self.profile_of) < len(self.profiles):
            raise UsageError("two profiles have the same name", where="profiles", hint="give every profile a name of its own")
        seen: set[str] = set()
        for i, job in enumerate(self.jobs):
            where = f"jobs[{i}]"
            if not job.name or job.name in seen:
                raise UsageError(f"the name {job.name[:64]!r} is empty or taken", where=where, hint="give every job a name of its own")
            seen.add(job.name)
            if not 1 <= job.gpus <= MAX_GPUS:
                raise UsageError(f"{job.gpus} GPUs", where=f"{where}.gpus", hint=f"a whole number from 1 to {MAX_GPUS}")
            if job.profile not in self.profile_of:
                known = ", ".join(sorted(self.profile_of)[:12]) or "none"
                raise UsageError(f"there is no profile {job.profile[:64]!r}", where=f"{where}.profile", hint=f"profiles of this queue: {known}")
            for what in ("arrival_s", "duration_s"):
                value = getattr(job, what)
                if not (math.isfinite(value) and 0 <= value <= MAX_S) or (what == "duration_s" and value == 0):
                    raise UsageError(f"a time of {value} s", where=f"{where}.{what}", hint="finite, not negative; a duration is above 0")

    @cached_property
    def profile_of(self) -> dict[str, int]:
        """Number of the profile of each name."""
        return {p.name: n for n, p in enumerate(self.profiles)}

    @cached_property
    def arrival_s(self) -> NDArray[np.float64]:
        return np.array([j.arrival_s for j in self.jobs], np.float64)

    @cached_property
    def duration_s(self) -> NDArray[np.float64]:
        return np.array([j.duration_s for j in self.jobs], np.float64)

    @cached_property
    def gpus(self) -> NDArray[np.int64]:
        return np.array([j.gpus for j in self.jobs], np.int64)

    @cached_property
    def priority(self) -> NDArray[np.int64]:
        return np.array([j.priority for j in self.jobs], np.int64)

    @cached_property
    def profile(self) -> NDArray[np.int64]:
        return np.array([self.profile_of[j.profile] for j in self.jobs], np.int64)
