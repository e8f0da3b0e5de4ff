"""Published traces of GPU clusters as queues: Philly (JSON), Gavel and Shockwave (TSV), one job a line (CSV: Alibaba, Helios, Acme).

They say how many GPUs for how long, and little of cores and memory: jobs get the profile `unprofiled`, or of Gavel's types the published profile
of the same model; `cluster.generate.reprofiled` draws others. Jobs that never had a GPU are left out. A duration is that of the recording.
Sources: github.com/msr-fiddle/philly-traces, github.com/stanford-futuredata/gavel, github.com/uw-mad-dash/shockwave,
github.com/alibaba/clusterdata (cluster-trace-gpu-v2020, -v2023, -v2025), github.com/S-Lab-System-Group/HeliosData, github.com/InternLM/AcmeTrace.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from ...cluster.generate import UNPROFILED, published_profiles
from ...cluster.queue import MAX_GPUS, MAX_JOBS, MAX_S, Queue, QueuedJob
from ...errors import FormatError
from ..limits import MaxBytes
from ..strict_json import decode, read_document, read_text

__all__ = ["GAVEL_TYPES", "philly_queue", "read_gavel", "read_gavel_rates", "read_job_table", "read_philly"]

GAVEL_TYPES: Mapping[str, str] = {
    "ResNet-18": "res18", "ResNet-50": "res50", "Transformer": "transformer", "LM": "lstm", "Recommendation": "unprofiled", "A3C": "unprofiled",
    "CycleGAN": "unprofiled",
}  # fmt: skip
# Of a table of jobs: what its columns are called by Alibaba in 2020, 2023 and 2025, and by Helios and Acme. An empty time of Alibaba's in 2025:
# before the recording, or after it.
TABLE = {"name": ("name", "instance_sn", "job_id"), "GPUs": ("num_gpu", "gpu_request", "gpu_num"), "came": ("creation_time", "submit_time"),
    "start": ("scheduled_time", "start_time"), "end": ("deletion_time", "end_time", "duration"), "instances": ("num_inst",)}
MAY_LACK = ("start", "instances")
# Alibaba's `pai_task_table` of 2020 has a task a line and no line of names; GPUs in percent of one, of each instance.
TASKS = ("job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu", "gpu_type")
STATES = ("Terminated", "Failed", "Running", "Waiting")
MAX_LINE = 65_536
_RATE_KEY = re.compile(r"\('(?P<type>[^']{1,128})', (?P<gpus>\d{1,6})\)")


class _Detail(msgspec.Struct):
    gpus: list[str] = []


class _Attempt(msgspec.Struct):
    start_time: str | None = None
    end_time: str | None = None
    detail: list[_Detail] = []


class _Logged(msgspec.Struct):
    jobid: str
    submitted_time: str | None
    attempts: list[_Attempt]


def _made(name: str, jobs: list[QueuedJob], where: str) -> Queue:
    if not jobs:
        raise FormatError("no job in it had GPUs and a time", where=where)
    if len(jobs) > MAX_JOBS:
        raise FormatError(f"more than {MAX_JOBS} jobs", where=where)
    first = min(j.arrival_s for j in jobs)
    moved = sorted((msgspec.structs.replace(j, arrival_s=j.arrival_s - first) for j in jobs), key=lambda j: (j.arrival_s, j.name))
    used = {j.profile for j in moved}
    return Queue(name=name, profiles=tuple(p for p in (*published_profiles(), UNPROFILED) if p.name in used), jobs=tuple(moved))


def _time_s(text: str | None, where: str) -> float | None:
    """Seconds since 1970 of `2017-10-07 01:11:39`, also with `+08:00` behind it; None where nothing is said."""
    if text is None or text in ("", "None"):
        return None
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise FormatError(f"{text[:32]!r} is no time", where=where, hint="as in 2017-10-07 01:11:39") from None


def philly_queue(data: bytes, where: str) -> Queue:
    """As `read_philly`, of bytes."""
    found, seen = [], set()
    for i, job in enumerate(decode(data, msgspec.json.Decoder(list[_Logged]), where)):
        at = f"{where}: [{i}]"
        submitted_s, ran_s, gpus = _time_s(job.submitted_time, at), 0.0, 0
        for attempt in job.attempts:
            start_s, end_s = _time_s(attempt.start_time, at), _time_s(attempt.end_time, at)
            if start_s is not None and end_s is not None:
                if end_s < start_s:
                    raise FormatError(f"job {job.jobid[:64]} ends {start_s - end_s:g} s before it starts", where=at)
                ran_s += end_s - start_s
                gpus = sum(len(d.gpus) for d in attempt.detail) or gpus
        if submitted_s is not None and ran_s > 0 and gpus:
            if job.jobid in seen or not job.jobid or gpus > MAX_GPUS:
                raise FormatError(f"the job {job.jobid[:64]!r} is there twice, has no name or {gpus} GPUs", where=at)
            seen.add(job.jobid)
            found.append(QueuedJob(name=job.jobid, gpus=gpus, profile="unprofiled", arrival_s=submitted_s, duration_s=ran_s))
    return _made("philly", found, where)


def read_philly(path: str | os.PathLike[str]) -> Queue:
    """`cluster_job_log`: GPUs of the last attempt that ran, for the time of all attempts. Raises: UsageError (no such file), FormatError."""
    return philly_queue(read_document(path, limit=MaxBytes.CLUSTER_TRACE), Path(path).name or str(path))


def _number(text: str, what: str, where: str, *, least: float = 0.0, most: float = MAX_S) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and least <= value <= most):
        raise FormatError(f"{what} is {text[:32]!r}", where=where, hint=f"a number from {least:g} to {most:g}")
    return value


def _whole(text: str, what: str, where: str, *, least: int = 0, most: int = MAX_GPUS) -> int:
    value = _number(text, what, where, least=least, most=most)
    if value != int(value):
        raise FormatError(f"{what} is {text[:32]!r}", where=where, hint="a whole number")
    return int(value)


def read_gavel_rates(path: str | os.PathLike[str], kind: str = "v100") -> dict[tuple[str, int], float]:
    """Steps per second of (type, GPUs) alone on GPUs of this kind, of Gavel's `simulation_throughputs.json`. Raises: UsageError, FormatError."""
    where, data = Path(path).name or str(path), read_document(path, limit=MaxBytes.CLUSTER_TRACE)
    tables = decode(data, msgspec.json.Decoder(dict[str, dict[str, dict[str, Any]]]), where)
    if kind not in tables:
        raise FormatError(f"there is no GPU {kind!r}", where=where, hint=f"there are: {', '.join(sorted(tables)[:12])}")
    found = {}
    for key, row in tables[kind].items():
        match = _RATE_KEY.fullmatch(key)
        if match and isinstance(rate := row.get("null"), (int, float)) and 0 < rate < MAX_S:
            found[match["type"], int(match["gpus"])] = float(rate)
    return found


