"""Journals of runs on engines: a line of JSON per action, written before and after it, flushed to the disk (docs/formats.md).

A line that a kill cut short is the last one and is left out; anything else that is no record is refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from ...cluster.allocation import Given
from ...cluster.placed import Placed
from ...errors import FormatError
from ..limits import MaxBytes
from ..strict_json import decode, read_document

__all__ = ["SCHEMA", "VERSION", "Record", "Saying", "read_journal", "record_bytes"]

SCHEMA, VERSION = "meshwright.journal", 1
Saying = Literal[
    "run", "submit", "place", "held", "start", "released", "running", "ended", "lost", "cancel", "suspend", "resume", "resize", "resized",
    "preempt", "preempted", "note",
]  # fmt: skip


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """`time_s`: seconds since 1970. `place` is written before engine objects are made, `held` after; `start` before they are let go, `released`
    after; `running` holds what the engine gave (`given`) and when it began; `ended` the exit code and when it ended (`at_s`). `resize` is written
    before the cores and memory of what runs are changed, `resized` after; `preempt` before a job is asked to end so that it may run elsewhere,
    `preempted` when it has."""

    what: Saying
    time_s: float
    job: str = ""
    attempt: int = 0
    placed: Placed | None = None
    ids: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()
    at_s: float = 0.0
    code: int = 0
    text: str = ""
    schema: str = ""
    version: int = 0


def record_bytes(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def read_journal(path: str | os.PathLike[str]) -> list[Record]:
    """Raises: UsageError (no such file), FormatError with the line."""
    data, where = read_document(path, limit=MaxBytes.JOURNAL), Path(path).name or str(path)
    decoder, found = msgspec.json.Decoder(Record), []
    lines = data.split(b"\n")
    for n, line in enumerate(lines[:-1], 1):  # behind the last end of line stands nothing, or a line that was cut short
        found.append(decode(line, decoder, f"{where}: line {n}"))
    if not found or (found[0].what, found[0].schema) != ("run", SCHEMA):
        raise FormatError("does not begin as a journal", where=f"{where}: line 1", hint="name the folder of a `cluster run`")
    if found[0].version != VERSION:
        raise FormatError(f"is version {found[0].version}, this reads {VERSION}", where=f"{where}: line 1", hint="use the meshwright that wrote it")
    return found
