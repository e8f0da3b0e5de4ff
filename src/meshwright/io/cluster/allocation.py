"""Allocations in files, `meshwright.allocation` (docs/formats.md)."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ...bound import fraction_of
from ...cluster.allocation import Allocation
from ...errors import FormatError
from ..limits import MaxBytes
from ..strict_json import decode, header, read_document, refuse_ambiguous, write_document

__all__ = ["SCHEMA", "VERSION", "allocation_document", "read_allocation", "write_allocation"]

SCHEMA, VERSION = "meshwright.allocation", 1


class _File(Allocation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: str = SCHEMA
    version: int = VERSION


def read_allocation(path: str | os.PathLike[str]) -> Allocation:
    """Raises: UsageError (no such file), FormatError. Whether it is right is the checker's to say."""
    data, where = read_document(path, limit=MaxBytes.ALLOCATION), Path(path).name or str(path)
    refuse_ambiguous(data, where)
    header(data, schema=SCHEMA, version=VERSION, where=where)
    found = decode(data, msgspec.json.Decoder(_File), where)
    if found.bound is not None:
        try:
            fraction_of(found.bound.value)
        except ValueError as error:
            raise FormatError(str(error), where=f"{where}: bound.value") from None
    return Allocation(**{name: getattr(found, name) for name in Allocation.__struct_fields__})


def allocation_document(allocation: Allocation) -> dict[str, object]:
    return {"schema": SCHEMA, "version": VERSION, **msgspec.to_builtins(allocation)}


def write_allocation(path: str | os.PathLike[str], allocation: Allocation) -> None:
    """All or nothing; equal allocations give equal bytes."""
    write_document(path, msgspec.json.encode(allocation_document(allocation)) + b"\n")
