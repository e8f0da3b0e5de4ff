"""Which entries a rank sends: those above a threshold that is found exactly, estimated, or reused from earlier steps.

exact: the k-th largest magnitude, every step. reuse: exact every `period` steps, in between guessed from the steps before, a little low; the k
largest of what is above it are sent, and where too few or far too many are, it is found exactly at once.
gaussian: from a normal distribution fitted to the vector, corrected until the count fits (Gaussiank). sampled: exact in a sample (DGC).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...kernels.entries import add_select, count_from, entry_values, moments, move_tail, select_from
from ...kernels.select import INFINITE, kth_magnitude, magnitude_of
from .state import Entries, RankState

__all__ = ["LocalSelection", "Selected", "ThresholdKind", "ahead", "bits_of", "followed", "largest_entries", "scaled", "take_largest", "value_of"]

ThresholdKind = Literal["exact", "reuse", "gaussian", "sampled"]
TAIL_EXPONENT = 0.15  # the k-th magnitude is a threshold times (count / k) to this power: a normal distribution's tail near 1 %
MAX_TAIL_FACTOR = 1.1  # by which that moves a threshold at most
GROWTH_SHARE = 0.75  # of the last step's growth of the threshold that is expected again
GUESS_SHARE = 0.98  # of the expected threshold that is guessed: a little low, so that more entries are found than needed
FIRST_GROWTH_FACTOR = 2**0.5  # from an empty residual to one that holds a gradient, if gradients are independent; more if they are alike
MAX_KEPT_SHARE = 4 / 3  # of k: no more entries of a sum are kept
MIN_FOUND_SHARE = 1 / 3  # of k: with fewer entries above it a threshold is found anew
GAUSSIAN_STEP_FACTOR = 1.02  # by which a fitted threshold is moved until the count fits (Gaussiank)
MAX_GAUSSIAN_STEPS = 20  # of those; then the count is taken as it is
ROOM_FACTOR = 8  # times k entries are kept in one pass: the k-th largest of so many costs less than another pass over the vector
SAMPLE_SHARE = 0.01  # of the vector in which the threshold is found exactly (DGC)
MAX_FLOAT32 = float(np.finfo(np.float32).max)


def bits_of(value: float) -> int:
    """Magnitude of a value as bits, at least 1."""
    return max(1, magnitude_of(value))


def value_of(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))


def scaled(bits: int, factor: float) -> int:
    """A threshold times a factor; it changes even where it is too small to be multiplied, and stays finite."""
    moved = bits_of(min(value_of(bits) * factor, MAX_FLOAT32))
    moved = max(moved, bits + 1) if factor > 1 else min(moved, bits - 1)
    return max(1, min(moved, INFINITE - 1))


@dataclass
class Selected:
    """`entries` in order of index. `wrong`: index of an element that is not finite, or -1; then nothing was selected."""

    entries: Entries
    wrong: int = -1


class LocalSelection:
    """Adds the gradient to the residual and selects; `low` is the threshold in force (0: none yet)."""

    def __init__(self, kind: ThresholdKind, k: int) -> None:
        if kind not in get_args(ThresholdKind):
            raise UsageError(f"no threshold {kind!r}", where="threshold", hint=f"one of {', '.join(get_args(ThresholdKind))}")
        self.kind, self.k, self.low = kind, k, 0
        self.kth = self._before = 0  # k-th magnitudes of this step (or what they seem to be) and the last one; of all committed once complete
        self._first = False  # this step starts from an empty residual

    def select(self, state: RankState, gradient: Any, *, anew: bool) -> Selected:
        """Writes `state.sums`. `anew`: find the threshold exactly, whatever the kind."""
        most = int(MAX_KEPT_SHARE * self.k) + 1
        room = state.entries("selected", max(most, min(ROOM_FACTOR * self.k, state.elements)))
        if self.kind == "reuse" and self.low and not anew:
            found, wrong, where = add_select(state.residual, gradient, state.sums, state.bits, np.int32(self.low), room)
            if wrong:
                return Selected(room[:0], where)
            return self._reused(state, room, found)
        _, wrong, where = add_select(state.residual, gradient, state.sums, state.bits, np.int32(INFINITE), room)
        if wrong:
            return Selected(room[:0], where)
        if anew or self.kind in ("exact", "reuse"):
            return self._exact(state, room)
        low = self._gaussian(state) if self.kind == "gaussian" else self._sampled(state)
        above, equal = select_from(state.bits, 0, np.int32(low), len(room), room)
        if above + equal > len(room):
            return self._exact(state, room)
        self.kth = low
        return Selected(room[: above + equal])

    def commit(self) -> None:
        """The step is complete: its threshold is known, the next one's is guessed."""
        self.low = scaled(self.kth, FIRST_GROWTH_FACTOR * GUESS_SHARE) if self._first else ahead(self._before, self.kth)
        self._before, self._first = self.kth, False

    def _exact(self, state: RankState, room: Entries) -> Selected:
        low = self.kth = max(1, kth_magnitude(state.sums, self.k))
        self._first = not self._before and not state.residual.any()
        return Selected(take_largest(state.bits, low, self.k, room, state.entries("dropped", len(room))))

    def _reused(self, state: RankState, room: Entries, found: int) -> Selected:
        if found > len(room) or (found < MIN_FOUND_SHARE * self.k and self.low > 1):
            return self._exact(state, room)
        if found < self.k:
            self.kth = followed(self.low, found, self.k)
            return Selected(room[:found])
        kept, _ = largest_entries(room[:found], self.k, state.entries("dropped", found))  # all that could be among the k largest is here
        self.kth = max(1, int(np.abs(np.ascontiguousarray(entry_values(room[:kept]))).min().view(np.int32)))
        return Selected(room[:kept])

    def _gaussian(self, state: RankState) -> int:
        n = state.elements
        total, squares = moments(state.sums)
        spread = max(0.0, squares / n - (total / n) ** 2) ** 0.5
        low = bits_of(spread * NormalDist().inv_cdf(1 - min(0.999, self.k / n) / 2))
        for _ in range(MAX_GAUSSIAN_STEPS):
            count = count_from(state.bits, np.int32(low))
            if 4 * count < 3 * self.k and low > 1:
                low = scaled(low, 1 / GAUSSIAN_STEP_FACTOR)
            elif 4 * count > 5 * self.k:
                low = scaled(low, GAUSSIAN_STEP_FACTOR)
            else:
                break
        return low

    def _sampled(self, state: RankState) -> int:
        rng = np.random.default_rng((state.rank, state.step))
        size = max(min(state.elements, 1024), int(SAMPLE_SHARE * state.elements))
        sample = state.sums[rng.integers(0, state.elements, size)]
        return max(1, kth_magnitude(sample, max(1, round(self.k * size / state.elements))))


