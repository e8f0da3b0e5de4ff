"""Clusters in virtual time: jobs arrive, get parts of servers, are resized, moved, preempted and done; servers fail and come back.

One engine for queues and for placements. A policy is asked at the moments that it names (rounds, arrivals, ends, failures) and answers what
changes: a job's parts, or () to take them away. Between moments a job's work goes down at its speed. Who is moved or started again stands still
for `move_s` first; who only gets other cores or memory on the same GPUs does not. A server that fails throws its jobs back to their last checkpoint.

Invariant: no GPU is held twice and no server gives more cores or memory than it has, or UsageError names it.
Cost: O(log jobs) per event, and what the policy takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..cluster.allocation import Parts
from ..cluster.queue import Queue
from ..cluster.servers import Servers
from ..errors import UsageError
from ..kernels.event_heap import heap_pop, heap_put, make_heap
from ..timeline import Spans, Timeline

__all__ = ["ClusterRun", "Costs", "Failure", "Measures", "Moment", "Policy", "State", "measures", "simulate_cluster"]

Why = Literal["end", "arrival", "failure", "repair", "round"]
SpeedOf = Callable[[int, Parts], float]
NEVER_S = float("inf")
DONE_S = 1e-9  # work left below which a job is done: sums of floats


class Failure(NamedTuple):
    """A server is away from `at_s` for `repair_s`."""

    server: int
    at_s: float
    repair_s: float


class Moment(NamedTuple):
    """`job` and `server`: which one, -1 where none is meant."""

    why: Why
    now_s: float
    job: int = -1
    server: int = -1


@dataclass(frozen=True, kw_only=True)
class Costs:
    """`move_s`: a job that starts again or on other GPUs saves and loads its state so long. `checkpoint_s`: time between checkpoints, beyond
    which work is not lost when a server fails; 0: all work since it was started is lost."""

    move_s: float = 0.0
    checkpoint_s: float = 0.0


@dataclass(kw_only=True)
class State:
    """What a policy sees. `parts`: of jobs that run; `changes`: arrivals, ends, failures and repairs so far. The columns have a place for every job:
    work left in seconds at the proportional share and GPU seconds attained, both at `since_s`; `progress` brings them up to now."""

    queue: Queue
    servers: Servers
    left_s: NDArray[np.float64]
    attained_s: NDArray[np.float64]
    speed: NDArray[np.float64]
    since_s: NDArray[np.float64]
    ready_s: NDArray[np.float64]  # it stands still until then
    parts: dict[int, Parts] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    down: set[int] = field(default_factory=set)
    changes: int = 0

    @property
    def there(self) -> NDArray[np.int64]:
        """Numbers of jobs that wait or run."""
        return np.array(sorted(self.waiting | self.parts.keys()), np.int64)

    def progress(self, jobs: NDArray[np.int64], now_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Work left and GPU seconds attained of these jobs."""
        runs = self.speed[jobs] > 0
        ran = np.where(runs, np.maximum(0.0, now_s - np.maximum(self.since_s[jobs], self.ready_s[jobs])), 0.0)
        return np.maximum(0.0, self.left_s[jobs] - ran * self.speed[jobs]), self.attained_s[jobs] + ran * self.queue.gpus[jobs]


class Policy(Protocol):
    """`moments`: at which it is asked. `round_s`: between rounds, 0: there are none."""

    moments: ClassVar[frozenset[str]]
    round_s: float

    def decide(self, state: State, moment: Moment) -> Mapping[int, Parts]: ...


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """Per job: `start_s` first start, `end_s` (not finite: not done), `moves` (starts after the first, and changes of GPUs), `resizes`, `lost_s` work
    lost to failures, `slow`: it was below its floor. `at_s` and the columns beside it: GPUs, cores and steps of memory in use, GPUs wanted, from that
    time on."""

    queue: Queue
    servers: Servers
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    moves: NDArray[np.int64]
    resizes: NDArray[np.int64]
    lost_s: NDArray[np.float64]
    slow: NDArray[np.bool_]
    at_s: NDArray[np.float64]
    gpus: NDArray[np.float64]
    cores: NDArray[np.float64]
    steps: NDArray[np.float64]
    wanted: NDArray[np.float64]
    asked: int
    spans: tuple[tuple[int, int, int, float, float], ...] = ()  # server, first GPU, job, from, to

    def timeline(self) -> Timeline:
        """Spans are of servers (`rank`) and their first GPU (`lane`), where they were recorded; counters of the whole cluster."""
        columns = list(zip(*self.spans, strict=True)) or [()] * 5
        server, gpu, job, start, end = columns
        minus = np.full(len(job), -1, np.int32)
        spans = Spans(
            rank=np.array(server, np.int32), lane=np.array(gpu, np.int32), step=minus, iteration=minus, start_s=np.array(start, np.float64),
            end_s=np.array(end, np.float64), name=[self.queue.jobs[j].name for j in job],
        )  # fmt: skip
        counters = {name: (self.at_s, getattr(self, name)) for name in ("gpus", "cores", "steps", "wanted")}
        return Timeline(
            origin="simulated", run_fabric=self.servers.fabric, spans=spans, makespan_s=float(self.at_s[-1]) if len(self.at_s) else 0.0,
            counters=counters
        )


