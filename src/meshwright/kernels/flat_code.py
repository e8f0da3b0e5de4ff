"""Object code made into bytes that run wherever they lie: loaded by one copy, without a linker and without LLVM.

Only code that refers to nothing but itself, relative to where it stands (ELF of x86-64 made position-independent): sections one after the other,
references filled in. Anything else is answered with None, and the caller loads the object code by LLVM. Format: System V ABI, AMD64 supplement 4.4.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np

__all__ = ["flat", "loaded"]

_IDENTITY = b"\x7fELF\x02\x01"  # 64 bits, low byte first
_X86_64 = 62
_PROGRAM, _SYMBOLS, _RELOCATIONS = 1, 2, 4  # kinds of sections
_ALLOCATED = 2
_PC32, _PLT32, _PC64 = 2, 4, 24  # references relative to their own place
_pages: list[Any] = []  # for as long as the process lives


def flat(code: bytes, entry: str) -> tuple[int, bytes] | None:
    """(place of the function `entry`, image) of an object file; None where it is of another machine or refers to something outside."""
    if code[:6] != _IDENTITY or struct.unpack_from("<H", code, 18)[0] != _X86_64:
        return None
    sections = _sections(code)
    image, place = bytearray(), {}
    for number, (name, kind, flags, at, size, _, _, align, _) in enumerate(sections):
        if kind == _PROGRAM and flags & _ALLOCATED and name != b".eh_frame":  # how to unwind: nothing raises
            image += bytes(-len(image) % max(align, 1))
            place[number] = len(image)
            image += code[at : at + size]
    symbols = next((_symbols(code, sections, s) for s in sections if s[1] == _SYMBOLS), [])
    for _, kind, _, at, size, _, info, _, each in sections:
        if kind != _RELOCATIONS or info not in place:
            continue
        for offset, what, addend in (struct.unpack_from("<QQq", code, at + i) for i in range(0, size, each)):
            _, home, value = symbols[what >> 32]
            if home not in place or what & 0xFFFFFFFF not in (_PC32, _PLT32, _PC64):
                return None
            here = place[info] + offset
            struct.pack_into("<q" if what & 0xFFFFFFFF == _PC64 else "<i", image, here, place[home] + value + addend - here)
    found = [place[home] + value for name, home, value in symbols if name == entry.encode() and home in place]
    return (found[0], bytes(image)) if found else None


def _sections(code: bytes) -> list[tuple[Any, ...]]:
    """(name, kind, flags, place in the file, size, link, info, alignment, size of an entry) of each."""
    start, each, count, names = (struct.unpack_from("<Q", code, 40)[0], *struct.unpack_from("<HHH", code, 58))
    rows = [struct.unpack_from("<IIQQQQIIQQ", code, start + i * each) for i in range(count)]
    texts = rows[names][4]
    return [(_text(code, texts + r[0]), r[1], r[2], *r[4:]) for r in rows]


def _symbols(code: bytes, sections: list[tuple[Any, ...]], table: tuple[Any, ...]) -> list[tuple[bytes, int, int]]:
    """(name, number of its section, place in it) of each."""
    _, _, _, at, size, link, _, _, each = table
    rows = [struct.unpack_from("<IBBHQQ", code, at + i) for i in range(0, size, each)]
    return [(_text(code, sections[link][3] + r[0]), r[3], r[4]) for r in rows]


def _text(code: bytes, at: int) -> bytes:
    return code[at : code.index(b"\0", at)]


def loaded(image: bytes) -> int | None:
    """The address of the image in memory that may be run; None where the system gives no such memory."""
    try:
        pages = mmap.mmap(-1, max(len(image), 1), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except (OSError, AttributeError, ValueError):  # a hardened system, or one that names no such right
        return None
    pages.write(image)
    _pages.append(pages)
    return int(np.frombuffer(pages, np.uint8).__array_interface__["data"][0])
