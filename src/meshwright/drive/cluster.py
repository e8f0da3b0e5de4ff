"""Queues on clusters: an order and an allocation composed into rounds; one round as a checked allocation beside its bound; whole queues simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..cluster.allocation import Allocation, Given, Parts, floor_of, speed_of
from ..cluster.queue import Queue
from ..cluster.servers import Servers
from ..decide.cluster import AllocationProblem, Book, Waiting
from ..decide.cluster.bound import groups_of, lp_prices, price_bound
from ..decide.cluster.fillings import fillings_bound
from ..decide.cluster.problem import AllocationStrategy, Divided, OrderStrategy, admitted, ranking, require_possible
from ..errors import TimeLimit, UsageError
from ..kernels.effort import look
from ..kernels.stages import innermost, stage
from ..simulate.cluster import ClusterRun, Costs, Failure, Measures, Moment, State, measures, simulate_cluster
from .cluster_programs import ProgramSpeeds

__all__ = ["ROUND_S", "Rounds", "Simulated", "given_of", "plan_allocation", "random_failures", "simulate_queue", "speeds"]

ROUND_S = 300.0
MAX_AGE_ROUNDS = 144  # of 300 s, 12 hours: so long a gang may be passed over by smaller jobs behind it before it goes first


def speeds(servers: Servers, queue: Queue, read: Callable[..., float]) -> Callable[[int, Parts], float]:
    """`speed_of` or `floor_of` of jobs by number, kept by what matters: profile, kinds, GPUs, cores and memory."""
    kept: dict[tuple[object, ...], float] = {}
    kinds = servers.kind.tolist()

    def found(job: int, parts: Parts) -> float:
        key = (queue.jobs[job].profile, *((kinds[p.server], len(p.gpus), p.cores, p.steps) for p in parts))
        if key not in kept:
            profile = queue.profiles[queue.profile_of[queue.jobs[job].profile]]
            kept[key] = speed_of(servers, queue.jobs[job], profile, parts) if read is speed_of else floor_of(servers, profile, parts)
        return kept[key]

    return found


def _moving(speed: Callable[[int, Parts], float], servers: Servers, queue: Queue) -> Callable[[int, Parts], float]:
    """Raises: UsageError for parts on which the job was never seen to run: a simulation of it would not end."""

    def found(job: int, parts: Parts) -> float:
        if (rate := speed(job, parts)) <= 0:
            told = ", ".join(f"{len(p.gpus)} GPUs and {p.cores} cores on {servers.servers[p.server].name}" for p in parts)
            raise UsageError(f"job {queue.jobs[job].name} has {told}: profile {queue.jobs[job].profile} has no speed there", where="queue",
                hint="measure the profile with less, or give the servers more cores or memory")
        return rate

    return found


@dataclass(kw_only=True)
class Rounds:
    """The policy of rounds. `age_rounds`: so often a job may be passed over for lack of GPUs before it goes first; 0: for ever. `resizes`: cores and
    memory change while a job runs; without it they change only where the job gains more than `move_s` loses. After a run,
    `waited`: sum over rounds of jobs that waited while one behind them ran; `rounds`; `planned`: rounds whose allocation was made anew."""

    servers: Servers
    queue: Queue
    order: OrderStrategy
    allocation: AllocationStrategy
    seed: int = 0
    round_s: float = ROUND_S
    age_rounds: int = MAX_AGE_ROUNDS
    move_s: float = 0.0
    resizes: bool = True
    moments: ClassVar[frozenset[str]] = frozenset({"round"})
    waited: int = 0
    rounds: int = 0
    planned: int = 0
    _seen: int = -1
    _ran: tuple[int, ...] = ()
    _ahead: int = 0
    _passed: dict[int, int] = field(default_factory=dict)
    _views: dict[frozenset[int], tuple[Servers, Book, list[int]]] = field(default_factory=dict)

    def _view(self, down: frozenset[int]) -> tuple[Servers, Book, list[int]]:
        """Servers that are up, and their numbers."""
        if down not in self._views:
            up = [s for s in range(len(self.servers)) if s not in down]
            servers = Servers(servers=tuple(self.servers.servers[s] for s in up), fabric=self.servers.fabric)
            self._views[down] = (servers, Book(servers, self.queue.profiles), up)
        return self._views[down]

    def decide(self, state: State, moment: Moment) -> Mapping[int, Parts]:
        here, jobs = innermost(), len(state.left_s)
        here.done, here.of = int((state.left_s <= 0.0).sum()), jobs
        try:
            look()
            return self._decided(state, moment)
        except TimeLimit as late:
            told = f"{here.done} of {jobs} jobs had ended, {moment.now_s / 3600:.1f} h of the queue's time had passed"
            raise TimeLimit(told, hint=late.hint) from late

    def _decided(self, state: State, moment: Moment) -> Mapping[int, Parts]:
        self.rounds += 1
        same = state.changes == self._seen
        if (same and self.order.steady and not self._passed) or len(state.down) == len(self.servers):
            self.waited += self._ahead
            return {}
        servers, book, up = self._view(frozenset(state.down))
        jobs = state.there
        wanted = int(self.queue.gpus[jobs].sum())
        left_s, attained_s = state.progress(jobs, moment.now_s)
        waiting = Waiting(
            servers=servers, queue=self.queue, book=book, now_s=moment.now_s, jobs=jobs, left_s=left_s, attained_s=attained_s,
            contention=max(1.0, wanted / servers.total_gpus),
        )  # fmt: skip
        ranked = ranking(self.order, waiting)
        aged = [j for j in ranked.tolist() if self.age_rounds and self._passed.get(j, 0) >= self.age_rounds]
        running = admitted(servers, self.queue, ranked, aged)
        key = tuple(ranked.tolist()) if self.allocation.admits else tuple(sorted(running))
        fresh = not same or key != self._ran
        changes: dict[int, Parts] = {}
        if fresh:
            self.planned += 1
            changes = self._planned(state, servers, book, up, running, ranked)
        self._seen, self._ran = state.changes, key
        runs = (set(state.parts) - {j for j, p in changes.items() if not p}) | {j for j, p in changes.items() if p}
        self._note(ranked, runs)
        return changes

    def _planned(self, state: State, servers: Servers, book: Book, up: list[int], running: list[int], ranked: NDArray[np.int64]) -> dict[int, Parts]:
        number = {s: n for n, s in enumerate(up)}
        previous = {j: tuple(p._replace(server=number[p.server]) for p in parts) for j, parts in state.parts.items()}
        problem = AllocationProblem(
            servers=servers, queue=self.queue, book=book, running=tuple(running), ranked=tuple(ranked.tolist()), previous=previous,
            move_s=self.move_s, round_s=self.round_s,
        )  # fmt: skip
        made = self.allocation.plan(problem, rng=np.random.default_rng(self.seed)).parts
        parts = {j: tuple(p._replace(server=up[p.server]) for p in found) for j, found in made.items()}
        if not self.resizes:
            self._steady(state, parts)
        changes: dict[int, Parts] = {j: () for j in state.parts if j not in parts}
        changes |= {j: found for j, found in parts.items() if state.parts.get(j) != found}
        return changes

    def _steady(self, state: State, parts: dict[int, Parts]) -> None:
        """Jobs that keep their GPUs keep their cores and memory, too, where there is room and a new start would gain less than it loses."""
        free = {s: [server.cores, server.kind.steps] for s, server in enumerate(self.servers.servers)}
        for p in (p for found in parts.values() for p in found):
            free[p.server][0] -= p.cores
            free[p.server][1] -= p.steps
        speed, worth = speeds(self.servers, self.queue, speed_of), max(0.0, 1.0 - self.move_s / self.round_s)
        same = [j for j, found in parts.items() if j in state.parts and [p[:2] for p in found] == [p[:2] for p in state.parts[j]]]
        for j in sorted(same, key=lambda j: sum(p.cores for p in state.parts[j]) - sum(p.cores for p in parts[j])):  # those that grew leave room
            more = [(p.server, p.cores - q.cores, p.steps - q.steps) for p, q in zip(state.parts[j], parts[j], strict=True)]
            fits = all(cores <= free[s][0] and steps <= free[s][1] for s, cores, steps in more)
            if fits and speed(j, parts[j]) * worth <= speed(j, state.parts[j]):
                parts[j] = state.parts[j]
                for s, cores, steps in more:
                    free[s][0] -= cores
                    free[s][1] -= steps

    def _note(self, ranked: NDArray[np.int64], runs: set[int]) -> None:
        """Who waits ahead of one that runs; who was passed over once more."""
        order = ranked.tolist()
        last = max((n for n, j in enumerate(order) if j in runs), default=-1)
        ahead = [j for j in order[:last] if j not in runs]
        self._ahead = len(ahead)
        self.waited += len(ahead)
        self._passed = {j: self._passed.get(j, 0) + 1 for j in ahead} if self.age_rounds else {}


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A queue under one order and one allocation. `violations`: mean over rounds of jobs that waited while one behind them ran."""

    order: str
    allocation: str
    run: ClusterRun
    measures: Measures
    violations: float
    rounds: int
    planned: int


