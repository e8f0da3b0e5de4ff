"""What dividing work by speed brings on devices of unlike speed: steps of plans that do and of plans with equal parts, in turns, in the lab.

Run: `python benchmarks/unlike_devices.py` (root or user namespaces; about a quarter of an hour). Four devices behind 500 Mbit/s ports, two
with half a core and two with half of that, by CPU quota. For the degrees of every row, and with all left open, the same model is planned twice
from the same measured prices, by speed and in equal parts; then all plans run in turns, ROUNDS times. Times are medians of the steps after
each run's first. Every step is predicted twice: by the plan, from prices that one process measured alone, and from what the run's own ranks measured
at its start, under their quotas and beside each other (`compare`). `cpu`: processor seconds of each rank, predicted (the second way) and measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from executed import star
from ranking import BATCH, MODEL, ROOT, WARM

DEGREES = ((4, 1, 1), (1, 1, 4), (2, 1, 2), (2, 2, 1), (None, None, None))  # data, tensor, pipeline
SHARES, PORT_MBIT = (0.5, 0.5, 0.25, 0.25), 500


def plans(lab: Any, degrees: Sequence[tuple[int | None, ...]]) -> list[tuple[str, dict[bool, Any]]]:
    from meshwright.capture.graph import capture
    from meshwright.drive.training.division import DivisionWanted
    from meshwright.drive.training.training import plan_training
    from meshwright.drive.training.wishes import LayoutWanted, StepPrices
    from meshwright.job import Training
    from meshwright.probe.costs.name import load_cost
    from meshwright.probe.costs.node_prices import as_measured, measured_prices

    job = Training(model=f"{ROOT / 'examples' / MODEL}", global_batch=BATCH)
    graph = capture(job.model, loss=job.loss, seed=job.seed)
    prices = measured_prices(job, batch_size=4, share=SHARES[0])
    fabric = as_measured(lab.measured_fabric, prices.peak_flops(graph), "fp32")
    cost = load_cost("roofline", fabric)
    found = []
    for data, tensor, pipeline in degrees:
        what = f"data {data} x tensor {tensor} x pipeline {pipeline}" if data else "degrees left open"
        fixed = {"data": data, "tensor": tensor, "pipeline": pipeline}
        pair = {by_speed: plan_training(
            job, fabric, cost, graph=graph, wishes=(LayoutWanted(**fixed), StepPrices(prices), DivisionWanted(by_speed)),
        ) for by_speed in (True, False)}  # fmt: skip
        found.append((what, pair))
    return found


def run(lab: Any, plan: Any, path: Path, out: Path, steps: int) -> tuple[list[float], dict[str, Any]]:
    """(seconds of each measured step, the run's comparison with what its ranks measured of themselves)."""
    from meshwright.compare.run import compare_run
    from meshwright.report.compare import compare_document

    command = [sys.executable, "-m", "meshwright", "train", "run", str(path), "--out", str(out), "--steps", str(WARM + steps)]
    lab.run(command, env={"TORCHELASTIC_RUN_ID": out.name}, timeout_s=600, sink=lambda rank, line: None)
    found = compare_document(compare_run(plan, out)[0])
    return [float(s) for s in json.loads((out / "run.json").read_text())["step_s"][WARM:]], {k: found[k] for k in ("step", "cpu", "others_share")}


def main() -> None:
    from meshwright.drive.plans import write_plan
    from meshwright.io.fabric.name import load_fabric
    from meshwright.lab import Lab

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of every run (default 3)")
    parser.add_argument("--quick", action="store_true", help="two rows, once; nothing is recorded")
    args = parser.parse_args()
    args.rounds = 1 if args.quick else args.rounds
    device = load_fabric("laptop:4").devices[0]
    plain = star(*[PORT_MBIT] * len(SHARES))
    devices = tuple(replace(device, name=d.name, group=d.name, cpu_share=s) for d, s in zip(plain.devices, SHARES, strict=True))
    measured: dict[tuple[str, bool], list[float]] = {}
    compared: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    with Lab.up(replace(plain, devices=devices)) as lab, tempfile.TemporaryDirectory() as name:
        folder, made = Path(name), plans(lab, DEGREES[:2] if args.quick else DEGREES)
        for turn in range(args.rounds):
            for number, (what, pair) in enumerate(made):
                for by_speed, plan in pair.items():
                    path = folder / f"{number}-{by_speed}.json"
                    write_plan(path, plan)
                    out = folder / f"run-{number}-{by_speed}-{turn}"
                    steps_s, found = run(lab, plan, path, out, args.steps)
                    measured.setdefault((what, by_speed), []).extend(steps_s)
                    compared.setdefault((what, by_speed), []).append(found)
                    said = f"{plan.prediction.time_s:.3f} s predicted, {found['step']['predicted_s']:.3f} calibrated"
                    said += f", {statistics.median(steps_s):.3f} measured"
                    print(f"{turn}: {what}, {'by speed' if by_speed else 'equal parts'}: {said}", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for what, pair in made:
        ours, even = (statistics.median(measured[what, by_speed]) for by_speed in (True, False))
        predicted = {by_speed: plan.prediction.time_s for by_speed, plan in pair.items()}
        division = pair[True].decisions["layout"]["options"].get("division", "equal parts")
        rows.append({
            "what": f"{what}: {division}, over equal parts", "value": round(even / ours, 3), "unit": "x", "higher_is_better": True,
            "predicted": round(predicted[False] / predicted[True], 3), "step_s": ours, "predicted_s": predicted[True], "even_step_s": even,
            "even_predicted_s": predicted[False], "calibrated_over_measured": {str(k): _calibrated(compared[what, k]) for k in (True, False)},
            "runs": {str(k): compared[what, k] for k in (True, False)}, "steps_s": {str(k): measured[what, k] for k in (True, False)},
        })  # fmt: skip
        print(f"{rows[-1]['what']:<110} {even / ours:6.3f} x (predicted {rows[-1]['predicted']}), {ours:.3f} s (predicted {predicted[True]:.3f}), "
              f"equal parts {even:.3f} s (predicted {predicted[False]:.3f})")  # fmt: skip
    if not args.quick:
        machine.record("unlike_devices", rows, command="python benchmarks/unlike_devices.py")


def _calibrated(runs: Sequence[dict[str, Any]]) -> float:
    """Predicted from what the run measured of itself over measured, the median of the runs."""
    return round(statistics.median(r["step"]["predicted_s"] / r["step"]["measured_s"] for r in runs), 3)


if __name__ == "__main__":
    main()
