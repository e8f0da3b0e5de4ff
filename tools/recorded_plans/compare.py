"""Where two plans differ first."""

from __future__ import annotations

import json
from typing import Any


def first_difference(a: Any, b: Any, path: str = "$") -> str:
    """The first place where two JSON documents differ, in the order of the first; "": nowhere."""
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            apart = next((k for k in (*a, *b) if (k in a) != (k in b)), "")
            return f"{path}.{apart}: only {'here' if apart in a else 'there'}" if apart else f"{path}: order of keys"
        return next((d for k in a if (d := first_difference(a[k], b[k], f"{path}.{k}"))), "")
    if isinstance(a, list) and isinstance(b, list):
        found = next((d for i, (x, y) in enumerate(zip(a, b, strict=False)) if (d := first_difference(x, y, f"{path}[{i}]"))), "")
        return found or (f"{path}: {len(a)} items here, {len(b)} there" if len(a) != len(b) else "")
    if type(a) is type(b) and a == b:
        return ""
    return f"{path}: {json.dumps(a)[:80]} here, {json.dumps(b)[:80]} there"


def difference(here: bytes, there: bytes) -> str:
    """"": equal bytes; else the first difference, by JSON path where both are JSON."""
    if here == there:
        return ""
    try:
        said = first_difference(json.loads(here), json.loads(there))
    except ValueError:
        said = ""
    at = next((i for i, (x, y) in enumerate(zip(here, there, strict=False)) if x != y), min(len(here), len(there)))
    return said or f"byte {at}: {here[at : at + 60]!r} here, {there[at : at + 60]!r} there"
