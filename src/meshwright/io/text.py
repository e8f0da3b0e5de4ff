"""Bytes of a text from outside as text: UTF-8 with or without its mark, and UTF-16 with one, which PowerShell's `>` writes."""

from __future__ import annotations

from ..errors import FormatError

__all__ = ["UTF16", "text_of"]

UTF16 = (b"\xff\xfe", b"\xfe\xff")  # the mark, in either order of bytes


def text_of(data: bytes, where: str) -> str:
    """Raises: FormatError with the first byte that is no text."""
    try:
        return data.decode("utf-16" if data[:2] in UTF16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"is not UTF-8 text (byte {error.start})", where=where, hint="save it as UTF-8") from None
