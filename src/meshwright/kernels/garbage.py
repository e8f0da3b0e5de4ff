"""What is done with memory that is let go: how often Python looks for garbage in cycles, and what glibc gives back to the system."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["few_collections", "keep_memory", "kept_memory"]

# mallopt's parameters: what may stay free, what is asked for at once, from which size arrays get pages of their own, how many of these.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_MALLOC_BYTES = {_MMAP_THRESHOLD: 4 << 20, _TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 16 << 20}


def keep_memory() -> None:
    """For the rest of the process, arrays of a few MiB that were let go are taken again as they are, not given back to the system and cleared by it.

    By glibc's mallopt(3); another library of C is left as it is. An 8B plan took 59 s of processor time with it, 61 without.
    """
    import ctypes

    if settle := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter_and_bytes in _MALLOC_BYTES.items():
            settle(*parameter_and_bytes)


_MAX_THRESHOLD_BYTES = 2**31 - 1
# What glibc's own thresholds grow to as large blocks are freed: from there on a process is as if they had never been set.
_USUAL = ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 64 << 20))


@contextmanager
def kept_memory() -> Iterator[bool]:
    """All freed memory stays with the process. Gives whether it does anything: with glibc only. What is free at the end goes back to the system.

    glibc gives the top of its heap back to the system when enough of it is free, and every page that comes again costs a fault and is cleared. In a
    training step that is a tenth of the time and more, most where plans hold little. What a call pays of it depends on what the process did before:
    an image filter took 1.5 to 2.2 times its time where it was the only task of its process (42,000 faults), and not beside others (1,000).
    Allocators of GPUs keep what they were given, and so do those that PyTorch's guides recommend for processors.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    known = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") and hasattr(libc, "gnu_get_libc_version")
    if known:
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, _MAX_THRESHOLD_BYTES)
    try:
        yield known
    finally:
        if known:
            for parameter, value in _USUAL:
                libc.mallopt(parameter, value)
            libc.malloc_trim(0)


@contextmanager
def few_collections() -> Iterator[None]:
    """Traces, graphs and programs of large models are millions of objects, hardly any of them in cycles: looking through them again and again costs a
    tenth of a capture's time, and almost half of writing out a step.

    What was there before (torch's modules are a million objects) lies in the oldest generation, which is left alone.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.collect(1)
