"""The command line: `meshwright <noun> <verb>`. One module per command, imported when used."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main", "process"]

FEW_COLLECTIONS = 50_000  # containers made between two looks for cycles; Python's own 700 is for programs that are always short of memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failure, 2 usage, 3 infeasible, 4 check failed, 5 time limit, 130 interrupted."""
    from .frame import main as run

    if argv is not None:
        return run(argv)
    # The process is this command's: what it loads stays, and looking through it for cycles, last of all at the end, takes a tenth of a short command.
    gc.set_threshold(FEW_COLLECTIONS)
    code = run()
    gc.freeze()
    return code


def process() -> NoReturn:
    """The command is the process: run it and end. What only takes memory apart at the end (0.02 s after numpy) is left to the system; functions that
    were registered for the end run, and where torch or threads are at work the interpreter ends as it always does."""
    import atexit
    import os
    import sys
    import threading

    from . import frame

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`>&-`), as by a daemon: what is said goes nowhere, and no file gets its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123
    frame.whole_process = True
    code = main()
    if "torch" not in sys.modules and threading.active_count() == 1:
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads any more; the interpreter says so in its own way
            sys.exit(code)
        os._exit(code)
    sys.exit(code)
