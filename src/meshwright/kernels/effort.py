"""When a search stops: after so much counted work, or when the time that the user allows has passed.

A search that looks at the clock finds less on a busy machine than on an idle one. So planners count what they do (flows, simulated steps, moves of a
local search) at about the seconds that a quiet core needs for it, and stop at a sum: equal problems give equal plans however busy the machine is.

    deadline = Deadline.after(work_s=5.0)
    while not deadline.past:
        ...                     # whoever works says so: count_work(3e-8 * steps)

The sum belongs to the thread and only grows. It is kept in whole TICKS, so that differences are exact whatever was counted before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from math import ceil
from time import monotonic
from typing import ParamSpec, TypeVar

__all__ = ["NEVER", "Deadline", "count_work", "make_up", "remembered", "worked_s"]

TICKS = 1 << 30  # per second
INFINITE = float("inf")
MOST_REMEMBERED = 512
P = ParamSpec("P")
T = TypeVar("T")


class _Tally(threading.local):
    ticks = 0


_tally = _Tally()


def count_work(seconds: float) -> None:
    """Work was done for which a quiet core needs about so many seconds."""
    _tally.ticks += ceil(seconds * TICKS)


def worked_s() -> float:
    """All work that this thread has counted, in seconds."""
    return _tally.ticks / TICKS


def make_up(begin_s: float, work_s: float) -> None:
    """Counts what is missing of so much work since the reading `begin_s`: what was remembered counts as the work that it was."""
    if (missing := work_s - (worked_s() - begin_s)) > 0:
        count_work(missing)


def remembered(make: Callable[P, T]) -> Callable[P, T]:
    """As `lru_cache`, but what is found again counts as the work that it was."""

    @lru_cache(maxsize=MOST_REMEMBERED)
    def made(*args: P.args, **options: P.kwargs) -> tuple[T, float]:
        begin_s = worked_s()
        return make(*args, **options), worked_s() - begin_s

    @wraps(make)
    def found(*args: P.args, **options: P.kwargs) -> T:
        begin_s = worked_s()
        value, work_s = made(*args, **options)  # type: ignore[arg-type]
        make_up(begin_s, work_s)
        return value

    return found


@dataclass(frozen=True)
class Deadline:
    """`work_s`: a reading of `worked_s()`; `clock_s`: monotonic seconds. It is past when either is."""

    work_s: float = INFINITE
    clock_s: float = INFINITE

    @staticmethod
    def after(work_s: float = INFINITE, clock_s: float = INFINITE) -> Deadline:
        """So many seconds of work, or by the clock, from now on."""
        return Deadline(worked_s() + work_s, monotonic() + clock_s)

    @property
    def past(self) -> bool:
        return worked_s() >= self.work_s or monotonic() > self.clock_s

    @property
    def work_left_s(self) -> float:
        """Seconds of work that are left, 0 or less when past."""
        return self.work_s - worked_s()

    @property
    def clock_left_s(self) -> float:
        """Seconds that are left by the clock, 0 or less when past."""
        return self.clock_s - monotonic()

    @property
    def solver_s(self) -> float:
        """Monotonic seconds at which a solver must stop that knows clocks only: the work that is left is taken for time."""
        return min(self.clock_s, monotonic() + self.work_left_s)


NEVER = Deadline()
