"""How ranks that outnumber the cores share them, so that every rank computes at a known speed.

- `none`: at most one rank per core; nothing is slowed.
- `quota`: each rank gets a share of one core from the kernel (`cpu_quota`); all shares together leave a fifth of the cores idle,
  because a quota is only kept while nobody waits for a core.
- `paced`: no right to make quotas: each compute step does its real work and then sleeps until CPU time / share has passed.
  Communication is not slowed, so its calibration differs; reports say which was used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ...errors import RunError, UsageError
from .cpu_quota import CpuQuota, cgroup_cpu_limit, gc, quota_place

__all__ = ["MAX_LOAD", "CpuQuota", "MachineFacts", "PacedClock", "Pacing", "choose_pacing", "declared_pacing", "gc", "machine_facts"]

MAX_LOAD = 0.8  # sum of the shares over the cores
MAX_PAYBACK_S = 0.01  # longer delays are not timer slack but other programs; hiding them would make later steps too fast
Mode = Literal["none", "quota", "paced"]


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What this process may use of the machine. `cores` is the smaller of affinity and group limits; may be fractional."""

    cores: float
    online_cores: int
    affinity: tuple[int, ...]
    quota_cores: float | None  # limit of the control groups, None if there is none
    cpu_model: str
    memory_bytes: int


@cache
def machine_facts(*, rank: bool = False) -> MachineFacts:
    """`rank`: of the machine that this rank shares with the others, not of its own quota."""
    affinity = tuple(sorted(os.sched_getaffinity(0)))
    quota = cgroup_cpu_limit(rank=rank)
    cores = min(float(len(affinity)), quota) if quota is not None else float(len(affinity))
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model", "cpu model")):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MachineFacts(
        cores=cores, online_cores=os.cpu_count() or 1, affinity=affinity, quota_cores=quota,
        cpu_model=model or os.uname().machine, memory_bytes=memory,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """`share` of one core per rank: predicted wall time of compute = CPU seconds / share. `why` goes into reports."""

    mode: Mode
    share: float = 1.0
    why: str = ""

    def wall_s(self, cpu_s: float) -> float:
        return cpu_s / self.share

    @contextmanager
    def limit(self, pids: list[int]) -> Iterator[list[CpuQuota]]:
        """Hold these processes, one rank each, under this pacing; a no-op unless the mode is `quota`."""
        quotas: list[CpuQuota] = []
        try:
            if self.mode == "quota":
                for pid in pids:
                    quotas.append(CpuQuota(self.share))
                    quotas[-1].attach(pid)
            yield quotas
        finally:
            for quota in quotas:
                quota.close()


def declared_pacing(environment: Mapping[str, str]) -> Pacing | None:
    """What a rehearsal lab says about this rank's device (`MESHWRIGHT_CPU_SHARE`, `MESHWRIGHT_CPU_PACING`); None outside of one.

    Raises: UsageError when the two do not say anything sensible.
    """
    share, mode = environment.get("MESHWRIGHT_CPU_SHARE"), environment.get("MESHWRIGHT_CPU_PACING")
    if share is None:
        return None
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1 or mode not in ("quota", "paced"):
        raise UsageError(
            f"MESHWRIGHT_CPU_SHARE={share[:32]!r} with MESHWRIGHT_CPU_PACING={str(mode)[:32]!r}", where="environment",
            hint="a share in (0, 1], and quota or paced",
        )  # fmt: skip
    return Pacing(mode="quota" if mode == "quota" else "paced", share=value, why=f"the lab declares {value:.3g} of a core")


def choose_pacing(ranks: int, cores: float | None = None, *, mode: Mode | Literal["auto"] = "auto") -> Pacing:
    """`none` while every rank has a core, else `quota` where the kernel lets us, else `paced`; `mode` overrides.

    Raises: UsageError for ranks < 1 or an unknown mode; RunError when quotas are demanded and cannot be had.
    """
    cores = machine_facts().cores if cores is None else cores
    if ranks < 1 or cores <= 0:
        raise UsageError(f"cannot pace {ranks} ranks on {cores} cores", hint="both must be positive")
    if mode not in ("auto", "none", "quota", "paced"):
        raise UsageError(f"unknown pacing {mode!r}", hint="one of auto, none, quota, paced")
    share = min(1.0, MAX_LOAD * cores / ranks)
    if mode == "none":
        return Pacing(mode="none", why="asked for")
    if mode == "auto" and ranks <= cores:
        return Pacing(mode="none", why=f"{ranks} ranks have {cores:g} cores")
    crowded = f"{ranks} ranks share {cores:g} cores: {share:.3g} of a core each"
    if mode != "paced" and quota_place() is not None:
        return Pacing(mode="quota", share=share, why=crowded)
    if mode == "quota":
        raise RunError("CPU quotas cannot be set on this machine", hint="use --pacing paced; quotas need root or a delegated control group")
    return Pacing(mode="paced", share=share, why=crowded + (", no control group can be written" if mode == "auto" else ""))


class PacedClock:
    """Stretches compute to `share` of a core: run the real work inside `step()`; on leaving it sleeps until CPU time / share.

    Sleeping too long (timer slack) is paid back by the next sleeps. CPU time is the calling thread's, so work that other
    threads do is not stretched: use one intra-op thread. With share 1 nothing happens.
    """

    def __init__(
        self,
        share: float,
        *,
        wall: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 < share <= 1:
            raise UsageError(f"a paced share must be in (0, 1], got {share}", hint="0.4 means four tenths of one core")
        self.share = share
        self._wall, self._cpu, self._sleep = wall, cpu, sleep
        self._overslept_s = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        wall, cpu = self._wall(), self._cpu()
        yield
        if self.share == 1:
            return
        before = self._wall()
        needed = max(0.0, (self._cpu() - cpu) / self.share - (before - wall))
        asked = needed - self._overslept_s
        if asked > 0:
            self._sleep(asked)
            self._overslept_s = min(max(0.0, self._wall() - before - asked), MAX_PAYBACK_S)
        else:
            self._overslept_s -= needed
