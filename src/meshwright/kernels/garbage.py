"""What is done with memory that is let go: how often Python looks for garbage in cycles, and what glibc gives back to the system."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["few_collections", "keep_memory"]

# mallopt's M_MMAP_THRESHOLD (larger arrays get pages of their own), M_TRIM_THRESHOLD (what may stay free), M_TOP_PAD (what is asked for at once).
_MALLOC_BYTES = {-3: 4 << 20, -1: 64 << 20, -2: 16 << 20}


def keep_memory() -> None:
    """For the rest of the process, arrays of a few MiB that were let go are taken again as they are, not given back to the system and cleared by it.

    By glibc's mallopt(3); another library of C is left as it is. An 8B plan took 59 s of processor time with it, 61 without.
    """
    import ctypes

    if settle := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter_and_bytes in _MALLOC_BYTES.items():
            settle(*parameter_and_bytes)


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
