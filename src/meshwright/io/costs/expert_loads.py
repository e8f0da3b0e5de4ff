"""How many tokens chose each expert of a run's layers, in a file (docs/formats.md): what `train plan --routing` reads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...errors import FormatError
from ...plan.routing import Routing
from ..limits import MaxBytes
from ..strict_json import read_versioned, write_document

__all__ = ["SCHEMA", "VERSION", "read_expert_loads", "write_expert_loads"]

SCHEMA, VERSION = "meshwright.expert-loads", 1
MAX_EXPERTS = 1 << 14  # of a layer


class _Loads(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    schema: str
    version: int
    layers: dict[str, tuple[int, ...]]


def read_expert_loads(path: str | Path, max_bytes: int = MaxBytes.EXPERT_LOADS) -> Routing:
    """Raises: UsageError (no such file), FormatError naming the layer: no experts, or more than 16,384, or a number below 0."""
    found, where = read_versioned(path, _Loads, schema=SCHEMA, version=VERSION, limit=max_bytes)
    if not found.layers:
        raise FormatError("names no layer", where=f"{where}: layers", hint="give `StackedExperts.load` of every layer, by module path")
    for name, counts in found.layers.items():
        if not 1 <= len(counts) <= MAX_EXPERTS or min(counts) < 0:
            text = f"must be tokens of 1 to {MAX_EXPERTS:,} experts, none below 0; got {len(counts)} numbers"
            raise FormatError(text, where=f"{where}: layers.{name}")
    return Routing(measured=tuple(found.layers.items()))


def write_expert_loads(path: str | Path, routing: Routing) -> None:
    """Equal loads give equal bytes."""
    write_document(path, msgspec.json.encode(_Loads(schema=SCHEMA, version=VERSION, layers=dict(routing.measured))))
