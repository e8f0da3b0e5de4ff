"""A pipeline of twelve image tasks on four unequal devices of a lab: measured beside simulated.

    python benchmarks/placement_run.py [--quick] [--first]     (root or user namespaces, control groups)

Devices have 0.6, 0.4, 0.3 and 0.2 of a core by CPU quota, behind ports of 200 Mbit/s; the camera is on the second. Tasks are numpy operations on
frames of 960 x 1,280 pixels, each done for a burst of 8 exposures, of which the last is sent on. Each is timed first on a whole core (median of 5),
while the other core works too, because clocks and caches are shared in the run as well:
its work is that time, and a device's rate its share. HEFT's and search's plans of these times run 5 times. Under quotas and beside the others tasks
take more processor time than that. So both plan again with what tasks took in these runs, as `place run --tasks-out` writes it, and run 5 times more;
the median of these counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
import numpy as np
from executed import star

from meshwright.decide.place import PlaceProblem
from meshwright.decide.place.lists import Heft
from meshwright.decide.place.search import Search
from meshwright.drive.place import plan_placement
from meshwright.graph.tasks import Task, TaskEdge, TaskGraph
from meshwright.kernels.garbage import kept_memory
from meshwright.lab import Lab
from meshwright.run.place.run import PlacementRun, measured_work, run_placement

ROWS, COLUMNS, SHARES, PORT_MBIT, RATE, BURST = 960, 1280, (0.6, 0.4, 0.3, 0.2), 200, 10**9, 8
PIXELS = ROWS * COLUMNS
COSTS = ("before", "in place")


def smooth(x: np.ndarray, times: int) -> np.ndarray:
    x = x.astype(np.float32)
    for _ in range(times):
        x[1:-1] = (x[:-2] + 2 * x[1:-1] + x[2:]) / 4
        x[:, 1:-1] = (x[:, :-2] + 2 * x[:, 1:-1] + x[:, 2:]) / 4
    return x


def slopes(x: np.ndarray) -> np.ndarray:
    gy, gx = np.gradient(x.astype(np.float32))
    return np.minimum(4 * np.hypot(gx, gy), 255)


def equal(x: np.ndarray) -> np.ndarray:
    counts = np.bincount(x.ravel(), minlength=256).cumsum()
    return (counts[x] * (255 / counts[-1])).astype(np.uint8)


def corners(x: np.ndarray) -> np.ndarray:
    gy, gx = np.gradient(x.astype(np.float32))
    a, b, c = smooth(gx * gx, 1), smooth(gx * gy, 1), smooth(gy * gy, 1)
    return np.clip(a * c - b * b - 0.05 * (a + c) ** 2, 0, 255)


def described(x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(ROWS // 16, 16, COLUMNS // 16, 16).transpose(0, 2, 1, 3).reshape(-1, 256).astype(np.float32)
    return np.abs(np.fft.rfft(blocks, axis=1))[:, :64]


# Task -> (what it reads, bytes that it makes, what it does).
STEPS: dict[str, tuple[tuple[str, ...], int, Callable[..., Any]]] = {
    "shoot": ((), PIXELS, lambda: np.random.default_rng(1).normal(128, 40, (ROWS, COLUMNS))),
    "clean": (("shoot",), PIXELS, lambda x: smooth(x, 3)),
    "even": (("clean",), PIXELS, equal),
    "edges": (("clean",), PIXELS, slopes),
    "corners": (("clean",), PIXELS, corners),
    "blur": (("even",), PIXELS, lambda x: smooth(x, 6)),
    "mask": (("edges", "blur"), PIXELS, lambda e, b: smooth((e > b) * 255.0, 3)),
    "describe": (("corners",), PIXELS // 4, described),
    "shrink": (("even",), PIXELS // 4, lambda x: smooth(x, 2).reshape(ROWS // 2, 2, COLUMNS // 2, 2).mean((1, 3))),
    "match": (("describe", "mask"), 65536, lambda d, m: np.outer(np.bincount(d.ravel(), minlength=256), np.bincount(m.ravel(), minlength=256)) % 251),
    "pack": (("shrink",), PIXELS // 4, lambda x: np.frombuffer(zlib.compress(x.tobytes(), 3)[: PIXELS // 4].ljust(PIXELS // 4), np.uint8)),
    "tell": (("match", "pack"), 4096, lambda m, p: np.sort(np.concatenate([m.ravel(), p.ravel()]))[-4096:]),
}
SHAPES = {PIXELS: (ROWS, COLUMNS), PIXELS // 4: (ROWS // 2, COLUMNS // 2), 65536: (256, 256)}


def work(task: str, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
    """What `place run --work benchmarks/placement_run.py:work` calls."""
    parents, _, run = STEPS[task]
    for _ in range(BURST):
        found = np.clip(run(*(inputs[p].reshape(SHAPES[len(inputs[p])]) for p in parents)), 0, 255).astype(np.uint8).ravel()
    for out in outputs.values():
        out[:] = found[: len(out)]


def neighbour() -> None:
    x = np.zeros((ROWS, COLUMNS))
    while True:
        smooth(x, 6)


def timed() -> dict[str, float]:
    """Processor seconds of every task on a whole core, while another core works too: as in a run, where devices share caches and clocks."""
    beside = multiprocessing.get_context("fork").Process(target=neighbour, daemon=True)
    beside.start()
    try:
        with kept_memory():  # as in a placement's processes
            return _timed()
    finally:
        beside.kill()
        beside.join()


def _timed() -> dict[str, float]:
    made: dict[str, np.ndarray] = {}
    found = {}
    for task, (parents, size, _) in STEPS.items():
        times, out = [], np.empty(size, np.uint8)
        for _ in range(6):
            begin = time.thread_time()
            work(task, {p: made[p] for p in parents}, {"next": out})
            times.append(time.thread_time() - begin)
        found[task], made[task] = statistics.median(times[1:]), out
    return found


def problem(seconds: Mapping[str, float]) -> PlaceProblem:
    plain = star(*[PORT_MBIT] * len(SHARES))
    runs = [{"cpu": round(RATE * s), **({"camera": round(RATE * s)} if i == 1 else {})} for i, s in enumerate(SHARES)]
    devices = tuple(replace(d, cpu_share=s, runs=r, group=d.name) for d, s, r in zip(plain.devices, SHARES, runs, strict=True))
    tasks = tuple(Task(name=t, work=s * RATE, kind="camera" if t == "shoot" else "cpu") for t, s in seconds.items())
    edges = tuple(TaskEdge(src=p, dst=t, size_bytes=STEPS[p][1]) for t, (parents, _, _) in STEPS.items() for p in parents)
    return PlaceProblem(graph=TaskGraph(name="image pipeline", tasks=tasks, edges=edges), fabric=replace(plain, devices=devices))


def ran(made: PlaceProblem, strategy: Heft | Search, costs: str, lab: Lab, runs: int) -> tuple[PlacementRun, dict[str, Any], list[dict[str, Any]]]:
    """(what ran, its row, its tasks)."""
    plan, _, bound = plan_placement(made, [strategy])
    found = run_placement(plan, work=f"{Path(__file__).resolve()}:work", lab=lab, runs=runs)
    r = found.rounds[0]
    measured = statistics.median(r.runs_s)
    m, simulated = r.measured.spans, r.simulated.spans
    row = {
        "what": f"{strategy.name}: measured over simulated, 12 tasks on {len(set(m.rank.tolist()))} of 4 devices, tasks timed {costs}",
        "value": measured / found.simulated_s, "unit": "ratio", **({"limit": 1.15, "at_least": 0.85} if costs == COSTS[1] else {}),
        "measured_s": measured, "simulated_s": found.simulated_s, "planned_s": plan.prediction.time_s if plan.prediction else None,
        "bound_s": float(bound), "runs_s": list(r.runs_s),
    }  # fmt: skip
    tasks = []
    for n, name in enumerate(m.name):
        at = int(np.flatnonzero(simulated.step == int(m.step[n]))[0])
        tasks.append({
            "plan": strategy.name, "costs": costs, "task": name, "device": plan.placement[int(m.rank[n])], "took_s": r.took_s[name],
            "simulated_s": [float(simulated.start_s[at]), float(simulated.end_s[at])], "measured_s": [float(m.start_s[n]), float(m.end_s[n])],
        })  # fmt: skip
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return found, row, tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one plan, once; nothing is written")
    parser.add_argument("--first", action="store_true", help="the lab's processes come before all others of this machine (control groups v1)")
    parser.add_argument("--unverified", action="store_true", help="do not measure the lab's links first")
    args = parser.parse_args()
    seconds = timed()
    print(json.dumps({t: round(s, 4) for t, s in seconds.items()}), flush=True)
    made, rows, tasks = problem(seconds), list[dict[str, Any]](), list[dict[str, Any]]()
    with Lab.up(made.fabric, verify=not args.unverified) as lab:
        if args.first:
            for device in range(len(SHARES)):
                for members in lab.groups_of(device):
                    (members.parent / "cpu.shares").write_text("262144")
        for strategy in [Heft()] if args.quick else [Heft(), Search()]:
            asked = made
            for costs in COSTS:
                found, row, more = ran(asked, strategy, costs, lab, 1 if args.quick else 5)
                rows.append(row)
                tasks += more
                asked = replace(made, graph=measured_work(found))
    if not args.quick:
        machine.record("placement_run", rows, command=" ".join(["python benchmarks/placement_run.py", *sys.argv[1:]]), tasks=tasks, task_s=seconds)


if __name__ == "__main__":
    main()
