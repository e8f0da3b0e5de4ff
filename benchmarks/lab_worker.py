"""One rank of the lab's benchmarks: runs a list of measurements in one job, a process group per measurement, and prints rank 0's rows.

Started by the other scripts through `measure`; not a benchmark by itself.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

GROUPS, WARM = 4, 10  # of each kind, and rounds that do not count, in `paired`


def measure(lab: Any, jobs: Sequence[dict[str, Any]], *, order: Sequence[int] | None = None, timeout_s: float = 3600.0) -> list[dict[str, Any]]:
    """Rows of all jobs on a lab whose fabric is what was measured of it. A job: op, sizes, and optionally strategies, backend, tune, iterations,
    warmup, plan."""
    from meshwright.io.fabric.toml import fabric_toml

    lines: list[dict[str, Any]] = []

    def sink(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if rank == 0 and text.startswith('{"row"'):
            lines.append(json.loads(text)["row"])
        elif rank == 0 and "Warning" not in text:
            sys.stderr.write(text)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measured.toml")
        path.write_text(fabric_toml(lab.measured_fabric))
        env = {"MESHWRIGHT_FABRIC": str(path), "LAB_JOBS": json.dumps(list(jobs)), "MESHWRIGHT_TIMEOUT_S": "600"}
        lab.run([sys.executable, __file__], order=order, env=env, timeout_s=timeout_s, sink=sink)
    return lines


def keep(group: Any, op: str, size_bytes: int, folder: str) -> str:
    """Write the program that ran; its file's name."""
    from meshwright.io.plan.plan import write_program

    chosen = group.engine.plans.choose(op, 0, size_bytes)
    if isinstance(chosen, str):
        return ""
    path = Path(folder, f"{chosen.name[:32]}.json.gz")
    if not path.exists():
        write_program(path, chosen.form.program)
    return str(path)


def paired() -> None:
    """What our backend adds to a call that falls through to gloo: ours against gloo, in pairs that follow each other.

    A group's sockets and buffers make it faster or slower than its twin for as long as it lives, by up to twice. So each of our groups is paired with
    a group of torch's over the very gloo object inside it: both calls take the same sockets, and only our path differs. Every round calls each pair,
    in an order of its own. `value`: the median of all rounds' quotients, with the 95 % interval of that median by order statistics; `own`: our median
    time over that of gloo groups with sockets of their own, `own_twin` how far these are from each other.
    """
    import random
    import statistics
    import time

    import torch
    import torch.distributed as dist

    import meshwright.torch
    from meshwright.bench.operations import make_case

    del meshwright
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control = dist.group.WORLD  # none of those measured is kept warm by barriers and times
    ours = [dist.new_group(backend="meshwright") for _ in range(GROUPS)]
    inner = iter([g.builtin for g in ours])
    dist.Backend.register_backend("inner", lambda store, rank, size, timeout: next(inner), devices=["cpu"])
    groups = [*ours, *(dist.new_group(backend="inner") for _ in ours), *(dist.new_group(backend="gloo") for _ in ours)]
    sizes = [int(x) for x in os.environ.get("LAB_SIZES", "").split(",") if x] or [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
    turns = random.Random(0)
    for op in os.environ.get("LAB_OPS", "all-reduce,all-gather,reduce-scatter,broadcast").split(","):
        for size in sizes:
            made = [make_case(op, size, torch.float32, "sum", 0, in_place=True, seed=0, group=g) for g in groups]
            rounds = WARM + (300 if size < 1 << 20 else 120 if size < 1 << 24 else 40)
            times = torch.zeros(rounds, len(groups), dtype=torch.float64)
            cpu = torch.zeros(rounds, len(groups), dtype=torch.float64)
            for turn in range(rounds):
                for pair in turns.sample(range(GROUPS), GROUPS):
                    for which in turns.sample(range(pair, len(groups), GROUPS), 3):
                        case = made[which]
                        assert case is not None
                        case.fill()
                        dist.barrier(control)
                        start, used = time.perf_counter(), time.thread_time()
                        case.call()
                        cpu[turn, which] = time.thread_time() - used
                        times[turn, which] = time.perf_counter() - start
            dist.all_reduce(times, dist.ReduceOp.MAX, group=control)
            if dist.get_rank() == 0:
                mine, same, own = times[WARM:].split(GROUPS, 1)
                quotients = sorted((mine / same).flatten().tolist())
                half = int(0.98 * len(quotients) ** 0.5)  # of the interval, in places: 1.96 sqrt(n) / 2
                apart = own.median(0).values
                used_s = [float(c.median()) for c in cpu[WARM:].split(GROUPS, 1)]
                row = {
                    "op": op, "size_bytes": size, "value": statistics.median(quotients), "pairs": len(quotients),
                    "low": quotients[len(quotients) // 2 - half], "high": quotients[len(quotients) // 2 + half],
                    "ours_s": float(mine.median()), "gloo_s": float(same.median()), "caller_cpu_s": used_s[0], "gloo_caller_cpu_s": used_s[1],
                    "own": float(mine.median() / own.median()), "own_twin": float(apart.max() / apart.min()),
                }  # fmt: skip
                sys.stdout.write(json.dumps({"row": row}) + "\n")
                sys.stdout.flush()
    dist.barrier(control)
    dist.destroy_process_group()


def main() -> None:
    if os.environ.get("LAB_PAIRED"):
        paired()
        return
    import torch
    import torch.distributed as dist

    import meshwright.torch
    from meshwright.bench.data import DTYPES
    from meshwright.bench.measure import Request, bench
    from meshwright.bench.worker import Described
    from meshwright.run.group.trials import most_calls

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    control = dist.group.WORLD
    for job in json.loads(os.environ["LAB_JOBS"]):
        tune, builtin = job.get("tune", 0), job.get("builtin", False)
        backend = job.get("backend", "meshwright")
        meshwright.torch.configure(strategies=job.get("strategies") or None, tune=tune, builtin=builtin or bool(tune), plans=job.get("plans") or None)
        group = dist.new_group(backend=backend, timeout=timedelta(minutes=30)) if backend != "gloo" else control
        trials = most_calls(tune + 1) + 1 if tune else 0
        request = Request(
            op=job["op"], sizes=tuple(job["sizes"]), dtype="float", iterations=job.get("iterations", 5), warmup=job.get("warmup", 2) + trials
        )  # fmt: skip
        describe = Described(group, DTYPES["float"]) if backend == "meshwright" else None
        for row in bench(request, backend, group, control, describe, in_place_only=True):
            timed = row.in_place or row.out_of_place
            assert timed is not None
            found = {
                **job, "size_bytes": row.size_bytes, "time_s": timed.time_s, "least_s": timed.least_s, "most_s": timed.most_s, "wrong": timed.wrong,
                "ran": row.ran, "simulated_s": row.simulated_s, "bound_s": row.bound_s,
            }  # fmt: skip
            if dist.get_rank() == 0 and job.get("keep"):
                found["program"] = keep(group, job["op"], row.size_bytes, job["keep"])
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps({"row": found}) + "\n")
                sys.stdout.flush()
        if backend == "meshwright":
            dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
