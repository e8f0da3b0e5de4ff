"""The least time that hosts can be in use: at every moment at least as many as the load of the scarcest resource, rounded up.

A machine takes at least its share of the kind of host that suits it best, and no host holds more than itself. It holds for any strategy, also one
that knows all ends and moves machines for nothing; what is refused does not count. Cost: O(n log n).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ....bound import Bound, Certificate
from ....cluster.vms import WHOLE, VmTrace

__all__ = ["used_hosts_bound"]

ROUNDING = 1e-9  # by which the sum of floats is taken down


def used_hosts_bound(trace: VmTrace, placed: NDArray[np.bool_], resized: NDArray[np.bool_], *, from_s: float, until_s: float) -> Bound:
    """Host seconds between the two times. `placed`: machines that were not refused; `resized`: which of the trace's resizes, by time, were done."""
    least = np.minimum(trace.billionths.min(1), WHOLE)
    vms = np.flatnonzero(placed)
    at_s = [np.maximum(trace.arrival_s[vms], trace.since_s), trace.end_s[vms]]
    change = [least[trace.shape[vms]], -least[trace.shape[vms]]]
    shape = trace.shape.copy()
    for r, done in zip(sorted(trace.resizes), resized.tolist(), strict=True):
        if done:
            at_s += [np.array([r.at_s, trace.end_s[r.vm]])]
            step = least[r.shape] - least[shape[r.vm]]
            change += [np.stack([step, -step])]
            shape[r.vm] = r.shape
    times, changes = np.concatenate(at_s), np.concatenate(change)
    order = np.argsort(times, kind="stable")
    times, load = np.clip(times[order], from_s, until_s), np.cumsum(changes[order], 0)
    needed = -(-load.max(1) // WHOLE) if len(load) else np.zeros(0, np.int64)
    spans = np.diff(np.append(times, until_s))
    total_s = float((np.maximum(needed, 0) * spans).sum())
    value = int(total_s * (1 - ROUNDING) * 1000)
    return Bound(quantity="time of hosts in use", value=f"{value}/1000", unit="s",
        certificate=Certificate(kind="hosts", data={"from_s": from_s, "until_s": until_s}))