@stage("jobs that ended")
def simulate_queue(
    servers: Servers, queue: Queue, order: OrderStrategy, allocation: AllocationStrategy, *, costs: Costs | None = None,
    failures: Sequence[Failure] = (),
    count: tuple[int, int] | None = None, round_s: float = ROUND_S, age_rounds: int = MAX_AGE_ROUNDS, seed: int = 0, record: bool = False,
    programs: ProgramSpeeds | None = None,
) -> Simulated:  # fmt: skip
    """`count`: first and last job (exclusive) that is measured, in the order of the queue; default: all. The run ends when they are done. `programs`:
    jobs with a plan are as fast as its program is on the devices that they got; so is their floor, at their share of the same place.

    Raises: Infeasible for a gang that no servers can ever hold; UsageError for a profile without a speed at what a job has."""
    require_possible(servers, queue)
    costs = costs or Costs()
    policy = Rounds(
        servers=servers, queue=queue, order=order, allocation=allocation, seed=seed, round_s=round_s, age_rounds=age_rounds, move_s=costs.move_s
    )
    first, last = count or (0, len(queue.jobs))
    speed, floor = _moving(speeds(servers, queue, speed_of), servers, queue), speeds(servers, queue, floor_of)
    if programs is not None:
        speed, floor = programs.times(speed), programs.times(floor)
    run = simulate_cluster(servers, queue, policy, speed=speed, floor=floor, costs=costs, failures=failures, last=last, record=record)
    return Simulated(
        order=order.name, allocation=allocation.name, run=run, measures=measures(run, first=first, last=last),
        violations=policy.waited / max(1, policy.rounds), rounds=policy.rounds, planned=policy.planned,
    )  # fmt: skip


