"""Search over schedules of a step (see step_schedule.py) for the fastest at every peak: an archive over the whole range at once.

From a schedule above a target, `descend` goes down: at the peak it tries to let each storage that is alive there, or all of a group, be computed
again after the peak, and takes the change with the least time per byte-action above the target removed. `improve` goes the other way: within the
target it keeps what saves most time. Kicks (keep a few at random, go down, improve) leave local optima. Targets are visited from the top down, each
from the solution before, then from the bottom up from the best in the archive. Every schedule evaluated on the way is noted in the archive. All
choices are by strict comparison in storage order and a fixed random sequence: equal inputs give equal archives, on every machine.
Cost: `effort` runs of nodes altogether, at most, beside one evaluation per seed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compile import allocating, called, copy_into
from .step_schedule import evaluate

__all__ = ["Archive", "archive_for", "measured", "random_below", "search"]

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
DEFAULT_SEED = 12345  # of the random sequence; any fixed number will do
CHANGES_PER_LOOK = 6  # changes tried one after the other from one look at the peak


class Archive(NamedTuple):
    """Per bin of peaks the fastest schedule seen: `time` (inf: none), `peak`, `hold_from`. Bins divide low..high evenly.

    `spent`: runs of nodes so far, their limit, and the state of the random sequence.
    """

    low: int
    high: int
    time: F64
    peak: I64
    hold_from: NDArray[np.int32]
    spent: I64


def archive_for(storages: int, low: int, high: int, *, bins: int, effort: int, seed: int = DEFAULT_SEED) -> Archive:
    return Archive(
        low, max(high, low + 1), np.full(bins, np.inf), np.zeros(bins, np.int64), np.zeros((bins, storages), np.int32),
        np.array([0, effort, seed], np.int64),
    )  # fmt: skip


@called
def measured(g, w, archive, hold, to, ahead):  # type: ignore[no-untyped-def]
    """(peak, seconds) of a schedule, which is noted in the archive where it is the fastest of its bin."""
    peak, seconds = evaluate(g, w, hold, to, ahead)
    archive.spent[0] += w.counts[0] + 1
    if seconds < np.inf and peak <= archive.high:
        bins = len(archive.time)
        i = min(max(((peak - archive.low) * bins) // (archive.high - archive.low + 1), 0), bins - 1)
        if seconds < archive.time[i] or (seconds == archive.time[i] and peak < archive.peak[i]):
            archive.time[i] = seconds
            archive.peak[i] = peak
            copy_into(archive.hold_from[i], hold)
    return peak, seconds


@called
def _above(w, target):  # type: ignore[no-untyped-def]
    total = 0.0
    for c in range(w.counts[0]):
        if w.live[c] > target:
            total += w.live[c] - target
    return total


@called
def _candidates(g, w, movable, hold, groups_ptr, moves, values, once):  # type: ignore[no-untyped-def]
    """Changes to try at the peak: (storage or -1 - group, hold_from), and how many."""
    at = w.counts[3]
    now = w.stage[at]
    count = 0
    for k in range(w.counts[2]):
        s = w.storage[k]
        there = w.birth[k] <= at < w.last[k]
        elsewhere = g.in_flight > 1 and w.birth[k] < w.counts[1] <= w.last[k]  # gone here, held for the other micro-batches
        if (there or elsewhere) and movable[s] and count < len(moves):
            moves[count] = s
            values[count] = 1 if once or not there else now + 1
            if there and w.born_in[k] == now and now > 0:
                values[count] = 0
            if values[count] != hold[s]:
                count += 1
    for i in range(len(groups_ptr) - 1):
        if count < len(moves):
            moves[count] = -1 - i
            values[count] = 1 if once else now + 1
            count += 1
    return count


@called
def _apply(hold, move, value, groups_ptr, groups):  # type: ignore[no-untyped-def]
    """Returns whether anything changed."""
    if move >= 0:
        changed = hold[move] != value
        hold[move] = value
        return changed
    changed = False
    for j in range(groups_ptr[-1 - move], groups_ptr[-move]):
        s = groups[j]
        if hold[s] < value:
            hold[s] = value
            changed = True
    return changed


@called
def _descend(g, w, archive, hold, to, ahead, target, movable, groups_ptr, groups, trial, moves, values, gain, once):  # type: ignore[no-untyped-def]
    """Changes `hold` until its peak is within the target; False when nothing helps any more or the effort is spent."""
    peak, seconds = measured(g, w, archive, hold, to, ahead)
    while peak > target:
        if archive.spent[0] > archive.spent[1] or seconds == np.inf:
            return False
        # Progress is the area above the target over all runs, not the peak alone: lowering one of several equal peaks counts.
        above = _above(w, target)
        count = _candidates(g, w, movable, hold, groups_ptr, moves, values, once)
        for i in range(count):
            copy_into(trial, hold)
            gain[i] = np.inf
            if _apply(trial, moves[i], values[i], groups_ptr, groups):
                _, s = measured(g, w, archive, trial, to, ahead)
                if s < np.inf:
                    a = _above(w, target)
                    if a < above:
                        # Seconds paid per byte-run taken away; the cheapest go first.
                        gain[i] = (s - seconds) / (above - a)
        taken = 0
        for _ in range(CHANGES_PER_LOOK):
            best = -1
            for i in range(count):
                if gain[i] < np.inf and (best < 0 or gain[i] < gain[best]):
                    best = i
            if best < 0:
                break
            copy_into(trial, hold)
            if _apply(trial, moves[best], values[best], groups_ptr, groups):
                p, s = measured(g, w, archive, trial, to, ahead)
                if s < np.inf:
                    a = _above(w, target)
                    # A change measured before others were made may be worth less now: it is taken if it still costs no more than a quarter
                    # above its price.
                    fair = gain[best] + 0.25 * abs(gain[best]) + 1e-18
                    if a < above and (taken == 0 or s - seconds <= fair * (above - a)):
                        copy_into(hold, trial)
                        peak, seconds, above = p, s, a
                        taken += 1
            gain[best] = np.inf
            if peak <= target:
                return True
        if taken == 0:
            return False
        peak, seconds = measured(g, w, archive, hold, to, ahead)
    return True


@called
def _again(w, movable, hold, moves):  # type: ignore[no-untyped-def]
    """Storages not kept from forward that are computed in backward, each once."""
    count = 0
    for k in range(w.counts[2]):
        s = w.storage[k]
        if w.born_in[k] > 0 and movable[s] and hold[s] > 0:
            seen = False
            for i in range(count):
                if moves[i] == s:
                    seen = True
            if not seen and count < len(moves):
                moves[count] = s
                count += 1
    return count


@called
def _improve(g, w, archive, hold, to, ahead, target, movable, trial, moves):  # type: ignore[no-untyped-def]
    """Keeps, one by one, what saves most time and stays within the target; returns the time."""
    _, seconds = measured(g, w, archive, hold, to, ahead)
    while archive.spent[0] <= archive.spent[1]:
        count = _again(w, movable, hold, moves)
        best, best_value, best_seconds, best_peak = -1, 0, seconds, 0
        for i in range(count):
            was = hold[moves[i]]
            for value in (0, 1):
                # Keep from forward (0), or from its first run in backward (1).
                if value < was:
                    hold[moves[i]] = value
                    p, s = measured(g, w, archive, hold, to, ahead)
                    if p <= target and (s < best_seconds or (best >= 0 and s == best_seconds and p < best_peak)):
                        best, best_value, best_seconds, best_peak = moves[i], value, s, p
            hold[moves[i]] = was
        if best < 0:
            return seconds
        hold[best] = best_value
        _, seconds = measured(g, w, archive, hold, to, ahead)
    return seconds


@called
def random_below(archive, below):  # type: ignore[no-untyped-def]
    """The next number of the archive's sequence, 0 to `below` - 1."""
    # The linear congruential generator of the C standard's example; the low bits, which repeat early, are dropped.
    archive.spent[2] = (archive.spent[2] * 1103515245 + 12345) % (1 << 31)
    return (archive.spent[2] >> 8) % below


