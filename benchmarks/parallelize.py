"""Steps of `meshwright.torch.parallelize` beside DDP's, in the own loop of two ranks under torchrun; plans are data parallel.

Short rounds of both alternate in one run. Asked: at most 1.02 of DDP's step, in seconds (at the slowest rank) on a quiet machine; on a loaded one the
processor time of a step (all threads of all ranks) is what can be compared. All are medians over all steps. Two plans: as planned for the fabric, and
with as few messages as there can be (a ring, nothing overlapped).

    python benchmarks/parallelize.py [--rounds 30] [--only "3.3 M"]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

LIMIT = 1.02
RANKS = 2


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        worker = str(Path(__file__).with_name("parallelize_worker.py"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), worker, folder]
        done = subprocess.run([*command, str(args.rounds), args.only], check=True, stdout=subprocess.PIPE, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [
        {"what": f"{what} of parallelize ({way}) over DDP's, {x['case']}", "value": x[key][way], "unit": "s", "peer": x[key]["ddp"],
         "ratio": x[key][way] / x[key]["ddp"], "limit": LIMIT}
        for x in found for way in x["parameters_apart"] for what, key in (("step", "wall_s"), ("processor time of a step", "cpu_s"))
    ]  # fmt: skip
    for row in rows:
        sys.stderr.write(f"{row['what']}: {row['ratio']:.3f} ({1e3 * row['value']:.1f} / {1e3 * row['peer']:.1f} ms)\n")
    for x in found:
        sys.stderr.write(f"{x['case']}: parameters apart by {max(x['parameters_apart'].values()):.1e}\n")
    return machine.record("parallelize", rows, command="python benchmarks/parallelize.py", load_before=load_before, cases=found)


if __name__ == "__main__":
    main()
