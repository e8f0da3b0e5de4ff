"""When a search stops: after so much counted work. The clock is a net under it, for whoever cannot wait, and when it cuts, that is said.

A search that looks at the clock finds less on a busy machine than on an idle one. So whoever decides counts: whole evaluations (layouts, schedules,
strategies) in a `Budget`; what is finer (flows, simulated steps, moves of a local search) at about the seconds that a quiet core needs for it, up to
a `Deadline`. Equal problems then give equal plans however busy the machine is, unless the clock cut.

    budget = Budget(len(candidates), time_limit_s=120.0)
    for candidate in candidates:
        if not budget.spend():      # all are looked at, or time is up (never before the first)
            break
        try:
            with budget.net():      # in here `look()` raises TimeLimit, and deadlines are past, when time is up
                ...
        except TimeLimit: ...
    budget.cut                      # None, or Cut(looked=3, of=25): an evaluation that was cut short is not counted

    deadline = Deadline.after(work_s=5.0)
    while not deadline.past:
        ...                         # whoever works says so: count_work(3e-8 * steps)

All of it belongs to the thread. Work only grows and is kept in whole ticks, so that differences are exact whatever was counted before. This module
is the only one whose clock decides what is planned: `monotonic` here, which tests replace.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from math import ceil
from time import monotonic
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import TimeLimit
from .interrupts import ASKED, NETS, TIME_IS_UP, raised_on_interrupt
from .stages import innermost

__all__ = [
    "NEVER", "Budget", "Cut", "Deadline", "clock_cut", "count_work", "cut_of", "cuts", "look", "make_up", "remembered",
    "stop_flag", "time_is_up", "why_with", "worked_s",
]  # fmt: skip

TICKS_PER_S = 1 << 30  # work is kept in whole ticks: a power of two, so that seconds convert exactly
INFINITE = float("inf")
MAX_REMEMBERED = 512  # results kept per table; the oldest go first
P = ParamSpec("P")
T = TypeVar("T")


class _Tally(threading.local):
    ticks = 0
    cuts = 0  # how often something ended because the clock said so
    until_s = INFINITE  # monotonic seconds: the net that is under whatever runs now


_tally = _Tally()


# ---- the clock ---------------------------------------------------------------------------------------------------------
def _late(until_s: float) -> bool:
    """Whether the clock is past `until_s` or the net, and so cuts. Without either it is not read. An interrupt cuts as the clock does."""
    until_s = min(until_s, _tally.until_s)
    if NETS.born >= ASKED.times and (until_s == INFINITE or monotonic() <= until_s):
        return False
    clock_cut()
    return True


def clock_cut() -> None:
    """The clock ended something: said by whoever asks another clock, as solvers do."""
    _tally.cuts += 1


def time_is_up() -> bool:
    """For loops that take long and have a best so far: whether the net's time is up (0.2 microseconds), which cuts."""
    return _late(INFINITE)


def look() -> None:
    """For loops that take long and have nothing to give yet: raises TimeLimit when the net's time is up."""
    if time_is_up():
        raise TimeLimit(TIME_IS_UP, hint="raise the time limit")


@contextmanager
def stop_flag() -> Iterator[NDArray[np.int64]]:
    """For compiled loops without the interpreter's lock: a flag (one number) that becomes 1 when the net's time is up, or when the process is
    interrupted, which cuts."""
    flag = np.zeros(1, np.int64)
    if _tally.until_s == INFINITE:
        with raised_on_interrupt(flag):
            yield flag
        if flag[0]:
            clock_cut()
        return

    def raise_flag() -> None:
        flag[0] = 1

    timer = threading.Timer(max(_tally.until_s - monotonic(), 0.0), raise_flag)
    timer.daemon = True
    timer.start()
    try:
        with raised_on_interrupt(flag):
            yield flag
    finally:
        timer.cancel()
        if flag[0]:
            clock_cut()


def cuts() -> int:
    """How often the clock has cut something in this thread: a search between whose readings it grew depends on the machine."""
    return _tally.cuts


@dataclass(frozen=True)
class Cut:
    """The clock, or an interrupt, ended a search that had looked at so many of so many."""

    looked: int
    of: int
    interrupted: bool = False

    def __str__(self) -> str:
        looked = f"looked at {self.looked} of {self.of}" if self.of > 1 else "the search was cut short"
        return f"{'interrupted' if self.interrupted else 'time limit'}: {looked}"

    def to_json(self) -> dict[str, int]:
        return {"looked": self.looked, "of": self.of, **({"interrupted": True} if self.interrupted else {})}

    def error(self, what: str) -> TimeLimit:
        """When nothing was found: `what` says what there is none of."""
        return TimeLimit(f"{self}; {what}", hint="" if self.interrupted else "raise the time limit", data=self.to_json())


