"""Tensor parallelism against plain eager training, on real processes: largest errors in float64, and bytes sent against bytes planned.

    python benchmarks/tensor_parallel.py            # all cases, about a minute of processor time
    python benchmarks/tensor_parallel.py --quick    # three of them

Models are those of the tests (`tests/run/tensor_models.py`): heads, columns and vocabularies that do not divide, tied heads, grouped-query attention,
dropout. Errors are relative to the largest entry of each gradient; one that is zero but for rounding is measured against a millionth of the
model's largest. No times are taken.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "run"
CASES = [
    ("even", (1, 2, 1)), ("even", (1, 4, 1)), ("odd_tied", (1, 3, 1)), ("odd_tied", (1, 2, 2)), ("odd_tied", (2, 2, 1)),
    ("grouped_expand", (1, 4, 1)), ("grouped_repeat", (1, 4, 1)), ("grouped_packed", (1, 2, 1)), ("grouped_native", (1, 4, 1)),
]  # fmt: skip


def measure(pool: Any, name: str, degrees: tuple[int, int, int]) -> dict[str, Any]:
    from tensor_rig import plan_case, predicted_sends, run_case, serial_step

    from meshwright.run.sharding import take_part

    case = plan_case(name, degrees)
    lay = case.layout
    outcomes = pool.run(run_case, lay.ranks, case)
    loss, gradients = serial_step(case, name)
    losses = [o.loss for r, o in enumerate(outcomes) if o.loss is not None and lay.coordinates(r)[2] == 0]
    shards = {s.param: s for s in lay.shards}
    floor = 1e-6 * max(float(g.abs().max()) for g in gradients.values())
    worst = 0.0
    for rank, o in enumerate(outcomes):
        for param, gradient in o.gradients.items():
            whole, part = gradients[param], lay.coordinates(rank)[2]
            own = take_part(whole, shards[param].axis, shards[param], part, lay.tensor) if param in shards else whole
            worst = max(worst, float((gradient - own).abs().max()) / max(float(whole.abs().max()), floor))
    return {
        "model": name, "data": degrees[0], "tensor": degrees[1], "pipeline": degrees[2], "shares": sorted({s.shares for s in lay.shards if s.shares}),
        "loss_error": abs(sum(losses) / len(losses) - loss) / abs(loss), "gradient_error": worst,
        "bytes_sent": sum(sum(o.sent.values()) for o in outcomes),
        "bytes_planned": sum(sum(predicted_sends(case, r).values()) for r in range(lay.ranks)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(TESTS))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    from machine import record
    from processes import RankPool

    pool = RankPool(4)
    try:
        rows = [measure(pool, name, degrees) for name, degrees in (CASES[:3] if args.quick else CASES)]
    finally:
        pool.close()
    for r in rows:
        same = "equal" if r["bytes_sent"] == r["bytes_planned"] else f"PLANNED {r['bytes_planned']}"
        degrees = f"{r['data']}x{r['tensor']}x{r['pipeline']}"
        print(f"{r['model']:15} {degrees:6} loss {r['loss_error']:.1e}  gradients {r['gradient_error']:.1e}  {r['bytes_sent']:>8} bytes, {same}")
    if not args.quick:
        record("tensor_parallel", [x for r in rows for x in _rows(r)])


def _rows(r: dict[str, Any]) -> list[dict[str, Any]]:
    what = f"{r['model']}, data {r['data']} x tensor {r['tensor']} x pipeline {r['pipeline']}"
    return [
        {"what": f"{what}: loss", "value": r["loss_error"], "unit": "relative error", "limit": 1e-9},
        {"what": f"{what}: worst gradient", "value": r["gradient_error"], "unit": "of its largest entry", "limit": 1e-9},
        {"what": f"{what}: sent", "value": r["bytes_sent"], "unit": "bytes", "peer": r["bytes_planned"]},
    ]


if __name__ == "__main__":
    main()
