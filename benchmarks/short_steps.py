"""Steps under 50 ms and phases under a CPU quota: predicted from what the run measured of itself, beside measured.

    python benchmarks/short_steps.py [--rounds 3] [--only mlp] [--ordinary]

Small nets, two ranks on two cores, then four under quotas of 0.4 of a core. Every pair is planned once and run in ROUNDS runs of 60 steps, each
calibrated at its start in its own ranks; its step is the median one. Two ranks run with real-time priority where that is allowed (root), so that
other programs do not keep a woken thread waiting: `others_share` says what those took meanwhile. Quotas do not hold for such threads: four ranks run
with ordinary priority, and other programs slow them. Values are medians over the runs, `runs` has all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import torch
from torch import nn

LIMIT, STEPS = 0.15, 60
PRIORITY = 5
# net, ranks, data, tensor, pipeline, micro-batch, global batch
PAIRS = (
    ("narrow", 2, 2, 1, 1, 16, 32), ("narrow", 2, 1, 1, 2, 8, 32), ("wide", 2, 2, 1, 1, 16, 32), ("wide", 2, 1, 1, 2, 8, 32),
    ("wide", 2, 1, 2, 1, 16, 32), ("convolutions", 2, 2, 1, 1, 8, 16), ("wide", 4, 2, 1, 2, 8, 32), ("wide", 4, 4, 1, 1, 8, 32),
)  # fmt: skip


def stack(width: int, layers: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    inside = [x for _ in range(layers) for x in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inside, nn.Linear(width, 10)), (torch.randn(16, width), torch.randint(0, 10, (16,)))


def narrow() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return stack(128, 6)


def wide() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return stack(384, 8)


def convolutions() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    net = nn.Sequential(*first, nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10))
    return net, (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,)))


def one(plan: Any) -> dict[str, Any]:
    """A run, and its comparison with its prediction."""
    from meshwright.compare.run import compare_run
    from meshwright.report.compare import compare_document
    from meshwright.run.launch.request import RunRequest
    from meshwright.run.launch.train_run import train_run

    with tempfile.TemporaryDirectory() as folder:
        train_run(plan, RunRequest(out=Path(folder) / "run", steps=STEPS, data="synthetic", pacing="auto"))
        found = compare_document(compare_run(plan, Path(folder) / "run")[0])
    return {k: found[k] for k in ("pacing", "others_share", "step", "phases", "cpu")}


def real_time(wanted: bool) -> bool:
    """Whether this process and those it starts have real-time priority now."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR if wanted else os.SCHED_OTHER, os.sched_param(PRIORITY if wanted else 0))
    except PermissionError:
        return False
    return wanted


def rows_of(what: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step's row, and of runs under a quota one for each phase that computes."""
    def row(name: str, pairs: list[tuple[float, float]], **more: Any) -> dict[str, Any]:
        predicted, measured = (1e3 * statistics.median(x) for x in zip(*pairs, strict=True))
        return {"what": f"{name}, {what}", "value": round(predicted, 3), "unit": "ms", "peer": round(measured, 3), **more}

    ratios = [round(r["step"]["predicted_s"] / r["step"]["measured_s"], 3) for r in runs]
    rows = [row("step", [(r["step"]["predicted_s"], r["step"]["measured_s"]) for r in runs], ratios=ratios)]
    if runs[0]["pacing"] == "quota":
        for phase in ("forward", "backward", "optimizer"):
            rows.append(row(phase, [(r["phases"][phase]["predicted_s"], r["phases"][phase]["measured_s"]) for r in runs]))
    return rows


def main() -> None:
    from meshwright.drive.plans import read_fabric
    from meshwright.drive.training.training import plan_training
    from meshwright.drive.training.wishes import LayoutWanted
    from meshwright.job import Training

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--ordinary", action="store_true", help="no real-time priority")
    args = parser.parse_args()
    rows, raw, errors = list[dict[str, Any]](), list[dict[str, Any]](), list[float]()
    for net, ranks, data, tensor, pipeline, micro, batch in PAIRS:
        what = f"{net}: {ranks} ranks, data {data} x tensor {tensor} x pipeline {pipeline}, micro-batch {micro}"
        if args.only not in what:
            continue
        job = Training(model=f"{__file__}:{net}", loss="cross-entropy", global_batch=batch)
        wish = LayoutWanted(data=data, tensor=tensor, pipeline=pipeline, microbatch=micro)
        plan = plan_training(job, read_fabric(f"laptop:{ranks}"), wishes=(wish,))
        priority = real_time(ranks <= 2 and not args.ordinary)
        runs = [one(plan) for _ in range(args.rounds)]
        real_time(False)
        made = rows_of(what, runs)
        rows += made
        raw.append({"pair": what, "real_time": priority, "runs": runs})
        errors += [abs(made[0]["value"] / made[0]["peer"] - 1)]
        for row in made:
            said = f"{row['value']:8.2f} ms predicted {row['peer']:8.2f} measured {row.get('ratios', '')}"
            print(f"{row['what']:<90} {said}", file=sys.stderr, flush=True)
    rows.append({"what": f"median error of {len(errors)} short steps", "value": statistics.median(errors), "unit": "relative error", "limit": LIMIT})
    rows.append({"what": f"worst error of {len(errors)} short steps", "value": max(errors), "unit": "relative error", "limit": LIMIT})
    if not args.only:
        machine.record("short_steps", rows, command="python benchmarks/short_steps.py", pairs=raw)


if __name__ == "__main__":
    main()
