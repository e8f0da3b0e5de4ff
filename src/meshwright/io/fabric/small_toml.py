"""Small files of our own in TOML: one table with its schema and version, read whole."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from ...errors import FormatError, UsageError
from ..fields import Table
from ..limits import MAX_TOML_DOTS
from ..text import text_of

__all__ = ["read_table"]


def read_table(path: str | os.PathLike[str], schema: str, most_bytes: int) -> Table:
    """The file's top table, version 1 of `schema`. Raises: UsageError when it cannot be read; FormatError when it is too large or another file."""
    where = Path(path).name
    try:
        with Path(path).open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(f"cannot read the file: {error.strerror}", where=str(path), hint="docs/formats.md shows one") from None
    if len(data) > most_bytes:
        raise FormatError(f"is larger than {most_bytes} bytes", where=where)
    text = text_of(data, where)
    if any(line.count(".") > MAX_TOML_DOTS for line in text.splitlines()):
        raise FormatError(f"has a line with more than {MAX_TOML_DOTS} dots", where=where)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        detail = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FormatError(detail, where=where, hint="docs/formats.md shows one") from None
    table = Table(document, where)
    if (said := table.text("schema")) != schema:
        raise table.error("schema", f"must be {schema!r}, got {said!r}")
    table.integer("version", least=1, most=1)
    return table
