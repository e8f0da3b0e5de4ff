"""Reading JSON from outside: bounded, typed, and stricter than JSON itself.

A document is read with a cap on its size and, if gzipped, on what it unpacks to. Refused are: what the type does not allow, unknown
fields, keys that occur twice, NaN and infinities, integers beyond 64 bits, and nesting that exhausts the parser. Every refusal is a
`FormatError` whose `where` names the file and the field.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import sys
import zlib
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from ..errors import FormatError, UsageError
from .atomic import write_bytes
from .limits import MaxBytes

__all__ = ["check_finite", "decode", "header", "read_document", "read_versioned", "refuse_ambiguous", "write_document"]

T = TypeVar("T")

_MIN_UNPACKED_BYTES = 64 << 20  # gzip may always unpack to this much ...
_MAX_UNPACKED_FACTOR = 100  # ... and to this many times its own size; a plan's ratio is below 50

# Strings, or long lists of integers. The lists are the bulk of a plan and hold no keys, so the strict pass skips them. A string that does not end
# is one, too: no place inside it is looked at again.
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|\[[-0-9,\s]{64,}+\]', re.DOTALL)
_OTHER_FORM = "give a file that a command of meshwright wrote with --out or --json; docs/formats.md has the formats"
_NOT_JSON = "the file is cut short, or of another kind: give one that meshwright wrote with --out or --json"
_AT = re.compile(r"^(.*) - at `(?:key in )?`?\$?(.*?)`$", re.DOTALL)


class _Header(msgspec.Struct):
    schema: str
    version: int


def read_at_most(path: str | os.PathLike[str], limit: int) -> tuple[str, bytes]:
    """(name for messages, bytes) of a file, or of standard input for `-`; one byte more than `limit` where there is more.

    Raises: UsageError if it cannot be read.
    """
    where = Path(path).name or str(path)
    try:
        if str(path) == "-":
            where, data = "standard input", sys.stdin.buffer.read(limit + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=str(path), hint="check the path") from error
    return where, data


def read_text(path: str | os.PathLike[str], limit: int) -> tuple[str, str]:
    """(name for messages, text) of a file of at most `limit` bytes. Raises: UsageError if it cannot be read; FormatError: too large, no UTF-8."""
    where, data = read_at_most(path, limit)
    if len(data) > limit:
        raise FormatError(f"larger than {limit} bytes", where=where)
    try:
        return where, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"byte {error.start} is not UTF-8", where=where) from None


def read_document(path: str | os.PathLike[str], *, limit: int = MaxBytes.DOCUMENT) -> bytes:
    """The bytes of a JSON file, unpacked if they are gzip (told by content); `-` is standard input.

    Raises: UsageError if it cannot be read, FormatError if it is too large or not whole.
    """
    where, data = read_at_most(path, limit)
    if len(data) > limit:
        raise FormatError(f"larger than {limit} bytes", where=where)
    return _unzip(data, where, limit) if data[:2] == b"\x1f\x8b" else data


def _unzip(data: bytes, where: str, limit: int) -> bytes:
    limit = min(limit, max(_MIN_UNPACKED_BYTES, _MAX_UNPACKED_FACTOR * len(data)))
    inflater = zlib.decompressobj(wbits=31)
    try:
        out = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise FormatError(f"damaged gzip: {error}", where=where) from error
    if len(out) > limit:
        raise FormatError(f"unpacks to more than {limit} bytes", where=where, hint="it is damaged or made to exhaust memory: get it again")
    if not inflater.eof:
        raise FormatError("truncated gzip", where=where, hint="copy or write the file again")
    if inflater.unused_data:
        raise FormatError("data after the end of the gzip stream", where=where)
    return out


def write_document(path: str | os.PathLike[str], data: bytes) -> None:
    """Write all or nothing; gzipped, without time or name, when `path` ends in `.gz`. Equal data gives equal bytes."""
    write_bytes(path, gzip.compress(data, 6, mtime=0) if str(path).endswith(".gz") else data)


def header(data: bytes, *, schema: str, version: int, where: str) -> None:
    """Raise FormatError unless the document says it is `schema` in a version that this program reads."""
    head = decode(data, msgspec.json.Decoder(_Header), where)
    if head.schema != schema:
        hint = f"give a file that a command of meshwright wrote with the schema {schema}"
        raise FormatError(f"is a {head.schema[:64]!r} document, expected {schema!r}", where=_joined(where, "schema"), hint=hint)
    if head.version > version:
        hint = f"this one reads {schema} up to version {version}; upgrade with `pip install -U meshwright`"
        raise FormatError(f"version {head.version} was written by a newer meshwright", where=_joined(where, "version"), hint=hint)
    if head.version < 1:
        raise FormatError(f"must be >= 1, got {head.version}", where=_joined(where, "version"))


def decode(data: Any, decoder: msgspec.json.Decoder[T], where: str) -> T:
    """`decoder.decode(data)`, its refusals as FormatError; the path of the field is appended to `where`."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT.match(text)
        message, path = (found[1], found[2].lstrip(".")) if found else (text, "")
        raise FormatError(message, where=_joined(where, path), hint="" if path else _OTHER_FORM) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"not JSON: {str(error).removeprefix('JSON is malformed: ')}", where=where, hint=_NOT_JSON) from error
    except RecursionError:
        raise FormatError("nested too deeply", where=where) from None
    except (ValueError, OverflowError) as error:  # bad UTF-8, integers of thousands of digits
        raise FormatError(f"not JSON: {str(error)[:120]}", where=where, hint=_NOT_JSON) from error


