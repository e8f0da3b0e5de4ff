"""Resizing of real processes: six in control groups under linucb with a prior, six with the same demands under the threshold, at the same time.

Run: `python benchmarks/resize_real.py` (needs groups with cpu and memory; five minutes on a quiet machine). Windows of one second stand for
five minutes of `cluster.demand`; steps of a twentieth of a core and of 64 MiB; five seeds. All begin with what their users ask for. The prior is
learned in virtual time, from other seeds. `waste` is the knob of linucb: 0.001 has fewer violations than the threshold in virtual time, but
real use has jitter from period to period, which that time has not; 0.0005 has a fifth. Both are run.
Throttled periods, kills for memory, core-seconds and GiB-seconds of all processes of a seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import msgspec
import numpy as np

SEEDS, WINDOWS, PROCESSES = 5, 50, 6
CORE_STEP, MEMORY_STEP = 0.05, 64 << 20
WORKER = Path(__file__).with_name("resize_worker.py")
MIN_MOST = 4  # steps that a user asks for at least: an interpreter's start takes three steps of cores in its first period
CHOICES = {
    "linucb": ("linucb", {"waste": 0.0005}), "linucb waste 0.001": ("linucb", {"waste": 0.001}),
    "threshold": ("threshold", {"add": 0.9, "remove": 0.4}),
}  # fmt: skip


def demands(seed: int) -> dict[str, tuple[Any, Any]]:
    from meshwright.cluster.demand import synthetic_demand

    cpu = synthetic_demand(PROCESSES, WINDOWS, seed=seed, median_steps=1.5, unit=CORE_STEP, window_s=1.0)
    memory = synthetic_demand(PROCESSES, WINDOWS, seed=seed + 50, wave=False, resource="memory", unit=MEMORY_STEP, window_s=1.0)
    return {"cpu": cpu, "memory": memory}


def prior_of(strategy: Any, resource: str) -> Any:
    """Learned in virtual time by the same strategy."""
    from meshwright.cluster.demand import synthetic_demand
    from meshwright.drive.resize import resize_simulated

    tenants, demand = synthetic_demand(200, 2 * 288, seed=1000, wave=resource == "cpu")
    return resize_simulated(tenants, demand, strategy).prior


def controlled(name: str, seed: int) -> dict[str, Any]:
    from meshwright.check.resize import check_resize_log
    from meshwright.cluster.resize import ResizeLog, Rules
    from meshwright.decide.cluster.resize import NAMES, Resizer
    from meshwright.run.resize import ResizeCommand, resize_commands

    kind, options = CHOICES[name]
    strategy, wanted = NAMES[kind](**options), demands(seed)
    tenants = {r: msgspec.structs.replace(t, most=tuple(max(m, MIN_MOST) for m in t.most)) for r, (t, _) in wanted.items()}
    rules = {"cpu": Rules(), "memory": Rules(hold_windows=12)}
    decide, windows = {}, {"cpu": [], "memory": []}
    for r in tenants:
        policy = strategy.plan(tenants[r], rules[r], prior=prior_of(strategy, r) if strategy.learns else None)
        decide[r] = Resizer(tenants[r], rules[r], policy, seed=seed)
    cpu, memory = wanted["cpu"][1] * CORE_STEP, wanted["memory"][1] * (MEMORY_STEP >> 20)
    commands = []
    for i in range(PROCESSES):
        words = (sys.executable, "-I", "-S", str(WORKER), json.dumps([cpu[:, i].tolist(), memory[:, i].tolist()]))
        commands.append(ResizeCommand(name=f"v{i}", command=words))
    found = resize_commands(commands, tenants, decide, most_windows=WINDOWS - 1, on_window=lambda r, w: windows[r].append(w))
    for r in tenants:
        log = ResizeLog(tenants=tenants[r], rules=rules[r], strategy=kind, windows=tuple(windows[r]), total=found.totals[r])
        check_resize_log(log).raise_if_wrong()
    return {
        "throttled": found.throttled, "periods": found.periods, "oom_kills": found.oom_kills, "core_s": found.totals["cpu"].unit_hours * 3600,
        "gib_s": found.totals["memory"].unit_hours * 3600 / (1 << 30), "cpu_violations": found.totals["cpu"].violations,
        "memory_violations": found.totals["memory"].violations, "codes": dict(found.codes),
    }  # fmt: skip


def main() -> list[dict[str, Any]]:
    each: dict[str, list[dict[str, Any]]] = {name: [] for name in CHOICES}
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            running = {}
            for name in CHOICES:
                out = Path(folder, name).open("wb")  # noqa: SIM115
                running[name] = subprocess.Popen([sys.executable, __file__, "controlled", name, str(seed)], stdout=out)
            for name, child in running.items():
                if child.wait():
                    raise SystemExit(f"{name} ended with {child.returncode}")
                each[name].append(json.loads(Path(folder, name).read_text()))
                print(seed, name, each[name][-1], flush=True)
    rows = []
    for what, unit in (("throttled", "periods"), ("oom_kills", "kills"), ("core_s", "core-seconds"), ("gib_s", "GiB-seconds")):
        peer = [e[what] for e in each["threshold"]]
        for name in CHOICES:
            if name != "threshold":
                ours = [e[what] for e in each[name]]
                rows.append({"what": f"{what} of six processes: {name}, beside the threshold", "value": float(np.median(ours)), "unit": unit,
                    "peer": float(np.median(peer)), "sum": sum(ours), "peer_sum": sum(peer), "seeds": ours, "peer_seeds": peer})  # fmt: skip
                print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["controlled"]:
        print(json.dumps(controlled(sys.argv[2], int(sys.argv[3]))))
    else:
        machine.record("resize_real", main(), command="python benchmarks/resize_real.py")
