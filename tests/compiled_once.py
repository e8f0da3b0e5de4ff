"""Each kernel is compiled once in a run: a worker that needs one that another compiles waits and loads it, instead of compiling it too.

On a fresh clone all kernels have to be compiled, some two minutes of CPU; numba's cache on disk knows no "somebody is at it".
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

__all__ = ["install"]


def install() -> None:
    """Make numba's dispatchers take a lock on disk, one per kernel, around looking a kernel up, compiling and keeping it."""
    from numba.core.caching import NullCache
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.dispatcher import Dispatcher

    folder = Path(os.environ["NUMBA_CACHE_DIR"]) / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    compiled = Dispatcher.compile

    def alone(self: Any, sig: Any) -> Any:
        if isinstance(self._cache, NullCache):
            return compiled(self, sig)
        function = self.py_func
        name = hashlib.sha256(f"{function.__code__.co_filename}:{function.__qualname__}".encode()).hexdigest()[:20]
        # numba's own lock first: a thread that waits for the file must not be waited for by one that compiles.
        with global_compiler_lock, (folder / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes
            return compiled(self, sig)

    Dispatcher.compile = alone
