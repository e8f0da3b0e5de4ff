"""What is worth remembering between sizes: orders, trees and programs that depend on the fabric and the ranks, not on the bytes.

The memory belongs to the fabric object, so it ends with it, and equal problems give equal answers with or without it: what is remembered counts
as the work that it was, or a search with a limit (`kernels.effort`) would get further the second time; what the clock cut short is not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ...fabric.fabric import Fabric
from ...kernels.effort import cuts, make_up, worked_s
from ...program.program import Program

__all__ = ["in_pieces", "remember", "with_chunk_bytes"]

MAX_KEPT_ENTRIES = 512  # answers kept per fabric; the least recently used goes first
MAX_KEPT_STEPS = 4_000_000  # stored steps of all kept programs of a fabric, about 100 bytes each
T = TypeVar("T")


def remember(fabric: Fabric, key: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it gave for this fabric and key before. Whatever is kept must not be changed by anyone."""
    kept: OrderedDict[Hashable, tuple[Any, float]] = fabric.__dict__.setdefault("_remembered", OrderedDict())
    begin_s, before = worked_s(), cuts()
    if key not in kept:
        found = make()
        if cuts() > before:
            return found
        kept[key] = found, worked_s() - begin_s
        while len(kept) > 1 and (len(kept) > MAX_KEPT_ENTRIES or sum(_steps(x) for x, _ in kept.values()) > MAX_KEPT_STEPS):
            kept.popitem(last=False)
    kept.move_to_end(key)
    value, work_s = kept[key]
    make_up(begin_s, work_s)
    return value  # type: ignore[no-any-return]


def _steps(kept: Any) -> int:
    return len(kept.steps) if isinstance(kept, Program) else 0


def with_chunk_bytes(program: Program, chunk_bytes: int) -> Program:
    """The same program for chunks of another size; all its buffers have chunks of one size."""
    return replace(program, buffers=replace(program.buffers, chunk_bytes=np.full(len(program.buffers), chunk_bytes, np.int64)))


def in_pieces(program: Program, pieces: int, chunk_bytes: int) -> Program:
    """The program, whose lanes all repeat, with another number of iterations and so another size of chunks."""
    lanes = replace(program.lanes, repeat=np.full_like(program.lanes.repeat, pieces))
    return with_chunk_bytes(replace(program, lanes=lanes), chunk_bytes)
