"""Which calls of the host launched what runs on a device, by the number that both have.

A number is mostly one call's. Where several calls have it (files of several processes joined, counters that began anew), k calls and k kernels are
taken in their order, one each; otherwise each kernel is shared by all those calls, and nothing says by how much. A call inside another one with its
number (the driver's inside the runtime's) is the same launch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .trace import I64, Trace

__all__ = ["launched"]


def launched(trace: Trace, calls: I64, kernels: I64, ids: I64) -> tuple[I64, NDArray[np.int64]]:
    """Pairs (row of a call, place in `kernels`), by place; a kernel without a call is in none, one that several share in several."""
    calls = calls[ids[calls] > 0]
    above = trace.parent[calls]
    calls = calls[~((above >= 0) & (ids[above] == ids[calls]) & np.isin(above, calls))]
    calls = calls[np.lexsort((trace.start_ns[calls], ids[calls]))]
    wanted = np.flatnonzero(ids[kernels] > 0)
    wanted = wanted[np.lexsort((trace.start_ns[kernels[wanted]], ids[kernels[wanted]]))]
    key, of = ids[calls], ids[kernels[wanted]]
    new = np.diff(of, prepend=0) != 0  # ids are positive
    first, run = np.flatnonzero(new), np.cumsum(new) - 1
    low, high = (np.searchsorted(key, of[first], side=side)[run] for side in ("left", "right"))
    same = np.diff(first, append=len(of))[run]  # kernels with the number
    turn = np.arange(len(of)) - first[run]
    single = (high - low == same) & (high > low)  # as many of either: one each, in their order
    low, high = np.where(single, low + turn, low), np.where(single, low + turn + 1, high)
    count = high - low
    place = np.repeat(np.arange(len(of)), count)
    call = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + low[place]
    order = np.argsort(wanted[place], kind="stable")
    return calls[call][order], wanted[place][order]
