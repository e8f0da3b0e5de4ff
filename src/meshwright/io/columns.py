"""Columns of integers as JSON: the smallest of four forms, made and read with whole-array operations.

    [3, 3, 4]                                   the numbers
    {"count": 3, "delta": [3, 0, 1]}            differences to the number before (the first one to 0)
    {"count": 3, "runs": [3, 2, 4, 1]}          value, how often, value, how often, ...
    {"count": 3, "delta_runs": [3, 1, 0, 1, 1, 1]}   runs of differences

Differences and their sums wrap modulo 2**64, so every int64 column survives. How long a column becomes is known from its header
and the sum of its counts, and is checked against what the caller expects and a `Budget` before an array is made.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..program.program import MAX_STEPS
from .strict_json import decode

__all__ = ["Budget", "decode_column", "encode_column"]

Numbers = NDArray[np.int64]
_UNSET = msgspec.UNSET


class _Packed(msgspec.Struct, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    delta: list[int] | msgspec.UnsetType = _UNSET
    runs: list[int] | msgspec.UnsetType = _UNSET
    delta_runs: list[int] | msgspec.UnsetType = _UNSET


_COLUMN: msgspec.json.Decoder[list[int] | _Packed] = msgspec.json.Decoder(list[int] | _Packed)


class Budget:
    """How many numbers a document may still expand to: a run of a million costs twelve bytes in a file, but memory when read."""

    FLOOR = 1 << 25
    TEXT_FLOOR = 1 << 28
    PER_BYTE = 64

    def __init__(self, document_bytes: int) -> None:
        self.left = max(self.FLOOR, self.PER_BYTE * document_bytes)
        self.characters = max(self.TEXT_FLOOR, self.PER_BYTE * document_bytes)

    def take(self, count: int, where: str) -> None:
        if count > MAX_STEPS:
            raise FormatError(f"{count} entries, the limit is {MAX_STEPS}", where=where)
        self.left -= count
        if self.left < 0:
            raise FormatError(
                "the document expands to more numbers than its size allows",
                where=where, hint="it is damaged or made to exhaust memory: get it again",
            )  # fmt: skip

    def take_text(self, characters: int, where: str) -> None:
        """Strings put together from a word and a number: the word counts every time."""
        self.characters -= characters
        if self.characters < 0:
            raise FormatError(
                f"{characters} characters, more than the document's size allows",
                where=where, hint="it is damaged or made to exhaust memory: get it again",
            )  # fmt: skip


def encode_column(values: Any) -> bytes:
    """JSON of one column. Ties between forms go to the plainer one, so equal columns give equal bytes."""
    plain: Numbers = np.ascontiguousarray(values, dtype=np.int64)
    best, name = plain, ""
    if len(plain) > 4:
        size = _text_bytes(plain)
        delta = np.diff(plain, prepend=np.int64(0))
        for form, candidate in (("delta", delta), ("runs", _to_runs(plain)), ("delta_runs", _to_runs(delta))):
            candidate_size = _text_bytes(candidate) + len(form) + 24
            if candidate_size < size:
                best, name, size = candidate, form, candidate_size
    numbers = msgspec.json.encode(best.tolist())
    return numbers if not name else b'{"count":%d,"%s":%s}' % (len(plain), name.encode(), numbers)


def _text_bytes(values: Numbers) -> int:
    """Bytes of the numbers and commas as text."""
    magnitude = np.abs(values)
    total = 2 * len(values) + int(np.count_nonzero(values < 0))
    largest, power = int(magnitude.max(initial=0)), 10
    while power <= largest:
        total += int(np.count_nonzero(magnitude >= power))
        power *= 10
    return total


def _to_runs(values: Numbers) -> Numbers:
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(values[1:] != values[:-1]) + 1])
    out = np.empty(2 * len(starts), np.int64)
    out[::2] = values[starts]
    out[1::2] = np.diff(starts, append=len(values))
    return out


def decode_column(raw: Any, dtype: type[np.integer[Any]], *, where: str, budget: Budget, expected: int | None = None) -> NDArray[Any]:
    """The column as an array of `dtype`.

    `raw` is its JSON. Raises FormatError when it is malformed, has another length than `expected`, or a number outside `dtype`.
    """
    packed = decode(raw, _COLUMN, where)
    count = len(packed) if isinstance(packed, list) else packed.count
    if expected is not None and count != expected:
        raise FormatError(f"has {count} entries, expected {expected}", where=where)
    budget.take(count, where)
    if isinstance(packed, list):
        values = _numbers(packed, where)
    else:
        values = _unpack(packed, where)
    limits = np.iinfo(dtype)
    if dtype is not np.int64 and count and (values.min() < limits.min or values.max() > limits.max):
        i = int(np.argmax((values < limits.min) | (values > limits.max)))
        raise FormatError(f"must be {limits.min}..{limits.max}, got {int(values[i])}", where=f"{where}[{i}]")
    return values.astype(dtype, copy=False)


def _unpack(packed: _Packed, where: str) -> Numbers:
    given = {name: value for name in ("delta", "runs", "delta_runs") if (value := getattr(packed, name)) is not _UNSET}
    if len(given) != 1:
        raise FormatError("a packed column has exactly one of `delta`, `runs`, `delta_runs`", where=where)
    form, listed = given.popitem()
    values = _numbers(listed, f"{where}.{form}")
    if form != "delta":
        values = _from_runs(values, packed.count, f"{where}.{form}")
    elif len(values) != packed.count:
        raise FormatError(f"has {len(values)} entries, `count` says {packed.count}", where=f"{where}.delta")
    return np.cumsum(values) if form != "runs" else values


def _from_runs(pairs: Numbers, count: int, where: str) -> Numbers:
    if len(pairs) % 2:
        raise FormatError("must be pairs of value and how often", where=where)
    times = pairs[1::2]
    if len(times) and (times.min() < 1 or times.max() > count):  # each at most `count` <= MAX_STEPS, so the sum cannot wrap
        raise FormatError(f"a run must be 1..{count} long", where=where)
    if int(times.sum()) != count:
        raise FormatError(f"runs add up to {int(times.sum())}, `count` says {count}", where=where)
    return np.repeat(pairs[::2], times)


def _numbers(listed: list[int], where: str) -> Numbers:
    try:
        return np.array(listed, dtype=np.int64)
    except OverflowError as error:
        raise FormatError("an integer beyond 64 bits", where=where) from error
