"""The best division of one server's cores and memory among the jobs on it: a multiple-choice knapsack, exactly.

Every job takes one of its options, a pair of cores and steps of memory with what it gains. `best[c, u]` is the most that the jobs so far gain with
c cores and u steps. Cost: O(jobs · cores · steps · options).
"""

from __future__ import annotations

import numpy as np

from .compile import kernel

__all__ = ["divide"]


@kernel
def divide(classes, count, first, cores, steps, gain, best, choice, picked):  # type: ignore[no-untyped-def]
    """The most that the first `count` entries of `classes` gain together, -inf if they do not fit; `picked[i]`: number of the option of each.

    `first[k] .. first[k + 1]`: options of class k in `cores`, `steps`, `gain`. Scratch: `best` [C + 1, U + 1], `choice` [count or more, C + 1, U
    + 1].
    """
    most_c, most_u = best.shape[0] - 1, best.shape[1] - 1
    for c in range(most_c + 1):
        for u in range(most_u + 1):
            best[c, u] = 0.0
    for i in range(count):
        k = classes[i]
        last = i == count - 1  # of what all gain, only the corner is asked, and the place beside it
        for c in range(most_c, most_c - 2 if last else -1, -1):
            for u in range(most_u, most_u - 1 if last else -1, -1):
                found, which = -np.inf, -1
                for o in range(first[k], first[k + 1]):
                    if cores[o] <= c and steps[o] <= u and (cores[o] > 0 or steps[o] > 0):
                        value = best[c - cores[o], u - steps[o]] + gain[o]
                        if value > found:
                            found, which = value, o
                best[c, u] = found
                choice[i, c, u] = which
    result = best[most_c, most_u]
    if result > -np.inf:
        c, u = most_c, most_u
        for i in range(count - 1, -1, -1):
            o = choice[i, c, u]
            picked[i] = o
            c -= cores[o]
            u -= steps[o]
    return result
