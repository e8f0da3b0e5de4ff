"""A profile in the public formats: 34 layers of 3 ms per sample on an A100."""

import json
from pathlib import Path

LAYERS = 34


def times(m: int, t: int) -> dict[str, list[float]]:
    return {str(i): [0.001 * m / t + 1e-4 * t, 0.002 * m / t + 1e-4 * t, 0.0005] for i in range(LAYERS)}


degrees = (1, 2, 4)
sizes = {str(i): {"params_floats": 1e7, "act_mem_floats": 4e6, "act_output_floats": 1e6} for i in range(LAYERS)}
curve = [[-0.1, 2.0, 3.0], 1.2e10]
layout = {"replicas": [{"device": "A100", "tensor": 2, "zone": "z"}]}
runs = [
    {"layout": {"stages": [{"layers": n, **layout} for n in stages], "microbatch": 1, "microbatches": [count]}, "time_s": time_s}
    for stages, count, time_s in (([34], 4, 0.36), ([17, 17], 8, 0.42), ([12, 11, 11], 8, 0.35))
]
documents = {
    "times": {"OPT-X": {"A100": {str(m): {str(t): times(m, t) for t in degrees} for m in (1, 2, 4)}}},
    "memory": {"OPT-X": {str(t): {i: {k: v / t for k, v in row.items()} for i, row in sizes.items()} for t in degrees}},
    "inside": {"A100": {"4": [[0.0, 0.0, 100.0], 1e11]}},
    "between": {"z": {"A100": {"4": {"z": {"A100": {"4": curve}}}}}},
    "runs": {"schema": "meshwright.measured-runs", "version": 1, "runs": runs},
}
for name, document in documents.items():
    Path(f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
