"""Where two plans differ first."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def leave_out(document: Any, path: str) -> Any:
    """The document without what `$.a.b` names; `*` stands for every key of a level."""
    keys = path.removeprefix("$.").split(".")
    levels = [document]
    for key in keys[:-1]:
        levels = [v for x in levels if isinstance(x, dict) for k, v in x.items() if key in (k, "*")]
    for level in levels:
        if isinstance(level, dict):
            level.pop(keys[-1], None)
    return document


def difference(here: bytes, there: bytes, but: Sequence[str] = ()) -> str:
    """"": equal bytes; else the first difference, by JSON path where both are JSON. `but`: paths that may differ where all else is equal."""
    if here == there:
        return ""
    try:
        documents = [json.loads(here), json.loads(there)]
        for path in but:
            documents = [leave_out(document, path) for document in documents]
        said = first_difference(*documents)
        if not said and but:
            return ""
    except ValueError:
        said = ""
    at = next((i for i, (x, y) in enumerate(zip(here, there, strict=False)) if x != y), min(len(here), len(there)))
    return said or f"byte {at}: {here[at : at + 60]!r} here, {there[at : at + 60]!r} there"
