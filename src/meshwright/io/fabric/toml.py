"""Fabric files in TOML: `meshwright.fabric` version 1 (docs/formats.md).

The file holds the same document as the JSON form, plus what makes it writable by hand: quantities with units, device
arrays by `count`, ranges `gpu[0-3]` as link ends, and `both_ways`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import FormatError, UsageError
from ...fabric.fabric import Device, Fabric, Link
from ..limits import MAX_TOML_DOTS, MaxBytes
from ..text import text_of
from .document import SCHEMA, VERSION, fabric_document, fabric_from_document

__all__ = ["fabric_document", "fabric_from_document", "fabric_toml", "parse_fabric_toml", "read_fabric_json", "read_fabric_toml"]

MAX_LINE_CHARACTERS = 16_384  # of one line, which is searched for texts and dots before it is parsed

_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|$)|\'[^\']*+(?:\'|$)|#.*')


def read_fabric_toml(path: str | os.PathLike[str]) -> Fabric:
    """Read and validate a TOML file.

    Raises: UsageError when the file cannot be read; FormatError naming line or field when it does not say what it must.
    """
    where = Path(path).name
    return parse_fabric_toml(text_of(_read(path, MaxBytes.FABRIC_TOML), where), where=where)


def read_fabric_json(path: str | os.PathLike[str]) -> Fabric:
    """The same for the JSON form. Raises: UsageError, FormatError."""
    import json

    where = Path(path).name

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise FormatError("a field is given twice", where=where)
        return found

    try:
        document = json.loads(text_of(_read(path, MaxBytes.FABRIC_JSON), where), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise FormatError(_why(error), where=where, hint="the file must be one JSON document") from None
    return fabric_from_document(document, where=where)


def parse_fabric_toml(text: str, *, where: str = "fabric.toml") -> Fabric:
    """Parse TOML text. Raises: FormatError."""
    if len(text) > MaxBytes.FABRIC_TOML:
        raise FormatError(f"is larger than {MaxBytes.FABRIC_TOML} bytes", where=where)
    for number, line in enumerate(text.split("\n"), start=1):
        if refused := _refused_line(line):
            raise FormatError(refused, where=f"{where}: line {number}")
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(_why(error), where=where, hint="see docs/formats.md for the format") from None
    return fabric_from_document(document, where=where)


def _refused_line(line: str) -> str:
    """Why a line is refused before the parser sees it, or nothing. Strings never span lines here, so each line stands alone."""
    if len(line) > MAX_LINE_CHARACTERS:
        return f"is longer than {MAX_LINE_CHARACTERS} characters"
    if '"""' in line or "'''" in line:
        return "texts of several lines are not used in fabric files"
    if line.count(".") > MAX_TOML_DOTS and _STRING_OR_COMMENT.sub("", line).count(".") > MAX_TOML_DOTS:
        return f"has more than {MAX_TOML_DOTS} dots outside texts"
    return ""


def _why(error: Exception) -> str:
    return "is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _read(path: str | os.PathLike[str], limit: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"cannot read the fabric: {error.strerror}", where=str(path), hint="name a .toml or .json file, or a preset") from None
    if len(data) > limit:
        raise FormatError(f"is larger than {limit} bytes", where=Path(path).name)
    return data


# ---- writing -----------------------------------------------------------------------------------------------------------
def fabric_toml(fabric: Fabric) -> str:
    """The fabric as TOML that reads back equal. Runs of equal devices and pairs of equal links are written once."""
    lines = [f"schema = {_quoted(SCHEMA)}", f"version = {VERSION}", f"name = {_quoted(fabric.name)}"]
    for count, device in _device_runs(fabric.devices):
        entry = fabric_document(Fabric(name="x", devices=(device,)))["devices"][0]
        name = entry.pop("name")
        lines += ["", "[[devices]]", *_lines({"name": name} | ({"count": count} if count else {}) | entry)]
    document = fabric_document(replace(fabric, provenance=()))
    for entry in document.get("switches", []):
        lines += ["", "[[switches]]", *_lines(entry)]
    entries = document.get("links", [])
    for index, both_ways in _link_pairs(fabric.links):
        lines += ["", "[[links]]", *_lines(entries[index] | ({"both_ways": True} if both_ways else {}))]
    for note in fabric.provenance:
        lines += ["", "[[provenance]]", *_lines({"what": note.what, "source": note.source})]
    return "\n".join(lines) + "\n"


def _device_runs(devices: tuple[Device, ...]) -> Iterator[tuple[int, Device]]:
    """(count, device) for arrays name0, name1, ... of equal devices; (0, device) for single ones."""
    at = 0
    while at < len(devices):
        first = devices[at]
        base = first.name[:-1]
        end = at
        if first.name.endswith("0") and base:
            while end < len(devices) and devices[end] == replace(first, name=f"{base}{end - at}"):
                end += 1
        if end - at >= 2:
            yield end - at, replace(first, name=base)
            at = end
        else:
            yield 0, first
            at += 1


def _link_pairs(links: tuple[Link, ...]) -> Iterator[tuple[int, bool]]:
    at = 0
    while at < len(links):
        link = links[at]
        pair = at + 1 < len(links) and links[at + 1] == replace(link, src=link.dst, dst=link.src)
        yield at, pair
        at += 2 if pair else 1


def _lines(entry: dict[str, Any]) -> list[str]:
    return [f"{name} = {_value(value)}" for name, value in entry.items()]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(x)}" for name, x in value.items()) + " }"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("'''", "''\\u0027")
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'
