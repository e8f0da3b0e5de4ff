"""Types of the cluster decision: which jobs run in a round (orders), and what each of them gets (allocations)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ...cluster.allocation import Parts
from ...cluster.queue import Queue
from ...cluster.servers import Servers
from ...errors import Infeasible
from ..strategies import Listed
from .book import Book

__all__ = ["AllocationProblem", "AllocationStrategy", "Divided", "OrderStrategy", "Waiting", "require_possible"]


def require_possible(servers: Servers, queue: Queue) -> None:
    """Raises: Infeasible for a gang that not even the empty cluster could hold, with the GPUs of the servers that it may use; UsageError for a
    profile without a speed at the share of a job of its size: that job would never end at its share."""
    for types in dict.fromkeys(j.types for j in queue.jobs):
        sizes = servers.gpus[servers.of_types(types)]
        total, largest = int(sizes.sum()), int(sizes.max(initial=0))
        for job in queue.jobs:
            if job.types == types and (job.gpus > total or (job.together and job.gpus > largest)):
                what = f"job {job.name} wants {job.gpus} GPUs{' on one server' if job.together else ''}{' of ' + ', '.join(types) if types else ''}"
                counts = {str(n): int((sizes == n).sum()) for n in sorted(set(sizes.tolist()), reverse=True)}
                told = ", ".join(f"{n} with {size}" for size, n in counts.items()) or "none"
                raise Infeasible(
                    f"{what}: no set of servers can ever hold it; servers: {told}", where="queue",
                    hint="make the gang smaller, allow it several servers, or name a larger fabric",
                    data={"job": job.name, "gpus": job.gpus, "fragments": counts, "largest_fragment": largest, "total": total},
                )  # fmt: skip
    book = Book(servers, queue.profiles)
    for profile, gpus, types in dict.fromkeys((queue.profile_of[j.profile], j.gpus, j.types) for j in queue.jobs):
        for n, kind in enumerate(book.kinds):
            if not types or kind.type in types:
                book.floor(profile, min(gpus, kind.gpus), n)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What orders look at: jobs that are there and not done (numbers), and of each the seconds left at its proportional share, GPU seconds attained,
    and seconds since it came. `contention`: GPUs wanted over GPUs there are, at least 1."""

    servers: Servers
    queue: Queue
    book: Book
    now_s: float
    jobs: NDArray[np.int64]
    left_s: NDArray[np.float64]
    attained_s: NDArray[np.float64]
    contention: float


@dataclass(frozen=True, kw_only=True)
class AllocationProblem:
    """`running`: jobs (numbers) that the order admits, first in the order first; together they want no more GPUs than there are. `ranked`: all
    jobs in the order. `previous`: what jobs had in the round before. `move_s`: seconds of work that moving a job costs; `round_s`: length of a
    round."""

    servers: Servers
    queue: Queue
    book: Book
    running: tuple[int, ...]
    ranked: tuple[int, ...] = ()
    previous: Mapping[int, Parts] = field(default_factory=dict)
    move_s: float = 0.0
    round_s: float = 300.0

    def allowed(self, job: int) -> NDArray[np.bool_]:
        return self.servers.of_types(self.queue.jobs[job].types)


@dataclass(frozen=True, kw_only=True)
class Divided:
    """`parts`: of every job that runs. `notes`: what the strategy has to say (JSON-able)."""

    parts: Mapping[int, Parts]
    notes: Mapping[str, Any] = field(default_factory=dict)


class OrderStrategy(Listed, Protocol):
    """A frozen dataclass of options. `steady`: while no job comes or goes, the order of those that wait and run stays."""

    answers: ClassVar[str] = "order"
    steady: ClassVar[bool] = False

    def plan(self, waiting: Waiting) -> NDArray[np.float64]:
        """A key per job, smallest first; ties by arrival."""
        ...


class AllocationStrategy(Listed, Protocol):
    """A frozen dataclass of options. `admits`: it takes jobs of `ranked` behind those that do not fit."""

    answers: ClassVar[str] = "allocation"
    admits: ClassVar[bool] = False

    def plan(self, problem: AllocationProblem, *, rng: np.random.Generator) -> Divided: ...


def ranking(order: OrderStrategy, waiting: Waiting) -> NDArray[np.int64]:
    """Numbers of jobs: by priority, then by the order's key, then by arrival."""
    queue, jobs = waiting.queue, waiting.jobs
    if not len(jobs):
        return jobs
    return jobs[np.lexsort((jobs, queue.arrival_s[jobs], order.plan(waiting), -queue.priority[jobs]))]


def admitted(servers: Servers, queue: Queue, ranked: NDArray[np.int64], first: Sequence[int] = ()) -> list[int]:
    """The jobs that fit into the GPUs, `first` before all others, then in order; one that does not fit into the rest is passed over."""
    left = servers.total_gpus
    room = {types: int(servers.gpus[servers.of_types(types)].sum()) for types in {queue.jobs[j].types for j in ranked.tolist()} if types}
    taken: list[int] = []
    ahead = set(first)
    candidates = [*first, *(j for j in ranked.tolist() if j not in ahead)] if ahead else ranked.tolist()
    least = int(queue.gpus[ranked].min()) if len(ranked) else 1
    for j in candidates:
        if left < least:
            break
        job = queue.jobs[j]
        within = [t for t in room if job.types and set(job.types) <= set(t)]
        if job.gpus <= left and all(room[t] >= job.gpus for t in within):
            taken.append(j)
            left -= job.gpus
            for t in within:
                room[t] -= job.gpus
    return taken
