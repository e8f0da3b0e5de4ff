"""One run on one engine: the interface that people and drivers use. Every action is journaled before and after, and may be repeated.

    with Session(Slurm(), Path("run")) as session:
        session.submit("train", ["python", "train.py"], number=0)
        session.place("train", given)          # held on the engine, pinned to its servers
        session.start(["train"])               # in this order
        for event in session.watch(): ...      # running, ended, lost
        session.audit("train")                 # what it really got

Opened again on the same folder it takes up what the journal says: what has ended is over, what the engine still has is watched, what it has lost
and never began is submitted again under the same attempt. A job's launcher starts an attempt at most once on a server, and not while an earlier one
runs.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

from ...cluster.allocation import Given
from ...cluster.placed import Per, placed
from ...cluster.servers import Servers
from ...errors import RunError, UsageError
from ...io.cluster.job_folder import GRACE_S, Ended, ranks_document, read_ended, read_started, write_ranks
from ...io.cluster.journal import Record
from ...io.plan.plan import read_plan
from .interface import Engine, Seen, Work
from .journal import Journal

__all__ = ["Event", "Session"]

MAX_LATE_S = 30.0  # behind the grace of a job that was asked to leave, until the engine is told to end it
LAUNCHER = Path(__file__).with_name("node.py")
Now = Literal["submitted", "placing", "held", "starting", "released", "running", "ended", "lost", "cancelled", "preempted"]
OVER: frozenset[Now] = frozenset({"ended", "lost", "cancelled", "preempted"})


class Event(NamedTuple):
    """`at_s`: when it happened, by the clock of the job's server, seconds since 1970. `code`: of the job's command, for `ended`. `lost`: the engine
    stopped it or forgot it after it had begun: it may be placed again, as a new attempt. `preempted`: so may one that was asked to end for it."""

    what: Literal["running", "ended", "lost", "preempted"]
    job: str
    at_s: float
    code: int = 0
    text: str = ""


@dataclass
class _Job:
    name: str
    number: int
    command: tuple[str, ...]
    plan: str = ""
    per: Per = "gpu"
    now: Now = "submitted"
    attempt: int = 0
    work: Work | None = None
    given: tuple[Given, ...] = ()
    code: int = 0
    leaving: bool = False
    late_s: float = 0.0  # by the monotonic clock, when it should have left; 0: the engine was not told to end it


@dataclass
class Session:
    """`servers`: default those that the engine has. `dry`: nothing is written; the engine says its commands instead. `grace_s`: what a job that is
    asked to leave has, to save its state. Raises: as `Journal` and the engine."""

    engine: Engine
    folder: Path
    dry: bool = False
    servers: Servers | None = None
    grace_s: float = GRACE_S
    jobs: dict[str, _Job] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        if self.servers is not None and not self.dry:
            there = {s.name for s in self.engine.discover().servers}
            unknown = [s.name for s in self.servers.servers if s.name not in there]
            if unknown:
                known = ", ".join(sorted(there)[:8])
                raise UsageError(f"{self.engine.name} has no server {unknown[0][:64]}", where="servers", hint=f"it has {known}")
        self._journal = None if self.dry else Journal(self.folder, engine=self.engine.name)
        self.run = self._journal.run if self._journal else "dry"
        self._noted = 0
        if not self.dry:
            shutil.copyfile(LAUNCHER, self.folder / "node.py")
        self._earlier = list(self._journal.records) if self._journal and not self._journal.fresh else []
        self.engine.remember([x for r in self._earlier for x in r.ids])

    @property
    def resumed(self) -> bool:
        """Whether the folder held a run already."""
        return bool(self._earlier)

    @property
    def records(self) -> list[Record]:
        """The journal so far."""
        return self._journal.records if self._journal else []

    def _say(self, what: str, job: str = "", **facts: object) -> None:
        if self._journal:
            self._journal.say(Record(what=what, time_s=time.time(), job=job, **facts))  # type: ignore[arg-type]
            for note in self.engine.notes[self._noted :]:
                self._noted += 1
                self._journal.note(note)

    # ---- the interface ---------------------------------------------------------------------------------------------------
    def discover(self) -> Servers:
        """Servers as the engine has them."""
        if self.servers is None:
            self.servers = self.engine.discover()
        return self.servers

    def submit(self, name: str, command: Sequence[str], *, number: int, plan: str = "", per: Per = "gpu") -> str:
        """Take a job in; it waits. `per`: its command runs once per GPU or once per server. `plan`: a plan's file, which travels with the job; its
        placement is the order of ranks where it names the job's GPUs. A job that was taken in before keeps its state. Raises: UsageError."""
        if name in self.jobs:
            return name
        if not command:
            raise UsageError("it has no command", where=f"job {name[:64]}", hint="give its command in the queue, or --command for all")
        job = self.jobs[name] = _Job(name, number, tuple(command), plan, per)
        earlier = [r for r in self._earlier if r.job == name]
        if not earlier:
            self._say("submit", name)
        for r in earlier:
            self._replay(job, r)
        return name

    def place(self, name: str, given: Sequence[Given]) -> None:
        """Hold it on the engine where it was decided. A job that was lost gets its next attempt. Raises: UsageError, EngineAway, RunError."""
        job = self._job(name)
        if job.now in ("held", "starting", "released", "running", "ended"):
            return
        fresh = job.now != "placing" or job.given != tuple(given)
        if fresh:
            job.attempt += 1
            job.given = tuple(given)
            job.work = self._prepared(job)
            job.leaving, job.late_s = False, 0.0
            self._say("place", name, attempt=job.attempt, placed=job.work.placed)
            job.now = "placing"
        assert job.work is not None
        job.work = replace(job.work, ids=self.engine.hold(replace(job.work, fresh=fresh)))
        self._say("held", name, attempt=job.attempt, ids=job.work.ids)
        job.now = "held"

    def start(self, names: Sequence[str]) -> None:
        """Let them run, in this order. Raises: EngineAway, RunError."""
        jobs = [j for j in map(self._job, names) if j.now in ("held", "starting")]
        for job in jobs:
            self._say("start", job.name, attempt=job.attempt)
            job.now = "starting"
        self.engine.start([j.work for j in jobs if j.work is not None])
        for job in jobs:
            self._say("released", job.name, attempt=job.attempt)
            job.now = "released"

    def watch(self) -> list[Event]:
        """What happened since the last call that did not raise. Raises: EngineAway."""
        known = ("held", "starting", "released", "running")
        live = [j for j in self.jobs.values() if j.work is not None and (j.now in known or (j.now == "placing" and j.leaving))]
        earlier = [bool(j.work and read_started(j.work.folder, j.attempt)) for j in live]  # before the engine is asked: it may begin meanwhile
        seen = self.engine.look([j.work for j in live if j.work is not None]) if live else []
        for job, s, begun in zip(live, seen, earlier, strict=True):
            self._changed(job, s, begun)
        events, self._events = self._events, []
        return events

    def audit(self, name: str) -> tuple[Given, ...]:
        """What the engine's books say that it has, or had last. Raises: EngineAway."""
        job = self._job(name)
        return () if job.work is None else self.engine.look([job.work])[0].given

    def cancel(self, name: str) -> None:
        """End it; nothing happens to one that is over."""
        self._told(name, "cancel", self.engine.cancel)
        if self._job(name).now not in OVER:
            self._job(name).now = "cancelled"

    def preempt(self, name: str) -> None:
        """Ask its command to end, so that it may be placed elsewhere as a new attempt; `watch` says when it has gone. One that ended by itself before
        has ended. Once the engine was told, nothing more happens. Raises: EngineAway, RunError."""
        job = self._job(name)
        if job.work is None or job.now in OVER or job.late_s:
            return
        if not job.leaving:
            self._say("preempt", name, attempt=job.attempt)
            job.leaving = True
        self.engine.leave(job.work)
        job.late_s = time.monotonic() + self.grace_s + MAX_LATE_S

    def suspend(self, name: str) -> None:
        self._told(name, "suspend", self.engine.suspend)

    def resume(self, name: str) -> None:
        self._told(name, "resume", self.engine.resume)

    def resize(self, name: str, given: Sequence[Given]) -> None:
        """Other cores and memory on the same GPUs. Raises: Unsupported where the engine cannot, RunError where it refuses."""
        job = self._job(name)
        try:
            self._told(name, "resize", lambda work: self.engine.resize(work, tuple(given)), given=tuple(given))
        except RunError:
            self._say("resize", name, attempt=job.attempt, given=job.given)  # it keeps what it had
            raise
        self._say("resized", name, attempt=job.attempt)
        job.given = tuple(given)

    # ---- inside ------------------------------------------------------------------------------------------------------------
    def _job(self, name: str) -> _Job:
        if name not in self.jobs:
            raise UsageError(f"no job {name[:64]!r} was submitted", where=str(self.folder))
        return self.jobs[name]

    def _told(self, name: str, what: str, tell: Callable[[Work], None], **facts: object) -> None:
        job = self._job(name)
        if job.work is not None and job.now not in OVER:
            self._say(what, name, attempt=job.attempt, **facts)
            tell(job.work)

    def _prepared(self, job: _Job) -> Work:
        """The job's folder, with ranks and plan."""
        folder = self.folder / "jobs" / f"{job.number:06d}"
        order: Sequence[str] = ()
        plan = Path(job.plan).name if job.plan else ""
        if job.plan:
            placement, gpus = read_plan(job.plan).placement, [x for g in job.given for x in g.gpus]
            order = tuple(map(str, placement)) if set(map(str, placement)) == set(gpus) else ()
        made = placed(self.discover(), job.name, job.given, number=job.number, attempt=job.attempt, per=job.per, order=order)
        if not self.dry:
            folder.mkdir(parents=True, exist_ok=True)
            if job.plan:
                shutil.copyfile(job.plan, folder / plan)
            addresses = self.engine.addresses([r.server for r in made.ranks[:1]])
            write_ranks(folder, ranks_document(made, job.command, plan=plan, addresses=addresses, own_gpus=self.engine.launches,
                                                grace_s=self.grace_s))
        key = f"mw-{self.run}-{job.number}-{job.attempt}"
        return Work(placed=made, folder=folder, key=key, command=job.command, node=self.folder / "node.py", plan=plan, grace_s=self.grace_s)

    def _replay(self, job: _Job, r: Record) -> None:
        states: Mapping[str, Now] = {
            "place": "placing", "held": "held", "start": "starting", "released": "released", "running": "running", "ended": "ended", "lost": "lost",
            "cancel": "cancelled", "preempted": "preempted",
        }  # fmt: skip
        job.leaving = (job.leaving or r.what == "preempt") and r.what not in ("place", "preempted", "ended", "lost")
        if r.what == "place" and r.placed is not None:
            job.attempt, job.given = r.attempt, r.placed.given
            job.work = Work(
                placed=r.placed, folder=self.folder / "jobs" / f"{job.number:06d}", key=f"mw-{self.run}-{job.number}-{r.attempt}",
                    command=job.command,
                node=self.folder / "node.py", plan=Path(job.plan).name if job.plan else "", grace_s=self.grace_s,
            )  # fmt: skip
        if r.what == "held" and job.work is not None:
            job.work = replace(job.work, ids=r.ids)
        job.now, job.code = states.get(r.what, job.now), r.code

    def _changed(self, job: _Job, seen: Seen, begun: bool) -> None:
        """`begun`: it had when the engine was asked. Events are kept at once: the engine may fail at the next job."""
        assert job.work is not None
        folder, attempt = job.work.folder, job.attempt
        began, over = read_started(folder, attempt), read_ended(folder, attempt)
        servers = {g.server for g in job.given}
        if job.leaving and self._left(job, seen, over, servers):
            return
        if seen.state in ("held", "waiting") and (begun or job.now == "running"):  # its memory is older than what happened: nothing starts again
            self._say("note", job.name, attempt=attempt, text=f"the engine says {seen.state}, and it has begun: cancelled there")
            self.engine.cancel(job.work)
            seen = Seen("gone")
        if job.now in ("held", "starting", "released") and seen.state != "gone" and (began or seen.started_s):
            at_s = min((s.time_s for s in began.values()), default=seen.started_s)
            self._say("running", job.name, attempt=attempt, given=seen.given, at_s=at_s)
            job.now = "running"
            self._events.append(Event("running", job.name, at_s))
        if seen.state in ("done", "failed") or (seen.state == "gone" and set(over) >= servers):
            at_s = max((e.time_s for e in over.values()), default=seen.ended_s or time.time())
            code = max((e.code for e in over.values()), default=seen.code if seen.ended_s else 0)
            whole = set(over) >= servers
            stopped = seen.state == "failed" and not code and not whole  # no launcher says why: the engine stopped it
            if stopped and _locked(folder / f"lock-{attempt}"):
                return  # it says so, and the launcher lives: no other attempt may begin
            if seen.state == "failed":
                self.engine.cancel(job.work)  # what is left of the gang
            self._say("lost" if stopped else "ended", job.name, attempt=attempt, given=seen.given, at_s=at_s, code=code, text=seen.why[:500])
            job.now, job.code = "lost" if stopped else "ended", code
            self._events.append(Event("lost" if stopped else "ended", job.name, at_s, code, seen.why))
        elif seen.state == "gone":
            self._gone(job, bool(began) or job.now == "running")
        elif seen.state == "held" and job.now in ("starting", "released") and not job.leaving:  # told, but the engine lost it
            job.now = "held"
            self.start([job.name])

    def _left(self, job: _Job, seen: Seen, over: Mapping[str, Ended], servers: set[str]) -> bool:
        """Whether it has gone, where it was asked to and did not end by itself before. One that stays too long is ended by the engine."""
        assert job.work is not None
        if seen.state not in ("done", "failed", "gone") or _locked(job.work.folder / f"lock-{job.attempt}"):
            if 0 < job.late_s < time.monotonic():
                job.late_s = time.monotonic() + self.grace_s + MAX_LATE_S
                self._say("note", job.name, attempt=job.attempt, text="it was asked to leave and stays: ended by the engine")
                self.engine.cancel(job.work)
            return False
        if set(over) >= servers and not any(e.asked for e in over.values()):
            return False
        if not over and (seen.state == "done" or (seen.code and seen.ended_s)):  # an engine without launchers' notes: by its books it ended before
            return False
        self.engine.cancel(job.work)  # its objects, which nobody needs any more
        at_s = max((e.time_s for e in over.values()), default=seen.ended_s or time.time())
        self._say("preempted", job.name, attempt=job.attempt, given=seen.given, at_s=at_s)
        job.now = "preempted"
        self._events.append(Event("preempted", job.name, at_s))
        return True

    def _gone(self, job: _Job, began: bool) -> None:
        """The engine has forgotten it. If it never began it is submitted again; if it runs, it is watched by its lock; else it is lost."""
        assert job.work is not None
        if not began:
            self._say("note", job.name, attempt=job.attempt, text="the engine does not know it any more and it has not begun: submitted again")
            again = job.now in ("starting", "released", "running")
            job.work = replace(job.work, ids=self.engine.hold(job.work))
            self._say("held", job.name, attempt=job.attempt, ids=job.work.ids)
            job.now = "held"
            if again:
                self.start([job.name])
            return
        if _locked(job.work.folder / f"lock-{job.attempt}"):
            return
        if set(read_ended(job.work.folder, job.attempt)) >= {g.server for g in job.given}:
            return  # it ended this moment: the next look says so
        job.now = "lost"
        self._say("lost", job.name, attempt=job.attempt, at_s=time.time(), text="the engine forgot it while it ran")
        self._events.append(Event("lost", job.name, time.time(), 0, "the engine forgot it while it ran"))

    def close(self) -> None:
        self.engine.close()
        if self._journal:
            self._say("note", text="closed")
            self._journal.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _locked(path: Path) -> bool:
    """Whether a launcher holds it."""
    try:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except OSError:
        return path.exists()


