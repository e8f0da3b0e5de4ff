"""Each kernel is compiled once in a run: a process that needs one that another compiles waits and loads it, instead of compiling it too.

Workers, and the interpreters that they fork: two ranks of a job ask for the same kernels at the same moment. On a fresh clone all kernels have to be
compiled, some two minutes of CPU; numba's cache on disk knows no "somebody is at it".
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from pathlib import Path
from typing import IO, Any

__all__ = ["install", "lock_of"]

MOST_WAITED_S = 60.0  # the longest kernel takes ten seconds to compile on a quiet machine
_folder: Path | None = None  # once installed; a test may name another cache for a while


def lock_of(source: str, name: str) -> Path:
    return (_folder or Path(os.environ["NUMBA_CACHE_DIR"], "locks")) / hashlib.sha256(f"{source}:{name}".encode()).hexdigest()[:20]


def _wait_for(file: IO[str]) -> None:
    """Not for ever: a test may have stopped the process that holds it."""
    deadline = time.monotonic() + MOST_WAITED_S
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)


def install() -> None:
    """Make numba's dispatchers take a lock on disk, one per kernel, around looking a kernel up, compiling and keeping it. Once in a process."""
    global _folder
    if _folder is not None or "NUMBA_CACHE_DIR" not in os.environ:  # also in forks: a second lock of one process would wait for the first
        return
    from numba.core.caching import NullCache
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.dispatcher import Dispatcher

    _folder = Path(os.environ["NUMBA_CACHE_DIR"], "locks")
    _folder.mkdir(parents=True, exist_ok=True)
    compiled = Dispatcher.compile

    def alone(self: Any, sig: Any) -> Any:
        if isinstance(self._cache, NullCache):
            return compiled(self, sig)
        function = self.py_func
        # numba's own lock first: a thread that waits for the file must not be waited for by one that compiles.
        with global_compiler_lock, lock_of(function.__code__.co_filename, function.__qualname__).open("w") as file:
            _wait_for(file)  # released when the file closes
            return compiled(self, sig)

    Dispatcher.compile = alone
