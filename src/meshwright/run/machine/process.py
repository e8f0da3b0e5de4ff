"""What launcher and ranks share: where every rank is (shared memory), what a failed rank reports, and small things about processes.

The progress table is a file of eight 64-bit numbers per rank, mapped by the rank and by the launcher, so the launcher knows the
place of a rank that was killed or stopped. A rank that fails writes its own view first: which step it was in, and for whom it
waited.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from ...io.atomic import write_bytes

__all__ = [
    "CALIBRATING", "DONE", "LOADING", "POSITION", "READY", "STATE", "STEP", "TRAINING", "WAITING_FOR", "FailureReport", "ProgressTable",
    "batch_scheduling", "blob_get", "blob_put", "die_with_parent", "peak_rss_bytes", "prompt_scheduling",
    "stopped",
]  # fmt: skip

WORDS_PER_RANK = 8  # of the shared memory, a cache line, so that no two ranks write into one; four are used
STEP, POSITION, WAITING_FOR, STATE = 0, 1, 2, 3  # WAITING_FOR: peer + 1, or 0
LOADING, READY, CALIBRATING, TRAINING, DONE = range(5)
_PR_SET_PDEATHSIG = 1
MAX_BLOB_PART_BYTES = 4 << 20  # the store refuses messages beyond 8 MiB


class FailureReport(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One rank's view. `kind`: "transport" (it waited for `peer` and was told that the connection broke or time was up) or "exception"."""

    rank: int
    kind: str
    training_step: int
    program_step: int
    peer: int
    error: str  # type of the exception
    message: str
    where: str = ""
    hint: str = ""
    code: str = ""  # of a MeshwrightError
    traceback: str = ""
    time_s: float = 0.0

    def write(self, folder: Path) -> None:
        write_bytes(folder / f"failure-{self.rank}.json", msgspec.json.encode(self))


class ProgressTable:
    """`row(rank)` is a writable view of that rank's numbers."""

    def __init__(self, path: Path, ranks: int, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(8 * WORDS_PER_RANK * ranks))
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 8 * WORDS_PER_RANK * ranks)
        self.words = memoryview(self.map).cast("q")

    def row(self, rank: int) -> Any:
        return self.words[rank * WORDS_PER_RANK : (rank + 1) * WORDS_PER_RANK]

    def states(self) -> list[tuple[int, int, int, int]]:
        """(training step, position, peer + 1, state) of every rank."""
        return [tuple(self.words[i : i + 4]) for i in range(0, len(self.words), WORDS_PER_RANK)]  # type: ignore[misc]


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def batch_scheduling() -> None:
    """Let threads of this process that wake up not push aside the one that runs (Linux: SCHED_BATCH). Another policy than the usual one stays.

    A message on loopback wakes its receiver inside the sender's system call. gloo's sender holds the pair's lock there; pushed aside, it leaves
    its own polling thread spinning on that lock until it runs again. Where ranks share cores this took most of the processor's time.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def prompt_scheduling() -> None:
    """Have this process run as soon as it wakes, before those that compute: it stands for hardware, or measures some.

    It does not inherit `batch_scheduling`, under which it would wait for a time slice of another, milliseconds each. Where priorities may not be
    raised, it waits a little longer.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_BATCH:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.nice(-10)


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def blob_put(store: Any, key: str, data: bytes) -> None:
    """Put bytes of any size into a store."""
    parts = [data[i : i + MAX_BLOB_PART_BYTES] for i in range(0, len(data), MAX_BLOB_PART_BYTES)]
    for i, part in enumerate(parts):
        store.set(f"{key}/{i}", part)
    store.set(key, str(len(parts)))


def blob_get(store: Any, key: str) -> bytes:
    """Wait for bytes put by `blob_put` and fetch them."""
    return b"".join(store.get(f"{key}/{i}") for i in range(int(store.get(key))))


def stopped(pid: int) -> bool:
    """Whether a process has been stopped (SIGSTOP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
