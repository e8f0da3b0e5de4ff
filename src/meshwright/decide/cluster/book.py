"""What jobs of each profile and size can do with cores and memory of each kind of server, worked out once; and servers divided among jobs, kept.

A class is (profile, GPUs, kind of server, fixed). Its options are the pairs of whole cores and steps of memory at which the job is no slower than at
its share and that no smaller pair equals. A fixed class, a part of a gang on several servers, has one option: the least that keeps the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...cluster.sensitivity import Sensitivity
from ...cluster.servers import Servers
from ...errors import UsageError
from ...kernels.servers import divide

__all__ = ["Book", "Division", "Options"]

EPSILON = 1e-9  # of speeds: sums of floats
MAX_KEPT = 200_000  # divisions that are kept, some 100 bytes each


Points = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]  # cores, GB and speed of measured points


class Options(NamedTuple):
    """Of one class, by cores and then steps: what the job gains, GPUs x speed."""

    cores: NDArray[np.int64]
    steps: NDArray[np.int64]
    gain: NDArray[np.float64]


class Division(NamedTuple):
    """Of one server among jobs: `gain` in all, -inf if they do not fit; numbers of the options; what one more core would be worth."""

    gain: float
    picked: tuple[int, ...]
    core: float


class Book:
    """Raises: UsageError for a profile that has no speed at the proportional share of a kind of server."""

    def __init__(self, servers: Servers, profiles: Sequence[Sensitivity]) -> None:
        self.servers, self.profiles = servers, tuple(profiles)
        self.kinds = servers.kinds
        self._class: dict[tuple[int, int, int, bool], int] = {}
        self._options: list[Options] = []
        self._columns: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]] | None = None
        self.points: dict[tuple[int, int], Points] = {}  # of a profile on a kind, for programmes
        self.settled: set[tuple[int, tuple[int, ...], int, tuple[int, ...]]] = set()  # pairs of servers that gain nothing by swaps
        self._floors: dict[tuple[int, int, int], float] = {}
        self._divided: dict[tuple[int, tuple[int, ...]], Division] = {}
        most = max(len(s.gpus) for s in servers.servers)
        self._scratch = [
            (np.empty((k.cores + 1, k.steps + 1)), np.empty((most, k.cores + 1, k.steps + 1), np.int32), np.empty(most, np.int64))
            for k in self.kinds
        ]

    def class_of(self, profile: int, gpus: int, kind: int, fixed: bool = False) -> int:
        key = (profile, gpus, kind, fixed)
        if key not in self._class:
            self._options.append(self._made(*key))
            self._columns = None
            self._class[key] = len(self._options) - 1
        return self._class[key]

    def options(self, number: int) -> Options:
        return self._options[number]

    def floor(self, profile: int, gpus: int, kind: int) -> float:
        """Speed at the share of so many GPUs."""
        key = (profile, gpus, kind)
        if key not in self._floors:
            self._floors[key] = self._floor(*key)
        return self._floors[key]

    def _floor(self, profile: int, gpus: int, kind: int) -> float:
        k = self.kinds[kind]
        cores, steps = k.share(gpus)
        floor = self.profiles[profile].on(k.type) * float(self.profiles[profile].at(cores / gpus, k.bytes_of(steps) / gpus))
        if floor <= 0:
            name = self.profiles[profile].name
            raise UsageError(
                f"profile {name} has no speed at the proportional share, {cores} cores and {k.bytes_of(steps)} bytes for {gpus} GPUs",
                where=f"servers with {k.gpus} GPUs of type {k.type}", hint="measure it there, or give the servers more cores or memory",
            )  # fmt: skip
        return floor

    def _made(self, profile: int, gpus: int, kind: int, fixed: bool) -> Options:
        k, floor = self.kinds[kind], self.floor(profile, gpus, kind)
        cores, steps = np.arange(1, k.cores + 1), np.arange(1, k.steps + 1)
        held = np.array([k.bytes_of(int(s)) for s in steps])
        speed = self.profiles[profile].on(k.type) * self.profiles[profile].at(cores[:, None] / gpus, held[None, :] / gpus)
        keeps = speed >= floor - EPSILON
        less = np.full_like(speed, -np.inf)
        less[1:] = speed[:-1]
        less[:, 1:] = np.maximum(less[:, 1:], speed[:, :-1])
        i, u = np.nonzero(keeps & (speed > np.where(less >= floor - EPSILON, less, -np.inf) + EPSILON))
        if fixed:
            i, u = i[:1], u[:1]
            return Options(cores[i], steps[u], np.array([gpus * floor]))
        return Options(cores[i], steps[u], gpus * speed[i, u])

    def _flat(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        if self._columns is None:
            o = self._options or [Options(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]  # no job has asked
            first = np.concatenate([[0], np.cumsum([len(x.gain) for x in o])]).astype(np.int64)
            self._columns = (first, *(np.concatenate([x[n] for x in o]).astype(t) for n, t in enumerate((np.int64, np.int64, np.float64))))  # type: ignore[assignment]
        assert self._columns is not None
        return self._columns

    def settle(self, pair: tuple[int, tuple[int, ...], int, tuple[int, ...]]) -> None:
        """Remember that these two servers gain nothing by swaps."""
        if len(self.settled) >= MAX_KEPT:
            self.settled.clear()
        self.settled.add(pair)

    def divide(self, kind: int, classes: tuple[int, ...]) -> Division:
        """The best division of a server of that kind among jobs of these classes, which must be sorted."""
        key = (kind, classes)
        found = self._divided.get(key)
        if found is None:
            best, choice, picked = self._scratch[kind]
            first, cores, steps, gain = self._flat()
            value = float(divide(np.array(classes, np.int64), len(classes), first, cores, steps, gain, best, choice, picked))
            numbers = tuple(int(picked[i] - first[k]) for i, k in enumerate(classes)) if value > -np.inf else ()
            found = Division(value, numbers, value - float(best[-2, -1]) if len(classes) else 0.0)
            if len(self._divided) >= MAX_KEPT:
                self._divided.clear()
            self._divided[key] = found
        return found
