"""Two readings of one trace compared: numbers of names and categories may differ, what they say may not."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ..trace.trace import Trace

__all__ = ["differences"]

_TABLES = {"name": "names", "category": "categories"}


def differences(a: Trace, b: Trace) -> list[str]:
    """Fields in which they differ."""
    found = []
    for name in Trace.__struct_fields__:
        if name in _TABLES.values():
            continue
        x, y = getattr(a, name), getattr(b, name)
        if name in _TABLES:
            table = _TABLES[name]
            x, y = (np.array(getattr(t, table), object)[c] for t, c in ((a, x), (b, y)))
        if not _same(x, y):
            found.append(name)
    return found


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray):
        return bool(np.array_equal(x, y))
    if isinstance(x, dict):
        return set(x) == set(y) and all(_same(x[k], y[k]) for k in x)
    if isinstance(x, tuple):
        return len(x) == len(y) and all(_same(p, q) for p, q in zip(x, y, strict=True))
    if isinstance(x, msgspec.Struct):
        return all(_same(getattr(x, k), getattr(y, k)) for k in x.__struct_fields__)
    return bool(x == y)
