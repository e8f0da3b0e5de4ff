"""Cost files: JSON, typed, versioned, unknown fields refused, every number checked.

    {"schema": "meshwright.cost", "version": 1, "cost": {"name": "mine", "flops_efficiency": 0.5, "table": {"s0|F": {"time_s": 0.01, ...}}}}
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from ...cost import Cost, Priced
from ...errors import FormatError, UsageError
from ..atomic import write_bytes
from ..limits import MaxBytes

__all__ = ["cost_document", "cost_of_document", "read_cost", "write_cost"]

SCHEMA = "meshwright.cost"
VERSION = 1


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str
    version: int
    cost: Cost


def cost_document(cost: Cost) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(_File(schema=SCHEMA, version=VERSION, cost=cost))
    return document


def cost_of_document(document: Any, *, where: str = "cost") -> Cost:
    """Raises: FormatError naming the field."""
    try:
        file = msgspec.convert(document, _File)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FormatError(_plain(error), where=where) from error
    return _checked(file, where)


def read_cost(path: str | Path) -> Cost:
    """Raises: UsageError (no such file), FormatError (anything wrong inside, naming the field)."""
    path = Path(path)
    try:
        if path.stat().st_size > MaxBytes.COST_TABLE:
            raise FormatError(f"larger than {MaxBytes.COST_TABLE} bytes", where=str(path))
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=str(path), hint="a cost is roofline, tables:SYSTEM or a cost file") from error
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(_plain(error), where=str(path)) from error
    return _checked(file, str(path))


def write_cost(cost: Cost, path: str | Path) -> None:
    """Write all or nothing; equal costs give equal bytes. Raises: UsageError, MeshwrightError, FormatError for values that no file may hold."""
    _checked(_File(schema=SCHEMA, version=VERSION, cost=cost), str(path))
    text = msgspec.json.encode(cost_document(cost), order="deterministic")
    write_bytes(path, msgspec.json.format(text, indent=1) + b"\n")


def _plain(error: Exception) -> str:
    return str(error).replace("`$.", "`") if str(error) else type(error).__name__


def _checked(file: _File, where: str) -> Cost:
    if file.schema != SCHEMA or file.version != VERSION:
        raise FormatError(f"schema {file.schema!r} version {file.version}, expected {SCHEMA!r} version {VERSION}", where=where)
    cost = file.cost
    for name in ("flops_efficiency", "memory_efficiency", "default_flops", "default_memory_Bps"):
        _positive(getattr(cost, name), f"cost.{name}", where)
    for name in ("flops_efficiency", "memory_efficiency"):
        if getattr(cost, name) > 1:
            raise FormatError(f"must be at most 1, got {getattr(cost, name)}", where=f"{where}: cost.{name}")
    _not_negative(cost.per_call_s, "cost.per_call_s", where)
    _not_negative(cost.table_share, "cost.table_share", where)
    if cost.table_share > 1:
        raise FormatError(f"must be at most 1, got {cost.table_share}", where=f"{where}: cost.table_share")
    for part, of in (("transport", cost.transport), ("thread", cost.thread or None)):
        for name in of.__struct_fields__ if of is not None else ():
            value = getattr(of, name)
            if isinstance(value, float):
                _not_negative(value, f"cost.{part}.{name}", where)
    for key, price in cost.table.items():
        _price(key, price, where)
    return cost


def _price(key: str, price: Priced, where: str) -> None:
    if "|" not in key:
        raise FormatError(f"key {key[:80]!r} is not SEGMENT|OPERATION", where=f"{where}: cost.table")
    _not_negative(price.time_s, f"cost.table[{key[:80]!r}].time_s", where)
    _not_negative(price.cpu_s, f"cost.table[{key[:80]!r}].cpu_s", where)


def _positive(value: float, field: str, where: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise FormatError(f"must be > 0, got {value}", where=f"{where}: {field}")


def _not_negative(value: float, field: str, where: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise FormatError(f"must be >= 0, got {value}", where=f"{where}: {field}")
