"""A command under real limits of cores, memory and reading from disk, which leaves no group and no process behind, whatever kills us.

Limits are those of control groups, v1 or v2, whichever has the controller: `cpu_quota` for cores; `memory.limit_in_bytes` or `memory.max`, which
counts the page cache of the files that the command reads; `blkio.throttle.read_bps_device` or `io.max` for the disk of a folder. A guard, a
small process of its own session, waits for the end of a pipe that only this process holds: when we are killed, it kills the members and removes
the groups.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ...errors import RunError, UsageError
from .cpu_quota import CgroupPlace, CpuQuota, find_place, gc, group_name, places_of, quota_place, remove_group

__all__ = ["Limits"]

MIN_MEMORY_BYTES = 4 << 20  # below it no process starts
MAX_KILL_S = 5.0  # until all members of a group are gone after SIGKILL
GUARD = Path(__file__).with_name("limits_guard.py")
_JOIN = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1" || exit 126; shift; n=$((n-1)); done; exec "$@"'


class Limits:
    """with Limits(cores=1.5, memory_bytes=1 << 30) as limits:
        process = limits.start(["python", "train.py"])

    Limits that are None are not set. `read_Bps` needs `disk`, a path on the disk that is meant.
    Raises: UsageError for limits that cannot be; RunError where the controller is missing or refuses, naming it.
    """

    def __init__(
        self, *, cores: float | None = None, memory_bytes: int | None = None, read_Bps: int | None = None, disk: Path | None = None,
        root: Path = Path("/")
    ) -> None:
        if memory_bytes is not None and memory_bytes < MIN_MEMORY_BYTES:
            raise UsageError(f"a memory limit of {memory_bytes} bytes", hint=f"at least {MIN_MEMORY_BYTES}")
        if read_Bps is not None and (read_Bps < 1 or disk is None):
            raise UsageError("a limit of reading is above 0 and names a path on the disk", hint="give disk=")
        self.memory_bytes, self.read_Bps, self.disk, self.root = memory_bytes, read_Bps, disk, root
        self.out_of_memory = False  # once it is closed: the kernel killed a member for the memory limit
        self._place = quota_place() if root == Path("/") else find_place(root)
        self._quota = CpuQuota(cores, place=self._place) if cores is not None else None
        self._folders: list[Path] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Limits:
        gc()
        try:
            if self._quota is not None:
                if self._place is None:
                    hint = "needs root or a delegated group"
                    raise RunError("no control group with the cpu controller can be made", where="cgroup controller cpu", hint=hint)
                self._folders.append(self._quota.open().members_file.parent)
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
            folder = place.folder / group_name()
            try:
                folder.mkdir()
                self._folders.append(folder)
                for file, value in second if place.version == 2 else first:
                    if (folder / file).exists() or file != "memory.swap.max":
                        (folder / file).write_text(value)
                return
            except OSError as error:
                why = f"{folder.name}: {error.strerror}"
                if folder in self._folders:
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

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed a member because of the memory limit."""
        for folder in self._folders:
            for file in ("memory.oom_control", "memory.events"):
                try:
                    lines = (folder / file).read_text().splitlines()
                except OSError:
                    continue
                if any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in lines):
                    return True
        return False

    def change(self, *, cores: float | None = None, memory_bytes: int | None = None) -> None:
        """Other limits from now on, of those that are set. Raises: UsageError, RunError where the kernel refuses, e.g. less than is in use."""
        unset = (cores is not None and self._quota is None) or (memory_bytes is not None and self.memory_bytes is None)
        if unset or (memory_bytes is not None and memory_bytes < MIN_MEMORY_BYTES):
            raise UsageError("only a limit that is set can be changed", hint=f"memory: at least {MIN_MEMORY_BYTES} bytes")
        if cores is not None and self._quota is not None:
            self._quota.change(cores)
        if memory_bytes is not None:
            file = next(f / name for f in self._folders for name in ("memory.limit_in_bytes", "memory.max") if (f / name).exists())
            try:
                file.write_text(str(memory_bytes))
            except OSError as error:
                raise RunError(f"the memory limit cannot be {memory_bytes}: {error.strerror}", where="cgroup controller memory",
                               hint="more than that may be in use") from error  # fmt: skip
            self.memory_bytes = memory_bytes

    def signal(self, number: int) -> bool:
        """Send it to every member; whether there is one."""
        members = {int(pid) for folder in self._folders for pid in _lines(folder / "cgroup.procs")}
        for pid in members:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        return bool(members)

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
        self._folders = []
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _delegated(place: CgroupPlace, controller: str) -> bool:
    """Whether groups made there have the controller; asks for it where it may."""
    control = place.folder / "cgroup.subtree_control"
    if controller in _lines(control):
        return True
    try:
        control.write_text(f"+{controller}")
    except OSError:
        return False
    return controller in _lines(control)
