"""Queues in files of our own, `meshwright.queue` (docs/formats.md): profiles, and jobs that name them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ...cluster.queue import Queue
from ...errors import FormatError, UsageError
from ..limits import MaxBytes
from ..strict_json import decode, header, read_document, refuse_ambiguous, write_document

__all__ = ["SCHEMA", "VERSION", "queue_bytes", "read_queue", "write_queue"]

SCHEMA, VERSION = "meshwright.queue", 1


class _File(Queue, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    schema: str = SCHEMA
    version: int = VERSION


def queue_of(data: bytes, where: str) -> Queue:
    """Raises: FormatError."""
    refuse_ambiguous(data, where)
    header(data, schema=SCHEMA, version=VERSION, where=where)
    try:
        found = decode(data, msgspec.json.Decoder(_File), where)
    except UsageError as error:
        raise FormatError(error.message, where=f"{where}: {error.where}", hint=error.hint) from None
    return Queue(name=found.name, profiles=found.profiles, jobs=found.jobs)


def read_queue(path: str | os.PathLike[str]) -> Queue:
    """Raises: UsageError (no such file), FormatError."""
    return queue_of(read_document(path, limit=MaxBytes.QUEUE), Path(path).name or str(path))


def queue_bytes(queue: Queue) -> bytes:
    """Equal queues give equal bytes."""
    return msgspec.json.encode({"schema": SCHEMA, "version": VERSION, **msgspec.to_builtins(queue)}) + b"\n"


def write_queue(path: str | os.PathLike[str], queue: Queue) -> None:
    """All or nothing; gzipped where the name ends in .gz."""
    write_document(path, queue_bytes(queue))
