"""The command line: `meshwright <noun> <verb>`. One module per command, imported when used."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failure, 2 usage, 3 infeasible, 4 check failed, 5 time limit, 130 interrupted."""
    from .frame import main as run

    return run(argv)
