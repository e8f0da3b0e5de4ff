"""Allocations in files, `meshwright.allocation` (docs/formats.md)."""

from __future__ import annotations

import os

import msgspec

from ...cluster.allocation import Allocation
from ..limits import MaxBytes
from ..strict_json import write_document
from .bounded import bounded_document

__all__ = ["SCHEMA", "VERSION", "allocation_document", "read_allocation", "write_allocation"]

SCHEMA, VERSION = "meshwright.allocation", 1


class _File(Allocation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema: str = SCHEMA
    version: int = VERSION


def read_allocation(path: str | os.PathLike[str]) -> Allocation:
    """Raises: UsageError (no such file), FormatError. Whether it is right is the checker's to say."""
    found = bounded_document(path, _File, schema=SCHEMA, version=VERSION, limit=MaxBytes.ALLOCATION)
    return Allocation(**{name: getattr(found, name) for name in Allocation.__struct_fields__})


def allocation_document(allocation: Allocation) -> dict[str, object]:
    return {"schema": SCHEMA, "version": VERSION, **msgspec.to_builtins(allocation)}


def write_allocation(path: str | os.PathLike[str], allocation: Allocation) -> None:
    """All or nothing; equal allocations give equal bytes."""
    write_document(path, msgspec.json.encode(allocation_document(allocation)) + b"\n")
