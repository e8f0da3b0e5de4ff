"""This machine as the engine: a job's part on each server is a launcher in namespaces of its own (processes, mounts, host name) under a control group
with the cores and the memory that it was given. The servers may be any fabric's; all of them are this machine. Nothing stays behind: when this
process ends or is killed, a guard kills the members of each group and removes it (`run.machine.limits`).

Where a controller is missing or namespaces are forbidden, jobs run without, and `notes` says so. Jobs end with this process; the journal says which.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ...cluster.allocation import Given
from ...cluster.servers import Server, Servers
from ...errors import RunError
from ..machine.limits import Limits
from .interface import Seen, Work

__all__ = ["Local"]

UNSHARE = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
MAX_END_S = 10.0  # between asking a launcher to end and killing all that is in its group


@dataclass
class _Part:
    """One server's part of a job that runs or ran: its processes, and what its group allows."""

    given: Given
    limits: Limits
    process: subprocess.Popen[bytes]
    cores: int
    memory_bytes: int


@dataclass
class Local:
    """`servers`: default this machine itself, with a GPU that is none. `root`: where the control groups are looked for (tests)."""

    servers: Servers | None = None
    dry: bool = False
    root: Path = Path("/")
    notes: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    name: ClassVar[str] = "local"
    picks_gpus: ClassVar[bool] = True
    resizes: ClassVar[bool] = True
    launches: ClassVar[bool] = True
    _parts: dict[str, list[_Part]] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    _over: dict[str, Seen] = field(default_factory=dict)
    _namespaces: bool | None = None

    def discover(self) -> Servers:
        if self.servers is not None:
            return self.servers
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        here = Server(name="here", gpus=("here0",), cores=len(os.sched_getaffinity(0)), memory_bytes=memory, type="none")
        return Servers(servers=(here,), fabric="this machine")

    def addresses(self, servers: Sequence[str]) -> Mapping[str, str]:
        return dict.fromkeys(servers, "127.0.0.1")

    def down(self) -> set[str]:
        return set()

    def remember(self, ids: Sequence[str]) -> None:
        """Names are never used again here."""

    def hold(self, work: Work) -> tuple[str, ...]:
        if work.key not in self._parts and work.key not in self._over:
            self._held.add(work.key)
        return (work.key,)

    def start(self, works: Sequence[Work]) -> None:
        for work in works:
            if self.dry:
                self.said += [f"# cores {g.cores}, {g.memory_bytes} bytes: {shlex.join(self._command(work, g.server))}" for g in work.placed.given]
            elif work.key not in self._parts and work.key not in self._over:
                self._parts[work.key] = []
                for given in work.placed.given:
                    self._parts[work.key].append(self._started(work, given))
            self._held.discard(work.key)

    def _command(self, work: Work, server: str) -> list[str]:
        before = list(UNSHARE) if self._may_unshare() else []
        return [*before, sys.executable, "-S", "-E", str(work.node), str(work.folder), str(work.placed.attempt), server]

    def _may_unshare(self) -> bool:
        if self._namespaces is None:
            self._namespaces = bool(shutil.which(UNSHARE[0])) and subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
            if not self._namespaces:
                self.notes.append("no namespaces of their own: `unshare` is missing or may not make them here; jobs see each other's processes")
        return self._namespaces

    def _started(self, work: Work, given: Given) -> _Part:
        limits, cores, memory_bytes = self._limits(given)
        environment = {**os.environ, **({"MESHWRIGHT_NAME_HOST": "1"} if self._may_unshare() else {})}
        out = work.folder / f"launcher-{work.placed.attempt}-{given.server}.txt"
        try:
            with out.open("ab") as file:
                process = limits.start(
                    self._command(work, given.server), env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                )
        except BaseException:
            limits.close()
            raise
        return _Part(given, limits, process, cores, memory_bytes)

    def _limits(self, given: Given) -> tuple[Limits, int, int]:
        """Those that can be set here, open; cores and bytes that are really limited, 0: not."""
        cores, memory_bytes = given.cores, given.memory_bytes
        while True:
            limits = Limits(cores=cores or None, memory_bytes=memory_bytes or None, root=self.root)
            try:
                return limits.__enter__(), cores, memory_bytes
            except RunError as error:
                missing = "memory" if "memory" in error.where else "cpu"
                note = f"no limit of {'memory' if missing == 'memory' else 'cores'}: {error.message}"
                if note not in self.notes:
                    self.notes.append(note)
                if missing == "memory" and memory_bytes:
                    memory_bytes = 0
                elif missing == "cpu" and cores:
                    cores = 0
                else:
                    raise

    def look(self, works: Sequence[Work]) -> list[Seen]:
        return [self._seen(work) for work in works]

    def _seen(self, work: Work) -> Seen:
        if work.key in self._over:
            return self._over[work.key]
        if work.key not in self._parts:
            return Seen("held") if work.key in self._held else Seen("gone")
        parts = self._parts[work.key]
        given = tuple(Given(job=p.given.job, server=p.given.server, gpus=p.given.gpus, cores=p.cores, memory_bytes=p.memory_bytes) for p in parts)
        codes = [p.process.poll() for p in parts]
        bad = [c for c in codes if c]
        if None in codes and not bad:
            return Seen("running", given)
        for p in parts:  # all have ended, or one has failed: the whole gang is over
            p.limits.close()
            p.process.wait()
        del self._parts[work.key]
        code = 128 - bad[0] if bad and bad[0] < 0 else bad[0] if bad else 0
        why = "out of memory" if code == 137 and any(p.limits.out_of_memory for p in parts) else ""
        self._over[work.key] = Seen("failed" if code else "done", given, code, why)
        return self._over[work.key]

    def _signal(self, work: Work, number: int) -> None:
        for p in self._parts.get(work.key, ()):
            p.limits.signal(number)

    def cancel(self, work: Work) -> None:
        self._held.discard(work.key)
        parts = self._parts.get(work.key, [])
        for p in parts:
            p.limits.signal(signal.SIGCONT)
            p.limits.signal(signal.SIGTERM)
        for p in parts:
            try:
                p.process.wait(MAX_END_S)
            except subprocess.TimeoutExpired:
                p.limits.kill()

    def leave(self, work: Work) -> None:
        self._held.discard(work.key)
        work.ask()
        self._signal(work, signal.SIGCONT)
        self._signal(work, signal.SIGTERM)

    def suspend(self, work: Work) -> None:
        self._signal(work, signal.SIGSTOP)

    def resume(self, work: Work) -> None:
        self._signal(work, signal.SIGCONT)

    def resize(self, work: Work, given: tuple[Given, ...]) -> None:
        """Raises: RunError where the kernel refuses, and where nearly all of the smaller memory is in use."""
        wanted = {g.server: g for g in given}
        for p in self._parts.get(work.key, ()):
            g = wanted[p.given.server]
            if not p.limits.change(cores=g.cores if p.cores else None, memory_bytes=g.memory_bytes if p.memory_bytes else None):
                raise RunError(
                    f"job {work.key} on {g.server} keeps its memory: more than {g.memory_bytes} bytes is in use", where=g.server,
                    hint="a smaller cut, or when less is in use",
                )  # fmt: skip
            p.given, p.cores, p.memory_bytes = g, g.cores if p.cores else 0, g.memory_bytes if p.memory_bytes else 0

    def close(self) -> None:
        """Ends all jobs."""
        for parts in self._parts.values():
            for p in parts:
                p.limits.close()
                p.process.wait()
        self._parts.clear()
