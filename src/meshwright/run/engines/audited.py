"""A run's journal and its jobs' notes, read for the auditor: `check.carried` compares what was decided with what was done."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...check.carried import Carried, check_carried
from ...check.verdict import Verdict
from ...cluster.allocation import Given
from ...cluster.placed import Placed
from ...io.cluster.job_folder import read_ended, read_started
from ...io.cluster.journal import Record, read_journal
from .interface import UNKNOWN

__all__ = ["Audit", "audit"]

PICKS_GPUS = frozenset({"local"})  # engines that are told numbers of GPUs


@dataclass(frozen=True, kw_only=True)
class Audit:
    """`verdict.findings` are the differences. `waits_s`: from release to start, per attempt. `unfinished`: jobs that are not over. `failed`: jobs
    whose command failed. `notes`: what the engine said of itself."""

    engine: str
    verdict: Verdict
    attempts: tuple[Carried, ...]
    waits_s: tuple[float, ...]
    unfinished: tuple[str, ...]
    failed: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class _Attempt:
    placed: Placed
    given: tuple[Given, ...] = ()
    released: int = -1
    released_s: float = 0.0
    over: bool = False
    good: bool = False
    code: int = 0
    resized: tuple[Given, ...] = ()  # told last, and
    before: tuple[Given, ...] = ()  # what it had until then, while the engine has not said that it did it
    ended_s: float = 0.0
    started_s: float = 0.0  # by the engine's books


@dataclass
class _Books:
    attempts: dict[tuple[str, int], _Attempt] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)  # what happened last
    notes: list[str] = field(default_factory=list)

    def add(self, turn: int, r: Record) -> None:
        if r.what == "note" and not r.job:
            self.notes.append(r.text)
        if not r.job or r.what == "note":
            return
        self.jobs[r.job] = r.what
        key = (r.job, r.attempt)
        if r.what == "place" and r.placed is not None:
            self.attempts[key] = _Attempt(r.placed)
        if key not in self.attempts:
            return
        a = self.attempts[key]
        if r.what == "released" and a.released < 0:
            a.released, a.released_s = turn, r.time_s
        elif r.what == "resize":
            a.before, a.resized = a.resized or a.placed.given, r.given
        elif r.what == "resized":
            a.before = ()
        elif r.what in ("running", "ended", "lost", "preempted"):
            a.given = _merged(a.given, r.given)
            if r.what == "running":
                a.started_s = r.at_s
            else:
                a.over, a.ended_s, a.code, a.good = True, r.at_s, r.code, r.what == "ended" and not r.code


def _merged(before: tuple[Given, ...], now: tuple[Given, ...]) -> tuple[Given, ...]:
    """What an engine says now; of GPUs that it has forgotten (Slurm does when a job ends) what it said before."""
    gpus = {g.server: g.gpus for g in before if g.gpus}
    return tuple(g if g.gpus else msgspec.structs.replace(g, gpus=gpus.get(g.server, ())) for g in now) or before


def _cores(given: tuple[Given, ...]) -> dict[str, tuple[int, int]]:
    """By server; memory in MiB."""
    return {g.server: (g.cores, g.memory_bytes >> 20) for g in given}


def audit(folder: Path) -> Audit:
    """Raises: UsageError (no run there), FormatError."""
    records = read_journal(folder / "journal.jsonl")
    engine = records[0].text.partition(" ")[0]
    books = _Books()
    for turn, record in enumerate(records):
        books.add(turn, record)
    found, waits = [], []
    for a in books.attempts.values():
        notes = folder / "jobs" / f"{a.placed.number:06d}"
        began, over = read_started(notes, a.placed.attempt), read_ended(notes, a.placed.attempt)
        started_s = min((s.time_s for s in began.values()), default=a.started_s)
        seen = {s.server: tuple(x for x in s.cuda_visible_devices.split(",") if x) for s in began.values()}
        told = a.before if a.before and _cores(a.before) == _cores(a.given) else a.resized or a.placed.given
        placed = msgspec.structs.replace(a.placed, given=told)
        for n, g in enumerate(a.given):
            vague = len(seen.get(g.server, ())) == len(g.gpus) and all(x.startswith(UNKNOWN) for x in g.gpus)
            if g.server in seen and (vague or not g.gpus):  # not in the engine's books, or over before it was asked: what the job itself saw
                a.given = (*a.given[:n], msgspec.structs.replace(g, gpus=tuple(f"{g.server}:{x}" for x in seen[g.server])), *a.given[n + 1 :])
        found.append(Carried(
            placed=placed, given=a.given, ranks={s.server: s.ranks for s in began.values()} if began else None, host_gpus=seen,
            released=a.released, started_s=started_s, ended_s=max((e.time_s for e in over.values()), default=a.ended_s), over=a.over, good=a.good,
        ))  # fmt: skip
        if started_s and a.released_s:
            waits.append(started_s - a.released_s)
    last = {a.placed.job: a for a in books.attempts.values()}
    return Audit(
        engine=engine, verdict=check_carried(found, picks_gpus=engine in PICKS_GPUS), attempts=tuple(found), waits_s=tuple(waits),
        unfinished=tuple(j for j, what in books.jobs.items() if what not in ("ended", "cancel")),
        failed=tuple(j for j, a in last.items() if a.over and not a.good), notes=tuple(dict.fromkeys(books.notes)),
    )  # fmt: skip
