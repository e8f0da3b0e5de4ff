"""The wire format of protocol buffers: fields written and read one by one, without generated code or a package.

Reading is for data from outside: every length is checked before anything is taken, and what is not a field is a `FormatError` that names
the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import FormatError

__all__ = ["BYTES", "FIXED32", "FIXED64", "VARINT", "block", "fields", "fixed64", "number", "read_varint", "signed", "text", "varint"]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_LAST = [bytes([v]) if v < 0x80 else bytes([v & 0x7F | 0x80, v >> 7]) for v in range(1 << 14)]
_MORE = [bytes([v & 0x7F | 0x80, v >> 7 | 0x80]) for v in range(1 << 14)]


# ---- writing -----------------------------------------------------------------------------------------------------------
def varint(value: int) -> bytes:
    """Two bytes at a time: of a large file, this is what takes the time."""
    value &= (1 << 64) - 1  # negative int64 is written as its two's complement
    out = b""
    while value >= 1 << 14:
        out += _MORE[value & 0x3FFF]
        value >>= 14
    return out + _LAST[value]


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def block(field: int, data: bytes) -> bytes:
    return varint(field << 3 | BYTES) + varint(len(data)) + data


def text(field: int, value: str) -> bytes:
    return block(field, value.encode())


def fixed64(field: int, values: Iterable[int]) -> bytes:
    return b"".join(varint(field << 3 | FIXED64) + value.to_bytes(8, "little") for value in values)


# ---- reading -----------------------------------------------------------------------------------------------------------
def read_varint(data: bytes, at: int, end: int, where: str) -> tuple[int, int]:
    """(value below 2^64, first byte after it). Raises: FormatError."""
    value = shift = 0
    start = at
    while True:
        if at >= end:
            raise FormatError(f"ends inside a number at byte {start}", where=where, hint="the file may be cut short")
        byte = data[at]
        at += 1
        # Seven bits a byte, the lowest first; the top bit says that more follow.
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise FormatError(f"a number of more than 64 bits at byte {start}", where=where)
            return value, at
        shift += 7
        if shift > 63:
            raise FormatError(f"a number of more than 10 bytes at byte {start}", where=where)


def fields(data: bytes, at: int, end: int, where: str) -> Iterator[tuple[int, int, int, int, int]]:
    """(field, wire type, value, first byte, first byte after) of every field of a message in `data[at:end]`.

    `value` is the number of VARINT; of BYTES, and of the fixed types, the place where the content begins, which ends with the field.
    Raises: FormatError.
    """
    while at < end:
        start = at
        # A field's key: its number, and in the lowest three bits how its content is written.
        key, at = read_varint(data, at, end, where)
        field, wire = key >> 3, key & 7
        if not field or field >= 1 << 29:
            raise FormatError(f"no field has the number {field} (byte {start})", where=where)
        if wire == VARINT:
            value, at = read_varint(data, at, end, where)
        else:
            if wire == BYTES:
                length, at = read_varint(data, at, end, where)
            elif wire in (FIXED64, FIXED32):
                length = 8 if wire == FIXED64 else 4
            else:
                raise FormatError(f"wire type {wire} at byte {start} is not used", where=where, hint="the file may be of another kind")
            # Checked before anything is read: content may not reach beyond its message.
            if length > end - at:
                raise FormatError(f"field {field} at byte {start} says {length} bytes, {end - at} are left", where=where)
            value, at = at, at + length
        yield field, wire, value, start, at


def signed(value: int, bits: int = 64) -> int:
    """Two's complement of the lowest `bits`."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
