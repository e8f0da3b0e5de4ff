"""Cutting a sequence into consecutive parts, one per expected content, by dynamic programming; for `annotate.structural`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .compile import kernel

__all__ = ["best_split"]

I64 = NDArray[np.int64]


@kernel  # type: ignore[untyped-decorator]
def best_split(
    group: I64, prefix: I64, least: I64, most: I64, weight: I64, outside: I64, opens: I64, place: I64, longest: I64, cost: I64, back: I64, parts: I64
) -> int:  # fmt: skip
    """Cheapest way to give part c of `len(least)` an interval of the sequence, in order, and the rest to nobody; returns its cost.

    `group[j]`: kind of item j; `prefix[g, j]`: items of kind g among the first j. A part is charged `weight[g]` per item of kind g short of
    `least[c, g]` or beyond `most[c, g]`, one if it does not begin with kind `opens[c]`, and one if it begins far from `place[c]`; an item in
    no part is charged `outside[g]`. Parts are at most `longest[c]` long. Fills `parts[c] = (begin, end)`; `cost` and `back` are scratch of
    (parts + 1) x (items + 1). Cost: O(parts · items · longest · kinds).
    """
    n, kinds = len(group), len(weight)
    count = len(least)
    far = np.int64(1) << 60
    for c in range(count + 1):
        for j in range(n + 1):
            cost[c, j] = far
    # cost[c, j]: the first c parts lie in the first j items, at least cost; back: length of the last part, -1 for an item outside.
    cost[0, 0] = 0
    for c in range(count + 1):
        for j in range(n + 1):
            now = cost[c, j]
            if now >= far:
                continue
            if j < n and now + outside[group[j]] < cost[c, j + 1]:
                cost[c, j + 1] = now + outside[group[j]]
                back[c, j + 1] = -1
            if c == count:
                continue
            # Length 0 is a part that never ran: charged for all that it lacks.
            for length in range(min(longest[c], n - j) + 1):
                charge = now
                for g in range(kinds):
                    have = prefix[g, j + length] - prefix[g, j]
                    charge += weight[g] * (max(least[c, g] - have, 0) + max(have - most[c, g], 0))
                if length:
                    charge += (1 if group[j] != opens[c] else 0) + (1 if abs(j - place[c]) > 1 else 0)
                if charge < cost[c + 1, j + length]:
                    cost[c + 1, j + length] = charge
                    back[c + 1, j + length] = length
    # Walk back from the end over what was cheapest.
    c, j = count, n
    while c > 0 or j > 0:
        length = back[c, j]
        if length < 0 or c == 0:
            j -= 1
        else:
            c -= 1
            parts[c, 0], parts[c, 1] = j - length, j
            j -= length
    return int(cost[count, n])
