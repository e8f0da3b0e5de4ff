"""Sparse sums up trees of simulated switches: pairs on every link beside the union formula, small tables, break-even with dense and with hosts.

Run: `python benchmarks/sparse_switch.py` (half a minute). 1,048,576 elements, supports drawn independently (seeds 0 to 2), densities 0.1 to 20 %,
trees of 8, 16 and 64 hosts. Times are the busiest link's bytes at 100 Gbit/s. Nothing here is measured on a wire.
"""

from __future__ import annotations

from math import prod
from typing import Any

import machine
import numpy as np

from meshwright.simulate.sparse_switch import SparseSwitch, random_supports, reduce_sparse, union_pairs, ways

ELEMENTS, RATE_BPS, SEEDS = 1 << 20, 12.5e9, 3
DENSITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
TREES = ((8,), (4, 4), (8, 8))
ASKED_APART = 0.03  # of the formula, at every link


def one(tree: tuple[int, ...], density: float, places: int, overlap: float, seed: int) -> tuple[Any, dict[str, float], float]:
    hosts = prod(tree)
    supports = random_supports(ELEMENTS, density, hosts, overlap=overlap, seed=seed)
    switch = SparseSwitch(places=places)
    found = reduce_sparse([(s, np.ones(len(s))) for s in supports], ELEMENTS, tree, switch)
    measured = sum(map(len, supports)) / hosts / ELEMENTS
    apart = [abs(x.pairs / x.senders / union_pairs(ELEMENTS, measured, x.hosts_below) - 1) for x in found.levels]
    apart.append(abs(len(found.indices) / union_pairs(ELEMENTS, measured, hosts) - 1))
    return found, ways(found, ELEMENTS, hosts, RATE_BPS, switch), max(apart)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for tree in TREES:
        for density in DENSITIES:
            if ELEMENTS * density * prod(tree) > 1 << 23:
                continue
            made = [one(tree, density, 1 << 19, 0.0, seed) for seed in range(SEEDS)]
            small, times, _ = one(tree, density, 1 << 11, 0.0, 0)
            like = one(tree, density, 1 << 11, 0.8, 0)[1]
            rows.append({
                "what": f"largest distance from the union formula, {prod(tree)} hosts in {'x'.join(map(str, tree))}, density {density:g}",
                "value": max(apart for _, _, apart in made), "unit": "share", "limit": ASKED_APART, "tree": tree, "density": density,
                "early_share_of_pairs_with_2048_places": sum(x.spilled for x in small.levels) / max(1, sum(x.pairs for x in small.levels)),
                "times_s": times, "best": min(times, key=times.__getitem__), "times_with_overlap_0.8_s": like,
                "best_with_overlap_0.8": min(like, key=like.__getitem__),
            })  # fmt: skip
            print(rows[-1], flush=True)
    machine.record("sparse_switch", rows, rate_Bps=RATE_BPS, elements=ELEMENTS)


if __name__ == "__main__":
    main()
