"""What the kernel took of files by itself. It may drop any page of the page cache at any time, for want of memory or ahead of it; pages that it
reclaims leave a mark in the file's cache, those that a program drops leave none."""

from __future__ import annotations

import ctypes
import os

from meshwright.data import pages

CACHESTAT = 451  # the number of the system call on all of Linux' machines; since 6.5
_call = ctypes.CDLL(None, use_errno=True).syscall


def _evicted(fd: int, offset: int, length: int) -> int:
    """Pages of this range that were reclaimed and not read again; -1 where the kernel does not say."""
    asked, said = (ctypes.c_uint64 * 2)(offset, length), (ctypes.c_uint64 * 5)()
    return -1 if _call(CACHESTAT, fd, asked, said, 0) else said[3]


with open(__file__, "rb") as _file:  # noqa: PTH123
    COUNTS_TAKEN = _evicted(_file.fileno(), 0, 0) >= 0


def taken_bytes(path: str, offset: int = 0, length: int = 0) -> int:
    """Of these bytes (`length` 0: to the end), those that the kernel reclaimed, in whole pages."""
    with pages.opened(path) as fd:
        end = min(os.fstat(fd).st_size, offset + length) if length else os.fstat(fd).st_size
        start = offset // pages.PAGE * pages.PAGE
        return max(_evicted(fd, start, pages.rounded(end) - start), 0) * pages.PAGE if end > start else 0


def as_if_nothing_was_taken() -> None:
    """From now on the product finds what was reclaimed in memory: what it kept there and what it dropped is seen, and nothing else."""
    found = pages.resident_bytes

    def resident_bytes(path: str, offset: int = 0, length: int = 0) -> int:
        end = min(pages.file_bytes(path), offset + length) if length else pages.file_bytes(path)
        there = found(path, offset, length)  # first: what is taken between both looks is counted by both, and cut off
        return min(there + taken_bytes(path, offset, length), max(end - offset, 0))

    pages.resident_bytes = resident_bytes