def read_versioned(path: str | os.PathLike[str], kind: type[T], *, schema: str, version: int, limit: int = MaxBytes.DOCUMENT) -> tuple[T, str]:
    """A document of a schema and version as `kind`, and the file's name for messages.

    Raises: UsageError (no such file), FormatError naming the field.
    """
    data, where = read_document(path, limit=limit), Path(path).name or str(path)
    header(data, schema=schema, version=version, where=where)
    try:
        document = decode(data, msgspec.json.Decoder(kind), where)
    except UsageError as error:  # what the record itself refuses
        raise FormatError(error.message, where=f"{where}: {error.where}", hint=error.hint) from None
    refuse_ambiguous(data, where)
    return document, where


def _joined(where: str, path: str) -> str:
    if not path:
        return where
    return f"{where}{'' if path.startswith('[') else '.'}{path}" if ": " in where else f"{where}: {path}"


def refuse_ambiguous(data: bytes, where: str) -> None:
    """Raise FormatError for keys that occur twice and numbers that do not survive. Call it on a document that has been decoded."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise FormatError(f"the key {twice[:64]!r} occurs twice in one object", where=where)
        return out

    def integer(text: str) -> int:
        if len(text) > 18 and not -(2**63) <= int(text[:40]) < 2**63:
            raise FormatError(f"an integer beyond 64 bits: {text[:24]}...", where=where)
        return 0

    def real(text: str) -> float:
        if not math.isfinite(float(text)):
            raise FormatError(f"a number beyond what a float holds: {text[:24]}", where=where)
        return 0.0

    def constant(text: str) -> NoReturn:
        raise FormatError(f"{text} is not a number", where=where)

    skeleton = _TOKENS.sub(lambda match: b"[]" if match[0][:1] == b"[" else match[0], data)
    try:
        json.loads(skeleton, object_pairs_hook=pairs, parse_int=integer, parse_float=real, parse_constant=constant)
    except RecursionError:
        raise FormatError("nested too deeply", where=where) from None
    except ValueError as error:
        raise FormatError(f"not JSON: {str(error)[:120]}", where=where, hint=_NOT_JSON) from error


def check_finite(value: Any, where: str) -> None:
    """Raise FormatError where a float is NaN or infinite: JSON has neither, and a silent null is worse than an error."""
    # Where it stands is only worked out inside of what holds one: documents of large fabrics have a million values.
    if isinstance(value, float) and not math.isfinite(value):
        raise FormatError(f"{value} cannot be written", where=where)
    if not _all_finite(value):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_finite(item, f"{where}.{key}" if isinstance(value, dict) else f"{where}[{key}]")


def _all_finite(value: Any) -> bool:
    todo = [value]
    while todo:
        for item in (x.values() if isinstance(x := todo.pop(), dict) else x if isinstance(x, (list, tuple)) else (x,)):
            if isinstance(item, float):
                if not math.isfinite(item):
                    return False
            elif isinstance(item, (dict, list, tuple)):
                todo.append(item)
    return True