class _Engine:
    def __init__(self, servers: Servers, queue: Queue, policy: Policy, speed: SpeedOf, costs: Costs, floor: SpeedOf, record: bool) -> None:
        n = len(queue.jobs)
        self.policy, self.speed_of, self.floor_of, self.costs, self.record = policy, speed, floor, costs, record
        self.state = State(
            queue=queue, servers=servers, left_s=queue.duration_s.copy(), attained_s=np.zeros(n), speed=np.zeros(n), since_s=np.zeros(n),
            ready_s=np.zeros(n)
        )
        self.now_s = 0.0
        self.began_s = np.zeros(n)
        self.start_s, self.end_s = np.full(n, NEVER_S), np.full(n, NEVER_S)
        self.moves, self.resizes, self.lost_s, self.slow = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n), np.zeros(n, np.bool_)
        self.free = [set(range(len(s.gpus))) for s in servers.servers]
        self.cores, self.steps = servers.cores.copy(), servers.steps.copy()
        self.opened: dict[int, float] = {}
        self.spans: list[tuple[int, int, int, float, float]] = []
        self.rows: list[tuple[float, float, float, float, float]] = []
        self.wanted, self.asked, self.done = 0, 0, 0
        self.heap = make_heap(n + 1 + len(servers))

    def put(self, slot: int, at_s: float, key: int) -> None:
        heap_put(self.heap, slot, at_s, key)

    def account(self, job: int) -> None:
        """Work and service up to now."""
        state = self.state
        ran = self.now_s - max(state.since_s[job], state.ready_s[job])
        if ran > 0:
            state.left_s[job] = max(0.0, state.left_s[job] - ran * state.speed[job])
            state.attained_s[job] += ran * state.queue.jobs[job].gpus
        state.since_s[job] = self.now_s

    def release(self, job: int) -> Parts:
        parts = self.state.parts.pop(job)
        for p in parts:
            self.free[p.server] |= set(p.gpus)
            self.cores[p.server] += p.cores
            self.steps[p.server] += p.steps
        return parts

    def take(self, job: int, parts: Parts) -> None:
        for p in parts:
            self.cores[p.server] -= p.cores
            self.steps[p.server] -= p.steps
            if p.server in self.state.down or not self.free[p.server].issuperset(p.gpus) or self.cores[p.server] < 0 or self.steps[p.server] < 0:
                name, host = self.state.queue.jobs[job].name, self.state.servers.servers[p.server].name
                raise UsageError(f"the policy gives job {name} what server {host} does not have", where=f"at {self.now_s:g} s")
            self.free[p.server] -= set(p.gpus)
        self.state.parts[job] = parts

    def close(self, job: int, parts: Parts) -> None:
        if self.record:
            self.spans += [(p.server, p.gpus[0], job, self.opened[job], self.now_s) for p in parts]

    def apply(self, changes: Mapping[int, Parts]) -> None:
        """Everything that is given up first, then everything that is taken."""
        before: dict[int, Parts] = {}
        for job in changes:
            if job in self.state.parts:
                self.account(job)
                before[job] = self.release(job)
                self.close(job, before[job])
        for job, parts in changes.items():
            if not parts:
                if job in before:
                    self.state.speed[job] = 0.0
                    self.state.waiting.add(job)
                    self.put(job, NEVER_S, 0)
                continue
            if job not in before and job not in self.state.waiting:
                raise UsageError(f"job {self.state.queue.jobs[job].name} is not there", where=f"at {self.now_s:g} s")
            self.take(job, parts)
            self.begin(job, parts, before.get(job))

    def begin(self, job: int, parts: Parts, had: Parts | None) -> None:
        self.state.since_s[job] = self.opened[job] = self.now_s
        if had is not None and [(p.server, p.gpus) for p in had] == [(p.server, p.gpus) for p in parts]:
            self.resizes[job] += 1
        else:
            self.state.waiting.discard(job)
            again = self.start_s[job] < NEVER_S
            self.moves[job] += again
            self.start_s[job] = min(self.start_s[job], self.now_s)
            self.state.ready_s[job] = self.now_s + (self.costs.move_s if again else 0.0)
            self.began_s[job] = self.state.ready_s[job]
        speed = self.speed_of(job, parts)
        self.state.speed[job] = speed
        self.slow[job] |= speed < self.floor_of(job, parts) * (1 - 1e-9)
        self.put(job, max(self.now_s, self.state.ready_s[job]) + self.state.left_s[job] / speed if speed > 0 else NEVER_S, 0)

    def fail(self, server: int) -> None:
        """Its jobs wait again, with the work since their last checkpoint to do once more."""
        self.state.down.add(server)
        for job in [j for j, parts in self.state.parts.items() if any(p.server == server for p in parts)]:
            self.account(job)
            ran = max(0.0, self.now_s - self.began_s[job])
            lost_s = ran % self.costs.checkpoint_s if self.costs.checkpoint_s > 0 else ran
            lost = min(lost_s * self.state.speed[job], self.state.queue.duration_s[job] - self.state.left_s[job])
            self.state.left_s[job] += lost
            self.lost_s[job] += lost
            self.apply({job: ()})

    def ask(self, moment: Moment) -> None:
        if moment.why in self.policy.moments:
            self.asked += 1
            changes = self.policy.decide(self.state, moment)
            if changes:
                self.apply(changes)

    def note(self) -> None:
        total = self.state.servers.total_gpus
        busy = total - sum(map(len, self.free))
        row = (
            self.now_s, float(busy), float(self.state.servers.cores.sum() - self.cores.sum()),
            float(self.state.servers.steps.sum() - self.steps.sum()), float(self.wanted),
        )  # fmt: skip
        if self.rows and self.rows[-1][0] == self.now_s:
            self.rows[-1] = row
        elif not self.rows or self.rows[-1][1:] != row[1:]:
            self.rows.append(row)

    def run(self, failures: Sequence[Failure], last: int) -> ClusterRun:
        n, queue = len(self.state.queue.jobs), self.state.queue
        pending = [[f for f in reversed(failures) if f.server == s] for s in range(len(self.state.servers))]
        for j, at_s in enumerate(queue.arrival_s.tolist()):
            self.put(j, at_s, 1)
        for s, listed in enumerate(pending):
            if listed:
                self.put(n + 1 + s, listed[-1].at_s, 2)
        come, round_s, left = np.zeros(n, np.bool_), self.policy.round_s, last
        ticking = False
        while left and self.heap.queued[0]:
            slot = int(heap_pop(self.heap))
            at_s = float(self.heap.time[slot])
            if at_s == NEVER_S:
                break
            self.now_s = at_s
            if slot == n:
                self.ask(Moment("round", at_s))
                ticking = bool(self.state.waiting or self.state.parts)
                if ticking:
                    self.put(n, at_s + round_s, 3)
            elif slot > n:
                self._server(slot - n - 1, pending[slot - n - 1], slot)
            elif not come[slot]:
                come[slot] = True
                self.state.waiting.add(slot)
                self.wanted += queue.jobs[slot].gpus
                self.state.changes += 1
                if round_s > 0 and not ticking:
                    self.put(n, np.ceil(at_s / round_s) * round_s, 3)
                    ticking = True
                self.ask(Moment("arrival", at_s, slot))
            else:
                self.account(slot)
                if self.state.left_s[slot] > DONE_S * max(1.0, queue.duration_s[slot]):
                    self.put(slot, at_s + self.state.left_s[slot] / self.state.speed[slot], 0)
                    continue
                self.close(slot, self.release(slot))
                self.end_s[slot], self.state.left_s[slot], self.state.speed[slot] = at_s, 0.0, 0.0
                self.wanted -= queue.jobs[slot].gpus
                self.state.changes += 1
                left -= slot < last
                self.ask(Moment("end", at_s, slot))
            self.note()
        rows = np.array(self.rows, np.float64).reshape(-1, 5)
        return ClusterRun(
            queue=queue, servers=self.state.servers, start_s=self.start_s, end_s=self.end_s, moves=self.moves, resizes=self.resizes,
            lost_s=self.lost_s, slow=self.slow, at_s=rows[:, 0], gpus=rows[:, 1], cores=rows[:, 2], steps=rows[:, 3], wanted=rows[:, 4],
            asked=self.asked, spans=tuple(self.spans),
        )  # fmt: skip

    def _server(self, server: int, pending: list[Failure], slot: int) -> None:
        self.state.changes += 1
        if server in self.state.down:
            self.state.down.discard(server)
            pending.pop()
            if pending:
                self.put(slot, max(self.now_s, pending[-1].at_s), 2)
            self.ask(Moment("repair", self.now_s, -1, server))
        else:
            self.fail(server)
            self.put(slot, self.now_s + pending[-1].repair_s, 2)
            self.ask(Moment("failure", self.now_s, -1, server))


