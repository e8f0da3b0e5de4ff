"""Orders and allocations of the cluster decision on 128 GPUs, with the profiles that Synergy's authors published: rounds, bounds, whole queues.

    python benchmarks/cluster.py [--quick] [--seeds 5] [--parts rounds,burst,steady,large]

16 servers of 8 GPUs, 24 cores, 500 GB; splits of image, language and speech models (20,70,10) and (33,33,33); rounds of 300 s; no cost of
moving, as in the simulator of Synergy. rounds: 200 jobs wait, FIFO: GPUs x W of every allocation over the bound of prices and, for `priced`,
over that of fillings, and seconds per round; the same on 1,024 GPUs without fillings. burst: 300 jobs at 20 an hour. steady: 700 jobs at 3.6
and 4.2 an hour, jobs 200 to 499 counted. large: 2,000 jobs simulated. TUNE, GREEDY and proportional are this repository's own, in the same run
on the same queues.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import machine
import numpy as np

from meshwright.cluster import Server, Servers
from meshwright.cluster.generate import synthetic
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import plan_allocation, simulate_queue

SPLITS = ((20.0, 70.0, 10.0), (33.0, 33.0, 33.0))
ALLOCATIONS = ("proportional", "greedy", "tune", "priced")


def servers(count: int) -> Servers:
    return Servers(servers=tuple(
        Server(name=f"s{n}", gpus=tuple(f"s{n}g{k}" for k in range(8)), cores=24, memory_bytes=500 * 10**9) for n in range(count)
    ))  # fmt: skip


def rounds(seeds: int, count: int, fillings: bool) -> list[dict[str, Any]]:
    rows = []
    for split in SPLITS:
        for seed in range(seeds):
            queue = synthetic(200 * count // 16, per_hour=20, split=split, seed=seed)
            row: dict[str, Any] = {"gpus": 8 * count, "split": split, "seed": seed}
            for name in (*ALLOCATIONS, "opt"):
                begun = time.process_time()
                found, _ = plan_allocation(servers(count), queue, order("fifo")(), allocation(name)())
                row |= {name: found.speed / float(found.bound), f"{name}_s": time.process_time() - begun}
            if fillings:
                found, _ = plan_allocation(servers(count), queue, order("fifo")(), allocation("priced")(), bound="fillings")
                row["priced_over_fillings"] = found.speed / float(found.bound)
            rows.append(row)
    for split in SPLITS:
        mine = [r for r in rows if r["split"] == split]
        names = [n for n in (*ALLOCATIONS, "opt", "priced_over_fillings", "priced_s") if n in mine[0]]
        print(f"{8 * count} GPUs {split}: " + ", ".join(f"{n} {statistics.median(r[n] for r in mine):.3f}" for n in names), flush=True)
    return rows


def queues(what: str, jobs: int, per_hour: float, count: tuple[int, int] | None, seeds: int, names: tuple[str, ...],
           orders: list[str]) -> list[dict[str, Any]]:
    rows = []
    for split in SPLITS:
        for first in orders:
            for seed in range(seeds):
                queue = synthetic(jobs, per_hour=per_hour, split=split, seed=seed)
                for name in names:
                    begun = time.process_time()
                    found = simulate_queue(servers(16), queue, order(first)(), allocation(name)(), count=count)
                    m = found.measures
                    rows.append({
                        "what": what, "per_hour": per_hour, "split": split, "seed": seed, "order": first, "allocation": name,
                        "mean_h": m.mean_s / 3600,
                        "p99_h": m.p99_s / 3600, "makespan_h": m.makespan_s / 3600, "gpus": m.gpu_utilisation, "below_floor": m.below_floor,
                        "violations": found.violations, "rho_p99": m.rho_p99, "cpu_s": time.process_time() - begun,
                    })  # fmt: skip
            told = []
            for name in names:
                mine = [r for r in rows if r["split"] == split and r["order"] == first and r["allocation"] == name]
                told.append(f"{name} mean {np.mean([r['mean_h'] for r in mine]):.2f} p99 {np.mean([r['p99_h'] for r in mine]):.0f} makespan "
                            f"{np.mean([r['makespan_h'] for r in mine]):.1f} below floor {sum(r['below_floor'] for r in mine)}")  # fmt: skip
            print(f"{what} {per_hour}/h {split} {first}: " + "; ".join(told), flush=True)
    return rows


def mean(rows: list[dict[str, Any]], what: str, **where: Any) -> float:
    return statistics.fmean(r[what] for r in rows if all(r[k] == v for k, v in where.items()))


def table_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked beside what was reached."""
    table: list[dict[str, Any]] = []
    for split in SPLITS:
        for gpus, limit in ((128, 1.0), (1024, 3.0)):
            mine = [r for r in result.get("rounds", ()) if r["split"] == split and r["gpus"] == gpus]
            if not mine:
                continue
            for name, least in (("priced", 0.90), ("tune", None), ("opt", None), ("proportional", None)):
                row: dict[str, Any] = {"what": f"{gpus} GPUs, {split}: {name} over the bound of prices, median", "unit": "share"}
                table.append(row | {"value": statistics.median(r[name] for r in mine)} | ({"at_least": least} if least else {}))
            if "priced_over_fillings" in mine[0]:
                value = statistics.median(r["priced_over_fillings"] for r in mine)
                table.append({"what": f"{gpus} GPUs, {split}: priced over the bound of fillings, median", "value": value, "unit": "share"})
            table.append({"what": f"{gpus} GPUs: a round with check and bound, median", "value": statistics.median(r["priced_s"] for r in mine),
                "unit": "s of processor",
                          "limit": limit})  # fmt: skip
        for first in dict.fromkeys(r["order"] for r in (*result.get("burst", ()), *result.get("steady", ()))):
            where = {"split": split, "order": first}
            if rows := result.get("burst"):
                ratio = mean(rows, "mean_h", allocation="priced", **where) / mean(rows, "mean_h", allocation="tune", **where)
                table.append({"what": f"burst {split} {first}: mean time over TUNE's", "value": ratio, "unit": "ratio", "limit": 0.98})
                ratio = mean(rows, "makespan_h", allocation="priced", **where) / mean(rows, "makespan_h", allocation="greedy", **where)
                table.append({"what": f"burst {split} {first}: makespan over GREEDY's", "value": ratio, "unit": "ratio", "limit": 1.0})
            for rate in (3.6, 4.2):
                if rows := result.get("steady"):
                    at = {"per_hour": rate, **where}
                    ours = mean(rows, "mean_h", allocation="priced", **at)
                    ratio = ours / mean(rows, "mean_h", allocation="tune", **at)
                    table.append({"what": f"steady {rate}/h {split} {first}: mean time over TUNE's", "value": ratio, "unit": "ratio", "limit": 1.0})
                    row = {"what": f"steady {rate}/h {split} {first}: proportional's mean time over ours", "unit": "ratio"}
                    row["value"] = mean(rows, "mean_h", allocation="proportional", **at) / ours
                    table.append(row | ({"at_least": 1.25} if split == SPLITS[1] else {}))
    runs = [*result.get("burst", ()), *result.get("steady", ())]
    if runs:
        below = sum(r["below_floor"] for r in runs if r["allocation"] == "priced")
        table.append({"what": "jobs below their floor under priced, in all queues", "value": below, "unit": "jobs", "limit": 0})
    if "large" in result:
        table.append({"what": "2,000 jobs simulated under FIFO and priced", "value": result["large"]["cpu_s"], "unit": "s of processor",
            "limit": 30.0})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, small queues; nothing is written")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", default="rounds,burst,steady,large")
    parser.add_argument("--orders", default="fifo,srtf,las", help="of burst and steady")
    parser.add_argument("--name", default="cluster", help="of the file of results")
    args = parser.parse_args()
    seeds, parts, orders = 1 if args.quick else args.seeds, args.parts.split(","), args.orders.split(",")
    simulate_queue(servers(2), synthetic(5, per_hour=20), order("fifo")(), allocation("priced")())  # kernels are compiled before anything is timed
    result: dict[str, Any] = {}
    if "rounds" in parts:
        result["rounds"] = [*rounds(seeds, 16, True), *rounds(seeds, 128, False)]
    if "large" in parts:
        queue = synthetic(200 if args.quick else 2000, per_hour=4.0, split=SPLITS[1], seed=1)
        begun, used = time.perf_counter(), time.process_time()
        simulate_queue(servers(16), queue, order("fifo")(), allocation("priced")())
        result["large"] = {"jobs": len(queue.jobs), "wall_s": time.perf_counter() - begun, "cpu_s": time.process_time() - used}
    if "burst" in parts:
        result["burst"] = queues("burst", 100 if args.quick else 300, 20.0, None, seeds, ALLOCATIONS, orders)
    if "steady" in parts:
        jobs, count = (300, (100, 200)) if args.quick else (700, (200, 500))
        result["steady"] = [r for rate in (3.6, 4.2) for r in queues("steady", jobs, rate, count, seeds, ("proportional", "tune", "priced"), orders)]
    table = table_of(result)
    for line in table:
        print(line)
    if not args.quick:
        machine.record(args.name, table, command=f"python benchmarks/cluster.py --seeds {seeds} --parts {args.parts} --orders {args.orders}",
            runs=result)


if __name__ == "__main__":
    main()
