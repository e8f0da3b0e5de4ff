"""Machines on hosts: empty hosts under every strategy and predictor, seconds that takes, a decision's latency, and real processes in control groups.

    shares: 200 hosts, 14 days, load 0.7, machines from 21 days before; figures from day 3 on. Points against best fit, per seed.
    recorded: the same on Huawei's recording (--trace), on 60 hosts; the size of a machine is all that is known. Seeds shuffle.
    learnt: the same with what can be learnt from the past: Kaplan-Meier, and binned hazards where LightGBM is installed.
    decisions: one decision at a time on 1,000 hosts, wall time of each.
    real: 60 processes that hold memory, each strategy with hosts of its own, which are control groups with a memory limit; 600 times faster.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np

from meshwright.cluster.generate_vms import synthetic_vms
from meshwright.cluster.vms import VmHosts, VmTrace
from meshwright.decide.cluster.vms import NAMES, forecast
from meshwright.drive.vms import DAY_S, Placer, compare_vms, place_vms, run_vms
from meshwright.errors import MissingExtra
from meshwright.io.cluster.vm_traces import read_huawei
from meshwright.run.machine.limits import Limits

PREDICTORS = ("perfect", "owners", "shuffled")
FROM_S = 3 * DAY_S
RECORDED_HOSTS = 60  # the recording takes 35 to 40 % of them
# of the real part
SPEED = 600.0  # virtual seconds in a real one
REAL_HOSTS, REAL_HOURS, HOST_BYTES = 8, 20.0, 256 << 20
PROCESSES = 60
REAL = ("least-allocated", "best-fit", "first-fit", "la", "nilas", "lava")
# Until a time of the clock that all processes of a machine share: an interpreter that starts slowly does not live longer for it.
HOLD = "import sys, time; b = bytearray(int(sys.argv[1])); time.sleep(max(0.0, float(sys.argv[2]) - time.monotonic()))"


def shares(traces: dict[int, VmTrace], hosts: int, predictors: tuple[str, ...], learn_s: float = 0.0) -> list[dict[str, Any]]:
    """By seed of the trace."""
    rows = []
    for seed, trace in traces.items():
        begun, used = time.perf_counter(), time.process_time()
        found = compare_vms(trace, VmHosts.of([hosts]), [kind() for kind in NAMES.values()], predictors, from_s=FROM_S, learn_s=learn_s, seed=seed)
        spent = {"wall_s": time.perf_counter() - begun, "cpu_s": time.process_time() - used}
        for x in found:
            m = x.run.measures
            rows.append({
                "seed": seed, "machines": int((trace.arrival_s >= 0).sum()), "strategy": x.strategy, "predictor": x.predictor, "load": m.load[0],
                "empty": m.empty_share, "most": x.most_empty_share, "density": m.density[0], "refused": m.refused, "moves": m.moves,
                "overdue": m.overdue_share, "deadlines": m.deadlines, "missed": m.missed, "doubtful": m.doubtful_share, "packed": m.packed_share,
                **spent,
            })  # fmt: skip
        print(seed, spent, flush=True)
    return rows


def checked(hosts: int, days: float) -> dict[str, Any]:
    """One placement of the size, proved."""
    trace = synthetic_vms(hosts, days=days, seed=1)
    used = time.process_time()
    made, _ = place_vms(trace, VmHosts.of([hosts]), NAMES["nilas"](), forecast("owners", trace), from_s=FROM_S)
    return {"stays": len(made.stays), "cpu_s": time.process_time() - used}


def decisions(hosts: int, days: float) -> list[dict[str, Any]]:
    trace = synthetic_vms(hosts, days=days, before_days=1.0, warm_days=0.0, seed=1)
    predicted, rows = forecast("owners", trace), []
    ends = sorted((float(trace.end_s[v]), v) for v in range(len(trace)))
    for name in ("first-fit", "best-fit", "most-allocated", "la", "la-binary", "aligned", "nilas", "lava"):
        placer, took, next_end = Placer(trace, VmHosts.of([hosts]), NAMES[name](), predicted), [], 0
        there: set[int] = set()
        for v, now_s in enumerate(trace.arrival_s.tolist()):
            while next_end < len(ends) and ends[next_end][0] <= now_s:
                if (gone := ends[next_end][1]) in there:
                    placer.leave(gone, ends[next_end][0])
                    there.discard(gone)
                next_end += 1
            begun = time.perf_counter()
            host = placer.arrive(v, now_s)
            took.append(time.perf_counter() - begun)
            if host >= 0:
                there.add(v)
        late = np.array(took[len(took) // 2 :])
        rows.append({"strategy": name, "hosts": hosts, "decisions": len(late), "median_s": float(np.median(late)),
            "p99_s": float(np.percentile(late, 99)),
            "worst_s": float(late.max())})
    return rows


def _real_trace(seed: int) -> VmTrace:
    """60 processes: two thirds live half an hour to two hours, the others 6 to 14 hours; an eighth, a quarter or half of a host."""
    rng, n = np.random.default_rng(seed), PROCESSES
    long = rng.random(n) < 1 / 3
    arrival_s = 3600 * np.sort(rng.uniform(0, REAL_HOURS * 0.75, n))
    life_s = 3600 * np.where(long, rng.uniform(6, 14, n), rng.uniform(0.5, 2, n))
    return VmTrace(
        name=f"real {seed}", resources=("memory",), kinds=("host",), shapes=("eighth", "quarter", "half"), size=np.array([[[0.125]], [[0.25]],
            [[0.5]]]),
        shape=rng.choice(3, n, p=(0.4, 0.4, 0.2)).astype(np.int32), arrival_s=arrival_s, end_s=arrival_s + life_s, owner=long.astype(np.int32),
        low=np.zeros(n, np.bool_), since_s=0.0, until_s=3600 * REAL_HOURS,
    )  # fmt: skip


class Cluster:
    """Hosts of one strategy: control groups, and the processes in them."""

    def __init__(self, name: str, trace: VmTrace) -> None:
        predicted, hosts = forecast("perfect", trace), VmHosts.of([REAL_HOSTS])
        self.name, self.trace = name, trace
        self.placer = Placer(trace, hosts, NAMES[name](guard=False) if NAMES[name].forecasts else NAMES[name](), predicted)
        self.simulated = run_vms(trace, hosts, NAMES[name](guard=False) if NAMES[name].forecasts else NAMES[name](), predicted,
            from_s=0.0).measures.empty_share
        self.limits = [Limits(memory_bytes=HOST_BYTES) for _ in range(REAL_HOSTS)]
        self.running: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        self.host_s, self.seen_s, self.failed, self.next, self.begun_s = 0.0, 0.0, 0, 0, 0.0

    def step(self, now_s: float) -> None:
        """Real seconds since the beginning: who ended is gone, who is due comes, hosts with a process are counted."""
        for v, (process, _) in list(self.running.items()):
            if process.poll() is not None:
                self.failed += process.returncode != 0
                self.placer.leave(v, now_s * SPEED)
                del self.running[v]
        self.placer.tick(now_s * SPEED)
        while self.next < len(self.trace) and self.trace.arrival_s[self.next] <= now_s * SPEED:
            v, self.next = self.next, self.next + 1
            host = self.placer.arrive(v, now_s * SPEED)
            if host >= 0:
                hold = int(float(self.trace.size[self.trace.shape[v], 0, 0]) * HOST_BYTES * 0.6)  # the rest is the interpreter's
                end_s = self.begun_s + float(self.trace.end_s[v]) / SPEED
                command = [sys.executable, "-S", "-E", "-c", HOLD, str(hold), str(end_s)]
                self.running[v] = (self.limits[host].start(command, stdout=subprocess.DEVNULL), host)
        self.host_s += (now_s - self.seen_s) * len({host for _, host in self.running.values()})
        self.seen_s = now_s


def real(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for seed in range(1, seeds + 1):
        clusters = [Cluster(name, _real_trace(seed)) for name in REAL]
        opened: list[Limits] = []
        try:
            for cluster in clusters:
                for limits in cluster.limits:
                    opened.append(limits.__enter__())
            begun, length_s = time.monotonic(), 3600 * REAL_HOURS / SPEED
            for cluster in clusters:
                cluster.begun_s = begun
            while (now_s := time.monotonic() - begun) < length_s:
                for cluster in clusters:
                    cluster.step(now_s)
                time.sleep(0.02)
        finally:
            for limits in opened:
                limits.close()
        for c in clusters:
            rows.append({"seed": seed, "strategy": c.name, "simulated": c.simulated, "measured": 1 - c.host_s / (c.seen_s * REAL_HOSTS),
                "failed": c.failed,
                "processes": c.next})
            print(rows[-1], flush=True)
    return rows


def _pairs(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of strategies that the simulation tells apart by half a point or more, over the means of all seeds; how many are measured in that
    order."""
    mean = {n: tuple(statistics.fmean(r[k] for r in rows if r["strategy"] == n) for k in ("simulated", "measured")) for n in REAL}
    told = [(a, b) for i, a in enumerate(REAL) for b in REAL[i + 1 :] if abs(mean[a][0] - mean[b][0]) >= 0.005]
    return len(told), sum((mean[a][0] - mean[b][0]) * (mean[a][1] - mean[b][1]) > 0 for a, b in told)


