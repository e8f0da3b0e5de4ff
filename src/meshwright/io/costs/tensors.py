"""Nets of ours in safetensors files: their weights, and in the header one document that says what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import FormatError
from ..atomic import write_bytes
from ..strict_json import read_at_most

__all__ = ["tensors_in", "write_tensors"]

KEY = "meshwright"  # of the header's metadata


def write_tensors(path: str | Path, tensors: Mapping[str, Any], head: Mapping[str, Any]) -> None:
    """Equal tensors (numpy) and heads give equal bytes."""
    from safetensors.numpy import save

    write_bytes(path, save(dict(tensors), {KEY: json.dumps(head, sort_keys=True)}))  # one key: safetensors writes several in any order


def tensors_in(path: str | Path, limit: int, schema: str, version: int, *, what: str, hint: str) -> tuple[str, dict[str, Any], Any]:
    """(name for messages, tensors, the header's `facts`). Raises: UsageError (no such file), FormatError for another file, schema or version."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    where, data = read_at_most(path, limit)
    if len(data) > limit:
        raise FormatError(f"larger than {limit} bytes", where=where)
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        head = dict(json.loads(header.get("__metadata__", {}).get(KEY, "{}")))
    except (SafetensorError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"is no safetensors file: {str(error)[:120]}", where=where, hint=hint) from None
    if head.get("schema") != schema or head.get("version") != version:
        text = f"holds {str(head.get('schema', what))[:64]!r} version {str(head.get('version'))[:16]}, expected {schema!r} version {version}"
        raise FormatError(text, where=where, hint=hint)
    return where, tensors, head.get("facts")
