"""Sharding levels against plain eager training, on real processes: errors in float64, bytes sent against bytes planned, peaks of live tensors.

    python benchmarks/sharding_levels.py            # all cases, about a minute of processor time
    python benchmarks/sharding_levels.py --quick    # one model

Models are those of the tests (`tests/run/tensor_models.py`). Errors are of losses and of every parameter after two steps of AdamW, relative to the
largest entry. No times are taken.
"""

from __future__ import annotations

from typing import Any

from machine import record
from real_ranks import quick_asked, rank_pool

CASES = [("even", (2, 1, 1)), ("even", (3, 1, 1)), ("odd_tied", (2, 1, 2)), ("odd_tied", (2, 2, 1)), ("grouped_expand", (2, 2, 1))]
BUCKET = 1500  # bytes: small models
STEPS = 2


def measure(pool: Any, name: str, degrees: tuple[int, int, int], level: int, overlap: bool) -> dict[str, Any]:
    from levels_rig import same_as_serial, serial, train
    from tensor_rig import plan_case, predicted_sends

    from meshwright.decide.layout.data_sharding import DataSharding

    case = plan_case(name, degrees, microbatch=1, global_batch=2 * degrees[0], sharding=DataSharding(level, overlap, BUCKET))
    found = pool.run(train, case.layout.ranks, case, STEPS, "adamw", True)
    planned = [predicted_sends(case, r) for r in range(case.layout.ranks)]
    assert all(sent == planned[r] for r, t in enumerate(found) for sent in t.sent), "bytes sent are not the plan's, per communicator"
    return {
        "what": f"{name}, data {degrees[0]} x tensor {degrees[1]} x pipeline {degrees[2]}, level {level}{', overlapped' if overlap else ''}",
        "error": same_as_serial(case, found, serial(case, name, STEPS)), "bytes_sent": sum(sum(t.sent[0].values()) for t in found),
        "bytes_planned": sum(sum(x.values()) for x in planned), "peak_bytes": max(t.peak_bytes for t in found),
    }  # fmt: skip


def main() -> None:
    quick = quick_asked(__doc__)
    with rank_pool() as pool:
        rows = [measure(pool, n, d, level, overlap) for n, d in (CASES[:1] if quick else CASES) for level in range(4) for overlap in (False, True)]
    for r in rows:
        print(f"{r['what']:72} error {r['error']:.1e}  {r['bytes_sent']:>7} bytes, as planned  peak {r['peak_bytes']:>7} bytes")
    if not quick:
        record("sharding_levels", [x for r in rows for x in _rows(r)])


def _rows(r: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"what": f"{r['what']}: losses and parameters", "value": r["error"], "unit": "relative error", "limit": 1e-9},
        {"what": f"{r['what']}: sent", "value": r["bytes_sent"], "unit": "bytes", "peer": r["bytes_planned"]},
        {"what": f"{r['what']}: peak", "value": r["peak_bytes"], "unit": "bytes"},
    ]


if __name__ == "__main__":
    main()
