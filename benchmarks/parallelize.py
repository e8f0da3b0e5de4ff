"""Steps of `meshwright.torch.parallelize` beside DDP's, in the own loop of two ranks under torchrun; plans are data parallel.

Rounds of both alternate in one run; a step is as long as at its slowest rank. Asked: at most 1.02 of DDP's, on a quiet machine.

    python benchmarks/parallelize.py [--rounds 12] [--only "3.3 M"]
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
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        worker = str(Path(__file__).with_name("parallelize_worker.py"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), worker, folder]
        done = subprocess.run([*command, str(args.rounds), args.only], check=True, stdout=subprocess.PIPE, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [
        {"what": f"step of parallelize over DDP's, {x['case']}", "value": x["parallelize_s"], "unit": "s", "peer": x["ddp_s"],
         "ratio": x["parallelize_s"] / x["ddp_s"], "limit": LIMIT}
        for x in found
    ]  # fmt: skip
    for row, x in zip(rows, found, strict=True):
        sys.stderr.write(f"{row['what']}: {row['ratio']:.3f} ({1e3 * row['value']:.1f} / {1e3 * row['peer']:.1f} ms), "
                         f"parameters apart by {x['parameters_apart']:.1e}\n")  # fmt: skip
    return machine.record("parallelize", rows, command="python benchmarks/parallelize.py", load_before=load_before, cases=found)


if __name__ == "__main__":
    main()
