"""`cluster profile` on two PyTorch jobs: predicted speeds beside measured ones where it did not look, and both jobs together as decided.

Run: `python benchmarks/sensitivity.py` (needs groups with cpu and memory, pillow, and a quiet machine; four minutes). One job decodes JPEG
pictures in two loader workers, the other multiplies matrices; 20 and 30 ms of a step are the paced device's. Profiles are measured at a few points of
cores. Then: speeds at ten other points, relative to one core, predicted and measured; and both jobs at once, with one core each and as `priced`
divides quarters of cores, measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import machine

from meshwright.cluster import Queue, QueuedJob, Sensitivity, Server, Servers
from meshwright.decide.cluster import allocation, order
from meshwright.drive.cluster import plan_allocation
from meshwright.probe.speeds import Timing, measure_rate, profile_command

JOB = Path(__file__).with_name("sensitivity_job.py")
CORES = {"decode": (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0), "matmul": (0.25, 0.5, 1.0, 2.0)}
UNSEEN = {"decode": (0.6, 0.85, 1.1, 1.4, 1.65), "matmul": (0.3, 0.6, 0.8, 1.3, 1.7)}
MEMORY_BYTES, QUARTERS = 2_000_000_000, 4
TIMING = Timing(steps="^step", warm_up_s=0.7, seconds=2.5, limit_s=60)
TOGETHER = Timing(steps="^step", warm_up_s=2.0, seconds=8.0, limit_s=90)
ASKED = {"error": 0.10, "sum": 1.2, "insensitive": 0.97}


def command(kind: str) -> list[str]:
    return [sys.executable, str(JOB), kind]


def divided(profiles: dict[str, Sensitivity]) -> dict[str, float]:
    """Cores of each job on a server of two devices and two cores, in quarters."""
    quarters = tuple(
        Sensitivity(name=n, cores=tuple(QUARTERS * c for c in p.cores), memory_bytes=(MEMORY_BYTES // 4,), speed=p.speed) for n, p in profiles.items()
    )
    jobs = tuple(QueuedJob(name=n, gpus=1, profile=n, arrival_s=0.0, duration_s=100.0) for n in profiles)
    servers = Servers(servers=(Server(name="s", gpus=("g0", "g1"), cores=2 * QUARTERS, memory_bytes=MEMORY_BYTES),))
    found, _ = plan_allocation(servers, Queue(profiles=quarters, jobs=jobs), order("fifo")(), allocation("priced")())
    return {g.job: g.cores / QUARTERS for g in found.given}


def together(cores: dict[str, float]) -> dict[str, float]:
    rates: dict[str, float] = {}

    def run(kind: str) -> None:
        rates[kind] = measure_rate(command(kind), TOGETHER, cores=cores[kind], memory_bytes=None)

    threads = [threading.Thread(target=run, args=(kind,)) for kind in cores]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return rates


def main() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    profiles, errors = {}, []
    for kind, cores in CORES.items():
        found = profile_command(command(kind), TIMING, name=kind, cores=cores, memory_bytes=(MEMORY_BYTES,), share=(1.0, MEMORY_BYTES))
        profiles[kind] = found.profile
        base = found.points[1.0, MEMORY_BYTES]
        print(kind, [(c, round(w[0], 3)) for c, w in zip(found.profile.cores, found.profile.speed, strict=True)], f"{base:.1f} steps/s", flush=True)
        for c in UNSEEN[kind]:
            told, real = float(found.profile.at(c, MEMORY_BYTES)), measure_rate(command(kind), TIMING, cores=c, memory_bytes=None) / base
            errors.append(abs(told / real - 1))
            rows.append({"what": f"speed of {kind} at {c:g} cores, measured", "value": real, "unit": "of that at one core", "predicted": told})
            print(f"{kind} {c:g} cores: predicted {told:.3f}, measured {real:.3f}", flush=True)
    rows.append({"what": "largest error of ten predicted speeds", "value": max(errors), "unit": "share", "asked": ASKED["error"],
        "median": statistics.median(errors)})  # fmt: skip
    chosen = divided(profiles)
    even, ours = together(dict.fromkeys(CORES, 1.0)), together(chosen)
    gain = {kind: ours[kind] / even[kind] for kind in CORES}
    rows.append({"what": "sum of speeds as decided, over one core each", "value": sum(gain.values()) / 2, "unit": "", "asked": ASKED["sum"],
        "cores": chosen, "rates": ours, "even_rates": even})  # fmt: skip
    rows.append({"what": "speed of matmul as decided, over one core", "value": gain["matmul"], "unit": "", "asked": ASKED["insensitive"]})
    for row in rows[-3:]:
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    machine.record("sensitivity", main(), command="python benchmarks/sensitivity.py")