def read_gavel(path: str | os.PathLike[str], *, rates: Mapping[tuple[str, int], float]) -> Queue:
    """A trace of 9, 10 or 11 columns: its type first, steps, GPUs (in the newest followed by a mode), priority, deadline and arrival last; of 12
    (Shockwave's): a duration before the arrival, which is not read; or of 7 (`traces/msr`): its type first, steps, arrival and GPUs last. Durations
    are steps over `rates`. Raises: UsageError (no such file), FormatError naming line and type."""
    where, text = read_text(path, MaxBytes.CLUSTER_TRACE)
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        at, fields = f"{where}:{number}", line.split("\t")
        if not line.strip():
            continue
        if len(fields) not in (7, 9, 10, 11, 12):
            raise FormatError(f"{len(fields)} columns", where=at, hint="traces of Gavel have 7 or 9 to 12, with tabs between them")
        wide = max(4, len(fields) - 6)
        size, work, came = (-1, -3, -2) if len(fields) == 7 else (-wide, -wide - 1, -1)
        kind, gpus, steps = fields[0], _whole(fields[size], "GPUs", at, least=1), _number(fields[work], "steps", at, least=1)
        model = kind.partition(" (")[0]
        if model not in GAVEL_TYPES:
            raise FormatError(f"unknown job type {kind[:64]!r}", where=at, hint=f"known are: {', '.join(GAVEL_TYPES)}")
        if (kind, gpus) not in rates:
            sizes = ", ".join(str(n) for known, n in sorted(rates) if known == kind)
            raise FormatError(f"no rate of {kind[:64]!r} on {gpus} GPUs", where=at,
                hint=f"it was measured on {sizes or 'no'} GPUs: give --rates the throughputs of the same trace, or leave the job out")
        found.append(QueuedJob(
            name=f"j{number}", gpus=gpus, profile=GAVEL_TYPES[model], arrival_s=_number(fields[came], "arrival", at),
            duration_s=_number(str(steps / rates[kind, gpus]), "duration", at, least=1e-9),
        ))  # fmt: skip
    return _made("gavel", found, where)


