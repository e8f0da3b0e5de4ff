"""Sparse sums over real sockets: pairs through switches in software, dense numbers through them, pairs among hosts, a ring; and what `auto` takes.

Run: `python benchmarks/sparse_aggregate.py [SECONDS]` (root; some seven quiet minutes). Eight workers on one switch, then four each on two
below a third, by links of 50 Mbit/s; 500,000 float32, packets of 1 KiB, densities of 0.1 to 20 %, places drawn independently, and places of which
four fifths are the same for all. A time is that of the slowest worker. `auto` first has calls of its own to try what is close (`tried_calls`). Then
all ways take turns, in an order drawn anew for each; ways more than 1.5 times behind drop out after three turns. A number is the median of the turns.
Turns go on until the fastest way has had SECONDS, at least seven: calls of 35 ms differ by a seventh from each other, and seven of them, once, made
a way 12 % slower than itself.

`ratio`: the median of `auto` over that of the fastest way, with the 95 % interval of a bootstrap over turns. `same`: the same ratio between the even
and the odd turns of the fastest way, which is what noise alone does. The fastest of several noisy medians is the fastest by luck too, so a perfect
choice has ratios above 1. `choice`: the median of the way that `auto` took most over that of the fastest. Every result is compared with the true sum.
Bytes: what came into worker 0's namespace, beside what the pairs of the union need.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import machine
import numpy as np
from aggregate import star, two_levels

from meshwright.fabric.fabric import Fabric
from meshwright.lab import Lab
from meshwright.lab.aggregators import PORT

ELEMENTS, WORKERS = 500_000, 8
DENSITIES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
OVERLAPS = (0.0, 0.8)
MEASURED_S = 3.0  # that the fastest way is measured
MIN_TURNS, FIRST_TURNS, MOST_TRIED = 7, 3, 20
DRAWS = 2000  # of the bootstrap
ASKED = 1.10  # of `auto`, beside the fastest way


def seats(lab: Lab, levels: bool) -> list[dict[str, Any]]:
    at = [f"{lab.wiring.address(WORKERS + i)}:{PORT}" for i in range(len(lab.fabric.switches))]
    if not levels:
        return [{"switch": at[0], "worker": w, "children": WORKERS, "above": []} for w in range(WORKERS)]
    half = WORKERS // 2
    above = [[{"address": at[2], "worker": w // half, "children": 2}] for w in range(WORKERS)]
    return [{"switch": at[w // half], "worker": w % half, "children": half, "above": above[w]} for w in range(WORKERS)]


def measured(name: str, fabric: Fabric, cases: list[dict[str, float]], measured_s: float, *, levels: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def sink(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if text.startswith('{"density"'):
            found.append(json.loads(text))
            row = found[-1]
            times = "  ".join(f"{way} {statistics.median(t) * 1e3:.1f}" for way, t in row["times_s"].items())
            case = f"{name}: density {row['density']:g}, alike {row['overlap']:g}"
            print(f"{case}: {times} ms; auto took {row['taken']} after {row['tried_calls']} calls; wrong {row['wrong']}", flush=True)
        elif "hostname" not in text and "socket.cpp" not in text:
            sys.stderr.write(f"{rank}: {text}")

    with Lab.up(fabric, verify=False) as lab:
        job = {"elements": ELEMENTS, "seats": seats(lab, levels), "cases": cases}
        job |= {"measured_s": measured_s, "min_turns": MIN_TURNS, "first_turns": FIRST_TURNS, "most_tried": MOST_TRIED}
        worker = str(Path(__file__).with_name("sparse_aggregate_worker.py"))
        lab.run([sys.executable, worker], env={"JOB": json.dumps(job)}, timeout_s=590, sink=sink)
    rows = []
    for got in found:
        times = {way: statistics.median(t) for way, t in got["times_s"].items()}
        best = min((way for way in times if way != "auto"), key=times.__getitem__)
        rows.append({
            "what": f"{name}: auto beside the fastest way ({best}), density {got['density']:g}, {got['overlap']:g} of places alike",
            "value": times["auto"], "unit": "s", "peer": times[best], "ratio": times["auto"] / times[best], "asked": ASKED,
            "interval": interval(got["times_s"]["auto"], got["times_s"][best]), "same": same(got["times_s"][best]),
            "choice": times[max(got["taken"], key=got["taken"].__getitem__)] / times[best], "medians_s": times, **got,
        })  # fmt: skip
    return rows


def interval(one: list[float], other: list[float]) -> list[float]:
    """The middle 95 % of the ratio of medians, turns drawn again."""
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(np.array(x), (DRAWS, len(x))), axis=1) for x in (one, other)]
    return [float(x) for x in np.percentile(medians[0] / medians[1], [2.5, 97.5])]


def same(times: list[float]) -> float:
    """How far the even and the odd turns of one way are apart."""
    halves = statistics.median(times[::2]), statistics.median(times[1::2])
    return max(halves) / min(halves)


def main(measured_s: float = MEASURED_S) -> None:
    cases = [{"density": d, "overlap": o} for o in OVERLAPS for d in DENSITIES]
    rows = measured("8 on one switch", star(WORKERS), cases, measured_s, levels=False)
    rows += measured("4 + 4 below a third switch", two_levels(WORKERS), cases, measured_s, levels=True)
    worst = max(rows, key=lambda row: row["ratio"])
    by_time, by_way = (sum(r[what] <= ASKED for r in rows) for what in ("ratio", "choice"))
    print(f"{by_time} of {len(rows)} at most {ASKED}; {by_way} by the way that was taken")
    low, high = worst["interval"]
    print(f"worst: {worst['what']}: {worst['ratio']:.3f} ({low:.3f} to {high:.3f}), same {worst['same']:.3f}")
    machine.record("sparse_aggregate", rows, elements=ELEMENTS, rate_bit_per_s=50_000_000, measured_s=measured_s)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else MEASURED_S)
