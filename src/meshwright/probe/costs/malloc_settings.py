"""Freed memory stays with the process while something is timed.

glibc gives the top of its heap back to the system when enough of it is free, and every page that comes again costs a fault and is cleared. In a
step that is a tenth of the time and more, most where plans hold little; a call measured alone pays another share of it than in its step. Allocators
of GPUs keep what they were given, and so do those that PyTorch's guides recommend for processors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_memory"]

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # mallopt's parameters
MAX_THRESHOLD_BYTES = 2**31 - 1
# What glibc's own thresholds grow to as large blocks are freed: from there on a process is as if they had never been set.
USUAL = ((MMAP_MAX, 65536), (MMAP_THRESHOLD, 32 << 20), (TRIM_THRESHOLD, 64 << 20))


@contextmanager
def kept_memory() -> Iterator[bool]:
    """Gives whether it does anything: with glibc only. What is free at the end goes back to the system."""
    libc = ctypes.CDLL(None)
    known = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") and hasattr(libc, "gnu_get_libc_version")
    if known:
        libc.mallopt(MMAP_MAX, 0)
        libc.mallopt(TRIM_THRESHOLD, MAX_THRESHOLD_BYTES)
    try:
        yield known
    finally:
        if known:
            for parameter, value in USUAL:
                libc.mallopt(parameter, value)
            libc.malloc_trim(0)