def simulate_cluster(
    servers: Servers, queue: Queue, policy: Policy, *, speed: Callable[[int, Parts], float], floor: Callable[[int, Parts], float] | None = None,
    costs: Costs | None = None, failures: Sequence[Failure] = (), last: int | None = None, record: bool = False,
) -> ClusterRun:  # fmt: skip
    """Run until the first `last` jobs (default: all) are done. `speed(job, parts)`: as a multiple of that at its proportional share; it may come from
    profiles, or from simulating the job's program on the devices that it got. `floor`: likewise, what it must not fall below. Equal inputs give
    equal results.

    Raises: UsageError for a policy that gives away what is not there."""
    engine = _Engine(servers, queue, policy, speed, costs or Costs(), floor or (lambda job, parts: 0.0), record)
    return engine.run(sorted(failures, key=lambda f: (f.at_s, f.server)), len(queue.jobs) if last is None else min(last, len(queue.jobs)))


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Of the jobs that are counted. Times in s. `rho`: time in the cluster over the time with an equal share of it, 50th and 99th percentile.
    Utilisation: of all GPUs, cores and memory while counted jobs were there."""

    jobs: int
    mean_s: float
    p99_s: float
    makespan_s: float
    gpu_utilisation: float
    core_utilisation: float
    memory_utilisation: float
    rho_median: float
    rho_p99: float
    below_floor: int
    moves: int
    resizes: int
    lost_s: float
    unfinished: int


def measures(run: ClusterRun, *, first: int = 0, last: int | None = None) -> Measures:
    """Of jobs first..last - 1 in the order of the queue: those before them are warm-up, those after them keep the load up."""
    last = len(run.queue.jobs) if last is None else last
    chosen = np.arange(first, min(last, len(run.queue.jobs)))
    done = chosen[np.isfinite(run.end_s[chosen])]
    arrival, end = run.queue.arrival_s[done], run.end_s[done]
    if not run.queue.jobs:
        raise UsageError("the queue has no jobs", where=run.queue.name, hint="a job says name, gpus, profile, arrival_s, duration_s: docs/formats.md")
    if not len(done):
        raise UsageError("no job that is counted is done", where=f"jobs {first} to {last - 1}", hint="count others: --count FIRST-LAST")
    took = end - arrival
    total = max(1, run.servers.total_gpus)
    span_s = float(end.max() - arrival.min())

    def integral(values: NDArray[np.float64], until: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(run.at_s))])
        at = np.clip(np.searchsorted(run.at_s, until, "right") - 1, 0, None)
        return np.asarray(np.where(until < run.at_s[0], 0.0, sums[at] + values[at] * (until - run.at_s[at])))

    def share(values: NDArray[np.float64], of: float) -> float:
        edges = integral(values, np.array([arrival.min(), end.max()]))
        return float((edges[1] - edges[0]) / (of * span_s)) if span_s else 0.0

    crowd = np.maximum(1.0, run.wanted / total)
    contention = (integral(crowd, end) - integral(crowd, arrival)) / np.maximum(took, 1e-300)
    rho = took / (run.queue.duration_s[done] * np.maximum(contention, 1.0))
    return Measures(
        jobs=len(done), mean_s=float(took.mean()), p99_s=float(np.percentile(took, 99)), makespan_s=span_s, gpu_utilisation=share(run.gpus, total),
        core_utilisation=share(run.cores, float(run.servers.cores.sum())), memory_utilisation=share(run.steps, float(run.servers.steps.sum())),
        rho_median=float(np.median(rho)), rho_p99=float(np.percentile(rho, 99)), below_floor=int(run.slow[chosen].sum()),
        moves=int(run.moves[chosen].sum()), resizes=int(run.resizes[chosen].sum()), lost_s=float(run.lost_s[chosen].sum()),
        unfinished=len(chosen) - len(done),
    )  # fmt: skip
