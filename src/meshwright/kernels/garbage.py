"""How often Python looks for garbage in cycles, while millions of objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["few_collections"]


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
