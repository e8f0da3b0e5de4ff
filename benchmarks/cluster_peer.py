"""Synergy's own simulator (github.com/msr-fiddle/synergy) beside ours on the same traces: mean completion times under FIFO, SRTF and LAS.

    python benchmarks/cluster_peer.py --peer FOLDER/simulator [--jobs 300] [--per-hour 20] [--seeds 1]

FOLDER is a checkout of theirs. Nothing of it is changed on the disk: a runner beside it gives names that Python 3.10 took away, and stand-ins for
modules that only deployments, pictures and OPT need (RPC, numa, pandas, matplotlib, cvxpy). Their replay format has whole numbers of iterations:
both sides are given the durations that follow. Gangs of 1, 2, 4 and 8 GPUs. Theirs speeds a job up by a line between its fair and its ideal share
and by one matrix per gang size, ours by the matrix of one GPU. Proportional shares are the same on both sides, so that row compares the simulators.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import msgspec
import numpy as np

from cluster import SPLITS, servers
from meshwright.cluster.generate import synthetic
from meshwright.cluster.queue import Queue
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import simulate_queue

ITERATION_S = {
    "alexnet": 0.6, "shufflenet": 0.615, "res18": 0.64, "mobilenet": 0.71, "res50": 0.78, "m5": 0.6, "deepspeech": 0.757, "gnmt": 0.12,
    "transformer": 0.67, "lstm": 0.011,
}  # fmt: skip
WAYS = {"proportional": "fair", "greedy": "", "tune": "tune"}
RUNNER = '''
import collections, collections.abc, json, random, sys, types
for name in ("Mapping", "MutableMapping", "Sequence", "Iterable", "Callable"):
    setattr(collections, name, getattr(collections.abc, name))
import numpy as np
for name in ("int", "float", "bool", "object"):
    if name not in np.__dict__:
        setattr(np, name, getattr(__builtins__, name))
class Any(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
for name in ("numa", "grpc", "deployment.runtime", "deployment.runtime.rpc", "deployment.runtime.rpc.scheduler_server",
             "deployment.runtime.rpc.scheduler_client", "schedulers.callbacks", "deployment.helper", "pandas", "matplotlib", "matplotlib.pyplot",
             "matplotlib.dates", "cvxpy"):
    sys.modules[name] = Any(name)
sys.path.insert(0, sys.argv[1])
import os
os.chdir(sys.argv[1])
import runner
scheduler, way, trace, jobs = sys.argv[2:6]
random.seed(42)
made = runner.Runner(cluster_job_log=None, scheduler=scheduler, series_id_filter=(0, int(jobs)), multigpu=True, placement=True, fair=way == "fair",
                     tune=way == "tune", opt=False, trace=trace)
made.run_simulation()
print(json.dumps({"finished": len(made.finished_jobs), "times": [float(y) for _, y in made.job_completion_times.data_series]}))
'''


def traced(queue: Queue, path: Path) -> Queue:
    """Their replay file, and the queue with durations of whole iterations."""
    lines, jobs = [], []
    for n, job in enumerate(queue.jobs):
        iterations = max(1, round(job.duration_s / ITERATION_S[job.profile]))
        lines.append(f"{n},{job.profile},{job.arrival_s},{iterations},{job.gpus}")
        jobs.append(msgspec.structs.replace(job, duration_s=iterations * ITERATION_S[job.profile]))
    path.write_text("\n".join(lines) + "\n")
    return msgspec.structs.replace(queue, jobs=tuple(jobs))


def theirs(peer: Path, scheduler: str, way: str, trace: Path, jobs: int) -> dict[str, Any]:
    command = [sys.executable, "-c", RUNNER, str(peer), scheduler, way, str(trace), str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{scheduler} {way}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="their folder `simulator`")
    parser.add_argument("--rows", type=Path, help="summarise the rows that a run printed, ended or not, and run nothing")
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--per-hour", type=float, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--orders", default="fifo,srtf,las")
    args = parser.parse_args()
    if args.rows is not None:
        printed = [ast.literal_eval(line) for line in args.rows.read_text().splitlines() if line.startswith("{'split'")]
        summarised(printed, f"python benchmarks/cluster_peer.py --jobs {args.jobs} --seeds {args.seeds}, {len(printed)} rows of it")
        return
    raw: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mw-peer-") as folder:
        for split in SPLITS:
            for seed in range(args.seeds):
                trace = Path(folder) / "trace"
                queue = traced(synthetic(args.jobs, per_hour=args.per_hour, split=split, seed=seed), trace)
                for first in args.orders.split(","):
                    for name in (*WAYS, "priced"):
                        mine = simulate_queue(servers(16), queue, order(first)(), allocation(name)()).measures
                        row = {"split": split, "seed": seed, "order": first, "allocation": name, "mean_h": mine.mean_s / 3600}
                        if name in WAYS:
                            found = theirs(args.peer, first.upper(), WAYS[name], trace, args.jobs)
                            row |= {"peer_mean_h": float(np.mean(found["times"])) / 3600, "peer_finished": found["finished"]}
                        raw.append(row)
                        print(row, flush=True)
    summarised(raw, f"python benchmarks/cluster_peer.py --jobs {args.jobs} --seeds {args.seeds}")


def summarised(raw: list[dict[str, Any]], command: str) -> None:
    """Medians over the rows, written with them."""
    rows: list[dict[str, Any]] = []
    for name in WAYS:
        ratios = [r["mean_h"] / r["peer_mean_h"] for r in raw if r["allocation"] == name]
        rows.append({"what": f"mean time, {name}, ours over theirs, median of {len(ratios)}", "value": statistics.median(ratios), "unit": "ratio"})
    tuned = {(*r["split"], r["seed"], r["order"]): r["peer_mean_h"] for r in raw if r["allocation"] == "tune"}
    ratios = [r["mean_h"] / tuned[key] for r in raw if r["allocation"] == "priced" and (key := (*r["split"], r["seed"], r["order"])) in tuned]
    rows.append({"what": f"mean time, priced over their TUNE, median of {len(ratios)}", "value": statistics.median(ratios), "unit": "ratio"})
    for row in rows:
        print(row, flush=True)
    machine.record("cluster_peer", rows, command=command, raw=raw)


if __name__ == "__main__":
    main()
