"""Writing a trace that opens in Perfetto: prediction and measurement of one program in one file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...errors import UsageError
from ...program.program import Program
from ...timeline import Timeline
from ..strict_json import write_document
from .chrome import chrome_bytes
from .events import build_trace
from .perfetto import perfetto_bytes

__all__ = ["require_ending", "trace_bytes", "write_trace"]

_ENDINGS = (".json", ".pftrace", ".perfetto-trace")


def write_trace(path: str | os.PathLike[str], program: Program, timelines: Sequence[Timeline], *, title: str = "") -> None:
    """Write the timelines of `program` as one trace, all or nothing.

    `program` is the one whose step ids the timelines carry (calls inlined). The ending of `path` chooses the format: `.json` is Chrome's,
    `.pftrace` or `.perfetto-trace` Perfetto's own (smaller, for large traces); `.gz` after it packs either.

    Raises: UsageError for another ending, or a timeline of another program.
    """
    write_document(path, trace_bytes(str(path), program, timelines, title=title))


def trace_bytes(name: str, program: Program, timelines: Sequence[Timeline], *, title: str = "") -> bytes:
    """The trace, not yet packed, in the format that the ending of `name` says."""
    require_ending(name)
    trace = build_trace(program, timelines, title=title)
    return chrome_bytes(trace) if name.removesuffix(".gz").endswith(".json") else perfetto_bytes(trace)


def require_ending(name: str) -> None:
    """Raises: UsageError for a name whose ending says no format."""
    if not name.removesuffix(".gz").endswith(_ENDINGS):
        raise UsageError(f"a trace ends in {', '.join(_ENDINGS)} (and .gz)", where=name, hint="e.g. trace.json.gz")
