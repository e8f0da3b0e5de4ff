"""The best choice of every layer of one stage within its memory: dynamic programme over layers and memory.

Cite: Miao et al., "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism", PVLDB 16, 2022, section 3.2:
f(l, e, s) = min over s' of f(l-1, e - mem(l, s), s') + time(l, s) + transform(s', s).
Left open: memory that is needed by one layer at a time (what is computed again). Our answer: the programme is solved for every value that
this can have, with the layers' choices that need no more, and that much less memory for the rest.
Invariant: the result fits, and no assignment whose memories, rounded up to whole units, fit is faster. Cost: O(layers · units · choices²) per value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....cite import Cite

__all__ = ["CITE", "best_choices"]

CITE = Cite(
    key="miao2022galvatron",
    title="Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism",
    year=2022,
    venue="PVLDB 16(3), arXiv:2211.13878",
)
F64 = NDArray[np.float64]


def best_choices(
    time_s: F64, memory_bytes: F64, working_bytes: F64, transform_s: F64, limit_bytes: float, unit_bytes: float
) -> tuple[float, list[int]] | None:
    """`time_s[l, s]`, `memory_bytes[l, s]`, `working_bytes[l, s]` of layer l under choice s; `transform_s[l, s', s]` on entering layer l.

    (seconds, choice per layer), or None where nothing fits. `unit_bytes`: resolution of memory; sizes are rounded up to it.
    """
    best: tuple[float, list[int]] | None = None
    for cap in np.unique(working_bytes):
        # one layer works at a time, so only the largest working memory counts: guessed first, then it is a constant
        allowed = working_bytes <= cap
        if not allowed.any(axis=1).all():
            continue
        found = _solve(np.where(allowed, time_s, np.inf), memory_bytes, transform_s, limit_bytes - cap, unit_bytes)
        if found is not None and (best is None or found[0] < best[0] * (1 - 1e-12)):
            best = found
    return best


def _solve(time_s: F64, memory_bytes: F64, transform_s: F64, limit_bytes: float, unit_bytes: float) -> tuple[float, list[int]] | None:
    layers, choices = time_s.shape
    units = int(limit_bytes // unit_bytes)
    if units < 0:
        return None
    need = np.ceil(memory_bytes / unit_bytes - 1e-9).astype(np.int64)
    least = np.array([need[x][np.isfinite(time_s[x])].min() for x in range(layers)])
    spare = units - int(least.sum())  # memory beyond what every layer takes at least
    if spare < 0:
        return None
    # what every layer takes in any case leaves the table: it is as long as the memory that is really chosen over
    need = need - least[:, None]
    state = np.full((spare + 1, choices), np.inf)
    origin: list[NDArray[np.int64]] = []
    for x in range(layers):
        fresh = np.full((spare + 1, choices), np.inf)
        came = np.zeros((spare + 1, choices), dtype=np.int64)
        for s in range(choices):
            n = int(need[x, s])
            if n > spare or not np.isfinite(time_s[x, s]) or n < 0:
                continue
            if x == 0:
                fresh[n:, s] = time_s[x, s]
                continue
            entering = state[: spare + 1 - n] + transform_s[x, :, s][None, :]
            came[n:, s] = entering.argmin(axis=1)
            fresh[n:, s] = entering.min(axis=1) + time_s[x, s]
        state = fresh
        origin.append(came)
    at = int(state[spare].argmin())
    total = float(state[spare, at])
    if not np.isfinite(total):
        return None
    chosen, e = [at], spare
    for x in range(layers - 1, 0, -1):
        before = int(origin[x][e, at])
        e -= int(need[x, at])
        at = before
        chosen.append(at)
    return total, chosen[::-1]
