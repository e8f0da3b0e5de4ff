"""Is the choice of `auto` ever slower than a strategy that can be named? Every one that has a plan, executed in the lab beside the choice.

Run: `python benchmarks/auto_choice.py [--fabrics slow-node ...] [--ops all-reduce ...] [--sizes 65536 ...] [--rounds 3]` (root or user namespaces).
Small fabrics with slow links, so that links and not this machine's cores limit. A case is a fabric, an operation and a size: all strategies, the
choice among all (`auto`, never gloo) and gloo run in turns, so that slow minutes of the machine meet all alike. A time is the least of all rounds'
medians, of the slowest rank; results are verified element by element. A row's `value` is the choice's time over that of the fastest strategy: what
exceeds 1 is a wrong choice, or noise where the choice is that strategy (`same` is then true, and the ratio says how large noise is here).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from executed import islands, links, star
from lab_worker import measure

from meshwright.decide.collective import STRATEGIES, CollectiveProblem
from meshwright.fabric.fabric import Device, Fabric

OPS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all")
SIZES = (1 << 16, 1 << 20)
ITERATIONS = 3


def cables(mbit: int) -> Fabric:
    """Four devices in a ring of cables, no switch."""
    row = tuple(x for i in range(4) for x in links(f"n{i}", f"n{(i + 1) % 4}", mbit))
    return Fabric(name="cables", devices=tuple(Device(name=f"n{i}", kind="cpu") for i in range(4)), links=row)


FABRICS = {"slow-node": lambda: star(80, 80, 80, 20), "islands": lambda: islands(2, 80, 40), "cables": lambda: cables(80)}


def names_of(fabric: Fabric, op: str, size_bytes: int) -> list[str]:
    """Strategies that may have a plan; those that only choose among others are what is judged here."""
    problem = CollectiveProblem.on(fabric, op, size_bytes)
    return [kind.name for kind in STRATEGIES if not kind.chooses and kind.applies(problem)]


def rows_of(name: str, fabric: Fabric, op: str, size_bytes: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One case's row, from all that was measured of it."""
    times: dict[str, list[float]] = {}
    ran: dict[str, str] = {}
    for row in found:
        key = row["backend"] if row.get("backend") else (row.get("strategies") or ["auto"])[0]
        times.setdefault(key, []).append(row["time_s"])
        ran[key] = row.get("ran") or ""
    wrong = sum(row["wrong"] or 0 for row in found)
    least = {key: min(of) for key, of in times.items()}
    # A name that has no plan here is run by gloo, which says so; it is no strategy's time.
    named = {key: s for key, s in least.items() if key not in ("auto", "gloo") and key in ran[key]}
    best = min(named, key=named.__getitem__)
    return {
        "what": f"{name}, {op} of {size_bytes} B: the choice's time over the fastest named strategy's",
        "value": round(least["auto"] / named[best], 4), "unit": "x", "limit": 1.0, "chosen": ran["auto"], "fastest": best,
        "same": best in ran["auto"], "over_gloo": round(least["auto"] / least["gloo"], 4), "wrong": wrong,
        "spread_of_choice": round(max(times["auto"]) / least["auto"], 4), "times_s": times,
    }  # fmt: skip


def keep(rows: list[dict[str, Any]], part: str | None) -> None:
    """Write all rows so far, with the worst and the median."""
    if part:
        machine.keep_part(part, rows)
        return
    values = [row["value"] for row in rows]
    worst = {"what": "worst of all cases", "value": max(values), "unit": "x", "limit": 1.0}
    typical = {"what": "median of all cases", "value": round(statistics.median(values), 4), "unit": "x", "limit": 1.0}
    machine.record("auto_choice", [worst, typical, *rows])


def main() -> None:
    from meshwright.lab import Lab

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fabrics", nargs="+", choices=tuple(FABRICS), default=tuple(FABRICS))
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", metavar="FILE", help="write the rows here instead of the results")
    parser.add_argument("--join", nargs="+", metavar="FILE", help="record what --part wrote, instead of running anything")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.join:
        rows, _ = machine.join_parts(args.join)
    for name in () if args.join else args.fabrics:
        fabric = FABRICS[name]()
        with Lab.up(fabric) as lab:
            for op in args.ops:
                for size in args.sizes:
                    every: dict[str, Any] = {"op": op, "sizes": [size], "iterations": ITERATIONS, "warmup": 1}
                    jobs = [every, {**every, "backend": "gloo"}, *({**every, "strategies": [s]} for s in names_of(fabric, op, size))]
                    turns = [job for turn in range(args.rounds) for job in (jobs if turn % 2 else jobs[::-1])]
                    rows.append(rows_of(name, fabric, op, size, measure(lab, turns)))
                    sys.stdout.write(f"{rows[-1]['what']}: {rows[-1]['value']} ({rows[-1]['chosen']} against {rows[-1]['fastest']})\n")
                    sys.stdout.flush()
                    keep(rows, args.part)  # what a run that is ended early has measured stays
    if args.join:
        keep(rows, None)


if __name__ == "__main__":
    main()
