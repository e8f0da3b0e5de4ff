"""Whether the layout predicted to be fastest is: predicted and measured step times of layouts of one model, in the lab.

Run: `python benchmarks/ranking.py` (root or user namespaces; about a quarter of an hour on two quiet cores). Four devices with half a core less a
tenth each behind 200 Mbit/s ports. Every layout is planned once, before anything runs, from operators timed on this machine and links measured by
the lab. Then all of them are run in turns, ROUNDS times, so that slow minutes of the machine meet all alike; a layout's time is the median of its
steps after each run's first WARM. Pairs whose measured times are within 3 % of each other are ties.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import sqrt
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from executed import star

ROOT = Path(__file__).parent.parent
MODEL, BATCH = "gpt.py:small", 32
# data, tensor, pipeline, micro-batch
LAYOUTS = (
    (4, 1, 1, 8), (4, 1, 1, 2), (1, 4, 1, 8), (1, 4, 1, 32), (1, 1, 4, 8), (1, 1, 4, 2), (1, 1, 4, 16), (2, 2, 1, 16), (2, 2, 1, 4), (2, 1, 2, 4),
    (2, 1, 2, 16), (1, 2, 2, 8), (1, 2, 2, 16),
)  # fmt: skip
SHARE, PORT_MBIT, WARM, TIE = Fraction(4, 10), 200, 2, 0.03


def tau_b(predicted: Sequence[float], measured: Sequence[float], tie: float) -> float:
    """Kendall's tau-b; measured times within `tie` of each other are ties."""
    agree = ties_predicted = ties_measured = 0
    pairs = list(combinations(range(len(predicted)), 2))
    for i, j in pairs:
        p = predicted[i] - predicted[j]
        m = 0.0 if max(measured[i], measured[j]) <= (1 + tie) * min(measured[i], measured[j]) else measured[i] - measured[j]
        agree += (p * m > 0) - (p * m < 0)
        ties_predicted += p == 0
        ties_measured += m == 0
    return agree / sqrt((len(pairs) - ties_predicted) * (len(pairs) - ties_measured))


def plans(lab: Any) -> list[tuple[str, Any]]:
    """Predicted before anything runs, by the way of `train plan --cost measured`."""
    from meshwright.capture.graph import capture
    from meshwright.drive.training.training import plan_training
    from meshwright.drive.training.wishes import LayoutWanted, StepPrices
    from meshwright.job import Training
    from meshwright.probe.costs.name import load_cost
    from meshwright.probe.costs.node_prices import as_measured, measured_prices

    job = Training(model=f"{ROOT / 'examples' / MODEL}", global_batch=BATCH)
    graph = capture(job.model, loss=job.loss, seed=job.seed)
    prices = measured_prices(job, batch_size=4, share=float(SHARE))
    fabric = as_measured(lab.measured_fabric, prices.peak_flops(graph), "fp32")
    cost = load_cost("roofline", fabric)
    found = []
    for data, tensor, pipeline, micro in LAYOUTS:
        plan = plan_training(
            job, fabric, cost, graph=graph, wishes=(LayoutWanted(data=data, tensor=tensor, pipeline=pipeline, microbatch=micro), StepPrices(prices)),
        )  # fmt: skip
        found.append((f"data {data} x tensor {tensor} x pipeline {pipeline}, micro-batch {micro}", plan))
    return found


def steps_of(lab: Any, plan: Path, out: Path, steps: int) -> list[float]:
    command = [sys.executable, "-m", "meshwright", "train", "run", str(plan), "--out", str(out), "--steps", str(WARM + steps), "--no-calibration"]
    said: list[bytes] = []
    lab.run(command, env={"TORCHELASTIC_RUN_ID": out.name}, timeout_s=600, sink=lambda rank, line: said.append(line))
    run = json.loads((out / "run.json").read_text())
    return [float(s) for s in run["step_s"][WARM:]]


def main() -> None:
    from meshwright.drive.plans import write_plan
    from meshwright.fabric.fabric import Device
    from meshwright.io.fabric.name import load_fabric
    from meshwright.lab import Lab

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of every run (default 3)")
    args = parser.parse_args()
    device: Device = load_fabric("laptop:4").devices[0]
    plain = star(*[PORT_MBIT] * 4)
    fabric = replace(plain, devices=tuple(replace(device, name=d.name, group=d.name, cpu_share=float(SHARE)) for d in plain.devices))
    measured: dict[str, list[float]] = {}
    with Lab.up(fabric) as lab, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = plans(lab)
        for number, (_, plan) in enumerate(made):
            write_plan(folder / f"{number}.json", plan)
        for turn in range(args.rounds):
            for number, (what, plan) in enumerate(made):
                measured.setdefault(what, []).extend(steps_of(lab, folder / f"{number}.json", folder / f"run-{number}-{turn}", args.steps))
                print(f"{turn}: {what}: {plan.prediction.time_s:.3f} s predicted, {statistics.median(measured[what]):.3f} measured", file=sys.stderr)
    predicted_s = [plan.prediction.time_s for _, plan in made]
    measured_s = [statistics.median(measured[what]) for what, _ in made]
    chosen = predicted_s.index(min(predicted_s))
    errors = [abs(p / m - 1) for p, m in zip(predicted_s, measured_s, strict=True)]
    rows = [
        {"what": what, "value": p, "unit": "s", "peer": m, "ratio": round(p / m, 3), "steps_s": measured[what]}
        for (what, _), p, m in zip(made, predicted_s, measured_s, strict=True)
    ]  # fmt: skip
    rows += [
        {"what": f"Kendall tau-b over {len(made)} layouts", "value": round(tau_b(predicted_s, measured_s, TIE), 3), "unit": "", "limit": 0.8,
         "higher_is_better": True},
        {"what": "slowest over fastest, measured", "value": round(max(measured_s) / min(measured_s), 2), "unit": "x", "limit": 3.0,
         "higher_is_better": True},
        {"what": "predicted winner over the best measured", "value": round(measured_s[chosen] / min(measured_s), 4), "unit": "x", "limit": 1.05},
        {"what": "median error of predicted step times", "value": round(statistics.median(errors), 4), "unit": "relative error"},
    ]  # fmt: skip
    for row in rows:
        print(f"{row['what']:<75} {row['value']:>10.4g} {row['unit']} {row.get('peer', row.get('limit', '')):>8}")
    machine.record("ranking", rows, command="python benchmarks/ranking.py")


if __name__ == "__main__":
    main()
