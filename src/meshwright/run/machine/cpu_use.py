"""How much of the machine other programs used during a run, so that disturbed measurements are repeated or marked.

Busy time of the whole machine minus the CPU time of our own process tree. Busy time comes from the root cpuacct group where
there is one (exact), else from `/proc/stat` (sampled at clock ticks, which alias with quotas of 10 ms: a few % of error).
Time stolen by a hypervisor counts as others' use.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MAX_OTHERS_SHARE", "MachineUse", "MachineUseRecorder", "tree_cpu_s"]

MAX_OTHERS_SHARE = 0.10  # share of the machine used by others above which a run is repeated or marked
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """`others` is the part of all cores' time that programs outside our process tree used, 0..1."""

    wall_s: float
    cores: int
    busy_s: float  # whole machine
    own_s: float  # our process tree
    stolen_s: float  # by the hypervisor
    source: str  # "cpuacct" | "proc-stat"

    @property
    def others(self) -> float:
        if self.wall_s <= 0:
            return 0.0
        used = max(0.0, self.busy_s - self.own_s) + self.stolen_s
        return min(1.0, used / (self.wall_s * self.cores))

    @property
    def disturbed(self) -> bool:
        return self.others > MAX_OTHERS_SHARE

    def to_json(self) -> dict[str, float | int | str | bool]:
        return {
            "wall_s": self.wall_s, "cores": self.cores, "busy_s": self.busy_s, "own_s": self.own_s, "stolen_s": self.stolen_s,
            "others": self.others, "disturbed": self.disturbed, "source": self.source,
        }  # fmt: skip


@dataclass(frozen=True)
class _Reading:
    wall_s: float
    busy_s: float
    own_s: float
    stolen_s: float


class MachineUseRecorder:
    """with MachineUseRecorder() as recorder: ...; recorder.result

    `root_pid` is the root of our own process tree (default: this process). Children that ended are counted through the
    parent that waited for them; one that outlives its parent counts as somebody else from then on.
    """

    def __init__(self, root_pid: int | None = None, *, proc: Path = Path("/proc")) -> None:
        self.root_pid = os.getpid() if root_pid is None else root_pid
        self.proc = proc
        self._cpuacct = _root_cpuacct(proc)
        self._start: _Reading | None = None
        self._result: MachineUse | None = None

    def start(self) -> MachineUseRecorder:
        self._start, self._result = self._read(), None
        return self

    def stop(self) -> MachineUse:
        """Use since `start()`; may be called repeatedly, each time from the same start."""
        if self._start is None:
            raise RuntimeError("stop() before start()")
        a, b = self._start, self._read()
        self._result = MachineUse(
            wall_s=b.wall_s - a.wall_s, cores=os.cpu_count() or 1, busy_s=b.busy_s - a.busy_s, own_s=b.own_s - a.own_s,
            stolen_s=b.stolen_s - a.stolen_s, source="cpuacct" if self._cpuacct else "proc-stat",
        )  # fmt: skip
        return self._result

    @property
    def result(self) -> MachineUse:
        return self._result if self._result is not None else self.stop()

    def __enter__(self) -> MachineUseRecorder:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self) -> _Reading:
        busy, stolen = _machine_s((self.proc / "stat").read_text())
        if self._cpuacct is not None:
            busy = int(self._cpuacct.read_text()) / 1e9
        return _Reading(time.monotonic(), busy, tree_cpu_s(self.root_pid, proc=self.proc), stolen)


def _machine_s(stat: str) -> tuple[float, float]:
    """(busy, stolen) seconds of all cores from the text of /proc/stat. Guest time is contained in user time."""
    user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(x) for x in stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq) / _TICKS, stolen / _TICKS


def _root_cpuacct(proc: Path) -> Path | None:
    """The machine-wide counter of the v1 cpuacct controller; None where our mount shows only a container's part of it."""
    try:
        if any(not _is_root(line) for line in (proc / "1/cgroup").read_text().splitlines() if "cpuacct" in line.split(":")[1].split(",")):
            return None
        for line in (proc / "self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            fields, (kind, _, options) = left.split(), right.split(" ", 2)
            usage = Path(fields[4]) / "cpuacct.usage"
            if kind == "cgroup" and "cpuacct" in options.split(",") and fields[3] == "/" and usage.is_file():
                return usage
    except (OSError, ValueError, IndexError):
        pass
    return None


def _is_root(cgroup_line: str) -> bool:
    return cgroup_line.split(":", 2)[2] in ("/", "/init.scope")


def tree_cpu_s(root_pid: int, *, proc: Path = Path("/proc")) -> float:
    """CPU seconds of a process, its live descendants, and everything they waited for."""
    parent: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended while we looked
                continue
            parent[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(int(x) for x in fields[11:15])
    children: dict[int, list[int]] = {}
    for pid, above in parent.items():
        children.setdefault(above, []).append(pid)
    total, todo = 0, [root_pid]
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo.extend(children.get(pid, ()))
    return total / _TICKS