@called
def _kick(g, w, archive, hold, to, ahead, target, movable, groups_ptr, groups, trial, other, moves, values, gain, once, kicks):  # type: ignore[no-untyped-def]
    """Tries to better `hold` (within the target) by keeping a few things more, going down again and improving."""
    _, seconds = measured(g, w, archive, hold, to, ahead)
    for _ in range(kicks):
        if archive.spent[0] > archive.spent[1]:
            return
        evaluate(g, w, hold, to, ahead)
        count = _again(w, movable, hold, moves)
        if count == 0:
            return
        copy_into(other, hold)
        for _ in range(1 + random_below(archive, 3)):
            # Keeping more than fits forces the descent to give up something else.
            other[moves[random_below(archive, count)]] = 0
        if _descend(g, w, archive, other, to, ahead, target, movable, groups_ptr, groups, trial, moves, values, gain, once):
            s = _improve(g, w, archive, other, to, ahead, target, movable, trial, moves)
            if s < seconds:
                seconds = s
                copy_into(hold, other)


@called
def _best_within(archive, target, hold):  # type: ignore[no-untyped-def]
    """Copies the fastest schedule within the target out of the archive; False when there is none."""
    best = -1
    for i in range(len(archive.time)):
        if archive.time[i] < np.inf and archive.peak[i] <= target and (best < 0 or archive.time[i] < archive.time[best]):
            best = i
    if best >= 0:
        copy_into(hold, archive.hold_from[best])
    return best >= 0


