"""Real steps with K-FAC's work in their idle time beside the same steps without it: 4 gloo processes, paced stages and paced work.

Run: `python benchmarks/filled_step.py [--turns 7]` on a quiet machine (prints and writes benchmarks/results/filled_step.json). 1F1B and GPipe, 8
micro-batches of 20/40 ms, a margin of 10 %; plain and filled runs alternate, and each turn's ratio is of their median steps.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

import machine

from meshwright.decide.pipeline import PipelineProblem
from meshwright.decide.pipeline.fill_work import KFACCosts, kfac_work
from meshwright.drive_fill import fill_plan
from meshwright.drive_pipelines import plan_pipeline
from meshwright.run.pipeline.rehearse import rehearse

LIMIT = 1.03  # of the step without the work
COSTS = KFACCosts(curvature_s=0.02, inverse_s=0.08, layers=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    problem = PipelineProblem.of(4, 8, forward_s=0.02, backward_s=0.04, activation_bytes=4096)
    rows = []
    for name in ("1f1b", "gpipe"):
        plain = plan_pipeline(problem, name)
        filled = fill_plan(plain, lambda p, s: kfac_work(p, s, COSTS), margin=0.1)
        times = [(rehearse(plain, steps=args.steps).median_s, rehearse(filled.plan, steps=args.steps).median_s) for _ in range(args.turns)]
        rows.append({
            "what": f"{name}: a filled step over a plain one", "value": round(median(b / a for a, b in times), 4), "unit": "of the plain step",
            "limit": LIMIT, "plain_s": [round(a, 4) for a, _ in times], "filled_s": [round(b, 4) for _, b in times],
            "planned_s": filled.filling.idle.step_s, "steps_per_refresh": filled.filling.steps,
            "used_planned": [round(filled.filling.used(filled=x), 4) for x in (False, True)],
        })  # fmt: skip
    command = f"python benchmarks/filled_step.py --turns {args.turns} --steps {args.steps}"
    print(json.dumps(machine.record("filled_step", rows, command=command)["rows"], indent=1))


if __name__ == "__main__":
    main()
