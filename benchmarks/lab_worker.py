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

GROUPS = 6  # of each kind, in `paired`


def measure(lab: Any, jobs: Sequence[dict[str, Any]], *, order: Sequence[int] | None = None, timeout_s: float = 3600.0) -> list[dict[str, Any]]:
    """Rows of all jobs on a lab whose fabric is what was measured of it. A job: op, sizes, and optionally strategies, backend, tune, iterations,
    warmup, plan."""
    from meshwright.io.fabric_toml import fabric_toml

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
    from meshwright.io.plan_file import write_program

    chosen = group.engine.plans.choose(op, 0, size_bytes)
    if isinstance(chosen, str):
        return ""
    path = Path(folder, f"{chosen.name[:32]}.json.gz")
    if not path.exists():
        write_program(path, chosen.form.program)
    return str(path)


def forwarding() -> Any:
    """A backend "forward": the least that a process group written in Python can do, hand everything on to gloo."""
    import torch
    import torch.distributed as dist

    class Forward(dist.ProcessGroup):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            super().__init__(rank, size)
            self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
            kind = dist.ProcessGroup.BackendType.GLOO
            self._set_default_backend(kind)
            self._register_backend(torch.device("cpu"), kind, self.gloo)
            self.name = ""

        def getBackendName(self) -> str:
            return "forward"

        @property
        def group_name(self) -> str:
            return self.name

        def _set_group_name(self, name: str) -> None:
            self.name = name

        def allreduce(self, tensors: Any, opts: Any) -> Any:
            return self.gloo.allreduce(tensors, opts)

        def broadcast(self, tensors: Any, opts: Any) -> Any:
            return self.gloo.broadcast(tensors, opts)

        def all_gather_single(self, output: Any, input: Any, opts: Any) -> Any:
            return self.gloo._allgather_base(output, input, opts)

        def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Any:
            return self.gloo._reduce_scatter_base(output, input, opts)

        _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    dist.Backend.register_backend("forward", Forward, devices=["cpu"])
    return dist.new_group(backend="forward")


def paired() -> None:
    """Our backend without plans, gloo, and a bare Python process group over gloo: what is added to what falls through.

    A group's sockets and buffers make it faster or slower than its twin for as long as it lives, so there are GROUPS of each kind; every round calls
    each of them once, in an order of its own. `twin`: the slowest gloo group's time over the fastest one's, which is what this cannot resolve.
    """
    import random
    import statistics
    import time

    import torch
    import torch.distributed as dist

    import meshwright.torch
    from meshwright.run.bench.operations import make_case

    del meshwright
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control = dist.group.WORLD  # none of those measured is kept warm by barriers and times
    kinds = {"ours": lambda: dist.new_group(backend="meshwright"), "gloo": lambda: dist.new_group(backend="gloo"), "forward": forwarding}
    groups = [(kind, make()) for _ in range(GROUPS) for kind, make in kinds.items()]
    sizes = [int(x) for x in os.environ.get("LAB_SIZES", "").split(",") if x] or [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24]
    turns = random.Random(0)
    for op in ("all-reduce", "all-gather", "reduce-scatter", "broadcast"):
        for size in sizes:
            made = [make_case(op, size, torch.float32, "sum", 0, in_place=True, seed=0, group=g) for _, g in groups]
            rounds = 10 + (150 if size < 1 << 20 else 60 if size < 1 << 24 else 15)
            times = torch.zeros(rounds, len(groups), dtype=torch.float64)
            cpu = torch.zeros(rounds, len(groups), dtype=torch.float64)
            for turn in range(rounds):
                for which in turns.sample(range(len(groups)), len(groups)):
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
                found: dict[str, Any] = {"op": op, "size_bytes": size}
                medians = times[10:].median(0).values.tolist()
                for kind in kinds:
                    mine = [i for i, (k, _) in enumerate(groups) if k == kind]
                    found |= {f"{kind}_s": statistics.mean(medians[i] for i in mine), f"{kind}_caller_cpu_s": float(cpu[10:, mine].median())}
                same = [medians[i] for i, (k, _) in enumerate(groups) if k == "gloo"]
                sys.stdout.write(json.dumps({"row": {**found, "twin": max(same) / min(same)}}) + "\n")
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
    from meshwright.run.bench.data import DTYPES
    from meshwright.run.bench.measure import Request, bench
    from meshwright.run.bench.worker import Described
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
