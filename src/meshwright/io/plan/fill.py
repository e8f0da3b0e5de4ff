"""Files of deferrable work (`meshwright.fill-work`, version 1): what may run in a pipeline's idle time."""

from __future__ import annotations

import os

import msgspec

from ...deferrable import Deferrable, FillWork
from ...errors import FormatError
from ..strict_json import decode, header, read_document, refuse_ambiguous

__all__ = ["read_fill_work"]


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str
    version: int
    items: tuple[Deferrable, ...]
    resident_bytes: tuple[int, ...] = ()
    exposed_s: tuple[float, ...] = ()


def read_fill_work(path: str | os.PathLike[str]) -> FillWork:
    """Raises: UsageError, FormatError naming the field."""
    data = read_document(path)
    where = os.path.basename(path)  # noqa: PTH119
    header(data, schema="meshwright.fill-work", version=1, where=where)
    found = decode(data, msgspec.json.Decoder(_File), where)
    refuse_ambiguous(data, where)
    if not found.items:
        raise FormatError("has no items", where=where)
    for i in found.items:
        if not i.name or not i.kind:
            raise FormatError("must not be empty", where=f"{where}: items", hint="every item has a name and a kind")
        if min(i.message_bytes, i.keeps_bytes, i.ready_step, i.deadline_steps) < 0:
            raise FormatError("must be >= 0", where=f"{where}: {i.name}")
    if min((*found.resident_bytes, *found.exposed_s), default=0) < 0:
        raise FormatError("must be >= 0", where=f"{where}: resident_bytes, exposed_s")
    return FillWork(items=found.items, resident_bytes=found.resident_bytes, exposed_s=found.exposed_s)
