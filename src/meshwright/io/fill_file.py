"""Files of deferrable work (`meshwright.fill-work`, version 1): what may run in a pipeline's idle time."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from ..errors import FormatError
from .strict_json import decode, header, read_document, refuse_ambiguous

__all__ = ["read_fill_work"]


class _Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    kind: str
    duration_s: float
    ranks: tuple[int, ...]
    together: bool = False
    after: tuple[str, ...] = ()
    actions: tuple[tuple[int, str], ...] = ()
    ready_step: int = 0
    deadline_steps: int = 0
    priority: int = 0
    piece_s: float = 0.0
    group: str = ""
    message_bytes: int = 0
    keeps_bytes: int = 0


class _Work(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str
    version: int
    items: tuple[_Item, ...]
    resident_bytes: tuple[int, ...] = ()
    exposed_s: tuple[float, ...] = ()


def read_fill_work(path: str | os.PathLike[str]) -> dict[str, Any]:
    """`items` (fields as in docs/bubble_filling.md), `resident_bytes` and `exposed_s` per rank. Raises: UsageError, FormatError naming the field."""
    data = read_document(path)
    where = os.path.basename(path)  # noqa: PTH119
    header(data, schema="meshwright.fill-work", version=1, where=where)
    found = decode(data, msgspec.json.Decoder(_Work), where)
    refuse_ambiguous(data, where)
    for i in found.items:
        if not i.name or not i.kind:
            raise FormatError("must not be empty", where=f"{where}: items", hint="every item has a name and a kind")
        if min(i.message_bytes, i.keeps_bytes, i.ready_step, i.deadline_steps) < 0:
            raise FormatError("must be >= 0", where=f"{where}: {i.name}")
    if min((*found.resident_bytes, *found.exposed_s), default=0) < 0:
        raise FormatError("must be >= 0", where=f"{where}: resident_bytes, exposed_s")
    return {
        "items": [{f: getattr(i, f) for f in _Item.__struct_fields__} for i in found.items], "resident_bytes": found.resident_bytes,
        "exposed_s": found.exposed_s,
    }  # fmt: skip
