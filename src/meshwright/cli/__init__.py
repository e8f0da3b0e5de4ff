"""The command line: `meshwright <noun> <verb>`. One module per command, imported when used."""

from __future__ import annotations

import gc
from collections.abc import Sequence

__all__ = ["main"]

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