def random_failures(servers: Servers, *, every_s: float, repair_s: float, until_s: float, seed: int = 0) -> tuple[Failure, ...]:
    """Every server fails at exponential intervals of this mean. Equal arguments give equal failures."""
    rng = np.random.default_rng(seed)
    found = []
    for s in range(len(servers)):
        at_s = float(rng.exponential(every_s))
        while at_s < until_s:
            found.append(Failure(s, at_s, repair_s))
            at_s += repair_s + float(rng.exponential(every_s))
    return tuple(found)


@stage("allocating servers")
def plan_allocation(
    servers: Servers, queue: Queue, order: OrderStrategy, allocation: AllocationStrategy, *, bound: str = "prices", seed: int = 0
) -> tuple[Allocation, Divided]:
    """One round with all jobs of the queue there and none begun, checked. `bound`: "prices", or "fillings" for the tighter one of both.

    Raises: Infeasible for a gang that no servers can ever hold; CheckFailed; Unsupported as the strategy and the bound do."""
    from ..check.cluster import check_allocation

    require_possible(servers, queue)
    book, jobs = Book(servers, queue.profiles), np.arange(len(queue.jobs))
    contention = max(1.0, float(queue.gpus.sum()) / servers.total_gpus)
    now_s = float(queue.arrival_s.max(initial=0.0))
    waiting = Waiting(
        servers=servers, queue=queue, book=book, now_s=now_s, jobs=jobs, left_s=queue.duration_s, attained_s=np.zeros(len(jobs)),
        contention=contention
    )
    ranked = ranking(order, waiting)
    problem = AllocationProblem(
        servers=servers, queue=queue, book=book, running=tuple(admitted(servers, queue, ranked)), ranked=tuple(ranked.tolist())
    )
    divided = allocation.plan(problem, rng=np.random.default_rng(seed))
    runs = [j for j in ranked.tolist() if j in divided.parts]
    groups = groups_of(problem, runs)
    proved = price_bound(book, groups, lp_prices(book, groups))
    if bound == "fillings" and runs:
        found = fillings_bound(AllocationProblem(servers=servers, queue=queue, book=book, running=tuple(runs)))
        proved = found if found.exact < proved.exact else proved
    read = speeds(servers, queue, speed_of)
    made = Allocation(
        strategy=allocation.name, ranking=order.name, fabric=servers.fabric, order=tuple(queue.jobs[j].name for j in runs),
        given=tuple(given for j in runs for given in given_of(servers, queue, j, divided.parts[j])),
        speed=sum(queue.jobs[j].gpus * read(j, divided.parts[j]) for j in runs),
        waiting=tuple(queue.jobs[j].name for j in ranked.tolist() if j not in divided.parts), bound=proved,
    )  # fmt: skip
    check_allocation(made, servers, queue).raise_if_wrong()
    return made, divided


def given_of(servers: Servers, queue: Queue, job: int, parts: Parts) -> list[Given]:
    """By names, and in bytes."""
    found = []
    for p in parts:
        host = servers.servers[p.server]
        gpus, memory_bytes = tuple(host.gpus[g] for g in p.gpus), host.kind.bytes_of(p.steps)
        found.append(Given(job=queue.jobs[job].name, server=host.name, gpus=gpus, cores=p.cores, memory_bytes=memory_bytes))
    return found
