"""Blocks of a network: consecutive operators joined by one storage, the residual stream.

Source: the card of MONeT, section 3.8 (ii). A cut is a place between two operators over which later forward operators read one storage only (storages
below 1/64 of the largest, such as statistics, do not count). Blocks are cut where they have reached `operators` operators.
"""

from __future__ import annotations

from .merging import Merged

__all__ = ["blocks"]


def blocks(m: Merged, *, operators: int) -> tuple[int, ...]:
    """The block of every operator, counted from 0."""
    small = max(m.size.values(), default=0) // 64
    last = {s: max((i for i in r if not m.operators[i].optional), default=-1) for s, r in m.readers.items()}
    found: list[int] = []
    block, since = 0, 0
    for j in range(len(m.operators)):
        found.append(block)
        since += 1
        crossing = [s for s in m.size if m.maker[s] <= j < last[s] and m.size[s] > small]
        if len(crossing) <= 1 and since >= operators:
            block, since = block + 1, 0
    return tuple(found)
