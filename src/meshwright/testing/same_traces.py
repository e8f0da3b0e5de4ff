"""Two readings of one trace compared: numbers of names and categories may differ, what they say may not."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from ..trace.trace import Trace

__all__ = ["differences"]

_TABLES = {"name": "names", "category": "categories"}


def differences(a: Trace, b: Trace) -> list[str]:
    """Fields in which they differ."""
    found = []
    for field in fields(Trace):
        if field.name in _TABLES.values():
            continue
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name in _TABLES:
            table = _TABLES[field.name]
            x, y = (np.array(getattr(t, table), object)[c] for t, c in ((a, x), (b, y)))
        if not _same(x, y):
            found.append(field.name)
    return found


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray):
        return bool(np.array_equal(x, y))
    if isinstance(x, dict):
        return set(x) == set(y) and all(_same(x[k], y[k]) for k in x)
    if isinstance(x, tuple):
        return len(x) == len(y) and all(_same(p, q) for p, q in zip(x, y, strict=True))
    if hasattr(x, "__dataclass_fields__"):
        return all(_same(getattr(x, k), getattr(y, k)) for k in x.__dataclass_fields__)
    return bool(x == y)
