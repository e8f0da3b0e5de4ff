"""Reading what was decided together with its bound: allocations, machines on hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from ...bound import Bound, fraction_of
from ...errors import FormatError
from ..strict_json import decode, header, read_document, refuse_ambiguous

__all__ = ["bounded_document"]


class _Bounded(Protocol):
    @property
    def bound(self) -> Bound | None: ...


T = TypeVar("T", bound=_Bounded)


def bounded_document(path: str | os.PathLike[str], file: type[T], *, schema: str, version: int, limit: int) -> T:
    """Raises: UsageError (no such file), FormatError. Whether it is right is the checker's to say."""
    data, where = read_document(path, limit=limit), Path(path).name or str(path)
    refuse_ambiguous(data, where)
    header(data, schema=schema, version=version, where=where)
    found = decode(data, msgspec.json.Decoder(file), where)
    if found.bound is not None:
        try:
            fraction_of(found.bound.value)
        except ValueError as error:
            raise FormatError(str(error), where=f"{where}: bound.value") from None
    return found
