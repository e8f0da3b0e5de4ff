"""What is worth remembering between sizes: orders, trees and programs that depend on the fabric and the ranks, not on the bytes.

The memory belongs to the fabric object, or to its rate graph, so it ends with it. Equal problems give equal answers with or without it: what is
remembered counts as the work that it was, or a search with a limit (`kernels.effort`) would get further the second time; what the clock cut short is
not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ...kernels.effort import cuts, make_up, worked_s
from ...program.program import Program

__all__ = ["in_pieces", "remember", "with_chunk_bytes"]

MAX_KEPT_ENTRIES = 512  # answers kept per fabric; the least recently used goes first
MAX_KEPT_STEPS = 4_000_000  # stored steps of all kept programs of a fabric, about 100 bytes each
T = TypeVar("T")


class _Memory:
    """What one fabric or graph remembers: key -> (value, seconds of counted work, stored steps), the least recently used first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Hashable, tuple[Any, float, int]] = OrderedDict()
        self.steps = 0  # of all that is kept

    def keep(self, key: Hashable, value: Any, work_s: float) -> None:
        steps = len(value.steps) if isinstance(value, Program) else 0
        self.kept[key] = value, work_s, steps
        self.steps += steps
        while len(self.kept) > 1 and (len(self.kept) > MAX_KEPT_ENTRIES or self.steps > MAX_KEPT_STEPS):
            self.steps -= self.kept.popitem(last=False)[1][2]


def remember(of: object, key: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it gave for this fabric (or its rate graph) and key before. Whatever is kept must not be changed by anyone."""
    memory: _Memory = of.__dict__.setdefault("_remembered", _Memory())
    begin_s, before = worked_s(), cuts()
    if key not in memory.kept:
        found = make()
        if cuts() > before:
            return found
        memory.keep(key, found, worked_s() - begin_s)
    memory.kept.move_to_end(key)
    value, work_s, _ = memory.kept[key]
    make_up(begin_s, work_s)
    return value  # type: ignore[no-any-return]


def with_chunk_bytes(program: Program, chunk_bytes: int) -> Program:
    """The same program for chunks of another size; all its buffers have chunks of one size."""
    return replace(program, buffers=replace(program.buffers, chunk_bytes=np.full(len(program.buffers), chunk_bytes, np.int64)))


def in_pieces(program: Program, pieces: int, chunk_bytes: int) -> Program:
    """The program, whose lanes all repeat, with another number of iterations and so another size of chunks."""
    lanes = replace(program.lanes, repeat=np.full_like(program.lanes.repeat, pieces))
    return with_chunk_bytes(replace(program, lanes=lanes), chunk_bytes)
