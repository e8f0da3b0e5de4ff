"""Logs of resizing, `meshwright.resize-log`: lines of JSON, written window by window, so that a run that is killed leaves what it did; and priors
of learners, `meshwright.resize-prior` (docs/formats.md)."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeVar

import msgspec

from ...cluster.resize import MAX_WINDOWS, ResizeLog, Total, Window
from ...errors import FormatError, UsageError
from ..limits import MaxBytes
from ..strict_json import decode, header, read_at_most, read_document, refuse_ambiguous, write_document

__all__ = ["LogWriter", "PriorFile", "read_prior", "read_resize_log", "write_prior", "write_resize_log"]

SCHEMA, PRIOR_SCHEMA, VERSION = "meshwright.resize-log", "meshwright.resize-prior", 1
T = TypeVar("T")


class _Head(ResizeLog, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: str = SCHEMA
    version: int = VERSION


class PriorFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sums of a learner's regression. `squares` is a square matrix as long as `products`."""

    schema: str = PRIOR_SCHEMA
    version: int = VERSION
    resource: str
    knots: tuple[float, ...]
    squares: tuple[tuple[float, ...], ...]
    products: tuple[float, ...]
    rows: float


class LogWriter:
    """Writes the head, then a line for each window, then the total. Raises: UsageError where the file cannot be written."""

    def __init__(self, path: str | os.PathLike[str], log: ResizeLog) -> None:
        try:
            self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115 (this is a context manager)
        except OSError as error:
            raise UsageError(f"cannot write: {error.strerror}", where=str(path), hint="check the path") from error
        self._line({"schema": SCHEMA, "version": VERSION, **msgspec.to_builtins(msgspec.structs.replace(log, windows=(), total=None))})

    def _line(self, what: object) -> None:
        self._file.write(msgspec.json.encode(what) + b"\n")
        self._file.flush()

    def add(self, window: Window) -> None:
        self._line(window)

    def end(self, total: Total) -> None:
        self._line({"total": msgspec.to_builtins(total)})

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


class _Last(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    total: Total


def write_resize_log(path: str | os.PathLike[str], log: ResizeLog) -> None:
    with LogWriter(path, log) as writer:
        for window in log.windows:
            writer.add(window)
        if log.total is not None:
            writer.end(log.total)


def read_resize_log(path: str | os.PathLike[str]) -> ResizeLog:
    """A last line without its end is that of a run that was killed, and left out. Raises: UsageError (no such file), FormatError."""
    where, data = read_at_most(path, MaxBytes.RESIZE_LOG)
    if len(data) > MaxBytes.RESIZE_LOG:
        raise FormatError(f"larger than {MaxBytes.RESIZE_LOG} bytes", where=where)
    lines = data.split(b"\n")[:-1]
    if not 1 <= len(lines) <= MAX_WINDOWS + 2:
        raise FormatError(f"{len(lines)} whole lines", where=where, hint="a log of `meshwright cluster resize --log`")
    head: _Head = _line(lines[0], _Head, f"{where}: line 1", first=True)
    if head.windows or head.total is not None:
        raise FormatError("the first line holds windows or a total", where=f"{where}: line 1")
    total = None
    if len(lines) > 1 and lines[-1].startswith(b'{"total"'):
        total = _line(lines.pop(), _Last, f"{where}: last line").total
    windows = tuple(_line(line, Window, f"{where}: line {n}") for n, line in enumerate(lines[1:], 2))
    said = {name: getattr(head, name) for name in ResizeLog.__struct_fields__}
    return ResizeLog(**(said | {"windows": windows, "total": total}))


def _line(data: bytes, kind: type[T], where: str, *, first: bool = False) -> T:
    refuse_ambiguous(data, where)
    if first:
        header(data, schema=SCHEMA, version=VERSION, where=where)
    return decode(data, msgspec.json.Decoder(kind), where)


def write_prior(path: str | os.PathLike[str], prior: PriorFile) -> None:
    """All or nothing."""
    write_document(path, msgspec.json.encode(prior) + b"\n")


def read_prior(path: str | os.PathLike[str]) -> PriorFile:
    """Raises: UsageError (no such file), FormatError."""
    data, where = read_document(path, limit=MaxBytes.RESIZE_PRIOR), Path(path).name or str(path)
    refuse_ambiguous(data, where)
    header(data, schema=PRIOR_SCHEMA, version=VERSION, where=where)
    found = decode(data, msgspec.json.Decoder(PriorFile), where)
    if len(found.squares) != len(found.products) or any(len(row) != len(found.products) for row in found.squares):
        raise FormatError("the matrix is not as long as the products, or not square", where=f"{where}: squares")
    return found
