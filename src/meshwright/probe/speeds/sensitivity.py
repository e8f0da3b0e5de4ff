"""How fast a command is at so many cores and so much memory: measured under real limits, few points instead of the whole grid.

Cite: Mohan et al., "Looking Beyond GPUs for DNN Scheduling on Multi-Tenant Clusters", OSDI 2022 (section 3.1, optimistic profiling).
Left open by the paper: how memory acts where there is no cache of known hit rate. Our answer: memory sizes are measured too, each at the most
cores, and a point is the slower of what its cores and what its memory allow.
Deviations: points of cores are bisected where the ends differ by more than `differ`, as in the paper; noise that falls is made monotone by isotonic
regression before it is written; speeds within noise of that at the share are 1.
Invariant: the profile is 1 at the share and falls nowhere.
Cost: a run of the command for each point.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cluster.sensitivity import Sensitivity
from ...errors import RunError, UsageError
from ...run.machine.limits import Limits

__all__ = ["Measured", "Timing", "isotonic", "measure_rate", "profile_command", "profiled"]

NOISE = 0.02  # of a speed: runs of a job at the same limits differ by so much (2 cores, 3 s of steps)
MAX_POINTS = 64  # runs of one profile
MAX_OUTPUT = 1 << 20  # of the command's last output that is kept to say why it failed


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How a rate is taken. `steps`: a pattern; a line of output that it matches is a step, and the rate is that of the steps between `warm_up_s` and
    `seconds` after the first one; empty: the command runs to its end, and the rate is 1 over its time. `limit_s`: it is given up then."""

    steps: str = ""
    warm_up_s: float = 1.0
    seconds: float = 5.0
    limit_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`points`: (cores, memory_bytes) -> steps per second, as measured; 0: killed for memory. `grid`: runs that all pairs would have taken."""

    profile: Sensitivity
    points: Mapping[tuple[float, int], float]
    grid: int


def measure_rate(command: Sequence[str], timing: Timing, *, cores: float, memory_bytes: int | None, read_Bps: int | None = None,
    disk: Path | None = None) -> float:
    """Steps per second, or 1 / seconds of the whole run; 0 where it was killed for memory.

    Raises: RunError for a command that fails or says no step in time; as `Limits` does."""
    try:
        pattern = re.compile(timing.steps.encode()) if timing.steps else None
    except re.error as error:
        raise UsageError(f"{timing.steps[:64]!r} is no pattern: {error}", where="steps") from None
    with Limits(cores=cores, memory_bytes=memory_bytes, read_Bps=read_Bps, disk=disk, first=True) as limits:
        begun = time.monotonic()
        process = limits.start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            times, tail, ended = _watched(process, pattern, timing, begun)
            took_s = time.monotonic() - begun
            if limits.ran_out_of_memory():
                return 0.0
            if ended and process.wait() != 0:
                said = tail.decode("utf-8", "replace")[-300:]
                raise RunError(f"the command ends with {process.returncode} at {cores:g} cores: {said}", where=command[0],
                    hint="run it without limits first")
        finally:
            limits.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    if pattern is None:
        if not ended:
            raise RunError(f"it runs longer than {timing.limit_s:g} s at {cores:g} cores", where=command[0], hint="shorter work, or count its steps")
        return 1 / took_s
    counted = [t for t in times if t >= times[0] + timing.warm_up_s] if times else []
    if len(counted) < 2:
        raise RunError(f"{len(counted)} steps at {cores:g} cores in time", where=command[0], hint="longer --seconds, or another pattern for --steps")
    return (len(counted) - 1) / (counted[-1] - counted[0])


def _watched(process: subprocess.Popen[bytes], pattern: re.Pattern[bytes] | None, timing: Timing, begun: float) -> tuple[list[float], bytes, bool]:
    """Times of steps, the last output, and whether the command ended by itself."""
    times: list[float] = []
    rest = tail = b""
    assert process.stdout is not None
    file = process.stdout.fileno()
    while True:
        now = time.monotonic()
        if now - begun > timing.limit_s or (times and now - times[0] > timing.warm_up_s + timing.seconds):
            return times, tail, False
        if not select([file], [], [], 0.2)[0]:
            continue
        data = os.read(file, 65536)
        if not data:
            return times, tail, True
        now = time.monotonic()
        tail = (tail + data)[-MAX_OUTPUT:]
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[-MAX_OUTPUT:]
        if pattern is not None:
            times += [now for line in lines if pattern.search(line)]


def isotonic(values: Any) -> NDArray[np.float64]:
    """The nearest sequence that does not fall, in squares (pool adjacent violators)."""
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        means.append(float(value))
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            total = counts[-2] + counts[-1]
            means[-2:] = [(means[-2] * counts[-2] + means[-1] * counts[-1]) / total]
            counts[-2:] = [total]
    return np.repeat(means, counts)


def profiled(
    rate: Callable[[float, int], float], *, name: str, cores: Sequence[float], memory_bytes: Sequence[int], share: tuple[float, int],
    differ: float = 0.1,
    full: bool = False,
) -> Measured:  # fmt: skip
    """The profile of what `rate(cores, memory_bytes)` measures. `cores` and `memory_bytes` grow and hold the share.

    Raises: UsageError for a share that is not among them; RunError where the command does not run at its share."""
    wanted, memories = sorted(set(map(float, cores))), sorted(set(map(int, memory_bytes)))
    if share[0] not in wanted or share[1] not in memories:
        raise UsageError(f"the share of {share[0]:g} cores and {share[1]} bytes is none of the points", where="share", hint="add it to both lists")
    if len(wanted) * len(memories) > MAX_POINTS * MAX_POINTS:
        raise UsageError(f"{len(wanted)} cores and {len(memories)} memory sizes", where="cores", hint=f"at most {MAX_POINTS} of each")
    points: dict[tuple[float, int], float] = {}

    def at(c: float, m: int) -> float:
        if (c, m) not in points:
            points[c, m] = rate(c, m)
        return points[c, m]

    most_c, most_m = wanted[-1], memories[-1]
    if full:
        table = np.array([[at(c, m) for m in memories] for c in wanted])
    else:
        by_core = _bisected(wanted, share[0], lambda c: at(c, most_m), differ)
        by_memory = np.array([at(most_c, m) for m in memories])
        table = np.minimum(by_core[:, None], by_memory[None, :])
    for _ in range(8):  # rows and columns in turns: a few are enough for noise
        table = np.array([isotonic(column) for column in table.T]).T
        table = np.array([isotonic(row) for row in table])
    table = np.maximum.accumulate(np.maximum.accumulate(table, 0), 1)
    base = float(table[wanted.index(share[0]), memories.index(share[1])])
    if base <= 0:
        raise RunError("it does not run at its share", where=name, hint="more memory for the share")
    table = table / base
    table[np.abs(table - 1) < NOISE] = 1.0  # or noise would say that a job loses what it does not feel
    profile = Sensitivity(name=name, cores=tuple(wanted), memory_bytes=tuple(memories), speed=tuple(tuple(row) for row in table.tolist()))
    return Measured(profile=profile, points=points, grid=len(wanted) * len(memories))


def _bisected(wanted: list[float], share: float, at: Callable[[float], float], differ: float) -> NDArray[np.float64]:
    """Rates at all cores: the ends and the share measured, what lies between where it matters, the rest by interpolation."""
    known = {i: at(wanted[i]) for i in sorted({0, wanted.index(share), len(wanted) - 1}, reverse=True)}
    open_ = [*zip(sorted(known), sorted(known)[1:], strict=False)]
    while open_:
        low, high = open_.pop()
        if high - low > 1 and abs(known[high] - known[low]) > differ * max(known[high], known[low]):
            middle = (low + high) // 2
            known[middle] = at(wanted[middle])
            open_ += [(low, middle), (middle, high)]
    places = sorted(known)
    return np.asarray(np.interp(wanted, [wanted[i] for i in places], [known[i] for i in places]))


def profile_command(command: Sequence[str], timing: Timing, *, read_Bps: int | None = None, disk: Path | None = None, **options: Any) -> Measured:
    """`profiled` of a command under real limits. `options`: of `profiled`."""
    return profiled(lambda c, m: measure_rate(command, timing, cores=c, memory_bytes=m, read_Bps=read_Bps, disk=disk), **options)