@called
def _search(  # type: ignore[no-untyped-def]
    g, w, archive, to, ahead, seeds, targets, bettered, movable, groups_ptr, groups, once, kicks, going_down, hold, trial, other, moves, values,
    gain,
):  # fmt: skip
    """`search`, in arrays that are made already."""
    for k in range(seeds.shape[0]):
        measured(g, w, archive, seeds[k], to, ahead)
    copy_into(hold, seeds[0])
    share = archive.spent[1]
    for i in range(len(targets)):
        # the way down has effort of its own, so that its last targets are reached; each target a part of what is left
        archive.spent[1] = archive.spent[0] + max((int(share * going_down) - archive.spent[0]) // (len(targets) - i), 1)
        if not _descend(g, w, archive, hold, to, ahead, targets[i], movable, groups_ptr, groups, trial, moves, values, gain, once):
            if not _best_within(archive, targets[i], other):
                continue
            copy_into(hold, other)
        _improve(g, w, archive, hold, to, ahead, targets[i], movable, trial, moves)
    first = len(targets) - bettered
    for i in range(len(targets) - 1, first - 1, -1):
        archive.spent[1] = archive.spent[0] + max((share - archive.spent[0]) // (i + 1 - first), 1)
        if _best_within(archive, targets[i], hold):
            _improve(g, w, archive, hold, to, ahead, targets[i], movable, trial, moves)
            _kick(g, w, archive, hold, to, ahead, targets[i], movable, groups_ptr, groups, trial, other, moves, values, gain, once, kicks)
    archive.spent[1] = share


@allocating
def search(g, w, archive, to, ahead, seeds, targets, bettered, movable, groups_ptr, groups, once, kicks, going_down):  # type: ignore[no-untyped-def]
    """Fills the archive. `seeds`: schedules to begin with, the first of them that of the most memory; `targets`: peaks, falling, of which the last
    `bettered` are gone back to. `once`: nothing runs more than twice (what is computed in backward is held to its last use). `going_down`: the share
    of the effort for the way down."""
    storages = seeds.shape[1]
    hold, trial, other = np.empty(storages, np.int32), np.empty(storages, np.int32), np.empty(storages, np.int32)
    most = storages + len(groups_ptr) + 64
    moves, values, gain = np.empty(most, np.int32), np.empty(most, np.int32), np.empty(most, np.float64)
    _search(
        g, w, archive, to, ahead, seeds, targets, bettered, movable, groups_ptr, groups, once, kicks, going_down, hold, trial, other, moves, values,
    gain,
    )  # fmt: skip
