"""What an engine adds to a job, fitted on one run, so that the simulator predicts the starts of another.

A policy holds a job's GPUs from its decision until it hears of its end. Beside the job's own time that is: from decision to the first line of the
launcher, and from then to the notice of its end, less its time. Both are means; without them errors pile up along chains of jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...cluster.queue import Queue
from ...cluster.servers import Servers
from ...errors import UsageError
from ...simulate.cluster import ClusterRun, Policy, simulate_cluster
from .driven import Ran

__all__ = ["Overheads", "fit_overheads", "predict"]


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds: from an arrival to a decision that nothing stands against, from a decision to the start, and after the job's own time to the
    notice."""

    arrival_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0


def fit_overheads(queue: Queue, ran: Sequence[Ran]) -> Overheads:
    """Raises: UsageError for a run in which nothing ended well at the first attempt."""
    good = [(job, r) for job, r in zip(queue.jobs, ran, strict=True) if r.code == 0 and r.attempts == 1]
    if not good:
        raise UsageError("no job ended well at its first attempt", where="run", hint="overheads are fitted on a run that went well")
    start = [r.started_s - r.decided_s for _, r in good]
    end = [r.noticed_s - r.started_s - job.duration_s for job, r in good]
    soon = sorted(r.decided_s - r.arrival_s for _, r in good)
    return Overheads(arrival_s=max(0.0, soon[len(soon) // 10]), start_s=float(np.mean(start)), end_s=float(np.mean(end)))


def predict(servers: Servers, queue: Queue, policy: Policy, overheads: Overheads) -> tuple[ClusterRun, NDArray[np.float64]]:
    """The queue in virtual time under the policy, and when each job starts. `policy`: a fresh one, made for this queue."""
    longer = tuple(
        msgspec.structs.replace(j, arrival_s=j.arrival_s + overheads.arrival_s, duration_s=max(1e-6,
            j.duration_s + overheads.start_s + overheads.end_s))
        for j in queue.jobs
    )
    run = simulate_cluster(servers, msgspec.structs.replace(queue, jobs=longer), policy, speed=lambda job, parts: 1.0)
    return run, run.start_s + overheads.start_s
