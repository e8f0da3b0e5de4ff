"""Reading a table from outside field by field, with errors that point: `fabric.toml: links[14].rate_Bps: must be > 0, got -100`.

A `Table` hands out each field once, checked; `done()` refuses what nobody asked for, so that a typing error is never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..errors import FormatError

__all__ = ["Table", "shown"]

T = TypeVar("T")

MAX_NAME_CHARACTERS = 128  # of a name in a file; messages stay readable


def shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 64 else text[:60] + "..."


class Table:
    """One table (dict) of a document, at `path` inside the file `where`."""

    def __init__(self, value: Any, where: str, path: str = "") -> None:
        self.where, self.path = where, path
        if not isinstance(value, dict):
            raise self.error("", f"must be a table, got {shown(value)}")
        self._values: dict[str, Any] = dict(value)
        self._asked: set[str] = set()

    def error(self, field: str, message: str, *, hint: str = "") -> FormatError:
        dotted = f"{self.path}.{field}" if self.path and field else self.path or field
        return FormatError(message, where=": ".join(x for x in (self.where, dotted) if x), hint=hint, data={"field": dotted})

    def has(self, field: str) -> bool:
        return field in self._values

    def take(self, field: str) -> Any:
        self._asked.add(field)
        return self._values.pop(field, None)

    def rest(self) -> tuple[Any, ...] | None:
        """What nobody has taken yet, as a key: equal for equal fields of equal types. None where a value is a list or a table."""
        values, kinds = tuple(self._values.values()), tuple(map(type, self._values.values()))
        return None if list in kinds or dict in kinds else (*self._values, *kinds, *values)

    def done(self) -> None:
        if self._values:
            from difflib import get_close_matches

            field = next(iter(self._values))
            close = get_close_matches(field, sorted(self._asked), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(sorted(self._asked))}"
            raise self.error(field if len(field) <= MAX_NAME_CHARACTERS else field[:60] + "...", "unknown field", hint=hint)

    # ---- typed fields ----------------------------------------------------------------------------------------------
    def text(self, field: str, default: str | None = None, *, limit: int = MAX_NAME_CHARACTERS) -> str:
        value = self._required(field, default)
        if not isinstance(value, str) or len(value) > limit or not value.isprintable():
            raise self.error(field, f"must be a text of at most {limit} printable characters, got {shown(value)}")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._required(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, got {shown(value)}")
        return value

    def integer(self, field: str, default: int | None = None, *, least: int = 0, most: int) -> int:
        return self.checked_integer(field, self._required(field, default), least=least, most=most)

    def checked_integer(self, field: str, value: Any, *, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(field, f"must be a whole number, got {shown(value)}")
        if value < least:
            raise self.error(field, f"must be {'> 0' if least == 1 else f'>= {least}'}, got {shown(value)}")
        if value > most:
            raise self.error(field, f"must be <= {most}, got {shown(value)}")
        return value

    def number(self, field: str, default: float | None = None, *, most: float) -> float:
        value = self._required(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"must be a number, got {shown(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(field, f"must be finite, got {value}")
        if not 0 <= value <= most:
            raise self.error(field, f"must be between 0 and {most:g}, got {shown(value)}")
        return float(value)

    def quantity(self, plain: str, written: str, parse: Callable[[str], T], check: Callable[[str, Any], T], default: T | None = None) -> T:
        """A quantity given as a plain number in `plain` (unit in its name) or as text with a unit in `written`; not both."""
        if self.has(plain) and self.has(written):
            raise self.error(written, f"give either {written} or {plain}, not both")
        if self.has(written):
            value = self.take(written)
            self._asked.add(plain)
            if not isinstance(value, str):
                raise self.error(written, f"must be a text with a unit, got {shown(value)}", hint=f"plain numbers go into {plain}")
            try:
                parsed = parse(value)
            except ValueError as error:
                raise self.error(written, str(error)) from None
            return check(written, parsed)
        self._asked.add(written)
        if self.has(plain):
            return check(plain, self.take(plain))
        self._asked.add(plain)
        if default is None:
            raise self.error("", f"needs {written} or {plain}")
        return default

    def tables(self, field: str, *, most: int) -> Iterator[Table]:
        """The entries of a list of tables, numbered in the path."""
        if not self.has(field):
            self._asked.add(field)
            return
        value = self.take(field)
        if not isinstance(value, list):
            raise self.error(field, f"must be a list of tables, got {shown(value)}")
        if len(value) > most:
            raise self.error(field, f"has {len(value)} entries; at most {most} are accepted")
        for index, entry in enumerate(value):
            yield Table(entry, self.where, f"{self.path}.{field}[{index}]" if self.path else f"{field}[{index}]")

    def _required(self, field: str, default: Any) -> Any:
        self._asked.add(field)
        if field in self._values:
            return self._values.pop(field)
        if default is None:
            raise self.error(field, "is missing", hint="docs/formats.md has an example of each kind of file")
        return default
