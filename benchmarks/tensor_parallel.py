"""Tensor and sequence parallelism against plain eager training, on real processes: largest errors in float64, bytes sent against bytes planned,
and bytes kept for backward with and without sequence parallelism.

    python benchmarks/tensor_parallel.py            # all cases, about two minutes of processor time
    python benchmarks/tensor_parallel.py --quick    # a few of them

Models are those of the tests (`tests/run/tensor_models.py`): heads, columns and vocabularies that do not divide, tied heads, grouped-query attention,
dropout. Errors are relative to the largest entry of each gradient; one that is zero but for rounding is measured against a millionth of the
model's largest. Bytes kept for backward are counted where autograd saves them, on every rank, for one micro-batch; with sequence parallelism
the parts that wait to be gathered again are added. The plan's number is the one that admission to memory uses. No times are taken.
"""

from __future__ import annotations

from typing import Any

from machine import record
from real_ranks import quick_asked, rank_pool

CASES = [
    ("even", (1, 2, 1)), ("even", (1, 4, 1)), ("odd_tied", (1, 3, 1)), ("odd_tied", (1, 2, 2)), ("odd_tied", (2, 2, 1)),
    ("grouped_expand", (1, 4, 1)), ("grouped_repeat", (1, 4, 1)), ("grouped_packed", (1, 2, 1)), ("grouped_native", (1, 4, 1)),
]  # fmt: skip
ALONG = [
    ("even", (1, 2, 1)), ("even", (1, 4, 1)), ("odd_tied", (1, 4, 1)), ("odd_tied", (1, 2, 2)), ("odd_tied", (2, 2, 1)),
    ("grouped_repeat", (1, 4, 1)), ("flat", (1, 4, 1)), ("turned", (1, 2, 1)), ("scaled", (1, 3, 1)), ("pooled", (1, 2, 2)),
]  # fmt: skip
KEPT = [("even", 2), ("even", 3), ("grouped_packed", 2)]


def measure(pool: Any, name: str, degrees: tuple[int, int, int], *, sequence: bool = False) -> dict[str, Any]:
    from tensor_rig import plan_case, predicted_sends, run_case, serial_step

    from meshwright.decide.layout.tensor_shares import TensorOptions
    from meshwright.run.tensor.sharding import take_part

    case = plan_case(name, degrees, options=TensorOptions(sequence=sequence))
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
        "model": name, "sequence": lay.sequence, "data": degrees[0], "tensor": degrees[1], "pipeline": degrees[2],
        "shares": sorted({s.shares for s in lay.shards if s.shares}),
        "loss_error": abs(sum(losses) / len(losses) - loss) / abs(loss), "gradient_error": worst,
        "bytes_sent": sum(sum(o.sent.values()) for o in outcomes),
        "bytes_planned": sum(sum(predicted_sends(case, r).values()) for r in range(lay.ranks)),
    }  # fmt: skip


def kept(pool: Any, name: str, tensor: int) -> dict[str, Any]:
    """Bytes per rank (the fullest) that one micro-batch keeps for backward: without and with, counted and planned."""
    from rig import graph_of
    from sequence_rig import planned_bytes, run_counting
    from tensor_models import BATCH, LENGTH
    from tensor_rig import plan_case

    from meshwright.decide.layout.tensor_shares import TensorOptions
    from meshwright.lower.kept_values import kept_values
    from meshwright.plan.shards import local_values

    row: dict[str, Any] = {"model": name, "tensor": tensor}
    for wanted in (False, True):
        case = plan_case(name, (1, tensor, 1), global_batch=BATCH, options=TensorOptions(sequence=wanted))
        keeps = kept_values(graph_of(case.model, BATCH), case.layout)
        again = {v for s in case.layout.segments for v in s.gathers if v in keeps[s.key]}
        counted = [o for _, o in pool.run(run_counting, tensor, case)]
        own = [sum(local_values(case.layout, r)[v].size_bytes for v in again) for r in range(tensor)]
        ends = BATCH * LENGTH * 9  # targets, and which of them are ignored
        row["with" if wanted else "without"] = max(a + b for a, b in zip(counted, own, strict=True)) - ends
        row["planned with" if wanted else "planned without"] = max(planned_bytes(case, r) for r in range(tensor))
    return row


def main() -> None:
    quick = quick_asked(__doc__)
    with rank_pool() as pool:
        rows = [measure(pool, name, degrees) for name, degrees in (CASES[:3] if quick else CASES)]
        rows += [measure(pool, name, degrees, sequence=True) for name, degrees in (ALONG[:3] if quick else ALONG)]
        memory = [kept(pool, name, tensor) for name, tensor in (KEPT[:1] if quick else KEPT)]
    for r in rows:
        same = "equal" if r["bytes_sent"] == r["bytes_planned"] else f"PLANNED {r['bytes_planned']}"
        degrees = f"{r['data']}x{r['tensor']}x{r['pipeline']}" + (" sequence" if r["sequence"] else "")
        print(f"{r['model']:15} {degrees:15} loss {r['loss_error']:.1e}  gradients {r['gradient_error']:.1e}  {r['bytes_sent']:>8} bytes, {same}")
    for r in memory:
        said = f"without {r['without']} (planned {r['planned without']}), with {r['with']} (planned {r['planned with']})"
        print(f"{r['model']:15} tensor {r['tensor']}: bytes kept for backward {said}")
    if not quick:
        record("tensor_parallel", [x for r in rows for x in _rows(r)] + [x for r in memory for x in _kept_rows(r)])


def _rows(r: dict[str, Any]) -> list[dict[str, Any]]:
    what = f"{r['model']}, data {r['data']} x tensor {r['tensor']} x pipeline {r['pipeline']}" + (", sequence" if r["sequence"] else "")
    return [
        {"what": f"{what}: loss", "value": r["loss_error"], "unit": "relative error", "limit": 1e-9},
        {"what": f"{what}: worst gradient", "value": r["gradient_error"], "unit": "of its largest entry", "limit": 1e-9},
        {"what": f"{what}: sent", "value": r["bytes_sent"], "unit": "bytes", "peer": r["bytes_planned"]},
    ]


def _kept_rows(r: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"what": f"{r['model']}, tensor {r['tensor']}, {way} sequence parallelism: kept for backward", "value": r[way], "unit": "bytes",
         "peer": r[f"planned {way}"]}
        for way in ("without", "with")
    ]  # fmt: skip


if __name__ == "__main__":
    main()
