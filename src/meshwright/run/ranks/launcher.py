"""Runs one process per rank on this machine (`worker` forks them), watches them, and ends all of them when one fails.

The launcher hosts the rendezvous store (a rank that dies must not take it along) on a socket bound to loopback, under a random
token. It sees where every rank is through shared memory. Whatever happens - a rank dies, fails, stops or hangs, Ctrl-C, the
launcher itself is killed - no process stays behind and exactly one error is raised.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec

from ...errors import Interrupted, PortInUse, RankDied, RunError
from ..machine.cpu_quota import process_start_ticks
from ..machine.cpu_use import MachineUseRecorder
from ..machine.pacing import Pacing
from ..machine.process import DONE, READY, TRAINING, FailureReport, ProgressTable, stopped
from .blame import first_cause, limit_error, timeout_error, typed
from .worker import Seat, WorkerSetup

__all__ = ["LocalRanks", "listen", "scratch_folder"]

T = TypeVar("T")
POLL_S = 0.02  # between looks at the ranks: a failure is seen that late
REPORT_GRACE_S = 0.3  # for reports after the first: survivors of a death report within 0.05 s
MAX_END_S = 20.0  # of killed ranks: a machine with eight runnable threads a core took more than 2
MAX_START_S = 300.0  # until all ranks have loaded, and again until all are calibrated: imports, tracing, timing


def listen(port: int) -> socket.socket:
    """A listening socket on loopback; port 0 lets the system choose. Raises: PortInUse."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind(("127.0.0.1", port))
        sock.listen(512)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            reason = "is in use" if error.errno == errno.EADDRINUSE else "may not be used"
            raise PortInUse(f"port {port} {reason}", where="--port", hint="choose another port, or leave it out", data={"port": port}) from None
        raise RunError(f"cannot listen on port {port}: {error.strerror}", where="--port") from None
    return sock


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a run like Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {s: signal.signal(s, interrupted) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """A folder for a run that keeps none; those of callers that were killed are removed."""
    prefix = f"meshwright-{what}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        match = re.fullmatch(rf"{prefix}(\d+)-(\d+)-\w+", folder.name)
        if match and process_start_ticks(int(match[1])) != match[2]:
            shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-{process_start_ticks(os.getpid())}-") as name:
        yield Path(name).resolve()


class LocalRanks:
    """Processes of one run. `run()` returns when all have ended well, or raises.

    Args:
        function: what every rank calls; its process imports it from its module. The result lies in `rank-<r>.json` (`results`) afterwards.
        timeout_s: how long nothing may happen, where ranks say in their progress that something does.
        limit_s: how long all of it may take; `limit_hint` tells what to do about it.
        describe: (rank, position of its walk) -> the step in words.
        on_step: called with the number of the training step that all ranks have reached.
    """

    def __init__(
        self, ranks: int, folder: Path, function: Callable[[Seat], Any], options: Any, *, pacing: Pacing | None = None, port: int = 0,
        timeout_s: float | None = None, limit_s: float | None = None, limit_hint: str = "",
        describe: Callable[[int, int], str] = lambda rank, position: f"rank {rank}", on_step: Callable[[int], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.folder, self.function, self.options, self.port = ranks, folder, function, options, port
        self.pacing = pacing or Pacing(mode="none")
        self.timeout_s, self.limit_s, self.limit_hint, self.describe, self.on_step = timeout_s, limit_s, limit_hint, describe, on_step
        self.environment = {**os.environ, **(environment or {})}
        self.worker: subprocess.Popen[bytes] | None = None
        self.pids: list[int] = []
        self.exits: dict[int, int] = {}  # return codes of ended ranks, in the order in which they ended
        self._rest = b""
        self.machine_use: dict[str, Any] = {}
        self.store: Any = None

    def run(self, prepare: Callable[[Any], None] | None = None) -> None:
        """`prepare` puts what ranks fetch into the store; it is called while the processes start.

        Raises: RankDied, RankFailed, RunTimeout, Interrupted, and what a rank refuses before it begins.
        """
        with _signals_as_interrupt():
            try:
                self._run(prepare)
            except KeyboardInterrupt:
                raise Interrupted("interrupted; all ranks have been ended") from None
            finally:
                self._end_all()

    def results(self, kind: type[T]) -> list[T]:
        """What the ranks' functions returned."""
        return [msgspec.json.decode((self.folder / f"rank-{r:03d}.json").read_bytes(), type=kind) for r in range(self.ranks)]

    def _run(self, prepare: Callable[[Any], None] | None) -> None:
        import torch.distributed as dist

        self._began = time.monotonic()
        sock = listen(self.port)
        with sock:
            host, port = sock.getsockname()
            token = secrets.token_hex(16)
            plain = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach(), use_libuv=True)
        self.store = dist.PrefixStore(token, plain)
        self.progress = ProgressTable(self.folder / "progress", self.ranks, create=True)
        setup = WorkerSetup(
            ranks=self.ranks, folder=str(self.folder), host=host, port=port, token=token, parent=os.getpid(),
            function=f"{self.function.__module__}:{self.function.__qualname__}", options=msgspec.to_builtins(self.options),
        )  # fmt: skip
        path = self.folder / "setup.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(setup))
        self._start(path)
        if prepare is not None:
            prepare(self.store)
        self._wait_until(READY, MAX_START_S)
        with self.pacing.limit(self.pids):
            self.store.set("go", "1")
            if self.timeout_s is not None:
                self._wait_until(TRAINING, MAX_START_S)
            with MachineUseRecorder() as use:
                self._watch()
            self.machine_use = use.result.to_json()

    def _start(self, setup: Path) -> None:
        with (self.folder / "output").open("wb") as output:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "meshwright.run.ranks.worker", str(setup)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output,
                env=self.environment, start_new_session=True, bufsize=0,
            )  # fmt: skip

    def _listen(self, wait_s: float) -> None:
        """Read what the worker process says about its ranks, waiting at most `wait_s`."""
        assert self.worker is not None and self.worker.stdout is not None
        # All has been said. A pipe whose writer is gone is always readable, so asking it again would not wait.
        if self.worker.poll() is not None and not self._rest and len(self.exits) == self.ranks:
            return
        if not select.select([self.worker.stdout], [], [], wait_s)[0]:
            return
        data = os.read(self.worker.stdout.fileno(), 1 << 16)
        if not data and len(self.exits) < self.ranks:
            code = self.worker.wait()
            last = self._tail("output").splitlines()
            raise RankDied(
                f"the process that starts the ranks ended (exit {code})",
                hint=f"its last line of output: {last[-1][:300]}" if last else "",
                data={"exit": code},
            )
        # The last line may be half there.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            said = msgspec.json.decode(line)
            if "pids" in said:
                self.pids = [said["pids"][str(r)] for r in range(self.ranks)]
            else:
                self.exits[said["rank"]] = said["exit"]

    def _wait_until(self, state: int, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while min(p[3] for p in self.progress.states()) < state:
            self._listen(POLL_S)
            self._raise_if_failed()
            if time.monotonic() > deadline:
                late = [r for r, p in enumerate(self.progress.states()) if p[3] < state]
                raise timeout_error(self.progress.states(), self.describe, limit_s, late)
            self._raise_if_late()

    def _watch(self) -> None:
        last, since = self.progress.states(), time.monotonic()
        told = -1
        while len(self.exits) < self.ranks:
            self._listen(POLL_S)
            self._raise_if_failed()
            places = self.progress.states()
            # Progress of any rank counts: a slow rank keeps the others waiting without being stuck.
            if places != last:
                last, since = places, time.monotonic()
                step = min(p[0] for p in places)
                if self.on_step is not None and step != told:
                    told = step
                    self.on_step(step)
            elif self.timeout_s is not None and time.monotonic() - since > self.timeout_s and not all(p[3] == DONE for p in places):
                raise timeout_error(places, self.describe, self.timeout_s, self._stopped())
            self._raise_if_late()
        self._raise_if_failed()

    def _raise_if_late(self) -> None:
        if self.limit_s is not None and time.monotonic() - self._began > self.limit_s:
            late = [r for r in range(self.ranks) if r not in self.exits]
            raise limit_error(late, self._stopped(), self.limit_s, self.limit_hint)

    def _stopped(self) -> list[int]:
        return [r for r, pid in enumerate(self.pids) if stopped(pid)]

    def _raise_if_failed(self) -> None:
        bad = {r: code for r, code in self.exits.items() if code}
        if not bad:
            return
        deadline = time.monotonic() + REPORT_GRACE_S
        # Who ends first need not be the cause: a death is seen by its peers, which fail and report it within this time.
        while time.monotonic() < deadline and len(self.exits) < self.ranks:
            self._listen(POLL_S)
        reports = self._reports()
        # A refusal of ours from before training (wrong data, wrong plan) is no rank's fault: it is raised as it is, the earliest first.
        early = [error for r in sorted(reports.values(), key=lambda r: r.time_s) if (error := typed(r)) is not None]
        if early:
            raise early[0]
        outputs = {r: self._tail(f"output-{r}") for r in bad}
        raise first_cause(bad, reports, self.progress.states(), self.describe, outputs)

    def _reports(self) -> dict[int, FailureReport]:
        found = {}
        for path in self.folder.glob("failure-*.json"):
            report = msgspec.json.decode(path.read_bytes(), type=FailureReport)
            found[report.rank] = report
        return found

    def _tail(self, name: str) -> str:
        try:
            return (self.folder / name).read_bytes()[-4000:].decode(errors="replace")
        except OSError:
            return ""

    def _end_all(self) -> None:
        """Kill what still runs, stopped processes too, and reap it. The ranks are in the worker's session and die with it."""
        if self.worker is None:
            return
        try:
            os.killpg(self.worker.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.worker.wait()
        if self.worker.stdout is not None:
            self.worker.stdout.close()
        deadline = time.monotonic() + MAX_END_S
        while any(_alive(pid) for pid in self.pids) and time.monotonic() < deadline:
            time.sleep(0.005)  # killed ranks are reaped by init, not by us


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False
