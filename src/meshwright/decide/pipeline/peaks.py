"""Most bytes held, from what changes when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["held_peaks"]


def held_peaks(events: Sequence[Iterable[tuple[Any, int]]]) -> tuple[int, ...]:
    """Of every device's (moment, change in bytes): the most that it holds. At one moment what is freed goes first."""
    peaks = []
    for rows in events:
        held = peak = 0
        for _, change in sorted(rows):
            held += change
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