def points(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[float]]:
    base = {r["seed"]: r["empty"] for r in rows if r["strategy"] == "best-fit"}
    found: dict[tuple[str, str], list[float]] = {}
    for r in rows:
        found.setdefault((r["strategy"], r["predictor"]), []).append(100 * (r["empty"] - base[r["seed"]]))
    return found


def table_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = []
    if rows := result.get("shares"):
        gained = {key: statistics.fmean(values) for key, values in points(rows).items()}
        still = {key: value for key, value in gained.items() if key[0] not in ("lars", "least-allocated", "most-allocated")}
        for predictor, least in (("perfect", 3.0), ("owners", 1.3)):
            name, value = max(((k[0], v) for k, v in still.items() if k[1] == predictor), key=lambda x: x[1])
            table.append({"what": f"{predictor}: best without moves ({name}) over best fit", "value": value, "unit": "points", "at_least": least})
        table.append({"what": "owners: best without moves over first fit", "value": value - gained["first-fit", ""], "unit": "points",
            "at_least": 0.0})
        worst = min(((k[0], v) for k, v in gained.items() if k[1] == "shuffled"), key=lambda x: x[1])
        table.append({"what": f"shuffled: the worst strategy ({worst[0]}) over best fit", "value": worst[1], "unit": "points", "at_least": -1.0})
        table.append({"what": "all strategies, three predictors, median", "value": statistics.median(r["cpu_s"] for r in rows),
            "unit": "s of processor",
            "limit": 90.0})
        for (name, predictor), value in gained.items():
            table.append({"what": f"{name} {predictor}".strip() + ": over best fit, mean", "value": value, "unit": "points"})
        table.append({"what": "machines of 14 days, mean", "value": statistics.fmean(r["machines"] for r in rows), "unit": "machines"})
        table.append({"what": "load, mean", "value": statistics.fmean(r["load"] for r in rows if r["strategy"] == "best-fit"), "unit": "share"})
        table.append({"what": "best fit's empty hosts, mean", "value": statistics.fmean(r["empty"] for r in rows if r["strategy"] == "best-fit"),
            "unit": "share"})
        table.append({"what": "most empty hosts by the bound, mean",
            "value": statistics.fmean(r["most"] for r in rows if r["strategy"] == "best-fit"),
            "unit": "share"})
    if rows := result.get("recorded"):
        table += [{"what": what, "value": rows[0][key], "unit": unit} for what, key, unit in (("machines of the recording", "machines", "machines"),
            ("load of the cores", "load", "share"), ("most empty hosts by the bound", "most", "share"))]
        table.append({"what": "best fit's empty hosts", "value": next(r["empty"] for r in rows if r["strategy"] == "best-fit"), "unit": "share"})
    for part in ("learnt", "recorded"):
        for (name, predictor), values in points(result.get(part, [])).items():
            if predictor or part == "recorded":
                table.append({"what": f"{name} {predictor}".strip() + ": over best fit, mean", "value": statistics.fmean(values), "unit": "points"})
    for r in result.get("decisions", ()):
        table.append({"what": f"{r['strategy']}: a decision on {r['hosts']} hosts, p99", "value": r["p99_s"] * 1e3, "unit": "ms", "limit": 1.0})
    if rows := result.get("real"):
        told, same = _pairs(rows)
        table.append({"what": f"real: of {told} pairs of strategies that differ in simulation, so many measured in that order", "value": same,
            "unit": "pairs",
            "at_least": told})
        table.append({"what": "real: processes that failed", "value": sum(r["failed"] for r in rows), "unit": "processes", "limit": 0})
        table.append({"what": "real: largest difference of empty hosts to the simulation", "unit": "points",
            "value": max(100 * abs(r["measured"] - r["simulated"]) for r in rows)})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small; nothing is written")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", default="shares,learnt,decisions,real")
    parser.add_argument("--trace", help="of the part recorded: Huawei-East-1.csv, also as lifetimes (data/Huawei-East-1-lt.csv of ChanTinPing/SPANE)")
    parser.add_argument("--name", default="vms", help="of the file of results")
    args = parser.parse_args()
    seeds, parts = 1 if args.quick else args.seeds, args.parts.split(",")
    hosts, days = (20, 5.0) if args.quick else (200, 14.0)
    small = synthetic_vms(3, days=4, before_days=1, load=0.3, owners=5, seed=1)
    compare_vms(small, VmHosts.of([3]), [NAMES["lars"]()], ("owners",), from_s=FROM_S, learn_s=0.0)  # kernels are compiled before anything is timed
    result: dict[str, Any] = {"hosts": hosts, "days": days}
    if "shares" in parts or "learnt" in parts:
        traces = {seed: synthetic_vms(hosts, days=days, seed=seed) for seed in range(1, seeds + 1)}
    if "shares" in parts:
        result["shares"] = shares(traces, hosts, PREDICTORS)
        result["checked"] = checked(hosts, days)
    if "learnt" in parts:
        predictors = ("kaplan-meier",)
        try:
            forecast("hazards", small)
            predictors += ("hazards",)
        except MissingExtra as error:
            print(error.message)
        result["learnt"] = shares(traces, hosts, predictors)
    if "recorded" in parts:
        recording = dict.fromkeys(range(1, seeds + 1), read_huawei(args.trace))
        result["recorded"] = shares(recording, RECORDED_HOSTS, ("perfect", "kaplan-meier", "shuffled"), learn_s=FROM_S)
    if "decisions" in parts:
        result["decisions"] = decisions(1000 if not args.quick else 50, 1.0)
    if "real" in parts:
        result["real"] = real(1 if args.quick else 2)
    table = table_of(result)
    for line in table:
        print(line)
    if not args.quick:
        command = f"python benchmarks/vms.py --seeds {seeds} --parts {args.parts}" + (f" --trace {Path(args.trace).name}" if args.trace else "")
        machine.record(args.name, table, command=command, runs=result)


if __name__ == "__main__":
    main()
