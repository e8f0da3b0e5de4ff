"""One clock for all ranks, from the collectives they share.

A collective ends on no rank before it has begun on all: for ranks i, j the shift x of each clock obeys x_i - x_j <= end_j - start_i, over all
shared collectives. These bounds close under shortest paths; what is left for a rank is an interval, and a rank whose interval is empty was not
part of the same run. Within it the estimate is the median difference of ends, since the last message of a collective reaches all ranks at about the
same time. The half width of the interval is what the data proves about the error. Ranks of one machine, by the host name in their traces, share
a clock: they get one shift, unless their collectives contradict it. Without this, ranks that leave a collective at unlike times (gloo on busy
cores) would seem to have clocks that differ.
Cost: O(ranks^2 x collectives) for ranks up to `MAX_CLOSED_RANKS`, beyond that each rank is bounded against the reference alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, UsageError
from .lanes import RankView

__all__ = ["Clocks", "Shared", "align", "shared_meetings"]

MAX_CLOSED_RANKS = 64  # ranks whose bounds are closed under shortest paths, which takes the cube of their number
MAX_CLOCK_DIFFERENCE_NS = 60 * 10**9  # between wall clocks of one run: a minute; more is taken for traces of different runs
I64 = NDArray[np.int64]
_UNBOUNDED_NS = np.int64(1) << 62  # in place of a bound that nothing gives


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """Meetings that more than one rank took part in: `row[m, r]` is the meeting's row in view r's `meetings`, or -1."""

    keys: tuple[str, ...]
    row: NDArray[np.int32]

    def times(self, views: Sequence[RankView]) -> tuple[I64, I64]:
        """(arrivals, ends), a column per rank; where a rank took no part, the arrival is far in the past and the end far in the future."""
        arrives, leaves = np.full(self.row.shape, -_UNBOUNDED_NS), np.full(self.row.shape, _UNBOUNDED_NS)
        for r, view in enumerate(views):
            here = self.row[:, r] >= 0
            arrives[here, r], leaves[here, r] = view.meetings.arrives[self.row[here, r]], view.meetings.leaves[self.row[here, r]]
        return arrives, leaves


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Per rank (in the order of the views): what was added to its clock, and the most that may be wrong (-1: nothing bounds it).

    `spread_ns`: how far the ends of shared collectives still differ from the first rank's, in the median: what the estimate is likely to be wrong.
    """

    shift_ns: tuple[int, ...]
    uncertain_ns: tuple[int, ...]
    spread_ns: tuple[int, ...]
    collectives: int
    warnings: tuple[str, ...] = ()


def shared_meetings(views: Sequence[RankView]) -> Shared:
    """Meetings by key, in the order of the rank that has most of them."""
    places = [{key: i for i, key in enumerate(v.meetings.key)} for v in views]
    count: dict[str, int] = {}
    for view in sorted(views, key=lambda v: -len(v.meetings)):
        for key in view.meetings.key:
            count[key] = count.get(key, 0) + 1
    keys = [k for k, n in count.items() if n > 1]
    return Shared(keys=tuple(keys), row=np.array([[p.get(k, -1) for p in places] for k in keys], np.int32).reshape(len(keys), len(views)))


def align(views: Sequence[RankView], *, one_clock: bool = False) -> tuple[list[RankView], Clocks, Shared]:
    """The views on the first one's clock; with `one_clock` they are on it already.

    Raises: UsageError for two traces of one rank, or ranks that share no collective; FormatError where no shift of clocks fits.
    """
    ranks = [v.rank for v in views]
    twice = next((r for r in ranks if ranks.count(r) > 1), None)
    if twice is not None:
        given = ", ".join(v.source for v in views if v.rank == twice)
        raise UsageError(f"rank {twice} is there more than once: {given}", hint="give one trace per rank, of one run")
    shared = shared_meetings(views)
    warnings = list(_missing(views))
    if len(views) == 1 or one_clock:
        none = (0,) * len(views)
        return list(views), Clocks(shift_ns=none, uncertain_ns=none, spread_ns=none, collectives=len(shared.keys), warnings=tuple(warnings)), shared
    for r, view in enumerate(views):
        if not (shared.row[:, r] >= 0).any():
            hint = "give traces of one run, profiled over the same steps"
            raise UsageError(f"rank {view.rank} has no collective in common with the other ranks", where=view.source, hint=hint)
    times = shared.times(views)
    together = _together(views, shared)
    limit = _limits(views, shared, *times, messages=True)
    # An empty interval: some pair of events contradicts another.
    if together.any() and any(-limit[0, r] > limit[r, 0] for r in range(len(views))):
        # Messages without numbers are matched by their order alone, which two channels between the same ranks may break.
        limit = _limits(views, shared, *times, messages=False)
        warnings.append("messages do not match by their order: clocks rest on collectives alone")
    high, low = limit[:, 0], -limit[0]
    shift, uncertain, spread = ([0] * len(views) for _ in range(3))
    for rows in _clocks(views, low, high):
        if rows == [0]:  # the clock that all others are told against
            continue
        found = _shift(views, rows, shared, times[1], together, high=int(high[rows].min()), low=int(low[rows].max()))
        for r in rows:
            shift[r], uncertain[r], spread[r] = found[0], found[1], found[2][r]
    moved = [v.aligned(s) for v, s in zip(views, shift, strict=True)]
    clocks = Clocks(
        shift_ns=tuple(shift), uncertain_ns=tuple(uncertain), spread_ns=tuple(spread), collectives=len(shared.keys), warnings=tuple(warnings)
    )  # fmt: skip
    return moved, clocks, shared


