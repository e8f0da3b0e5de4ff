"""What an engine adds to a job, fitted on one run, so that the simulator predicts the starts of another.

A policy holds a job's GPUs from its decision until it hears of its end. Beside the job's own time that is: from decision to the first line of the
launcher, which grows with the jobs that were decided at the same moment and are placed before it, and from then to the notice of its end, less its
time. Without them errors pile up along chains of jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...cluster.allocation import Parts
from ...cluster.queue import Queue
from ...cluster.servers import Servers
from ...errors import UsageError
from ...simulate.cluster import ClusterRun, Moment, Policy, State, simulate_cluster
from .driven import Ran

__all__ = ["Overheads", "fit_overheads", "predict"]


SAME_S = 0.02  # decisions nearer to each other fell at one moment: the driver writes them down one after the other


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds: from an arrival to a decision that nothing stands against, from a decision to the start, more of that for each job that was decided at
    the same moment before it, and after the job's own time to the notice."""

    arrival_s: float = 0.0
    start_s: float = 0.0
    turn_s: float = 0.0
    end_s: float = 0.0


@dataclass
class _InTurn:
    """A policy, and which turn each job had when it was decided."""

    inner: Policy
    turn: NDArray[np.int64]
    round_s: float
    moments: ClassVar[frozenset[str]] = frozenset({"arrival", "end", "failure", "repair", "round"})
    at_s: float = -np.inf
    placed: int = 0

    def decide(self, state: State, moment: Moment) -> Mapping[int, Parts]:
        if moment.why not in self.inner.moments:
            return {}
        found = self.inner.decide(state, moment)
        if moment.now_s - self.at_s >= SAME_S:  # the simulator asks at every arrival of a moment, the driver once
            self.at_s, self.placed = moment.now_s, 0
        for job in (j for j, parts in found.items() if parts):
            self.turn[job] = self.placed
            self.placed += 1
        return found


def fit_overheads(queue: Queue, ran: Sequence[Ran]) -> Overheads:
    """Raises: UsageError for a run in which nothing ended well at the first attempt."""
    good = sorted(((r.decided_s, n) for n, r in enumerate(ran) if r.code == 0 and r.attempts == 1))
    if not good:
        raise UsageError("no job ended well at its first attempt", where="run", hint="overheads are fitted on a run that went well")
    rows = [ran[n] for _, n in good]
    turn = np.zeros(len(rows))
    for k in range(1, len(rows)):
        turn[k] = turn[k - 1] + 1 if rows[k].decided_s - rows[k - 1].decided_s < SAME_S else 0
    start = np.array([r.started_s - r.decided_s for r in rows])
    spread = float(((turn - turn.mean()) ** 2).sum())
    turn_s = max(0.0, float(((turn - turn.mean()) * start).sum()) / spread) if spread else 0.0
    end = [ran[n].noticed_s - ran[n].started_s - queue.jobs[n].duration_s for _, n in good]
    soon = sorted(r.decided_s - r.arrival_s for r in rows)
    return Overheads(arrival_s=max(0.0, soon[len(soon) // 10]), start_s=float(start.mean() - turn_s * turn.mean()), turn_s=turn_s,
                     end_s=float(np.mean(end)))  # fmt: skip


def predict(servers: Servers, queue: Queue, policy: Policy, overheads: Overheads) -> tuple[ClusterRun, NDArray[np.float64]]:
    """The queue in virtual time under the policy, and when each job starts. `policy`: a fresh one, made for this queue."""
    o, turned = overheads, _InTurn(policy, np.zeros(len(queue.jobs), np.int64), policy.round_s)
    later = tuple(msgspec.structs.replace(j, arrival_s=j.arrival_s + o.arrival_s) for j in queue.jobs)

    def speed(job: int, parts: Parts) -> float:
        own_s = queue.jobs[job].duration_s
        return own_s / max(1e-6, own_s + o.start_s + o.turn_s * float(turned.turn[job]) + o.end_s)

    run = simulate_cluster(servers, msgspec.structs.replace(queue, jobs=later), turned, speed=speed)
    return run, run.start_s + o.start_s + o.turn_s * turned.turn
