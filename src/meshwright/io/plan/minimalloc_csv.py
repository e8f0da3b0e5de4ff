"""Storages with lifetimes as MiniMalloc's CSV: a heading, then `id,lower,upper,size[,offset]`, one storage a line.

Older files call the columns `buffer,start,end,size`; both are read. Lifetimes are half-open: [lower, upper).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import FormatError
from ..limits import MaxBytes
from ..strict_json import read_text

__all__ = ["BufferTable", "buffers_csv", "parse_buffers_csv", "read_buffers_csv"]

MAX_ROWS = 1_000_000  # buffers of one table
MAX_VALUE = 1 << 60  # times, sizes and offsets: a sum of two stays below 2^63
HEADINGS = {"id": "id", "buffer": "id", "lower": "lower", "start": "lower", "upper": "upper", "end": "upper", "size": "size", "offset": "offset"}
_NUMBER = re.compile(r"-?\d{1,19}\Z")
_NAME = re.compile(r"[^,\s\"\x00-\x1f]{1,128}\Z")


@dataclass(frozen=True, kw_only=True)
class BufferTable:
    """Columns of one file. `offset_bytes` is empty where the file has none."""

    names: tuple[str, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    size_bytes: tuple[int, ...]
    offset_bytes: tuple[int, ...] = ()


def read_buffers_csv(path: str | os.PathLike[str]) -> BufferTable:
    """A file (`-`: standard input). Raises: UsageError if it cannot be read; FormatError."""
    where, text = read_text(path, MaxBytes.BUFFERS_CSV)
    return parse_buffers_csv(text, where=where)


def parse_buffers_csv(text: str, *, where: str = "csv") -> BufferTable:
    """Raises: FormatError that names the line and the column."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise FormatError("is empty", where=where, hint="a heading `id,lower,upper,size` and one line per storage")
    if len(lines) - 1 > MAX_ROWS:
        raise FormatError(f"has {len(lines) - 1} storages, more than {MAX_ROWS}", where=where)
    columns = _heading(lines[0][1], f"{where}: line {lines[0][0]}")
    cells: dict[str, list[str]] = {column: [] for column in columns}
    numbers: dict[str, list[int]] = {column: [] for column in columns if column != "id"}
    seen: dict[str, int] = {}
    for number, line in lines[1:]:
        parts = [part.strip() for part in line.split(",")]
        at = f"{where}: line {number}"
        if len(parts) != len(columns):
            raise FormatError(f"has {len(parts)} cells, the heading {len(columns)}", where=at)
        for column, part in zip(columns, parts, strict=True):
            if column == "id":
                if not _NAME.match(part):
                    raise FormatError(f"{part[:32]!r} is no name", where=f"{at}: id", hint="up to 128 characters without blanks, commas and quotes")
                if part in seen:
                    raise FormatError(f"{part!r} stands in line {seen[part]} too", where=f"{at}: id")
                seen[part] = number
                cells["id"].append(part)
            else:
                numbers[column].append(_value(part, column, f"{at}: {column}"))
        if numbers["lower"][-1] >= numbers["upper"][-1]:
            raise FormatError(f"is alive from {numbers['lower'][-1]} to {numbers['upper'][-1]}", where=at, hint="upper lies above lower")
    return BufferTable(
        names=tuple(cells["id"]), lower=tuple(numbers["lower"]), upper=tuple(numbers["upper"]), size_bytes=tuple(numbers["size"]),
        offset_bytes=tuple(numbers.get("offset", ())),
    )  # fmt: skip


def _heading(line: str, where: str) -> list[str]:
    columns = [HEADINGS.get(part.strip().lower(), "") for part in line.split(",")]
    if "" in columns:
        wrong = line.split(",")[columns.index("")].strip()
        raise FormatError(f"there is no column {wrong[:32]!r}", where=where, hint="columns are id, lower, upper, size and perhaps offset")
    missing = [c for c in ("id", "lower", "upper", "size") if columns.count(c) != 1] + (["offset"] if columns.count("offset") > 1 else [])
    if missing:
        raise FormatError(f"needs exactly one column {missing[0]!r}", where=where)
    return columns


def _value(text: str, column: str, where: str) -> int:
    if not _NUMBER.match(text) or abs(int(text)) > MAX_VALUE or (column != "lower" and column != "upper" and int(text) < 0):
        raise FormatError(f"{text[:32]!r} is no whole number{'' if column in ('lower', 'upper') else ' >= 0'} up to 2^60", where=where)
    return int(text)


def buffers_csv(table: BufferTable, offset_bytes: Sequence[int] = ()) -> str:
    """The same storages, with their offsets if given."""
    offsets = offset_bytes or table.offset_bytes
    lines = ["id,lower,upper,size,offset" if len(offsets) else "id,lower,upper,size"]
    for i, name in enumerate(table.names):
        row = [name, table.lower[i], table.upper[i], table.size_bytes[i], *([offsets[i]] if len(offsets) else [])]
        lines.append(",".join(map(str, row)))
    return "\n".join(lines) + "\n"