def _clocks(views: Sequence[RankView], low: I64, high: I64) -> list[list[int]]:
    """Views that share a clock: those of one machine, if one shift fits them all. A view without a machine's name is alone."""
    machines: dict[str, list[int]] = {}
    for r, view in enumerate(views):
        machines.setdefault(view.machine or f"\0{r}", []).append(r)
    return [part for rows in machines.values() for part in ([rows] if low[rows].max() <= high[rows].min() else [[r] for r in rows])]


def _shift(
    views: Sequence[RankView], rows: Sequence[int], shared: Shared, leaves: I64, together: NDArray[np.bool_], *, high: int, low: int
) -> tuple[int, int, dict[int, int]]:
    """(shift, most that it may be wrong, spread of ends by view) of views on one clock, which the bounds leave between `low` and `high`."""
    last = views[rows[-1]]
    if low > high:
        raise FormatError(
            f"no shift of rank {last.rank}'s clock fits: some collective would end before it had begun on all ranks "
            f"(by {(low - high) / 1e3:.0f} us)",
            where=last.source, hint="are the traces of one run and the same steps?",
        )  # fmt: skip
    differences = {}
    for r in rows:
        both = (shared.row[:, 0] >= 0) & (shared.row[:, r] >= 0)
        both = both & together if (both & together).any() else both
        differences[r] = leaves[both, 0] - leaves[both, r]
    every = np.concatenate(list(differences.values()))
    middle = int(np.median(every)) if len(every) else (low + high) // 2
    # The estimate may not leave what the data proves.
    value = min(max(middle, low), high)
    if abs(value) > MAX_CLOCK_DIFFERENCE_NS and min(int(views[0].host.start[0]), int(last.host.start[0])) > 10**18:
        raise UsageError(
            f"the clocks of ranks {views[0].rank} and {last.rank} differ by {abs(value) / 1e9:.0f} s: these are not of one run",
            where=last.source,
        )  # fmt: skip
    bounded = high < _UNBOUNDED_NS // 4 and low > -(_UNBOUNDED_NS // 4)
    spread = {r: int(np.median(np.abs(d - value))) if len(d) else -1 for r, d in differences.items()}
    return value, max(high - value, value - low) if bounded else -1, spread


def _together(views: Sequence[RankView], shared: Shared) -> NDArray[np.bool_]:
    """Which shared meetings nobody leaves before all have arrived."""
    out = np.zeros(len(shared.keys), bool)
    for r, view in enumerate(views):
        here = np.flatnonzero(shared.row[:, r] >= 0)
        out[here] |= view.meetings.everyone[shared.row[here, r]]
    return out


def _limits(views: Sequence[RankView], shared: Shared, arrives: I64, leaves: I64, *, messages: bool) -> I64:
    """limit[i, j]: x_i - x_j is at most this, closed by shortest paths. A message bounds its receiver by its sender alone."""
    ranks, far = len(views), _UNBOUNDED_NS // 2
    everyone, source, destination = _together(views, shared), np.full(len(shared.keys), -1), np.full(len(shared.keys), -1)
    for r, view in enumerate(views) if messages else ():
        here = np.flatnonzero(shared.row[:, r] >= 0)
        rows = shared.row[here, r]
        source[here], destination[here] = view.meetings.source[rows], view.meetings.destination[rows]
    limit = np.full((ranks, ranks), far)
    for i in range(ranks):
        for j in range(ranks) if ranks <= MAX_CLOSED_RANKS or i == 0 else (0,):
            bound = everyone | ((source == views[i].rank) & (destination == views[j].rank))
            both = bound & (arrives[:, i] > -_UNBOUNDED_NS) & (leaves[:, j] < _UNBOUNDED_NS)
            if i != j and both.any():
                limit[i, j] = (leaves[both, j] - arrives[both, i]).min()
    np.fill_diagonal(limit, 0)
    for k in range(ranks) if ranks <= MAX_CLOSED_RANKS else ():
        limit = np.minimum(limit, limit[:, k : k + 1] + limit[k : k + 1, :])
    return limit


def _missing(views: Sequence[RankView]) -> tuple[str, ...]:
    """Ranks whose trace has fewer steps than the others'."""
    most = max(len(v.steps) for v in views)
    return tuple(f"rank {v.rank} has {len(v.steps)} of {most} steps" for v in views if len(v.steps) < most)
