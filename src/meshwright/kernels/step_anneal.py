"""Betters one schedule of a step (see step_schedule.py) by many small changes, each tried at the price of a single evaluation.

A change moves when one, two or three storages are held: kept from forward, computed again once, computed again after the present peak, or from
any stage on. It stays when it makes the schedule hardly worse than it was, where bytes above the target cost time; what "hardly" is falls to
nothing. Changes of two at once are what a budget without room needs: one thing goes so that another may stay. Every schedule evaluated is noted in
the archive.
Source: threshold accepting (Dueck, Scheuer, Journal of Computational Physics 90, 1990). Deviation: the thresholds fall linearly with the effort that
is spent. No exponentials and a fixed random sequence: equal inputs give equal schedules, on every machine.
"""

from __future__ import annotations

import numpy as np

from .compile import allocating, called
from .step_schedule import NEVER
from .step_search import measured, random_below

__all__ = ["anneal"]


@called
def _value(archive, held, beyond, stages):  # type: ignore[no-untyped-def]
    """From which stage on a storage is held next. `held`: now; `beyond`: the stage after the peak's."""
    draw = random_below(archive, 100)
    if held != 0:
        if draw < 60:
            return 0
        draw = (draw - 60) * 5 // 2
    if draw < 40:
        return beyond
    if draw < 75:
        return 1
    return 2 + random_below(archive, stages) if draw < 95 else NEVER


@called
def _anneal(g, w, archive, hold, to, ahead, target, choice, threshold_s, price, moved, was):  # type: ignore[no-untyped-def]
    """`anneal`, in arrays that are made already."""
    if len(choice) == 0:
        return
    peak, seconds = measured(g, w, archive, hold, to, ahead)
    cost = seconds + price * max(0, peak - target)
    beyond = w.stage[w.counts[3]] + 1
    stages = len(g.time) - g.boundary
    begin, limit = archive.spent[0], archive.spent[1]
    while archive.spent[0] < limit:
        # Threshold accepting: what may get worse shrinks with the effort that is left.
        threshold = threshold_s * (limit - archive.spent[0]) / (limit - begin)
        draw = random_below(archive, 100)
        count = 1 if draw < 60 else 2 if draw < 92 else 3
        changed = False
        for i in range(count):
            s = choice[random_below(archive, len(choice))]
            moved[i], was[i] = s, hold[s]
            hold[s] = _value(archive, hold[s], beyond, stages)
            changed |= hold[s] != was[i]
        if not changed:
            # A change that changes nothing still costs something, so the loop ends.
            archive.spent[0] += 1
            continue
        peak, seconds = measured(g, w, archive, hold, to, ahead)
        found = seconds + price * max(0, peak - target)
        if found <= cost + threshold:
            cost, beyond = found, w.stage[w.counts[3]] + 1
        else:
            # Backwards: a storage may have been moved twice, and its first value is the one to restore.
            for i in range(count - 1, -1, -1):
                hold[moved[i]] = was[i]


@allocating
def anneal(g, w, archive, hold, to, ahead, target, choice, threshold_s, price):  # type: ignore[no-untyped-def]
    """Changes `hold` until the archive's effort is spent. `choice`: storages that may be moved; `threshold_s`: seconds by which a change may make it
    worse at first; `price`: seconds per byte above the target."""
    _anneal(g, w, archive, hold, to, ahead, target, choice, threshold_s, price, np.empty(3, np.int64), np.empty(3, np.int32))
