"""How much busy cores slow each other down, and what a CPU quota costs, measured on this machine in ratios.

One process per core, each pinned to its own. In every round they do the same work on 1, 2, 4, ... and all cores, so what slows the machine slows the
reference too. Times are processor times: waiting for other programs is no part of them. Work that computes: products of matrices in a core's own
cache. Work in memory: sums of parts of arrays of 32 MiB, one part after the other.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from ...errors import RunError, UsageError
from ...fabric.fabric import Fabric, Provenance
from ...run.machine.cpu_quota import CpuQuota, quota_place
from ...run.machine.cpu_use import MachineUseRecorder
from ...run.machine.pacing import machine_facts

__all__ = ["CoreSpeeds", "QuotaCost", "busy_counts", "measure_cores", "quota_cost", "require_cpus", "speeds_of", "with_speeds"]

KINDS = ("compute", "memory")
ROUNDS = 9
WINDOW_S = 0.02  # of one kind of work on so many cores in one round
QUOTA_SHARES = (0.25, 0.5)  # of a core, under which the work is done too
QUOTA_WINDOW_S = 0.1  # ten periods
MAX_WAIT_S = 60.0  # for a core's answer, on a busy machine
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
SIDE, FLOATS, PARTS = 192, 8 << 20, 8  # of a matrix; of an array, far more than a core's own caches hold; of it, so that a piece is short

Sample = tuple[float, float]  # processor seconds of a piece of work; of all of them by wall seconds


@dataclass(frozen=True, kw_only=True)
class QuotaCost:
    """One core under a quota of `share`: `got`, its processor seconds per second; `cost`, of a piece of work by that without quota, by kind."""

    share: float
    got: float
    cost: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class CoreSpeeds:
    """`speeds`: a device's `cpu_speeds`. `others_share`: of the machine, that other programs used meanwhile: above a tenth, measure again."""

    cores: int
    speeds: Mapping[str, tuple[float, ...]]
    quotas: tuple[QuotaCost, ...]
    rounds: int
    others_share: float


def busy_counts(cores: int) -> list[int]:
    """Of how many busy cores the speed is measured; between them it is interpolated."""
    return sorted({min(cores, 1 << n) for n in range(cores.bit_length() + 1)})


def speeds_of(rounds: Sequence[Mapping[int, Sequence[float]]]) -> tuple[float, ...]:
    """From seconds of a piece of work, by busy cores, on each of them: the median over rounds of one alone over the mean of those busy, not above 1.

    Raises: RunError for times that are not positive."""
    if not rounds or any(not times or min(times) <= 0 for r in rounds for times in r.values()):
        raise RunError("a core did no work while it was timed", hint="measure again on a machine that is not so busy")
    counts = sorted(rounds[0])
    known = [min(1.0, statistics.median(r[1][0] / statistics.fmean(r[k]) for r in rounds)) for k in counts]
    found = [1.0]
    for (a, low), (b, high) in zip(zip(counts, known, strict=True), zip(counts[1:], known[1:], strict=True), strict=False):
        found += [low + (high - low) * (k - a) / (b - a) for k in range(a + 1, b + 1)]
    return tuple(round(x, 4) for x in found)


def quota_cost(share: float, rounds: Sequence[Mapping[str, tuple[Sample, Sample]]]) -> QuotaCost:
    """From samples by kind, without the quota and under it. Raises: as `speeds_of`."""
    if not rounds or any(sample[0] <= 0 for r in rounds for pair in r.values() for sample in pair):
        raise RunError("a core did no work while it was timed", hint="measure again on a machine that is not so busy")
    cost = {kind: round(statistics.median(r[kind][1][0] / r[kind][0][0] for r in rounds), 4) for kind in rounds[0]}
    got = statistics.median(under[1] for r in rounds for _, under in r.values())
    return QuotaCost(share=share, got=round(got, 4), cost=cost)


def require_cpus(fabric: Fabric) -> None:
    """Raises: UsageError where a device is no CPU."""
    if odd := next((d.name for d in fabric.devices if d.kind != "cpu"), None):
        raise UsageError(f"device {odd} is no CPU", where=fabric.name, hint="speeds of cores are for fabrics of CPUs")


def with_speeds(fabric: Fabric, found: CoreSpeeds) -> Fabric:
    """The fabric with its devices on these cores. Raises: UsageError where a device is no CPU."""
    require_cpus(fabric)
    devices = tuple(replace(d, cpu_cores=float(found.cores), cpu_speeds=dict(found.speeds)) for d in fabric.devices)
    said = f"measured here: median of {found.rounds} rounds, one core alone beside several; other programs used {found.others_share:.0%}"
    return replace(fabric, devices=devices, provenance=(*fabric.provenance, Provenance(what="cpu_speeds", source=said)))


