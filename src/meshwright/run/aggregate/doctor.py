"""What a switch's status says in words: which slot of which job waits for which worker."""

from __future__ import annotations

from .control import Status, StatusJob, StatusSlot

__all__ = ["MIN_SILENT_S", "missing_worker", "status_lines"]

MIN_SILENT_S = 3.0  # of a worker that others wait for, until it is called missing: a second is a step's computing


def missing_worker(job: StatusJob) -> tuple[int, int]:
    """(worker, slot): who is waited for: the longest silent of those that the oldest slot lacks, or of all where nothing waits."""
    rows = [(w.missing, w.slot) for w in job.waits if w.missing] or [(list(range(job.workers)), 0)]
    missing, slot = rows[0]
    return max(missing, key=lambda w: job.silent_s[w] if w < len(job.silent_s) else 0.0), slot


def status_lines(status: Status) -> tuple[list[str], bool]:
    """Lines, the first of which says what is wrong, and whether something is."""
    said = [_verdict(job) for job in status.jobs]
    wrong = [line for line in said if line]
    lines = [wrong[0] if wrong else f"nothing is wrong: {len(status.jobs)} job{'s' if len(status.jobs) != 1 else ''}"]
    counters = ", ".join(f"{k} {v}" for k, v in status.counters.items())
    lines.append(f"{status.free_slots} of {status.slots} slots of {4 * status.words} B are free; {counters}")
    for job in status.jobs:
        lines.append(f"job {job.job}: {job.state}, {job.joined} of {job.workers} workers, {job.slots} slots, {job.mode}")
        lines += [f"  {_wait(job, wait)}" for wait in job.waits]
    return lines, bool(wrong)


def _wait(job: StatusJob, wait: StatusSlot) -> str:
    if wait.above:
        return f"slot {wait.slot}, chunk {wait.chunk}: waits for the switch above"
    who = ", ".join(f"worker {w} (silent for {job.silent_s[w]:.1f} s)" for w in wait.missing)
    return f"slot {wait.slot}, chunk {wait.chunk}: waits for {who}"


def _verdict(job: StatusJob) -> str:
    if job.state == "over":
        return f"job {job.job}: was given up"
    waits = [w for w in job.waits if w.missing]
    if job.state == "joining" or not waits:
        return ""
    worker, slot = missing_worker(job)
    silent_s = job.silent_s[worker]
    return f"job {job.job}: slot {slot} waits for worker {worker}, silent for {silent_s:.1f} s" if silent_s >= MIN_SILENT_S else ""
