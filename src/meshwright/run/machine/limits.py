"""A command under real limits of cores, memory and reading from disk, which leaves no group and no process behind, whatever kills us.

Limits are those of control groups, v1 or v2, whichever has the controller: `cpu_quota` for cores; `memory.limit_in_bytes` or `memory.max`, which
counts the page cache of the files that the command reads; `blkio.throttle.read_bps_device` or `io.max` for the disk of a folder. A guard, a
small process of its own session, waits for the end of a pipe that only this process holds: when we are killed, it kills the members and removes
the groups.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ...errors import RunError, UsageError
from ...io.own_limits import CgroupPlace, lines_of, places_of
from .cpu_quota import PERIOD_US, CpuQuota, find_place, gc, group_name, quota_place, remove_group

__all__ = ["Limits", "Used"]

MIN_MEMORY_BYTES = 4 << 20  # below it no process starts
TAKE_BACK_SHARE = 0.95  # of a smaller memory limit that members may hold when it is set: they go on allocating meanwhile
MAX_KILL_S = 5.0  # until all members of a group are gone after SIGKILL
MAX_LOOKS = 100  # at who is in a group, for one signal: a job that goes on forking is not followed without end
GUARD = Path(__file__).with_name("limits_guard.py")
_JOIN = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1" || exit 126; shift; n=$((n-1)); done; exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Used:
    """Since the start: processor seconds; periods of the CPU quota with work, and those in which it was used up; kills for memory. Now: bytes of
    memory that cannot be dropped (no page cache). What was not limited is 0."""

    cpu_s: float
    periods: int
    throttled: int
    memory_bytes: int
    oom_kills: int


class Limits:
    """with Limits(cores=1.5, memory_bytes=1 << 30) as limits:
        process = limits.start(["python", "train.py"])

    Limits that are None are not set. `read_Bps` needs `disk`, a path on the disk that is meant. `watch`: `used` is asked for. `first`: within
    their limit of cores members go before whatever else runs (the kernel's largest weight), for measurements. Limits of cores and memory that are
    set can be changed while members run.
    Raises: UsageError for limits that cannot be; RunError where the controller is missing or refuses, naming it.
    """

    def __init__(
        self, *, cores: float | None = None, memory_bytes: int | None = None, read_Bps: int | None = None, disk: Path | None = None,
        root: Path = Path("/"), period_us: int = PERIOD_US, watch: bool = False, first: bool = False
    ) -> None:
        if memory_bytes is not None and memory_bytes < MIN_MEMORY_BYTES:
            raise UsageError(f"a memory limit of {memory_bytes} bytes", hint=f"at least {MIN_MEMORY_BYTES}")
        if read_Bps is not None and (read_Bps < 1 or disk is None):
            raise UsageError("a limit of reading is above 0 and names a path on the disk", hint="give disk=")
        self.memory_bytes, self.read_Bps, self.disk, self.root = memory_bytes, read_Bps, disk, root
        self.out_of_memory = False  # once it is closed: the kernel killed a member for the memory limit
        self._place = None if cores is None else quota_place() if root == Path("/") else find_place(root)
        self._quota = CpuQuota(cores, place=self._place, period_us=period_us) if cores is not None else None
        self._watch, self._first = watch, first
        self._of: dict[str, CgroupPlace] = {}
        self._folders: list[Path] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Limits:
        gc()
        try:
            if self._quota is not None:
                if self._place is None:
                    hint = "needs root or a delegated group"
                    raise RunError("no control group with the cpu controller can be made", where="cgroup controller cpu", hint=hint)
                self._of["cpu"] = self._of["cpuacct"] = self._quota.place
                self._folders.append(self._quota.place.folder)
                if self._first:
                    file, most = ("cpu.weight", "10000") if self._quota.place.version == 2 else ("cpu.shares", "262144")
                    (self._quota.place.folder / file).write_text(most)
                if self._watch and self._quota.place.version == 1 and not (self._quota.place.folder / "cpuacct.usage").exists():
                    self._make("cpuacct", [], [])
            if self.memory_bytes is not None:
                self._make("memory", [("memory.limit_in_bytes", str(self.memory_bytes))], [("memory.max", str(self.memory_bytes)),
                    ("memory.swap.max", "0")])
            if self.read_Bps is not None:
                assert self.disk is not None
                number = self.disk.stat().st_dev
                name = f"{os.major(number)}:{os.minor(number)}"
                self._make("blkio", [("blkio.throttle.read_bps_device", f"{name} {self.read_Bps}")], [("io.max", f"{name} rbps={self.read_Bps}")])
            self._guard = subprocess.Popen(
                [sys.executable, "-S", "-E", str(GUARD), *map(str, self._folders)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        return self

    def _make(self, controller: str, first: list[tuple[str, str]], second: list[tuple[str, str]]) -> None:
        """A group with these settings of v1 or v2."""
        why = "no hierarchy has it"
        for place in places_of(self.root, controller):
            if place.version == 2 and not _delegated(place, "io" if controller == "blkio" else controller):
                why = f"it is not delegated to groups in {place.folder}"
                continue
            # A process is in one group of v2: all limits are there. Of v1 it is in one group of each hierarchy.
            mine = next((p.folder for p in self._of.values() if place.version == p.version == 2 and p.folder.parent == place.folder), None)
            folder = mine or place.folder / group_name()
            try:
                if mine is None:
                    folder.mkdir()
                    self._folders.append(folder)
                self._of[controller] = CgroupPlace(place.version, folder)
                for file, value in second if place.version == 2 else first:
                    if (folder / file).exists() or file != "memory.swap.max":
                        (folder / file).write_text(value)
                return
            except OSError as error:
                why = f"{folder.name}: {error.strerror}"
                if mine is None and folder in self._folders:
                    remove_group(folder)
                    self._folders.remove(folder)
        raise RunError(
            f"the limit of {controller} cannot be set: {why}", where=f"cgroup controller {controller}",
            hint="needs root or a delegated group; a disk must be a whole block device", data={"controller": controller},
        )  # fmt: skip

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        """Start a command inside; `options` are those of `subprocess.Popen`. Its children stay inside, too."""
        files = [str(folder / "cgroup.procs") for folder in self._folders]
        line = ["/bin/sh", "-c", _JOIN, "sh", str(len(files)), *files, *command]
        try:
            return subprocess.Popen(line, start_new_session=True, **options)  # type: ignore[call-overload,no-any-return]
        except OSError as error:
            raise RunError(f"cannot start: {error.strerror}", where=str(command[0])) from error

    def change(self, *, cores: float | None = None, memory_bytes: int | None = None) -> bool:
        """Other limits from now on; whether memory could be taken back: what members hold is not taken, since the kernel would kill them.

        Raises: UsageError for limits that were not set or cannot be; RunError."""
        if cores is not None:
            if self._quota is None:
                raise UsageError("no limit of cores was set", hint="give cores=")
            self._quota.change(cores)
        if memory_bytes is None or memory_bytes == self.memory_bytes:
            return True
        if "memory" not in self._of or memory_bytes < MIN_MEMORY_BYTES:
            raise UsageError(f"a memory limit of {memory_bytes} bytes", hint=f"give memory_bytes= at the start; at least {MIN_MEMORY_BYTES}")
        version, folder = self._of["memory"].version, self._of["memory"].folder
        if memory_bytes < (self.memory_bytes or 0) and self.used().memory_bytes > TAKE_BACK_SHARE * memory_bytes:
            return False
        names = ["memory.max"] if version == 2 else ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]  # the latter is never the smaller
        names = [n for n in names if (folder / n).exists()]
        try:
            for name in names if memory_bytes < (self.memory_bytes or 0) else names[::-1]:
                (folder / name).write_text(str(memory_bytes))
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise RunError(f"the memory limit cannot be changed: {error.strerror}", where=folder.name) from error
        self.memory_bytes = memory_bytes
        return True

    def used(self) -> Used:
        """Needs `watch`."""
        cpu, memory = _table(self._of.get("cpu"), "cpu.stat"), _table(self._of.get("memory"), "memory.stat")
        acct = self._of.get("cpuacct")
        nanoseconds = _words(acct.folder / "cpuacct.usage") if acct is not None else []
        events = _table(self._of.get("memory"), "memory.oom_control") | _table(self._of.get("memory"), "memory.events")
        return Used(
            cpu_s=int(nanoseconds[0]) / 1e9 if nanoseconds else cpu.get("usage_usec", 0) / 1e6, periods=cpu.get("nr_periods", 0),
            throttled=cpu.get("nr_throttled", 0), memory_bytes=memory.get("total_rss", memory.get("anon", 0)), oom_kills=events.get("oom_kill", 0),
        )  # fmt: skip

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed a member because of the memory limit."""
        return self.used().oom_kills > 0

    def signal(self, number: int) -> bool:
        """Send it once to every member, those that are forked meanwhile too; whether there is one."""
        told = set[int]()
        for _ in range(MAX_LOOKS):
            if not (fresh := {int(pid) for folder in self._folders for pid in _words(folder / "cgroup.procs")} - told):
                break
            told |= fresh
            for pid in fresh:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
        return bool(told)

    def kill(self) -> None:
        """End every member, and wait until they are gone."""
        deadline = time.monotonic() + MAX_KILL_S
        while time.monotonic() < deadline and self.signal(signal.SIGKILL):
            time.sleep(0.01)

    def close(self) -> None:
        self.kill()
        self.out_of_memory |= self.ran_out_of_memory()
        for folder in self._folders:
            remove_group(folder)
        if self._quota is not None:
            self._quota.close()
        self._folders, self._of = [], {}
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _table(place: CgroupPlace | None, name: str) -> dict[str, int]:
    """A file of lines `name number`."""
    words = [] if place is None else _words(place.folder / name)
    return {key: int(value) for key, value in zip(words[::2], words[1::2], strict=False) if value.isdigit()}


def _words(path: Path) -> list[str]:
    return " ".join(lines_of(path)).split()


def _delegated(place: CgroupPlace, controller: str) -> bool:
    """Whether groups made there have the controller; asks for it where it may."""
    control = place.folder / "cgroup.subtree_control"
    if controller in _words(control):
        return True
    try:
        control.write_text(f"+{controller}")
    except OSError:
        return False
    return controller in _words(control)