def why_with(why: str, cut: Cut | None) -> dict[str, Any]:
    """The part of a plan's decision that says why, and whether the clock cut the search: `{"why": ...}` or `{"why": ..., "cut": ...}`."""
    return {"why": why} if cut is None else {"why": f"{why}; {cut}", "cut": cut.to_json()}


def cut_of(decisions: Mapping[str, Mapping[str, Any]]) -> Cut | None:
    """The first cut that a plan's decisions carry, each under the key `cut`."""
    return next((Cut(**d["cut"]) for d in decisions.values() if d.get("cut")), None)


class Budget:
    """So many `evaluations`, from now on within `time_limit_s` by the clock."""

    def __init__(self, evaluations: int, *, time_limit_s: float = INFINITE) -> None:
        self.of, self.looked = evaluations, 0
        self._begun, self._cut, self._born = 0, False, ASKED.times
        self._until_s = min(monotonic() + time_limit_s, _tally.until_s)

    def spend(self) -> bool:
        """Whether one more evaluation may begin, which is counted then. The first may whatever the clock says."""
        if self._begun >= self.of or (self._begun and self.late):
            return False
        self._begun += 1
        self.looked += 1
        if self.of > 1:
            here = innermost()
            here.done, here.of = self._begun, self.of
        return True

    @property
    def late(self) -> bool:
        """Whether time is up, or somebody interrupts: whoever asks stops then, which is a cut."""
        late = _late(self._until_s) or self.interrupted
        self._cut |= late
        return late

    @contextmanager
    def net(self) -> Iterator[None]:
        """An evaluation whose end the clock may bring: it is then not counted as looked at."""
        outer_s, before, oldest = _tally.until_s, _tally.cuts, NETS.born
        _tally.until_s, NETS.born = min(outer_s, self._until_s), min(oldest, self._born)
        try:
            yield
        finally:
            _tally.until_s, NETS.born = outer_s, oldest
            if _tally.cuts > before:
                self.looked, self._cut = max(self.looked - 1, 0), True

    @property
    def cut(self) -> Cut | None:
        """What was left out because the clock said so; None when it did not."""
        return Cut(self.looked, self.of, self.interrupted) if self._cut else None

    @property
    def interrupted(self) -> bool:
        return self._born < ASKED.times


# ---- work --------------------------------------------------------------------------------------------------------------
def count_work(seconds: float) -> None:
    """Work was done for which a quiet core needs about so many seconds."""
    _tally.ticks += ceil(seconds * TICKS_PER_S)


def worked_s() -> float:
    """All work that this thread has counted, in seconds."""
    return _tally.ticks / TICKS_PER_S


def make_up(begin_s: float, work_s: float) -> None:
    """Counts what is missing of so much work since the reading `begin_s`: what was remembered counts as the work that it was."""
    if (missing := work_s - (worked_s() - begin_s)) > 0:
        count_work(missing)


def remembered(make: Callable[P, T]) -> Callable[P, T]:
    """As `lru_cache`, but what is found again counts as the work that it was, and what the clock cut short is not kept."""
    kept: OrderedDict[tuple[Any, ...], tuple[T, float]] = OrderedDict()

    @wraps(make)
    def found(*args: P.args, **options: P.kwargs) -> T:
        key = (args, *sorted(options.items()))
        begin_s, before = worked_s(), cuts()
        if key not in kept:
            value = make(*args, **options)
            if cuts() > before:
                return value
            kept[key] = value, worked_s() - begin_s
            while len(kept) > MAX_REMEMBERED:
                kept.popitem(last=False)
        kept.move_to_end(key)
        value, work_s = kept[key]
        make_up(begin_s, work_s)
        return value

    return found


@dataclass(frozen=True)
class Deadline:
    """`work_s`: a reading of `worked_s()`; `clock_s`: monotonic seconds. It is past when either is, or the net's time is up."""

    work_s: float = INFINITE
    clock_s: float = INFINITE

    @staticmethod
    def after(work_s: float = INFINITE, clock_s: float = INFINITE) -> Deadline:
        """So many seconds of work, or by the clock, from now on."""
        return Deadline(worked_s() + work_s, monotonic() + clock_s)

    @property
    def past(self) -> bool:
        return worked_s() >= self.work_s or _late(self.clock_s)

    @property
    def work_left_s(self) -> float:
        """Seconds of work that are left, 0 or less when past."""
        return self.work_s - worked_s()

    @property
    def clock_left_s(self) -> float:
        """Seconds that are left by the clock, 0 or less when past."""
        return min(self.clock_s, _tally.until_s) - monotonic()


NEVER = Deadline()
