"""Begin at all ranks at one moment, where they share a clock.

Ranks leave a barrier apart by the latencies of its messages: over links of 5 ms eight ranks were up to 35 ms apart. What begins early waits for what
begins late, and the wait would count as the collective's time. So ranks of one machine, which a lab's ranks are too, agree on a moment of its clock.
Left alone are ranks of several machines, whose clocks differ by more than what is timed, and beginnings that are close anyway.
Invariant: all ranks decide alike, from numbers that all have heard.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["Start", "clock_number"]

MIN_APART_S = 1e-3  # below it, sleeping until a moment is no better than a barrier
MAX_SHARE = 0.05  # of what is timed
MAX_DROPPED = 6  # iterations, while a moment is looked for that all ranks reach: on a busy machine there may be none
BOOT = Path("/proc/sys/kernel/random/boot_id")


def clock_number() -> float:
    """Equal where `time.monotonic` is of one clock: the same boot of one kernel. Otherwise another number each time."""
    try:
        text = BOOT.read_bytes() + Path("/proc/self/timens_offsets").read_bytes()
    except OSError:
        return float(time.monotonic_ns())
    return float(int.from_bytes(hashlib.sha256(text).digest()[:6], "big"))


class Start:
    """`most` gives, of each value, the largest of all ranks'. `begin()`, do what is timed, then `counts(seconds)`; ranks call them alike."""

    def __init__(
        self, most: Callable[[list[float]], list[float]], *, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep, clock_is: float | None = None,
    ) -> None:  # fmt: skip
        self.most, self.clock, self.sleep = most, clock, sleep
        mine = clock_number() if clock_is is None else clock_is
        highest, lowest = most([mine, -mine])
        self.shared = highest == -lowest
        self.ahead_s, self.dropped, self.began_s = 0.0, 0, 0.0

    def begin(self) -> None:
        """Return when all ranks have called it."""
        [latest] = self.most([self.clock()])
        if self.ahead_s:
            self.sleep(min(max(latest + self.ahead_s - self.clock(), 0.0), self.ahead_s))
        self.began_s = self.clock()

    def counts(self, lasted_s: float) -> tuple[bool, float]:
        """(whether all began together, or nearly; the longest of all ranks' seconds)."""
        longest, last, first = self.most([lasted_s, self.began_s, -self.began_s])
        apart_s = last + first
        if not self.shared or apart_s <= max(MIN_APART_S, MAX_SHARE * longest) or self.dropped == MAX_DROPPED:
            return True, longest
        self.ahead_s = max(self.ahead_s, 2 * apart_s)
        self.dropped += 1
        return False, longest
