"""`python -m meshwright.run.worker SETUP`: the ranks of a local run, started by `meshwright.run.launcher`.

Importing torch and what its optimizers pull in takes seconds of processor time, so one process does it and then forks the ranks;
no thread of torch runs by then. It tells the launcher (JSON lines on stdout) the ranks' process numbers and how each ended. Ranks
end when it ends, it ends when the launcher ends. A rank listens on loopback only and writes its own view of any failure to the
run's folder before it exits.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MeshwrightError
from .process import READY, STATE, STEP, TRAINING, WAITING_FOR, FailureReport, ProgressTable, die_with_parent

__all__ = ["TerminationWatch", "WorkerSetup", "main", "report_of"]

EXIT_REPORTED = 70


class WorkerSetup(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Written by the launcher into a folder that only this user can read. `options` are `rank.RankOptions` when the task is training."""

    ranks: int
    plan: str
    folder: str
    host: str
    port: int
    token: str
    parent: int
    options: dict[str, Any]
    task: str = "train"  # or "pipeline": a pipeline plan, with `pipeline.rank.PipelineOptions`


def report_of(error: BaseException, rank: int, progress: Any) -> FailureReport:
    """What this rank knows about its failure."""
    from .executor import StepFailed

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _preload(setup.task)
    ranks = {_fork(setup, rank): rank for rank in range(setup.ranks)}
    _say({"pids": {str(rank): pid for pid, rank in ranks.items()}})
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            _say({"rank": ranks.pop(pid), "exit": os.waitstatus_to_exitcode(status)})
    return 0


def _say(line: dict[str, Any]) -> None:
    os.write(1, msgspec.json.encode(line) + b"\n")


def _preload(task: str) -> None:
    """Load everything that ranks need, and what torch loads at first use."""
    import safetensors.torch  # noqa: F401
    import torch
    import torch.distributed

    from ..io import plan_file  # noqa: F401
    from . import rank  # noqa: F401

    if task == "pipeline":
        from .pipeline import rank as pipeline_rank  # noqa: F401
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
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
        _run(setup, rank, progress)
    except BaseException as error:
        report_of(error, rank, progress).write(folder)
        sys.stderr.write("".join(traceback.format_exception(error)))
        sys.stderr.flush()
        return EXIT_REPORTED
    return 0


def _run(setup: WorkerSetup, rank: int, progress: Any) -> None:
    import torch.distributed as dist

    from ..io.atomic import write_bytes
    from ..io.plan_file import read_plan
    from .rank import RankLink, RankOptions, fetch_setup, run_rank

    limit = timedelta(seconds=max(4 * float(setup.options["timeout_s"]), 120))  # of the rendezvous; the launcher watches for silence itself
    plain = dist.TCPStore(setup.host, setup.port, is_master=False, timeout=limit, wait_for_workers=False)
    store = dist.PrefixStore(setup.token, plain)
    plan = read_plan(setup.plan)
    dist.init_process_group(
        "gloo" if setup.options["device"] == "cpu" else "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=setup.ranks, timeout=limit
    )
    graph, orders = fetch_setup(store)

    def go() -> None:
        assert progress[STATE] == READY
        store.get("go")

    link = RankLink(store=store, progress=progress, go=go)
    recording: Any
    if setup.task == "pipeline":
        from .pipeline.rank import PipelineOptions, run_pipeline_rank

        recording = run_pipeline_rank(plan, orders, rank, msgspec.convert(setup.options, PipelineOptions), link)
    else:
        recording = run_rank(plan, graph, orders, rank, msgspec.convert(setup.options, RankOptions), link)
    write_bytes(Path(setup.folder) / f"rank-{rank:03d}.json", msgspec.json.encode(recording))
    if setup.ranks > 1:
        dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
