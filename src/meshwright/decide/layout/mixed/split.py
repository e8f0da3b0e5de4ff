"""The one automatic stage split: layers over stages of unlike speed so that the slowest stage is as fast as can be.

Exact: on a chain, whether a bottleneck time T can be met is decided by giving every stage as many layers as fit in T, and T is one of the
stage sums (binary search over T, then the least sum that is reachable). Embedding, head and vocabulary are layers like all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....errors import UsageError

__all__ = ["split_layers"]


def split_layers(times: Sequence[NDArray[np.float64]]) -> tuple[int, ...]:
    """`times[s][l]`: seconds of layer l on stage s. Layers per stage, each at least 1, with the least largest stage time.

    Raises: UsageError when there are fewer layers than stages. Cost: O(stages log layers) per probe, about 60 probes.
    """
    stages, layers = len(times), len(times[0])
    if layers < stages:
        raise UsageError(f"{stages} stages for {layers} layers", where="stages")
    alike: dict[int, NDArray[np.float64]] = {}
    sums = [alike.setdefault(id(t), np.concatenate(([0.0], np.cumsum(t)))) for t in times]

    def fill(limit: float) -> list[int] | None:
        at, counts = 0, []
        for s in range(stages):
            left = stages - s - 1
            end = int(np.searchsorted(sums[s], sums[s][at] + limit * (1 + 1e-12), side="right")) - 1
            end = min(max(end, at), layers - left)  # a layer stays for each stage behind
            if end == at:
                return None
            counts.append(end - at)
            at = end
        return counts if at == layers else None

    low, high = 0.0, max(float(s[-1]) for s in sums)
    best = fill(high)
    assert best is not None
    for _ in range(60):
        middle = (low + high) / 2
        found = fill(middle)
        if found is None:
            low = middle
        else:
            best = found
            starts = np.concatenate(([0], np.cumsum(found)))
            # the bottleneck really reached, not the one allowed: it is one of the finitely many stage sums
            high = min(middle, max(float(sums[s][starts[s + 1]] - sums[s][starts[s]]) for s in range(stages)))
        if high - low <= 1e-13 * high:
            break
    return tuple(best)
