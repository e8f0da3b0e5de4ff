"""A repeated pattern's orders, pulled together at both ends of the step: what the V schedules do with what the pattern leaves empty there.

Source: P. Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, and what its authors publish: in unit slots every action before
the first micro-batch is back, and after the last one has entered, moves to the earliest free slot in which what it needs is done and no device keeps
more than the pattern does; then once more at the end, with weight gradients wherever slots are free.
Deviation: the second pass is left out beyond `MAX_PLACES` actions: it looks at memory anew for every slot.
Cost: O(actions · slots tried).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["reordered"]

Slots = list[list[list[int]]]  # [device][type][micro-batch]; types: F of the first stage, F, I of the second stage, I of the first stage, W
MAX_PLACES = 16_000  # some seconds


def reordered(offsets: Sequence[Sequence[int]], period: int, many: int) -> list[list[tuple[int, int]]]:
    """Per device its (type, micro-batch) in order; the k-th W belongs to the k-th I. `offsets[device]`: slots of micro-batch 0's F, F, I, I."""
    slots = [_with_weights([list(range(x, x + period * many, period)) for x in row]) for row in offsets]
    _move(slots, both_ends=True)
    slots = _squeezed(slots)
    if len(offsets) * many * 5 <= MAX_PLACES:
        slots = [row[:4] for row in slots]
        _move(slots, both_ends=False)
        slots = [_with_weights(row) for row in slots]
    return [[(t, m) for _, t, m in sorted((x, t, m) for t, row in enumerate(rows) for m, x in enumerate(row))] for rows in slots]


def _with_weights(rows: list[list[int]]) -> list[list[int]]:
    used = {x: t for t, row in enumerate(rows[:4]) for x in row}
    found, waiting = list[int](), 0
    slot = 0
    while len(found) < 2 * len(rows[0]):
        if slot in used:
            waiting += used[slot] >= 2
        elif waiting:
            found.append(slot)
            waiting -= 1
        slot += 1
    return [*rows[:4], found]


def _peak(rows: list[list[int]]) -> int:
    """Activations kept; where W's have no slots yet, one runs in every free slot."""
    at = {x: t for t, row in enumerate(rows) for x in row}
    held = most = waiting = 0
    for slot in range(max(at) + 1):
        t = at.get(slot, -1)
        held += t in (0, 1)
        waiting += t in (2, 3)
        if t == 4 or (t < 0 and len(rows) < 5 and waiting):
            held, waiting = held - 1, waiting - 1
        most = max(most, held)
    return most


def _needed(slots: Slots, d: int, t: int, m: int) -> int:
    """The last slot of what an action waits for; -1: nothing."""
    row = slots[d]
    found = [row[t][m - 1]] if m else []
    beside = d - 1 if t in (0, 2) else d + 1
    if t < 4 and 0 <= beside < len(slots):
        found.append(slots[beside][t][m])
    if 0 < t < 4:
        found.append(row[t - 1][m])
    elif t == 4:
        found.append(sorted(row[2] + row[3])[m])
    return max(found, default=-1)


def _move(slots: Slots, *, both_ends: bool) -> None:
    limit = max(map(_peak, slots))
    taken: list[set[int]] = [set() for _ in slots]
    middle = end = False
    last = len(slots[0][0]) - 1
    for slot, d, t, m in sorted((x, d, t, m) for d, rows in enumerate(slots) for t, row in enumerate(rows) for m, x in enumerate(row)):
        middle = middle or (t == 3 and d == 0)
        if end or (both_ends and not middle):
            for x in range(_needed(slots, d, t, m) + 1, slot):
                if x in taken[d]:
                    continue
                slots[d][t][m] = x
                if (both_ends and t >= 2) or _peak(slots[d]) <= limit:  # with W's in slots, only an earlier F keeps more
                    break
                slots[d][t][m] = slot
        end = end or (middle and t == 0 and m == last)
        taken[d].add(slots[d][t][m])


def _squeezed(slots: Slots) -> Slots:
    """The same orders, every action as early as it can be."""
    found: Slots = [[[0] * len(row) for row in rows] for rows in slots]
    free = [0] * len(slots)
    for _, d, t, m in sorted((x, d, t, m) for d, rows in enumerate(slots) for t, row in enumerate(rows) for m, x in enumerate(row)):
        found[d][t][m] = max(free[d], _needed(found, d, t, m) + 1 if t < 4 else 0)
        free[d] = found[d][t][m] + 1
    return found
