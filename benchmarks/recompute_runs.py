"""Recomputation predicted and measured: step time and peak memory of the example GPT with none, selective and full, on real processes.

Each policy is planned with the same degrees, run for real (gloo, calibrated at its start under its own pacing), and its program is simulated on the
fabric and costs that the run measured. Losses must agree to the last bit. A run disturbed by other programs (more than 10 % of the cores) is
repeated, at most twice, and marked if it stays so.

    python benchmarks/recompute_runs.py                        # tiny GPT, two stages, 6 steps
    python benchmarks/recompute_runs.py --model small --steps 12
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).parent.parent
DISTURBED, TRIES = 0.10, 3
POLICIES = ("none", "selective", "full")


def one(model: str, policy: str, degrees: tuple[int, int, int], micro: int, batch: int, steps: int, pacing: str) -> dict[str, Any]:
    from meshwright.compare.run import compare_run
    from meshwright.drive.plans import read_fabric
    from meshwright.drive.training.recompute import RecomputeWanted
    from meshwright.drive.training.training import plan_training
    from meshwright.drive.training.wishes import LayoutWanted
    from meshwright.job import Training
    from meshwright.report.compare import compare_document
    from meshwright.run.launch.request import RunRequest
    from meshwright.run.launch.train_run import train_run

    data, tensor, pipeline = degrees
    fabric = read_fabric(f"laptop:{data * tensor * pipeline}")
    job = Training(model=f"{ROOT / 'examples' / 'gpt.py'}:{model}", global_batch=batch)
    plan = plan_training(job, fabric, wishes=(LayoutWanted(data=data, tensor=tensor, pipeline=pipeline, microbatch=micro), RecomputeWanted(policy)))
    assert plan.layout is not None
    with tempfile.TemporaryDirectory() as folder:
        train_run(plan, RunRequest(out=Path(folder) / "run", steps=steps, data="python-source", pacing=pacing))
        comparison, _ = compare_run(plan, Path(folder) / "run")
    found = compare_document(comparison)
    saved = sum(s.saved_bytes for s in plan.layout.segments)
    return {**found, "losses": list(comparison.measured.losses), "saved_bytes": saved}


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--degrees", default="1,1,2", help="data,tensor,pipeline")
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pacing", default="auto")
    args = parser.parse_args()
    data, tensor, pipeline = (int(x) for x in args.degrees.split(","))
    rows: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    for policy in POLICIES:
        found, attempts = one(args.model, policy, (data, tensor, pipeline), args.microbatch, args.global_batch, args.steps, args.pacing), 1
        while found["others_share"] > DISTURBED and attempts < TRIES:
            found = one(args.model, policy, (data, tensor, pipeline), args.microbatch, args.global_batch, args.steps, args.pacing)
            attempts += 1
        step, memory = found["step"], found["memory"]
        measured, predicted = max(m["measured_bytes"] for m in memory), max(m["predicted_bytes"] for m in memory)
        rows += [
            {"what": f"step time, {policy}", "value": step["predicted_s"], "unit": "s", "peer": step["measured_s"],
             "ratio": step["predicted_s"] / step["measured_s"]},
            {"what": f"peak memory, fullest rank, {policy}", "value": predicted, "unit": "B", "peer": measured, "ratio": predicted / measured},
        ]  # fmt: skip
        raw[policy] = {**found, "attempts": attempts, "disturbed": found["others_share"] > DISTURBED}
        print(f"{policy}: {1000 * step['predicted_s']:.1f} ms predicted, {1000 * step['measured_s']:.1f} measured; peak {predicted:,} B predicted, "
              f"{measured:,} measured; saved {found['saved_bytes']:,} B", file=sys.stderr, flush=True)  # fmt: skip
    same = all(raw[p]["losses"] == raw["none"]["losses"] for p in POLICIES)
    rows.append({"what": "losses equal to the last bit", "value": float(same), "unit": "1 = yes", "limit": 1.0})
    return machine.record("recompute_runs", rows, command="python benchmarks/recompute_runs.py", degrees=args.degrees, model=args.model, policies=raw)


if __name__ == "__main__":
    main()
