"""Permutations and all-to-alls: many paths per pair beside every other strategy, and beside the bound, on the simulator.

Run: `python benchmarks/multipath.py` (two minutes; simulated times, so a busy machine changes nothing). Of every preset, operation and size: the
bound over `multipath`'s time (1 = no schedule is faster), and how many times longer the fastest other strategy and the vendor's choice take.
Permutations: every rank sends to the next one, and a random one.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import machine
import numpy as np

from meshwright.decide.collective import CollectiveProblem, auto
from meshwright.io.fabric.name import load_fabric

FABRICS = ("dgx1-v100:1", "dgx1-v100:2", "mi250:1", "mi250:2", "mi300x:1", "dgx-a100:2", "dragonfly:4")
SIZES = (1 << 20, 1 << 26, 1 << 30)
EACH_S = 5.0


def problems(fabric: Any, size: int) -> Iterator[tuple[str, CollectiveProblem]]:
    order = np.random.default_rng(0).permutation(len(fabric.devices)).tolist()
    peers = [0] * len(order)
    for a, b in zip(order, order[1:] + order[:1], strict=True):
        peers[b] = a
    yield "shift", CollectiveProblem.on(fabric, "permute", size)
    yield "random permutation", CollectiveProblem.on(fabric, "permute", size, peers=tuple(peers))
    yield "all-to-all", CollectiveProblem.on(fabric, "all-to-all", size)


def main() -> None:
    rows = []
    for name in FABRICS:
        fabric = load_fabric(name)
        for size in SIZES:
            for what, problem in problems(fabric, size):
                ranked = {r.strategy: r for r in auto(problem, search=True, each_s=EACH_S) if r.time_s is not None}
                ours = ranked.pop("multipath", None)
                if ours is None or ours.plan is None or ours.plan.bound is None or not ours.time_s:
                    continue
                other, vendor = min(ranked.values(), key=lambda r: r.time_s or 0.0), ranked.get("nccl")
                row = {
                    "what": f"{name} {what}, {size} B", "value": round(float(Fraction(ours.plan.bound.value)) / ours.time_s, 4),
                    "unit": "bound over time", "other": other.strategy, "other_over_ours": round((other.time_s or 0.0) / ours.time_s, 3),
                    "vendor_over_ours": round(vendor.time_s / ours.time_s, 3) if vendor is not None and vendor.time_s else None,
                }  # fmt: skip
                rows.append(row)
                print(f"{row['what']:<50} {row['value']:>7}  {other.strategy} {row['other_over_ours']}, vendor {row['vendor_over_ours']}", flush=True)
    machine.record("multipath", rows, command="python benchmarks/multipath.py")


if __name__ == "__main__":
    main()