def measure_cores(*, rounds: int = ROUNDS, window_s: float = WINDOW_S, quotas: Sequence[float] = QUOTA_SHARES) -> CoreSpeeds:
    """Takes rounds x kinds x counts windows, and with quotas (where control groups can be made) as many of a tenth of a second for each.

    Raises: UsageError for no rounds, RunError where a core does not answer."""
    if rounds < 1 or not 0 < window_s <= 10:
        raise UsageError(f"cannot measure {rounds} rounds of {window_s:g} s", hint="at least one round, of at most 10 s")
    affinity = machine_facts().affinity
    cores = max(1, min(len(affinity), int(machine_facts().cores)))
    counts, seen = busy_counts(cores), list[dict[str, dict[int, list[float]]]]()
    with MachineUseRecorder() as use, _workers(affinity[:cores]) as workers:
        for _ in range(rounds):
            seen.append({kind: {k: [x[0] for x in workers.run(kind, k, window_s)] for k in counts} for kind in KINDS})
        costs = tuple(workers.quota(share, max(1, rounds // 3)) for share in quotas) if quota_place() is not None else ()
    speeds = {kind: speeds_of([r[kind] for r in seen]) for kind in KINDS}
    return CoreSpeeds(cores=cores, speeds=speeds, quotas=costs, rounds=rounds, others_share=use.result.others)


class _Workers:
    def __init__(self, processes: Sequence[Any], pipes: Sequence[Any]) -> None:
        self.processes, self.pipes = processes, pipes

    def run(self, kind: str, busy: int, window_s: float) -> list[Sample]:
        for pipe in self.pipes[:busy]:
            pipe.send((kind, window_s))
        return [self.answer(i) for i in range(busy)]

    def answer(self, number: int) -> Sample:
        with suppress(EOFError, OSError):  # it is gone
            if self.pipes[number].poll(MAX_WAIT_S):
                found: Sample = self.pipes[number].recv()
                return found
        raise RunError(f"core {number} of {len(self.pipes)} does not answer", hint="is there memory for 64 MiB on each?")

    def quota(self, share: float, rounds: int) -> QuotaCost:
        seen = []
        for _ in range(rounds):
            pairs = {}
            for kind in KINDS:
                free = self.run(kind, 1, QUOTA_WINDOW_S)[0]
                with CpuQuota(share) as quota:
                    quota.attach(self.processes[0].pid)
                    pairs[kind] = (free, self.run(kind, 1, QUOTA_WINDOW_S)[0])
            seen.append(pairs)
        return quota_cost(share, seen)


@contextmanager
def _workers(cpus: Sequence[int]) -> Iterator[_Workers]:
    context = multiprocessing.get_context("spawn")
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    made = []
    try:
        for cpu in cpus:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, cpu), daemon=True)
            process.start()
            there.close()
            made.append((process, here))
        workers = _Workers([p for p, _ in made], [pipe for _, pipe in made])
        for number in range(len(made)):
            workers.answer(number)  # it is ready
        yield workers
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for process, pipe in made:
            pipe.close()
            process.kill()
            process.join()


def _work(pipe: Any, cpu: int) -> None:
    """What a core's process does: pieces of work for as long as it is told to, until the pipe is closed."""
    import numpy as np

    os.sched_setaffinity(0, {cpu})
    a, out = np.ones((SIDE, SIDE), np.float32), np.empty((SIDE, SIDE), np.float32)
    long, sums = np.ones(FLOATS, np.float32), np.ones(FLOATS, np.float32)  # written: their pages are there
    parts = itertools.cycle(zip(np.split(long, PARTS), np.split(sums, PARTS), strict=True))

    def add() -> None:
        part, into = next(parts)
        np.add(part, 1, out=into)

    pieces: dict[str, Callable[[], object]] = {"compute": lambda: np.matmul(a, a, out=out), "memory": add}
    for piece in pieces.values():
        piece()
    pipe.send((0.0, 0.0))
    while True:
        try:
            kind, window_s = pipe.recv()
        except EOFError:
            return
        piece, done, used, begin = pieces[kind], 0, time.thread_time(), time.perf_counter()
        while time.perf_counter() - begin < window_s:
            piece()
            done += 1
        used = time.thread_time() - used
        pipe.send((used / done, used / (time.perf_counter() - begin)))
