"""A policy of the simulator drives a real engine: the same decisions, by the wall clock.

Jobs come at their times; the policy is asked at arrivals, ends, failures and repairs; what it answers is placed, started in its order, and watched.
An engine that does not answer is asked again for `patience_s`. What an engine lost is decided anew, as the next attempt.

Policies of rounds move and preempt: a job is asked to end, saves its state, and begins again where it was decided once it has gone, as the next
attempt; its command finds what it saved in `MESHWRIGHT_STATE`. Other cores and memory on the same GPUs are given in place, where the engine can.
Nothing is placed on a server that somebody still has to leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...cluster.allocation import Given, Part, Parts
from ...cluster.placed import Per
from ...cluster.queue import Queue
from ...cluster.servers import Servers
from ...errors import EngineAway, RunError, RunTimeout
from ...simulate.cluster import Moment, Policy, State
from .session import Event, Session

__all__ = ["MAX_ATTEMPTS", "Driver", "Ran"]

MAX_ATTEMPTS = 3  # of a job that the engine lost; one whose own command failed is not tried again
POLL_S = 0.1  # between looks at an engine
NODES_S = 2.0  # between looks at which servers are down
GivenOf = Callable[[int, Parts], tuple[Given, ...]]


@dataclass
class Ran:
    """One job, times in seconds since the run began (`duration_s` of the queue is what was asked). `decided_s`, `released_s`, `started_s` (first
    line of its first launcher), `ended_s` (last line), `noticed_s`; not finite where it did not come to that. `code`: of its command; -1: given up.
    `moves`: how often it was asked to leave."""

    arrival_s: float
    decided_s: float = np.inf
    released_s: float = np.inf
    started_s: float = np.inf
    ended_s: float = np.inf
    noticed_s: float = np.inf
    code: int = -1
    attempts: int = 0
    moves: int = 0
    resizes: int = 0


@dataclass(kw_only=True)
class Driver:
    """`given`: a job's parts by names. `speed`: of a job on its parts, by which rounds guess what is left of it (default: that of its share).
    `limit_s`: the run is given up then. `say`: told of every event.

    Raises (run): RunTimeout; EngineAway after `patience_s`; RunError, UsageError."""

    session: Session
    servers: Servers
    queue: Queue
    policy: Policy
    given: GivenOf
    speed: Callable[[int, Parts], float] = lambda job, parts: 1.0
    per: Per = "gpu"
    poll_s: float = POLL_S
    patience_s: float = 60.0
    limit_s: float = np.inf
    say: Callable[[str], None] = lambda text: None
    ran: list[Ran] = field(default_factory=list)
    _began_s: float = 0.0
    _away_s: float = 0.0
    _looked_s: float = -np.inf
    _round_s: float = 0.0
    _leaving: dict[int, Parts] = field(default_factory=dict)  # what jobs still have that were asked to end
    _resized: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        n = len(self.queue.jobs)
        zeros = np.zeros(n)
        self.ran = [Ran(arrival_s=float(a)) for a in self.queue.arrival_s]
        self.state = State(
            queue=self.queue, servers=self.servers, left_s=self.queue.duration_s.copy(), attained_s=zeros.copy(), speed=zeros.copy(),
                since_s=zeros.copy(),
            ready_s=zeros.copy(),
        )  # fmt: skip
        self._number = {j.name: n for n, j in enumerate(self.queue.jobs)}
        self._come: set[int] = set()
        self._over: set[int] = set()
        self._names = {s.name: n for n, s in enumerate(self.servers.servers)}

    def now_s(self) -> float:
        return time.time() - self._began_s

    def run(self) -> list[Ran]:
        self._began_s = time.time()
        if self.session.resumed:
            self._take_up()
        while len(self._over) < len(self.queue.jobs):
            if self.now_s() > self.limit_s:
                raise RunTimeout(f"{len(self.queue.jobs) - len(self._over)} jobs are not done after {self.limit_s:g} s",
                    where=str(self.session.folder))
            try:
                self._turn()
                self._away_s = 0.0
            except EngineAway as error:
                if not self._away_s:
                    self._away_s = self.now_s()
                    self.say(f"the engine does not answer: {error.message}")
                if self.now_s() - self._away_s > self.patience_s:
                    raise
            time.sleep(self.poll_s)
        return self.ran

    def first(self) -> list[str]:
        """Decide once with all jobs there, tell the engine, and return who starts; for dry runs."""
        self._began_s = time.time()
        for n in range(len(self.queue.jobs)):
            self._submit(n)
            self.state.waiting.add(n)
        self._decide(Moment("arrival", float(self.queue.arrival_s.max(initial=0.0))))
        self._tell()
        return [self.queue.jobs[n].name for n in self.state.parts]

    def _take_up(self) -> None:
        """What the journal says of a run that was broken off."""
        for n, job in enumerate(self.queue.jobs):
            if not any(r.job == job.name for r in self.session.records):
                continue
            self._submit(n)
            self._come.add(n)
            known = self.session.jobs[job.name]
            if known.now in ("ended", "cancelled"):
                self._over.add(n)
                self.ran[n].code, self.ran[n].attempts = known.code, known.attempt
            elif known.now in ("submitted", "lost", "preempted"):
                self.state.waiting.add(n)
            elif known.leaving:
                self.state.waiting.add(n)
                self._leaving[n] = self._parts_of(known.given)
            else:
                self._hold(n, self._parts_of(known.given))
            self.state.changes += 1

    def _parts_of(self, given: tuple[Given, ...]) -> Parts:
        found = []
        for g in given:
            server = self.servers.servers[self._names[g.server]]
            steps = -(-g.memory_bytes * server.kind.steps // server.memory_bytes)
            found.append(Part(self._names[g.server], tuple(server.gpus.index(x) for x in g.gpus), g.cores, steps))
        return tuple(found)

    def _submit(self, n: int) -> None:
        job = self.queue.jobs[n]
        self.session.submit(job.name, job.command, number=n, plan=job.plan, per=self.per)

    def _hold(self, n: int, parts: Parts) -> None:
        self.state.waiting.discard(n)
        self.state.parts.pop(n, None)  # last in the order of decisions
        self.state.parts[n] = parts
        self.state.speed[n], self.state.since_s[n] = self.speed(n, parts), self.now_s()

    def _account(self, n: int) -> None:
        """Work and service up to now, as they are guessed."""
        state, ran = self.state, max(0.0, self.now_s() - self.state.since_s[n])
        if state.speed[n] > 0:
            state.left_s[n] = max(0.0, state.left_s[n] - ran * state.speed[n])
            state.attained_s[n] += ran * self.queue.jobs[n].gpus
        state.since_s[n] = self.now_s()

    def _turn(self) -> None:
        """Everything that is due now."""
        moments: list[Moment] = []
        for event in self.session.watch():
            self._heard(event, moments)
        if self.now_s() - self._looked_s > NODES_S:
            self._servers_down(moments)
        for n, job in enumerate(self.queue.jobs):
            if n not in self._come and job.arrival_s <= self.now_s():
                self._come.add(n)
                self._submit(n)
                self.state.waiting.add(n)
                self.state.changes += 1
                moments.append(Moment("arrival", self.now_s(), n))
        if self.policy.round_s > 0 and self.now_s() >= self._round_s and self.state.there.size:
            self._round_s = self.now_s() + self.policy.round_s
            moments.append(Moment("round", self.now_s()))
        for moment in [m for m in moments if m.why in self.policy.moments][:1]:
            self._decide(moment)
        self._tell()

    def _servers_down(self, moments: list[Moment]) -> None:
        self._looked_s = self.now_s()
        down = {self._names[s] for s in self.session.engine.down() if s in self._names}
        for s in sorted(down ^ self.state.down):
            self.say(f"server {self.servers.servers[s].name} is {'down' if s in down else 'back'}")
            moments.append(Moment("failure" if s in down else "repair", self.now_s(), -1, s))
            self.state.changes += 1
        self.state.down = down

    def _decide(self, moment: Moment) -> None:
        changes: Mapping[int, Parts] = self.policy.decide(self.state, moment)
        for n, parts in changes.items():
            had = self.state.parts.get(n)
            if had == parts:
                continue
            if had is not None:
                self._account(n)
                if self.session.engine.resizes and [(p.server, p.gpus) for p in had] == [(p.server, p.gpus) for p in parts]:
                    self.state.parts[n], self.state.speed[n] = parts, self.speed(n, parts)
                    self._resized.add(n)
                    continue
                self._send_off(n, had)
            if parts:
                self._hold(n, parts)
                self.ran[n].decided_s = min(self.ran[n].decided_s, self.now_s())

    def _send_off(self, n: int, had: Parts) -> None:
        """It is asked to end, and waits."""
        self.state.parts.pop(n)
        self.state.speed[n] = 0.0
        self.state.waiting.add(n)
        self._resized.discard(n)
        if self.session.jobs[self.queue.jobs[n].name].now in ("submitted", "preempted", "lost"):
            return  # it has nothing yet
        self._leaving.setdefault(n, had)
        self.ran[n].moves += 1
        self.say(f"{self.now_s():8.2f} s  {self.queue.jobs[n].name} is asked to leave {', '.join(self.servers.servers[p.server].name for p in had)}")

    def _tell(self) -> None:
        """Who is to leave is told; cores and memory change; what was decided and is not placed is placed and started, in the order of decisions."""
        for n in self._leaving:
            self.session.preempt(self.queue.jobs[n].name)
        for n in sorted(self._resized):
            self._resize(n)
        busy = {p.server for parts in self._leaving.values() for p in parts}
        told = [(n, self.queue.jobs[n].name) for n, parts in self.state.parts.items() if n not in self._leaving
                and busy.isdisjoint(p.server for p in parts)]  # fmt: skip
        now = ("submitted", "placing", "lost", "preempted", "held", "starting")
        waiting = [(n, name) for n, name in told if self.session.jobs[name].now in now]
        late: EngineAway | None = None
        for n, name in waiting:
            job = self.session.jobs[name]
            self.session.place(name, job.given if job.now == "placing" else self.given(n, self.state.parts[n]))
            self.ran[n].attempts = job.attempt
            if late is None:  # at once: whoever is first does not wait until all are placed
                try:
                    self.session.start([name])
                except EngineAway as error:
                    late = error
                    continue
                self.ran[n].released_s = self.now_s()
                self.say(f"{self.now_s():8.2f} s  {name} released on {', '.join(g.server for g in job.given)}")
        if late is not None:
            raise late

    def _resize(self, n: int) -> None:
        """Other cores and memory for one that runs; where they cannot be taken, it moves."""
        name, parts = self.queue.jobs[n].name, self.state.parts[n]
        if self.session.jobs[name].now not in ("released", "running") or self.session.jobs[name].leaving:
            return  # later: it is being started
        try:
            self.session.resize(name, self.given(n, parts))
            self._resized.discard(n)
            self.ran[n].resizes += 1
        except RunError as error:
            self.say(f"{self.now_s():8.2f} s  {name} moves: {error.message}")
            self._send_off(n, parts)
            self._hold(n, parts)
            self.session.preempt(name)

    def _heard(self, event: Event, moments: list[Moment]) -> None:
        n, ran = self._number[event.job], self.ran[self._number[event.job]]
        if event.what == "running":
            ran.started_s = min(ran.started_s, event.at_s - self._began_s)
            return
        self._leaving.pop(n, None)
        if event.what == "preempted":
            self.say(f"{self.now_s():8.2f} s  {event.job} has left")
            self.state.changes += 1
            return
        self.state.parts.pop(n, None)
        self.state.waiting.discard(n)
        self._resized.discard(n)
        self.state.speed[n] = 0.0
        self.state.changes += 1
        again = event.what == "lost" and self.session.jobs[event.job].attempt < MAX_ATTEMPTS
        if again:
            self.state.waiting.add(n)
        else:
            self._over.add(n)
            ran.ended_s, ran.noticed_s = event.at_s - self._began_s, self.now_s()
            ran.code = event.code if event.what == "ended" else -1
        self.say(f"{self.now_s():8.2f} s  {event.job} {'lost' if event.what == 'lost' else f'ended with {event.code}'} {event.text}".rstrip())
        moments.append(Moment("end", self.now_s(), n))
