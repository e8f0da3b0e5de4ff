"""A file's pages in the page cache: whether they are there, and out of it. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import UsageError

__all__ = ["PAGE", "drop", "fetch", "file_bytes", "opened", "read", "resident_bytes", "rounded"]

PAGE = mmap.PAGESIZE
MAX_WINDOW_BYTES = 1 << 30  # of a file that is looked at in one call: 262,144 pages, a byte each


def file_bytes(path: str) -> int:
    """Raises: OSError for a file that is gone."""
    return Path(path).stat().st_size


def rounded(size_bytes: int) -> int:
    """What a file takes in the page cache."""
    return -(-size_bytes // PAGE) * PAGE


def drop(path: str, offset: int = 0, length: int = 0) -> None:
    """Takes the pages that these bytes touch out of the page cache (`length` 0: to the end). Other readers' dirty or mapped pages stay.

    Raises: OSError where the file cannot be opened.
    """
    start = offset // PAGE * PAGE  # the kernel drops whole pages only: a range is widened to them
    with opened(path) as fd:
        os.posix_fadvise(fd, start, rounded(offset + length) - start if length else 0, os.POSIX_FADV_DONTNEED)


def fetch(path: str, offset: int = 0, length: int = 0) -> None:
    """Reads bytes through the page cache, so that they are there. Raises: OSError."""
    with opened(path) as fd:
        end = os.fstat(fd).st_size if not length else offset + length
        while offset < end and (got := len(os.pread(fd, min(end - offset, 1 << 22), offset))):
            offset += got


def read(path: str, offset: int, length: int, *, ahead: bool = True) -> bytes:
    """These bytes. `ahead`: the kernel may read on behind them. Raises: OSError; UsageError where the file has become shorter."""
    with opened(path) as fd:
        if not ahead:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        parts, at = [], offset
        while at < offset + length:
            part = os.pread(fd, offset + length - at, at)
            if not part:
                raise UsageError(f"ends at byte {at}, an item needs {offset + length}", where=path, hint="the file changed: make the dataset again")
            parts.append(part)
            at += len(part)
    return b"".join(parts)


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return libc


def resident_bytes(path: str, offset: int = 0, length: int = 0) -> int:
    """Of these bytes (`length` 0: to the end), those in the page cache, in whole pages cut off at the end. Nothing is read.

    Linux says this only of files that the caller owns or may write; of others it says that all is there. Raises: OSError.
    """
    with opened(path) as fd:
        end = min(os.fstat(fd).st_size, offset + length) if length else os.fstat(fd).st_size
        found, at = 0, offset // PAGE * PAGE
        while at < end:
            window = min(MAX_WINDOW_BYTES, end - at)
            address = _libc().mmap(None, window, mmap.PROT_READ, mmap.MAP_SHARED, fd, at)
            if address == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
            try:
                there = ctypes.create_string_buffer(rounded(window) // PAGE)
                if _libc().mincore(address, window, there):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
            finally:
                _libc().munmap(address, window)
            for page, flag in enumerate(there.raw):
                if flag & 1:
                    first = at + page * PAGE
                    found += min(first + PAGE, end) - max(first, offset)
            at += window
        return found