def take_largest(bits: NDArray[np.int32], low: int, k: int, room: Entries, dropped: Entries) -> Entries:
    """The k largest, given the k-th largest magnitude `low`; of those equal to it the first. `room`, `dropped`: 2k rows, or as many as bits."""
    above, equal = select_from(bits, 0, np.int32(low), k, room)
    kept, _ = move_tail(room[: above + min(equal, k)], low, k - above, dropped)
    return room[:kept]


def largest_entries(entries: Entries, k: int, dropped: Entries) -> tuple[int, int]:
    """Move the k largest (of equal ones the first) to the front, in order, and the others to `dropped`; how many (stay, went)."""
    values = np.ascontiguousarray(entry_values(entries))
    low = max(1, kth_magnitude(values, k))
    above = count_from(values.view(np.int32), np.int32(low + 1))
    kept, left = move_tail(entries, low, k - above, dropped)
    return kept, left


def followed(low: int, count: int, k: int) -> int:
    """About the k-th magnitude, where `count` entries are above `low`; the power is that of a normal distribution's tail near 1 %."""
    factor = max(1 / MAX_TAIL_FACTOR, min(MAX_TAIL_FACTOR, (count / k) ** TAIL_EXPONENT))
    return low if factor == 1 else scaled(low, factor)


def ahead(before: int, now: int) -> int:
    """The threshold for the next step, from the k-th magnitudes of the last two (0: there was none)."""
    growth = 1 + GROWTH_SHARE * (1 - value_of(before) / value_of(now)) if before else 1.0
    return scaled(now, GUESS_SHARE * max(1 / MAX_TAIL_FACTOR, growth))
