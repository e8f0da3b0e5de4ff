"""Did an engine do what was decided? Decisions and what engine and servers say are laid beside each other, job by job.

Compared: servers; GPUs on each, by number where the engine can be told numbers, else how many; cores and memory where the engine keeps books of them;
ranks on each server, from the notes that launchers write there; whether a job ended well twice, or an attempt began while an earlier one ran; GPUs
that two jobs have at a time. Starts out of the order of releases are counted, not held against the engine: what is released together starts together.
Shares nothing with engines but the types of decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..cluster.allocation import Given
from ..cluster.placed import Placed
from .verdict import Finding, Verdict

__all__ = ["Carried", "check_carried"]

MEMORY_STEP_BYTES = 1 << 20  # engines count memory in MiB
MAX_FINDINGS = 1000
UNKNOWN = "?"  # what the name of a GPU begins with where nobody says which it is


@dataclass(frozen=True, kw_only=True)
class Carried:
    """One attempt of a job: what was decided; what the engine's books say (`given`); the ranks that each server says it started; times, 0 where it
    did not come to that. `released`: its turn among all releases. `over`: it ended or was lost."""

    placed: Placed
    given: tuple[Given, ...] = ()
    ranks: Mapping[str, tuple[int, ...]] | None = None
    host_gpus: Mapping[str, tuple[str, ...]] | None = None
    released: int
    started_s: float
    ended_s: float
    over: bool
    good: bool


def check_carried(jobs: Sequence[Carried], *, picks_gpus: bool) -> Verdict:
    """`picks_gpus`: the engine was told numbers of GPUs. Findings name the job. `facts`: jobs, attempts, differences by kind, starts out of
    order, and attempts of which the engine's books were never seen (it was away)."""
    found: list[Finding] = []
    for job in jobs:
        found += list(_placed(job, picks_gpus))
        found += list(_ranks(job))
    found += list(_twice(jobs))
    found += list(_held_twice(jobs))
    kinds: dict[str, int] = {}
    for f in found:
        kinds[str(f.witness["what"])] = kinds.get(str(f.witness["what"]), 0) + 1
    starts = [j.started_s for j in sorted(jobs, key=lambda j: j.released) if j.started_s and j.released >= 0]
    early = sum(b < a for a, b in pairwise(starts))
    facts: dict[str, Any] = {"jobs": len({j.placed.job for j in jobs}), "attempts": len(jobs), "differences": len(found), "kinds": kinds,
                             "out_of_order": early, "unseen": sum(bool(j.started_s) and not j.given for j in jobs)}  # fmt: skip
    return Verdict(findings=tuple(found[:MAX_FINDINGS]), facts=facts)


def _differs(job: Carried, what: str, message: str, **more: Any) -> Finding:
    name, attempt = job.placed.job, job.placed.attempt
    return Finding(check="values", message=f"job {name}, attempt {attempt}: {message}", witness={"job": name, "attempt": attempt, "what": what,
        **more})


def _placed(job: Carried, picks_gpus: bool) -> Iterable[Finding]:
    if not job.started_s:
        if job.over and job.good:
            yield _differs(job, "never started", "is said to have ended and no server says that it began")
        return
    if not job.given:  # over before the engine was asked: servers' notes are all there is
        return
    decided, real = {g.server: g for g in job.placed.given}, {g.server: g for g in job.given}
    for server in sorted(decided.keys() - real.keys()):
        yield _differs(job, "server", f"was to be on {server} and is not", server=server)
    for server in sorted(real.keys() - decided.keys()):
        yield _differs(job, "server", f"is on {server}, which was not decided", server=server)
    for server in sorted(decided.keys() & real.keys()):
        want, has = decided[server], real[server]
        if len(want.gpus) != len(has.gpus):
            yield _differs(job, "GPUs", f"has {len(has.gpus)} GPUs on {server}, decided were {len(want.gpus)}", server=server)
        elif picks_gpus and set(want.gpus) != set(has.gpus):
            yield _differs(job, "GPUs", f"has {', '.join(sorted(has.gpus))} on {server}, decided were {', '.join(sorted(want.gpus))}", server=server)
        if has.cores != want.cores:
            yield _differs(job, "cores", f"has {has.cores or 'no limit of'} cores on {server}, decided were {want.cores}", server=server)
        if not has.memory_bytes or abs(has.memory_bytes - want.memory_bytes) > MEMORY_STEP_BYTES:
            yield _differs(
                job, "memory", f"has {has.memory_bytes or 'no limit of'} bytes of memory on {server}, decided were {want.memory_bytes}", server=server
            )


def _ranks(job: Carried) -> Iterable[Finding]:
    if not job.started_s or job.ranks is None:
        return
    decided: dict[str, list[int]] = {}
    for n, rank in enumerate(job.placed.ranks):
        decided.setdefault(rank.server, []).append(n)
    for server in sorted(decided.keys() | job.ranks.keys()):
        want, has = decided.get(server, []), list(job.ranks.get(server, ()))
        if want != has and (has or job.good):
            yield _differs(job, "ranks", f"started ranks {has} on {server}, decided were {want}", server=server)
    for server, seen in (job.host_gpus or {}).items():
        count = len(job.placed.numbers(server))
        if len(seen) != count:
            yield _differs(job, "GPUs seen", f"sees {len(seen)} GPUs on {server}, decided were {count}", server=server)


def _twice(jobs: Sequence[Carried]) -> Iterable[Finding]:
    """A job ends well once, and an attempt begins when the one before it is over."""
    of: dict[str, list[Carried]] = {}
    for job in jobs:
        of.setdefault(job.placed.job, []).append(job)
    for attempts in of.values():
        good = [a for a in attempts if a.good]
        if len(good) > 1:
            yield _differs(good[-1], "twice", f"ended well {len(good)} times")
        for before, after in pairwise(attempts):
            if before.started_s and after.started_s and (not before.ended_s or after.started_s < before.ended_s):
                yield _differs(after, "twice", f"began while attempt {before.placed.attempt} ran")


def _held_twice(jobs: Sequence[Carried]) -> Iterable[Finding]:
    """No GPU is held by two jobs at a time, by the engine's books."""
    held: dict[tuple[str, str], list[tuple[float, float, Carried]]] = {}
    for job in jobs:
        if job.started_s and job.ended_s:
            for g in job.given:
                for gpu in (x for x in g.gpus if not x.startswith(UNKNOWN)):
                    held.setdefault((g.server, gpu), []).append((job.started_s, job.ended_s, job))
    for (server, gpu), spans in held.items():
        spans.sort(key=lambda x: x[:2])
        for (_, until, first), (since, _, second) in pairwise(spans):
            if since < until:
                yield _differs(second, "shared", f"has {gpu} of {server} while job {first.placed.job} has it", server=server, gpu=gpu)
