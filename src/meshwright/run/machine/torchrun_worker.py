"""How a command that torchrun started tells its agent that it failed. Needs no torch, so that it works before torch is loaded."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ...errors import MeshwrightError
from ...io.atomic import write_bytes
from .pacing import declared_pacing

__all__ = ["ends_with_its_own_code", "tell_torchrun"]

MAX_EXIT_S = 20.0  # for threads and exit functions of a rank that leaves, on a whole core; at load 14 they took 3 s with torch loaded


def tell_torchrun(error: MeshwrightError) -> None:
    """Write this worker's torchelastic error file, in the format of torch's `record` decorator; without torchrun do nothing.

    The decorator itself would never see the error: the command line turns it into an exit code, and a rank that is told to end leaves at
    once. torchrun's summary prints `py_callstack` as the traceback (or `<N/A>` without a file), so the typed error with rank, step and
    peer stands there. Best effort: a folder that is gone must not hide the error itself.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    facts = [f"{key} {error.data[key]}" for key in ("rank", "step", "peer") if isinstance(error.data.get(key), int) and error.data[key] >= 0]
    text = f"{type(error).__name__}: {error}" + (f" ({', '.join(facts)})" if facts else "")
    stack = "\n".join([text, *([f"hint: {error.hint}"] if error.hint else []), *str(error.data.get("traceback", "")).splitlines()])
    message = {"message": text, "errorCode": error.exit_code, "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        write_bytes(Path(path), json.dumps({"message": message}).encode())


def ends_with_its_own_code(code: int, max_exit_s: float = MAX_EXIT_S) -> None:
    """From here on this process only exits, and with this code: neither the agent's SIGTERM nor a busy machine may change it.

    When one rank has gone the agent tells the others to end. Python puts back the default handlers early in its shutdown, which takes a
    while with torch loaded: the signal would then kill a rank that has just said what went wrong, and the agent's summary would show
    -15 for it. An ignored signal stays ignored, and the slow part (clearing modules) is left out: after the other exit functions the process
    ends at once. A thread or an exit function that hangs is ended by the alarm. Main thread only; elsewhere it does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        pacing = declared_pacing(os.environ)
        signal.setitimer(signal.ITIMER_REAL, max_exit_s / (pacing.share if pacing is not None else 1.0))
        atexit.register(_leave, code)


def _leave(code: int) -> None:
    """The last registered exit function runs first: it runs the others, then ends the process."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
