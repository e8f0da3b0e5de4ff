"""Who got what in one round: parts of servers for every job that runs."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..bound import Bound
from .queue import QueuedJob
from .sensitivity import Sensitivity
from .servers import Servers

__all__ = ["Allocation", "Given", "Part", "Parts", "floor_of", "speed_of"]


class Part(NamedTuple):
    """GPUs (numbers within the server), whole cores and steps of memory of one server."""

    server: int
    gpus: tuple[int, ...]
    cores: int
    steps: int


Parts = tuple[Part, ...]


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one job has on one server, by names, and in bytes."""

    job: str
    server: str
    gpus: tuple[str, ...]
    cores: int
    memory_bytes: int


class Allocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One round. `order`: jobs that run, first in the queue first. `waiting`: jobs that do not. `speed`: sum over jobs of GPUs times W (times the
    factor of the GPU's type). `bound`: no allocation of these jobs that keeps everyone's floor has a higher one."""

    strategy: str
    fabric: str
    order: tuple[str, ...]
    given: tuple[Given, ...]
    speed: float
    waiting: tuple[str, ...] = ()
    bound: Bound | None = None
    ranking: str = ""


def speed_of(servers: Servers, job: QueuedJob, profile: Sensitivity, parts: Parts) -> float:
    """W times the factor of the GPUs' type; a gang on several servers is as fast as its slowest part."""
    found = float("inf")
    for part in parts:
        kind, n = servers.servers[part.server].kind, len(part.gpus)
        found = min(found, profile.on(kind.type) * float(profile.at(part.cores / n, kind.bytes_of(part.steps) / n)))
    return found


def floor_of(servers: Servers, profile: Sensitivity, parts: Parts) -> float:
    """Speed at the proportional share of the same servers, in whole cores and steps (`Kind.share`)."""
    found = float("inf")
    for part in parts:
        kind, n = servers.servers[part.server].kind, len(part.gpus)
        cores, steps = kind.share(n)
        found = min(found, profile.on(kind.type) * float(profile.at(cores / n, kind.bytes_of(steps) / n)))
    return found
