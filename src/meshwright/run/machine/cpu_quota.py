"""CPU quotas through control groups, v2 (`cpu.max`) or v1 (`cpu.cfs_quota_us`), whichever has the cpu controller.

A group is named `meshwright-<owner pid>-<owner start time>-<serial>` and lies in the deepest group of this process's own
ancestry where groups can be made. It is removed by `close()`, on interpreter exit, or by `gc()` of any later process once
its owner is gone (killed owners included); the pair of pid and start time keeps a recycled pid from passing as the owner.
The period is 10 ms: at the kernel's default of 100 ms a step that fits into one period's burst runs unthrottled.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import time
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import RunError, UsageError
from ...io.own_limits import CgroupPlace, lines_of, places_of

__all__ = [
    "CpuQuota", "cgroup_cpu_limit", "find_place", "gc", "group_name", "process_start_ticks", "quota_place", "quota_times", "remove_group",
]  # fmt: skip

PERIOD_US = 10_000  # of a quota: a rank that has used its share stands still for less than this
MIN_QUOTA_US = 1_000  # the kernel refuses quotas below 1 ms
PREFIX = "meshwright-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-(\d+)")
COARSE_CLOCK = 6  # Linux' CLOCK_MONOTONIC_COARSE, which goes on at every tick of the kernel's timer
_serial = itertools.count()
MAX_REMOVE_S = 2.0  # until a group can be removed: an exiting member keeps it busy for a moment


CONTROLLERS = ("cpu", "cpuacct", "memory", "blkio")  # of which groups of ours may exist


def cgroup_cpu_limit(root: Path = Path("/"), *, rank: bool = False) -> float | None:
    """Cores that this process's own groups allow it (the smallest over its ancestry), or None if nothing limits it. `rank`: without the group in
    which it is the rank of a run alone, so what all ranks have together."""
    limits, places = [], places_of(root)
    for place in places:
        if rank and _NAME.fullmatch(place.folder.name) and place == next(p for p in places if p.version == place.version):
            continue
        if place.version == 2:
            quota, _, period = "".join(lines_of(place.folder / "cpu.max")[:1]).partition(" ")
        else:
            quota = "".join(lines_of(place.folder / "cpu.cfs_quota_us")[:1])
            period = "".join(lines_of(place.folder / "cpu.cfs_period_us")[:1])
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def find_place(root: Path = Path("/")) -> CgroupPlace | None:
    """Where quota groups can really be made and joined, found by doing it with a short-lived child; None if nowhere.

    On v2 this may enable the cpu controller for the children of a group of ours, as service managers do.
    """
    for place in places_of(root):
        if place.version == 2 and "cpu" not in "".join(lines_of(place.folder / "cgroup.subtree_control")).split():
            try:
                (place.folder / "cgroup.subtree_control").write_text("+cpu")
            except OSError:  # no cpu controller here, no right, or processes of its own (v2 allows either those or children)
                continue
        child = subprocess.Popen(["/bin/sleep", "30"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with CpuQuota(0.5, place=place) as quota:
                quota.attach(child.pid)
            return place
        except RunError:
            continue
        finally:
            child.kill()
            child.wait()
    return None


def quota_times(shares: Sequence[float], cores: float) -> list[dict[str, Any]]:
    """Of every device under a quota, by the names of a fabric's fields: the period; for how long a process runs on past its quota; the machine's
    cores, which devices share that run at the same moment. `shares`: of a core, of all devices, 0: none of its own.

    The kernel looks at its timer's tick (4 ms at 250 Hz): bursts of 5 to 20 ms take as long as if they ran on for a quarter of it (measured at a
    quota of 4 of 10 ms).
    """
    late_s = time.clock_getres(COARSE_CLOCK) / 4
    return [{"cpu_period_s": PERIOD_US / 1e6, "cpu_overrun_s": late_s, "cpu_cores": cores} if 0 < share < 1 else {} for share in shares]


@cache
def quota_place() -> CgroupPlace | None:
    """`find_place()` of this machine, tried once per process."""
    return find_place()


def process_start_ticks(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot; None if there is none (a zombie counts as gone)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def group_name() -> str:
    """A name for a new group of this process."""
    return f"{PREFIX}{os.getpid()}-{process_start_ticks(os.getpid())}-{next(_serial)}"


class CpuQuota:
    """Limits processes to `share` of one core, together, per 10 ms.

    with CpuQuota(0.4) as quota:
        quota.attach(pid)            # the whole process with all its threads, and children it starts from now on

    Raises: UsageError for a share that is not positive; RunError when the group cannot be made or joined.
    """

    def __init__(self, share: float, *, period_us: int = PERIOD_US, place: CgroupPlace | None = None) -> None:
        if not 0 < share < float("inf"):
            raise UsageError(f"a CPU share must be positive, got {share}", hint="0.4 means four tenths of one core")
        self.share, self.period_us = share, period_us
        self._place = place
        self._folder: Path | None = None
        self._finalizer: weakref.finalize[..., CpuQuota] | None = None

    def open(self) -> CpuQuota:
        """Make the group; done by `with` and by the first `attach`."""
        if self._folder is not None:
            return self
        place = self._place or quota_place()
        if place is None:
            hint = "use paced compute: --pacing paced; quotas need root or a delegated group"
            raise RunError("no control group with the cpu controller can be written here", hint=hint)
        self._place = place
        folder = place.folder / group_name()
        try:
            folder.mkdir()
        except OSError as error:
            raise RunError(f"cannot make a control group: {error.strerror}", where=str(folder), hint="use --pacing paced, or run as root") from error
        self._folder = folder
        self._finalizer = weakref.finalize(self, _remove_if_owner, folder, os.getpid())
        try:
            if place.version == 1:
                (folder / "cpu.cfs_period_us").write_text(str(self.period_us))
            self._write()
        except OSError as error:
            self.close()
            hint = "a parent group may allow less than this share"
            raise RunError(f"cannot set a CPU quota: {error.strerror}", where=str(folder), hint=hint) from error
        return self

    def _write(self) -> None:
        assert self._folder is not None and self._place is not None
        quota_us = max(round(self.share * self.period_us), MIN_QUOTA_US)
        if self._place.version == 2:
            (self._folder / "cpu.max").write_text(f"{quota_us} {self.period_us}")
        else:
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def change(self, share: float) -> None:
        """Another share, from now on. Raises: UsageError, RunError."""
        if not 0 < share < float("inf"):
            raise UsageError(f"a CPU share must be positive, got {share}", hint="0.4 means four tenths of one core")
        self.open()
        self.share = share
        try:
            self._write()
        except OSError as error:
            raise RunError(f"cannot set a CPU quota: {error.strerror}", where=str(self._folder), hint="a parent group may allow less") from error

    @property
    def place(self) -> CgroupPlace:
        """Where the group is: version and folder."""
        self.open()
        assert self._place is not None and self._folder is not None
        return CgroupPlace(self._place.version, self._folder)

    def attach(self, pid: int) -> None:
        """Move a process, with all its threads, into the group."""
        self.open()
        folder = self._folder
        assert folder is not None
        try:
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            message = f"cannot put process {pid} under a CPU quota: {error.strerror}"
            raise RunError(message, where=str(folder), hint="is it running, and yours?") from error

    @property
    def members_file(self) -> Path:
        """The file through which a process joins the group by writing `0` to it."""
        self.open()
        assert self._folder is not None
        return self._folder / "cgroup.procs"

    def pids(self) -> list[int]:
        return [] if self._folder is None else [int(line) for line in lines_of(self._folder / "cgroup.procs")]

    def close(self) -> None:
        """Let members go back to the group above and remove this one."""
        if self._folder is not None:
            remove_group(self._folder)
            self._folder = None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None

    __enter__ = open

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_if_owner(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not take its parent's groups away
        remove_group(folder)


def remove_group(folder: Path) -> bool:
    """Let members go back to the group above, and remove the group; whether it is gone."""
    deadline = time.monotonic() + MAX_REMOVE_S
    while True:
        for line in lines_of(folder / "cgroup.procs"):
            try:
                (folder.parent / "cgroup.procs").write_text(line)
            except OSError:  # it ended meanwhile, or may not be moved: rmdir below decides
                pass
        try:
            folder.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)


def gc(root: Path = Path("/")) -> list[str]:
    """Remove the groups of owners that are gone; returns their names. Members still running lose the quota, nothing else."""
    removed = []
    for place in dict.fromkeys(place for controller in CONTROLLERS for place in places_of(root, controller)):
        for folder in sorted(place.folder.glob(f"{PREFIX}*")):
            match = _NAME.fullmatch(folder.name)
            if match and process_start_ticks(int(match[1])) != match[2] and remove_group(folder):
                removed.append(folder.name)
    return removed
