"""Columns of numbers and lists of texts as one small text that the page unpacks itself.

A block is a header (names, places, lengths) and the base64 of a gzip stream. A column of kind `i4` is int32, little-endian, its four byte
planes one after the other (all lowest bytes first), each value the difference to the one before (modulo 2^32): slowly rising numbers leave
three planes of zeros. `f8` is float64, little-endian, as it is. A list of texts is UTF-8 with a line feed after each.
Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError

__all__ = ["clean", "pack"]

MAX_NAME_CHARACTERS = 400  # that are kept of a name


def clean(text: str, limit: int = MAX_NAME_CHARACTERS) -> str:
    """A name from outside, on one line, without control and direction characters and halves of surrogate pairs, at most `limit` long."""
    if len(text) <= limit and text.isprintable():
        return text
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def pack(columns: Mapping[str, NDArray[Any]], texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """`{"columns": [...], "texts": [...], "bytes": n, "data": base64}`; whole numbers become `i4`, floats `f8`; texts are cleaned.

    Raises: UsageError for whole numbers beyond int32.
    """
    parts: list[bytes] = []
    header: dict[str, Any] = {"columns": [], "texts": []}
    at = 0
    for name, values in columns.items():
        whole = values.dtype.kind in "iu"
        data = _planes(values, name) if whole else np.ascontiguousarray(values, "<f8").tobytes()
        header["columns"].append({"name": name, "kind": "i4" if whole else "f8", "length": len(values), "at": at})
        parts.append(data)
        at += len(data)
    for name, lines in texts.items():
        data = "".join(clean(x) + "\n" for x in lines).encode()
        header["texts"].append({"name": name, "length": len(lines), "at": at, "bytes": len(data)})
        parts.append(data)
        at += len(data)
    packed = gzip.compress(b"".join(parts), compresslevel=6, mtime=0)
    return {**header, "bytes": at, "data": base64.b64encode(packed).decode()}


def _planes(values: NDArray[Any], name: str) -> bytes:
    wide = values.astype(np.int64)
    if len(wide) and (wide.min() < -(1 << 31) or wide.max() >= 1 << 31):
        raise UsageError("has numbers beyond 32 bits", where=f"column {name!r}")
    steps = np.diff(wide, prepend=0) & 0xFFFFFFFF
    return np.ascontiguousarray(steps.astype("<u4")).view(np.uint8).reshape(-1, 4).T.tobytes()
