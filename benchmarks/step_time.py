"""Predicted step time and memory against real runs: at least eight (model, layout) pairs on this machine.

Each pair is planned with fixed degrees, run for real (one process per rank, gloo, calibrated at its start under its own pacing), and its program
is simulated on the fabric and costs that the run measured. A run disturbed by other programs (more than 10 % of the cores) is repeated,
at most twice, and marked if it stays so.

    python benchmarks/step_time.py [--seven] [--steps 12] [--only gpt] [--pacing auto]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).parent.parent
LIMIT_MEDIAN, LIMIT_WORST, LIMIT_MEMORY = 0.10, 0.25, 0.10
DISTURBED, TRIES = 0.10, 3

# (model, loss, ranks, data, tensor, pipeline, micro-batch, global batch)
PAIRS = (
    ("gpt.py:small", "cross-entropy", 2, 2, 1, 1, 8, 32),
    ("gpt.py:small", "cross-entropy", 4, 4, 1, 1, 8, 32),
    ("gpt.py:small", "cross-entropy", 4, 2, 2, 1, 8, 32),
    ("gpt.py:small", "cross-entropy", 4, 2, 1, 2, 4, 32),
    ("gpt.py:small", "cross-entropy", 4, 1, 1, 4, 4, 32),
    ("gpt.py:small", "cross-entropy", 4, 1, 2, 2, 4, 32),
    ("convnet.py:small", "cross-entropy", 2, 2, 1, 1, 16, 64),
    ("convnet.py:small", "cross-entropy", 2, 1, 1, 2, 16, 64),
    ("encoder_decoder.py:small", "cross-entropy", 2, 1, 2, 1, 8, 32),
    ("encoder_decoder.py:small", "cross-entropy", 4, 2, 1, 2, 8, 32),
)

# Seven kinds of net (`seven_nets.py`), three layouts each, on two ranks: one for each core. Recurrent layers and pictures' means do not divide by
# columns: their third layout has smaller micro-batches.
SPLIT, SMALLER = (2, 1, 2, 1, 8, 32), (2, 2, 1, 1, 4, 32)
SEVEN = tuple(
    (f"../benchmarks/seven_nets.py:{net}", "cross-entropy", *layout)
    for net in ("residual", "vit", "gru", "lstm", "moe", "gpt2", "llama_like")
    for layout in ((2, 2, 1, 1, 8, 32), (2, 1, 1, 2, 8, 32), SPLIT if net in ("vit", "gpt2", "llama_like") else SMALLER)
)
SEVEN_STEP, SEVEN_MEMORY = 0.15, 0.05  # asked of every row


def one(model: str, loss: str, ranks: int, data: int, tensor: int, pipeline: int, micro: int, batch: int, steps: int, pacing: str) -> dict[str, Any]:
    from meshwright.compare.run import compare_run
    from meshwright.drive.plans import read_fabric
    from meshwright.drive.training.training import plan_training
    from meshwright.drive.training.wishes import LayoutWanted
    from meshwright.job import Training
    from meshwright.report.compare import compare_document
    from meshwright.run.launch.request import RunRequest
    from meshwright.run.launch.train_run import train_run

    fabric = read_fabric(f"laptop:{ranks}")
    job = Training(model=str(ROOT / "examples" / model), loss=loss, global_batch=batch)
    plan = plan_training(job, fabric, wishes=(LayoutWanted(data=data, tensor=tensor, pipeline=pipeline, microbatch=micro),))
    with tempfile.TemporaryDirectory() as folder:
        source = "python-source" if model.startswith("gpt") else "synthetic"
        train_run(plan, RunRequest(out=Path(folder) / "run", steps=steps, data=source, pacing=pacing))
        comparison, _ = compare_run(plan, Path(folder) / "run")
    return compare_document(comparison)


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--pacing", default="auto")
    parser.add_argument("--seven", action="store_true", help="seven kinds of net, three layouts each; written to step_time_seven.json")
    args = parser.parse_args()
    rows, raw = [], []
    memory_limit = SEVEN_MEMORY if args.seven else LIMIT_MEMORY
    for pair in SEVEN if args.seven else PAIRS:
        model, _, _, data, tensor, pipeline, micro, _ = pair
        name = f"{model.rpartition('/')[2]} data {data} x tensor {tensor} x pipeline {pipeline}, micro-batch {micro}"
        if args.only not in name:
            continue
        found, attempts = one(*pair, args.steps, args.pacing), 1
        while found["others_share"] > DISTURBED and attempts < TRIES:
            found, attempts = one(*pair, args.steps, args.pacing), attempts + 1
        error = found["step"]["error"]
        memory = max(abs(m["predicted_bytes"] / m["measured_bytes"] - 1) for m in found["memory"])
        predicted, measured = found["step"]["predicted_s"], found["step"]["measured_s"]
        rows += [
            {"what": f"step time, {name}", "value": predicted, "unit": "s", "peer": measured, "ratio": predicted / measured},
            {"what": f"peak memory, worst rank, {name}", "value": memory, "unit": "relative error", "limit": memory_limit},
        ]
        raw.append({"pair": name, "attempts": attempts, "disturbed": found["others_share"] > DISTURBED, **found})
        print(f"{name}: {1000 * predicted:.0f} ms predicted, {1000 * measured:.0f} measured ({100 * error:+.1f} %), memory {100 * memory:.1f} %, "
              f"others {100 * found['others_share']:.0f} %", file=sys.stderr, flush=True)  # fmt: skip
    errors, worst = [abs(r["step"]["error"]) for r in raw], SEVEN_STEP if args.seven else LIMIT_WORST
    rows += [
        {"what": f"median error of {len(errors)} step times", "value": statistics.median(errors), "unit": "relative error", "limit": LIMIT_MEDIAN},
        {"what": f"worst error of {len(errors)} step times", "value": max(errors), "unit": "relative error", "limit": worst},
    ]
    name, option = ("step_time_seven", " --seven") if args.seven else ("step_time", "")
    return machine.record(name, rows, command=f"python benchmarks/step_time.py{option}", pairs=raw)


if __name__ == "__main__":
    main()
