"""When shards arrive that travel along all their shortest ways, and which neighbours can bring them.

At step t a rank receives the shards of all ranks t hops away, each from neighbours that are t - 1 hops from its owner. Shards with the same such
neighbours are a class; a class is a bit mask of ports. `kernels.port_division` divides the classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....kernels.port_division import Division, Ports, divide

__all__ = ["Division", "Ports", "breadth_first", "distances", "divide"]


def distances(senders: Sequence[Ports]) -> NDArray[np.int32]:
    """[v, u]: hops from v to u, -1 where there is no way. `senders[u]`: who has a way straight to u."""
    n = len(senders)
    receivers: list[list[int]] = [[] for _ in range(n)]
    for u, ports in enumerate(senders):
        for w in ports:
            receivers[w].append(u)
    hops = np.full((n, n), -1, np.int32)
    for v in range(n):
        hops[v, v], front = 0, [v]
        while front:
            after = []
            for w in front:
                for u in receivers[w]:
                    if hops[v, u] < 0:
                        hops[v, u] = hops[v, w] + 1
                        after.append(u)
            front = after
    return hops


def breadth_first(senders: Sequence[Ports], hops: NDArray[np.int32], rank: int) -> list[dict[int, list[int]]]:
    """Per step, class -> the ranks whose shards arrive; bit i of a class is the i-th neighbour in order of number."""
    ports = sorted(senders[rank])
    steps: list[dict[int, list[int]]] = [{} for _ in range(int(hops[:, rank].max(initial=0)))]
    for v in range(len(senders)):
        t = int(hops[v, rank])
        if t > 0:
            mask = sum(1 << i for i, w in enumerate(ports) if hops[v, w] == t - 1)
            steps[t - 1].setdefault(mask, []).append(v)
    return steps
