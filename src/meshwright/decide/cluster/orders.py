"""Orders of a queue: arrival, shortest rest, least attained service, finish-time fairness, dominant resource, packing score.

Cite: each below; the set is that of Synergy's evaluation (OSDI 2022).
Left open by the papers: how jobs without users share by dominant resource (DRF): every job is a user of its own, and what counts is the dominant
resource it has attained over time. Tetris mixes packing and shortness by their means, as its paper proposes.
Deviations: remaining times are those at the proportional share, so that a job's surplus does not change its place in the order.
Invariant: a key per job, smallest first; ties go by arrival, priorities before all keys.
Cost: O(jobs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ...cite import FOLKLORE, Cite
from .problem import OrderStrategy, Waiting

__all__ = ["Drf", "Fifo", "Ftf", "Las", "Srtf", "Tetris"]

TIRESIAS = Cite(key="gu2019tiresias", title="Tiresias: A GPU Cluster Manager for Distributed Deep Learning", year=2019, venue="NSDI",
    authors="Juncheng Gu et al.")
THEMIS = Cite(key="mahajan2020themis", title="Themis: Fair and Efficient GPU Cluster Scheduling", year=2020, venue="NSDI",
    authors="Kshiteej Mahajan et al.")
DRF = Cite(key="ghodsi2011drf", title="Dominant Resource Fairness", year=2011, venue="NSDI", authors="Ali Ghodsi et al.")
TETRIS = Cite(key="grandl2014tetris", title="Multi-resource Packing for Cluster Schedulers", year=2014, venue="SIGCOMM",
    authors="Robert Grandl et al.")
KNEE = 0.95  # share of a job's highest speed at which it has what it demands


@dataclass(frozen=True, kw_only=True)
class Fifo(OrderStrategy):
    """First come, first served. No options."""

    name: ClassVar[str] = "fifo"
    cite: ClassVar[Cite] = FOLKLORE
    steady: ClassVar[bool] = True

    def plan(self, waiting: Waiting) -> NDArray[np.float64]:
        return waiting.queue.arrival_s[waiting.jobs]


@dataclass(frozen=True, kw_only=True)
class Srtf(OrderStrategy):
    """Shortest remaining time first. No options."""

    name: ClassVar[str] = "srtf"
    cite: ClassVar[Cite] = FOLKLORE

    def plan(self, waiting: Waiting) -> NDArray[np.float64]:
        return waiting.left_s


@dataclass(frozen=True, kw_only=True)
class Las(OrderStrategy):
    """Least attained service, in GPU seconds, first. No options."""

    name: ClassVar[str] = "las"
    cite: ClassVar[Cite] = TIRESIAS

    def plan(self, waiting: Waiting) -> NDArray[np.float64]:
        return waiting.attained_s


@dataclass(frozen=True, kw_only=True)
class Ftf(OrderStrategy):
    """Finish-time fairness: the job whose expected time is the largest multiple of the time with an equal share first. No options."""

    name: ClassVar[str] = "ftf"
    cite: ClassVar[Cite] = THEMIS

    def plan(self, waiting: Waiting) -> NDArray[np.float64]:
        queue, jobs = waiting.queue, waiting.jobs
        alone_s = queue.duration_s[jobs] * waiting.contention
        return -(waiting.now_s - queue.arrival_s[jobs] + waiting.left_s * waiting.contention) / alone_s


def _demands(waiting: Waiting) -> NDArray[np.float64]:
    """[jobs, 3]: shares of all GPUs, cores and memory that jobs demand, on the first kind of server."""
    queue, book, servers = waiting.queue, waiting.book, waiting.servers
    kind, totals = book.kinds[0], (servers.total_gpus, int(servers.cores.sum()), float(servers.steps.sum()))
    rows = []
    for j in waiting.jobs.tolist():
        gpus = min(queue.jobs[j].gpus, kind.gpus)
        o = book.options(book.class_of(int(queue.profile[j]), gpus, 0))
        at = int(np.argmax(o.gain >= KNEE * o.gain.max()))
        times = queue.jobs[j].gpus / gpus
        rows.append((queue.jobs[j].gpus / totals[0], times * o.cores[at] / totals[1], times * o.steps[at] / totals[2]))
    return np.array(rows, np.float64).reshape(-1, 3)


@dataclass(frozen=True, kw_only=True)
class Drf(OrderStrategy):
    """Dominant resource fairness: least attained of the resource that the job uses most of, first. No options."""

    name: ClassVar[str] = "drf"
    cite: ClassVar[Cite] = DRF

    def plan(self, waiting: Waiting) -> NDArray[np.float64]:
        ran_s = waiting.attained_s / np.maximum(waiting.queue.gpus[waiting.jobs], 1)
        return np.asarray(ran_s * _demands(waiting).max(1))


@dataclass(frozen=True, kw_only=True)
class Tetris(OrderStrategy):
    """Packing score and shortness together: large demands that an empty cluster takes, and short rests, first. No options."""

    name: ClassVar[str] = "tetris"
    cite: ClassVar[Cite] = TETRIS

    def plan(self, waiting: Waiting) -> NDArray[np.float64]:
        fits = _demands(waiting).sum(1)
        work = waiting.left_s * fits
        return np.asarray(-fits + work * (fits.mean() / max(float(work.mean()), 1e-300)))
