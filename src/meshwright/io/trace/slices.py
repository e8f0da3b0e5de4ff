"""What a trace is made of, before it has a file format: processes, tracks, slices, flows and counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Counter", "Slices", "Trace", "Track", "batched", "join", "layers", "no_slices", "take"]

T = TypeVar("T")


@dataclass(frozen=True)
class Track:
    process: int
    name: str


@dataclass(frozen=True)
class Counter:
    process: int
    name: str
    unit: str
    time_s: NDArray[np.float64]
    value: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Columns; sorted by track, then start. `name` and `category` index `Trace.names` and `Trace.categories`; `step` may be -1."""

    track: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    name: NDArray[np.int64]
    category: NDArray[np.int64]
    step: NDArray[np.int64]
    iteration: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.track)


@dataclass
class Trace:
    title: str
    processes: list[str] = field(default_factory=list)  # in the order to show them
    tracks: list[Track] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    counters: list[Counter] = field(default_factory=list)
    slices: Slices = field(default_factory=lambda: no_slices())
    flows: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))  # (slice of the send, slice of the receive)

    def name_id(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def category_id(self, name: str) -> int:
        return self.categories.setdefault(name, len(self.categories))

    def process_id(self, name: str) -> int:
        self.processes.append(name)
        return len(self.processes) - 1

    def track_id(self, process: int, name: str) -> int:
        self.tracks.append(Track(process, name))
        return len(self.tracks) - 1


def no_slices() -> Slices:
    return join([])


def join(parts: Sequence[Slices]) -> Slices:
    def column(name: str, dtype: type) -> NDArray[np.generic]:
        return np.concatenate([np.zeros(0, dtype), *(getattr(part, name) for part in parts)]).astype(dtype)

    integers = {name: column(name, np.int64) for name in ("track", "name", "category", "step", "iteration")}
    return Slices(start_s=column("start_s", np.float64), end_s=column("end_s", np.float64), **integers)  # type: ignore[arg-type]


def take(slices: Slices, chosen: NDArray[np.int64]) -> Slices:
    columns = {name: getattr(slices, name)[chosen] for name in ("track", "start_s", "end_s", "name", "category", "step", "iteration")}
    return Slices(**columns)


def layers(start: NDArray[np.float64], end: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Splits intervals, sorted by start, into as few lists without overlaps as possible (first fit)."""
    if not np.any(start[1:] < np.maximum.accumulate(end)[:-1]):
        return [np.arange(len(start))]
    layers: list[list[int]] = []
    free: list[float] = []
    for i, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        layer = next((j for j, at in enumerate(free) if at <= begin), len(free))
        if layer == len(free):
            layers.append([])
            free.append(0.0)
        layers[layer].append(i)
        free[layer] = finish
    return [np.array(layer) for layer in layers]


def batched(items: Iterable[T], size: int = 4096) -> Iterator[list[T]]:
    """Lists of at most `size`, in order."""
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch
