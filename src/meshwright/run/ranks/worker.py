"""`python -m meshwright.run.ranks.worker SETUP`: the ranks of a local run, started by `meshwright.run.ranks.launcher`.

Importing torch and what its optimizers pull in takes seconds of processor time, so one process does it and then forks the ranks;
no thread of torch runs by then. It tells the launcher (JSON lines on stdout) the ranks' process numbers and how each ended. Ranks
end when it ends, it ends when the launcher ends. A rank listens on loopback only and writes its own view of any failure to the
run's folder before it exits.

What a rank does is a function named by `module:name`, called with its `Seat`; what it returns is written to `rank-<r>.json`.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from ...errors import MeshwrightError
from ...io.atomic import write_bytes
from ..machine.process import (
    DONE,
    READY,
    STATE,
    STEP,
    TRAINING,
    WAITING_FOR,
    WORDS_PER_RANK,
    FailureReport,
    ProgressTable,
    batch_scheduling,
    die_with_parent,
)

__all__ = ["RankLink", "Seat", "TerminationWatch", "WorkerSetup", "main", "report_of"]

EXIT_REPORTED = 70  # exit code of a rank that has left a report (EX_SOFTWARE of sysexits.h)


class WorkerSetup(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Written by the launcher into a folder that only this user can read. `function`: `module:name` of what every rank calls; a function
    `preload` of that module is called once before the ranks are forked."""

    ranks: int
    folder: str
    host: str
    port: int
    token: str
    parent: int
    function: str
    options: dict[str, Any]

    def entry(self) -> tuple[Any, Callable[[Seat], Any]]:
        """(the module, the ranks' function)."""
        place, _, name = self.function.partition(":")
        module = importlib.import_module(place)
        return module, getattr(module, name)


@dataclass
class RankLink:
    """How a rank reaches the others before and after its work. `progress`: where it is, for those who watch; `go` blocks until it may start;
    `on_step`: told by the rank itself which step begins, where nobody watches; `leave`: to be called where a rank of others' starting fails."""

    store: Any = None
    progress: Any = field(default_factory=lambda: array("q", bytes(8 * WORDS_PER_RANK)))
    go: Callable[[], None] = lambda: None
    on_step: Callable[[int], None] | None = None
    leave: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Seat:
    """One rank's place in a run of this machine."""

    setup: WorkerSetup
    rank: int
    progress: Any

    @property
    def ranks(self) -> int:
        return self.setup.ranks

    @property
    def folder(self) -> Path:
        return Path(self.setup.folder)

    @property
    def options(self) -> dict[str, Any]:
        return self.setup.options

    def link(self, timeout_s: float) -> RankLink:
        """The run's store, hosted by the launcher, and its word that the processes are under their pacing."""
        import torch.distributed as dist

        limit = timedelta(seconds=max(4 * timeout_s, 120))  # the launcher watches for silence itself
        plain = dist.TCPStore(self.setup.host, self.setup.port, is_master=False, timeout=limit, wait_for_workers=False)
        store = dist.PrefixStore(self.setup.token, plain)

        def go() -> None:
            self.progress[STATE] = READY
            store.get("go")

        return RankLink(store, self.progress, go)

    def join(self, device: str, timeout_s: float) -> RankLink:
        """`link`, with `torch.distributed` initialised over its store."""
        import torch.distributed as dist

        link = self.link(timeout_s)
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        limit = timedelta(seconds=max(4 * timeout_s, 120))
        dist.init_process_group(backend, store=link.store, rank=self.rank, world_size=self.ranks, timeout=limit)
        return link


def report_of(error: BaseException, rank: int, progress: Any) -> FailureReport:
    """What this rank knows about its failure."""
    from ..executor.executor import StepFailed

    step, peer, kind = -1, -1, "exception"
    cause: BaseException = error
    if isinstance(error, StepFailed):
        step, peer = error.step, error.waiting_for - 1
        cause = error.__cause__ or error
        kind = "transport" if peer >= 0 or _broken_connection(cause) else "exception"
    elif _broken_connection(error):
        kind = "transport"
    own = cause if isinstance(cause, MeshwrightError) else None
    lines = str(cause).strip().splitlines()
    return FailureReport(
        rank=rank, kind=kind, training_step=int(progress[STEP]) if progress[STATE] >= TRAINING else -1, program_step=step, peer=peer,
        error=type(cause).__name__, message=own.message if own else (lines[0] if lines else "no message"), where=own.where if own else "",
        hint=own.hint if own else "", code=own.code if own else "",
        traceback="".join(traceback.format_exception(cause))[-8000:], time_s=time.time(),
    )  # fmt: skip


def _broken_connection(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, (RuntimeError, ConnectionError)) and any(
        w in text for w in ("Connection closed by peer", "Connection reset", "gloo", "Timed out", "Broken pipe", "NCCL", "Socket", "store")
    )


class TerminationWatch:
    """Acts on SIGTERM at once, even while the main thread is blocked in the transport: a thread reads the wake-up pipe."""

    def __init__(self, action: Any) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.read, self.action = read, action
        threading.Thread(target=self._wait, daemon=True, name="termination").start()

    def _wait(self) -> None:
        while data := os.read(self.read, 16):
            if signal.SIGTERM in data:
                self.action()


def main(argv: list[str]) -> int:
    setup = msgspec.json.decode(Path(argv[0]).read_bytes(), type=WorkerSetup)
    die_with_parent(setup.parent)
    batch_scheduling()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    os.environ |= {
        "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(setup.ranks), "LOCAL_WORLD_SIZE": str(setup.ranks), "MASTER_ADDR": setup.host,
        "MASTER_PORT": str(setup.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # for functions that meet by torch's own `env://`: the store is already hosted, as by torchrun's agent  # fmt: skip
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _preload(setup)
    ranks = {_fork(setup, rank): rank for rank in range(setup.ranks)}
    _say({"pids": {str(rank): pid for pid, rank in ranks.items()}})
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            _say({"rank": ranks.pop(pid), "exit": os.waitstatus_to_exitcode(status)})
    return 0


def _say(line: dict[str, Any]) -> None:
    os.write(1, msgspec.json.encode(line) + b"\n")


def _preload(setup: WorkerSetup) -> None:
    """Load everything that ranks need."""
    import torch
    import torch.distributed

    module, _ = setup.entry()
    if hasattr(module, "preload"):
        module.preload()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def _fork(setup: WorkerSetup, rank: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_REPORTED
    try:
        die_with_parent(parent)
        output = os.open(Path(setup.folder) / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        code = rank_main(setup, rank)
    finally:
        os._exit(code)  # nothing of the parent's clean-up may run here


def rank_main(setup: WorkerSetup, rank: int) -> int:
    """One rank, in its own process."""
    folder = Path(setup.folder)
    progress = ProgressTable(folder / "progress", setup.ranks).row(rank)

    def terminated() -> None:
        peer = int(progress[WAITING_FOR]) - 1
        report = FailureReport(
            rank=rank, kind="transport", training_step=int(progress[STEP]), program_step=-1, peer=peer, error="SIGTERM", message="was told to end",
            time_s=time.time(),
        )  # fmt: skip
        report.write(folder)
        os._exit(EXIT_REPORTED)

    TerminationWatch(terminated)
    try:
        _run(Seat(setup, rank, progress))
    except BaseException as error:
        report_of(error, rank, progress).write(folder)
        sys.stderr.write("".join(traceback.format_exception(error)))
        sys.stderr.flush()
        return EXIT_REPORTED
    return 0


def _run(seat: Seat) -> None:
    import torch.distributed as dist

    _, function = seat.setup.entry()
    result = function(seat)
    seat.progress[STATE] = DONE
    write_bytes(seat.folder / f"rank-{seat.rank:03d}.json", msgspec.json.encode(result))
    if dist.is_initialized():
        if seat.ranks > 1:
            dist.barrier()  # nobody leaves while others still talk to it
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
