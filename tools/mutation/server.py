"""A process that has imported what is slow and never changes, and forks for every run of tests.

One JSON job per line on stdin: `{"arguments": [...], "environment": {...}, "log": file, "limit_s": seconds}`; one JSON answer per line:
`{"status": exit status or null when the time was up, "seconds": ...}`. Its arguments are imported instead of
`IMPORTED`. Started by `runs.Server`; never imports the package under test.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

IMPORTED = ("pytest", "_pytest.assertion.rewrite", "hypothesis", "numpy", "numba", "torch", "msgspec", "networkx")
DATA_BYTES = 8 << 30  # of one process: a loop that does not end any more must not take the machine's memory
PARENT_DIED = 1  # PR_SET_PDEATHSIG
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: what a run leaves behind becomes a child of this process


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue
    return found


def end(pid: int) -> None:
    """Ends a process and all below it; processes that were orphaned meanwhile turn up as children of this one."""
    below = children_of(pid)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    for child in below:
        end(child)


def end_all() -> None:
    while left := children_of(os.getpid()):
        for pid in left:
            end(pid)
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue


def stop(number: int, frame: object) -> None:
    end_all()
    os._exit(128 + number)


def run_tests(job: dict[str, Any]) -> int:
    """In the forked process."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(job["environment"])
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = os.environ.get("NUMBA_CACHE_DIR", "")
    import pytest

    sys.argv[:] = ["pytest", *job["arguments"]]
    return int(pytest.main(job["arguments"]))


def serve() -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)
    prctl(PARENT_DIED, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, stop)
    for name in sys.argv[1:] or IMPORTED:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    for line in sys.stdin:
        job = json.loads(line)
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                status = run_tests(job)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        answer: int | None = None
        while time.monotonic() < start + job["limit_s"]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                answer = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.01)
        end_all()
        print(json.dumps({"status": answer, "seconds": round(time.monotonic() - start, 2)}), flush=True)


if __name__ == "__main__":
    serve()
