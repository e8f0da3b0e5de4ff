"""How a command that torchrun started tells its agent that it failed. Needs no torch, so that it works before torch is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

from ...errors import MeshwrightError
from ...io.atomic import write_bytes
from .pacing import declared_pacing

__all__ = ["ends_with_its_own_code", "tell_torchrun"]

MAX_EXIT_S = 2.0  # for the interpreter's own shutdown, on a whole core


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


def ends_with_its_own_code() -> None:
    """From here on this process only exits: the agent's SIGTERM must not change its exit code, nor may the exit last.

    When one rank has gone the agent tells the others to end. Python puts back the default handlers early in its shutdown, which takes a
    while with torch loaded: the signal would then kill a rank that has just said what went wrong, and the agent's summary would show
    -15 for it. An ignored signal stays ignored. A shutdown that hangs is ended by the alarm. Main thread only; elsewhere it does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        pacing = declared_pacing(os.environ)
        signal.setitimer(signal.ITIMER_REAL, MAX_EXIT_S / (pacing.share if pacing is not None else 1.0))
