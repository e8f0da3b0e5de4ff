"""Further calls of modules that ran before in the same forward pass, told by what backward does not do after them.

A gradient is accumulated once per parameter: after the node of its first call, which backward reaches last. So an operator with parameters
after whose node nothing is accumulated was a further call of a module that an earlier operator called. Of which one, the names say: the
stretch around it repeats an earlier one. This holds for a kind of operator only where each of its modules was called by one operator
that accumulates; with frozen parameters it says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..trace.trace import Trace
from .backward import ACCUMULATES, forward_of
from .slices import Units

__all__ = ["ACCUMULATED", "NO_NODE", "UNACCUMULATED", "gradients_of", "sources_of"]

NO_NODE, UNACCUMULATED, ACCUMULATED = -1, 0, 1
MAX_OPERATORS = 20_000  # operators of a stretch beyond which repetitions are not looked for: each is compared with all that came before


def gradients_of(trace: Trace, units: Units) -> NDArray[np.int8]:
    """Per slice that is the head of a forward unit: whether a gradient is accumulated right after a node that it made."""
    found = np.full(len(trace), NO_NODE, np.int8)
    rows = np.flatnonzero(units.evaluate)
    if not len(rows):
        return found
    accumulates = np.array([ACCUMULATES in n for n in trace.names], bool)[trace.name[rows]]
    made_by = forward_of(trace, units, rows)
    head = np.where(made_by >= 0, units.head[np.maximum(made_by, 0)], -1)
    found[head[~accumulates & (head >= 0)]] = UNACCUMULATED
    place = np.maximum.accumulate(np.where(accumulates, -1, np.arange(len(rows))))  # the node before each, which is none's of another track
    place = np.where((place >= 0) & (trace.track[rows[np.maximum(place, 0)]] == trace.track[rows]), place, -1)
    owners = head[place[accumulates & (place >= 0)]]
    found[owners[owners >= 0]] = ACCUMULATED
    return found


def sources_of(names: Sequence[str], further: NDArray[np.bool_], fixed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each operator that belongs to a further call the earlier operator whose module it is, else -1.

    `further`: operators known to be of further calls; `fixed`: those known not to be. What lies between and beside belongs to the call
    as far as it repeats the same earlier operators.
    """
    found = np.full(len(names), -1, np.int64)
    if not further.any() or len(names) > MAX_OPERATORS:
        return found
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    text = np.array([numbers[name] for name in names], np.int64)
    at = 0
    for begin in np.flatnonzero(further).tolist():
        if begin < at:
            continue
        source, left, right = _longest(text, begin, fixed, at)
        if right == 0:
            continue
        here = np.arange(begin - left, begin + right)
        found[here] = here - (begin - source)
        at = begin + right
    return found


def _longest(text: NDArray[np.int64], begin: int, fixed: NDArray[np.bool_], least: int) -> tuple[int, int, int]:
    """(source, how far it agrees before, how far from `begin` on) of the earlier place whose surroundings agree farthest; the nearest of equals."""
    blocked = np.flatnonzero(fixed[begin:])
    limit = int(blocked[0]) if len(blocked) else len(text) - begin
    best = (0, 0, 0)
    for source in np.flatnonzero(text[:begin] == text[begin])[::-1].tolist():
        unequal = np.flatnonzero(text[source : source + limit] != text[begin : begin + limit])
        right = int(unequal[0]) if len(unequal) else limit
        left = 0
        for here, there in zip(range(begin - 1, least - 1, -1), range(source - 1, -1, -1), strict=False):
            if fixed[here] or text[here] != text[there]:
                break
            left += 1
        if left + right > best[1] + best[2]:
            best = (source, left, right)
    return best