def read_job_table(path: str | os.PathLike[str]) -> Queue:
    """`pai_task_table.csv` and `pai_job_*.csv` (2020), `openb_pod_list_*.csv` (2023) and `disaggregated_DLRM_trace.csv` (2025) of Alibaba,
    `cluster_log.csv` of Helios, `trace_seren.csv` and `trace_kalos.csv` of Acme: jobs with GPUs that ended, from when they started (or came) to when
    they ended; one that came before the recording is left out. An instance with a part of a GPU counts as one with a whole one. Times are seconds or
    dates. Raises: UsageError (no such file), FormatError."""
    where, text = read_text(path, MaxBytes.CLUSTER_TRACE)
    lines = text.splitlines()
    if any(len(line) > MAX_LINE for line in lines):
        raise FormatError(f"a line of more than {MAX_LINE} characters", where=where)
    rows = csv.reader(lines, strict=True)
    try:
        header = [h.strip() for h in next(rows, [])]
        if len(header) == len(TASKS) and header[TASKS.index("status")] in STATES:
            return _made(Path(where).stem, _of_tasks(chain([header], rows), where, 1), where)
        if header == list(TASKS):
            return _made(Path(where).stem, _of_tasks(rows, where, 2), where)
        return _made(Path(where).stem, _of_jobs(header, rows, where), where)
    except csv.Error as error:
        raise FormatError(f"not CSV: {str(error)[:80]}", where=where) from None


def _of_jobs(header: list[str], rows: Iterable[list[str]], where: str) -> list[QueuedJob]:
    place = {what: next((header.index(n) for n in names if n in header), -1) for what, names in TABLE.items()}
    lacks = [" or ".join(TABLE[what]) for what, at in place.items() if at < 0 and what not in MAY_LACK]
    if lacks:
        raise FormatError(f"lacks columns: {', '.join(lacks)}", where=f"{where}:1", hint="a table of jobs by Alibaba, Helios or Acme")
    found, seen, lasts = [], set(), header[place["end"]] == "duration"
    for number, row in enumerate(rows, start=2):
        at = f"{where}:{number}"
        if len(row) != len(header):
            raise FormatError(f"{len(row)} columns, the first line has {len(header)}", where=at)
        name, gpus = row[place["name"]], math.ceil(_number(row[place["GPUs"]], "GPUs", at, most=MAX_GPUS))
        if place["instances"] >= 0:
            gpus *= _whole(row[place["instances"]], "instances", at, least=1)
        came_s, start_s, end_s = (_moment(row[place[x]] if place[x] >= 0 else "", header[place[x]], at) for x in ("came", "start", "end"))
        if not gpus or came_s is None or end_s is None:
            continue
        start_s = came_s if start_s is None else start_s
        end_s += start_s if lasts else 0.0
        if end_s < start_s:
            raise FormatError(f"job {name[:64]} ends {start_s - end_s:g} s before it starts", where=at)
        if name in seen or not name:
            raise FormatError(f"the name {name[:64]!r} is empty or taken", where=at)
        if gpus > MAX_GPUS:
            raise FormatError(f"job {name[:64]} has {gpus} GPUs", where=at)
        seen.add(name)
        if end_s > start_s:
            found.append(QueuedJob(name=name, gpus=gpus, profile="unprofiled", arrival_s=came_s, duration_s=end_s - start_s))
    return found


def _of_tasks(rows: Iterable[list[str]], where: str, first: int) -> list[QueuedJob]:
    """A job's tasks run at the same time: it has the GPUs of all, from the first one's start to the last one's end."""
    jobs: dict[str, tuple[int, float, float]] = {}
    for number, row in enumerate(rows, start=first):
        at = f"{where}:{number}"
        if len(row) != len(TASKS):
            raise FormatError(f"{len(row)} columns, a table of tasks has {len(TASKS)}", where=at)
        one = dict(zip(TASKS, row, strict=True))
        if one["status"] not in STATES or not one["job_name"]:
            raise FormatError(f"a task of job {one['job_name'][:64]!r} in state {one['status'][:32]!r}", where=at, hint=f"one of {', '.join(STATES)}")
        start_s, end_s = (_moment(one[x], x, at) for x in ("start_time", "end_time"))
        parts = _number(one["plan_gpu"] or "0", "plan_gpu", at, most=100.0 * MAX_GPUS)
        if not parts or start_s is None or end_s is None:
            continue
        if end_s < start_s:
            raise FormatError(f"a task of job {one['job_name'][:64]} ends {start_s - end_s:g} s before it starts", where=at)
        gpus = math.ceil(parts / 100) * _whole(one["inst_num"], "inst_num", at, least=1)
        before = jobs.get(one["job_name"], (0, start_s, end_s))
        jobs[one["job_name"]] = (before[0] + gpus, min(before[1], start_s), max(before[2], end_s))
        if before[0] + gpus > MAX_GPUS:
            raise FormatError(f"job {one['job_name'][:64]} has {before[0] + gpus} GPUs", where=at)
    return [
        QueuedJob(name=name, gpus=gpus, profile="unprofiled", arrival_s=start_s, duration_s=end_s - start_s)
        for name, (gpus, start_s, end_s) in jobs.items() if end_s > start_s
    ]  # fmt: skip


def _moment(text: str, what: str, where: str) -> float | None:
    """Seconds of `12902960.0` or of a date; None where nothing is said."""
    if not text or text == "None":
        return None
    return _time_s(text, where) if text[4:5] == "-" else _number(text, what, where)
