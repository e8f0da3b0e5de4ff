"""What the gate costs: on the quickstart's plan, and at 8B, where a copy is compared, beside planning. Processor time. Needs transformers for 8B.

    python benchmarks/gate_cost.py [--quick]       # --quick: the quickstart alone, nothing recorded

LLaMA 8B is planned on one machine of eight GPUs with `train plan --gate`, and what of it went into the gate is taken apart. Then the command
`train gate` is run by the same process: it reads the plan and proves it before it compares, which `train run` does too, with the gate or without.
Last, the same by a process of its own, imports of torch and transformers included.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import record
from real_ranks import ROOT, quick_asked

MAX_GATE_S = 10.0
MAX_SHARE_OF_PLANNING = 0.05


def quickstart_s() -> float:
    """The gate, from the plan's file on: what `train run` takes longer."""
    from meshwright.cli import main

    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder, "plan.json"))
        words = ["train", "plan", "--model", "examples/gpt.py:small", "--fabric", "examples/fabrics/two_islands.toml", "--global-batch", "32"]
        assert main([*words, "--out", plan]) == 0
        start = time.process_time()
        assert main(["train", "gate", plan]) == 0
        return time.process_time() - start


def large_s() -> tuple[float, float, float, float]:
    """(planning, the gate of it, the command `train gate` in the same process, the same in a process of its own)."""
    from llama_capture import FIELDS, LENGTH, SIZES

    import meshwright.run.gate.gate as room
    from meshwright.cli import main
    from meshwright.errors import TimeLimit

    own, inside = room.gate, list[float]()

    def timed(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        found = own(*args, **options)
        inside.append(time.process_time() - start)
        return found

    with tempfile.TemporaryDirectory() as folder:
        plan, config = str(Path(folder, "plan.json")), Path(folder, "config.json")
        config.write_text(json.dumps({**FIELDS, **SIZES["8B"]}))
        words = ["--model", f"hf:{config}@{LENGTH}", "--fabric", "dgx-h100:1", "--global-batch", "64", "--time-limit", "3600", "--out", plan]
        start = time.process_time()
        room.gate = timed
        assert main(["train", "plan", *words, "--gate"]) in (0, TimeLimit.exit_code)  # of a search that was cut the plan is written too
        room.gate = own
        planned = time.process_time()
        gate = ["train", "gate", plan, "--data", "synthetic"]
        assert main(gate) == 0
        gated = time.process_time()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "meshwright", *gate], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        alone = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return planned - start - inside[0], inside[0], gated - planned, alone


def rows_of(quickstart: float, large: tuple[float, float, float, float] | None) -> list[dict[str, Any]]:
    rows = [{"what": "the gate on the quickstart's plan", "value": quickstart, "unit": "s", "limit": MAX_GATE_S}]
    if large is not None:
        limit = MAX_SHARE_OF_PLANNING * large[0]
        rows.append({"what": "planning LLaMA 8B on dgx-h100:1", "value": large[0], "unit": "s"})
        what = "the gate on a copy of that plan: what `train plan --gate` takes longer"
        rows.append({"what": what, "value": large[1], "unit": "s", "limit": limit})
        rows.append({"what": "`train gate` by the process that planned: the plan read and proved, and the gate", "value": large[2], "unit": "s"})
        rows.append({"what": "`train gate` by a process of its own, imports included", "value": large[3], "unit": "s"})
    return rows


def main() -> None:
    quick = quick_asked(__doc__)
    os.chdir(ROOT)
    large = large_s() if find_spec("transformers") and not quick else None
    rows = rows_of(quickstart_s(), large)
    for r in rows:
        print(f"{r['what']:100} {r['value']:.6g} {r['unit']}")
    if not quick:
        record("gate_cost", rows)


if __name__ == "__main__":
    main()
