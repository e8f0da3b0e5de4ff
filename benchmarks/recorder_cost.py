"""What `train run`'s recorder costs: the same plan with and without module spans, in turns; and with torch.profiler for comparison.

Run: `python benchmarks/recorder_cost.py [--quick]` (prints a summary; raw output goes to benchmarks/results/recorder_cost.json).

Each pair is two whole runs of the same plan of the example GPT (`examples/gpt.py:small`, 2 ranks), in alternating order. A run's figure is the
median of its steps without the first three. The cost is the median over pairs of with / without - 1, by the clock and in processor time of
the ranks (what a disturbed machine does not change). Limit: 3 % of the step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshwright.io.plan.plan import read_plan
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.train_run import train_run

sys.path.insert(0, str(Path(__file__).parent))
import machine

SKIPPED = 3
LIMIT = 0.03
EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt.py"


def make_plan(folder: Path, model: str, batch: int) -> Any:
    command = [sys.executable, "-m", "meshwright", "train", "plan", "--model", f"{EXAMPLE}:{model}", "--fabric", "laptop:2"]
    subprocess.run([*command, "--global-batch", str(batch), "-o", str(folder / "plan.json")], check=True, capture_output=True, timeout=600)
    return read_plan(folder / "plan.json")


def one_run(plan: Any, steps: int, *, spans: bool, profile: bool = False) -> dict[str, float]:
    """Medians over the run's steps; with `profile`, over the profiled ones."""
    from meshwright.run.launch.run_folder import read_run

    with tempfile.TemporaryDirectory() as folder:
        request = RunRequest(
            out=Path(folder) / "run", steps=steps, module_spans=spans, profile=profile, calibrate=False, pacing="none", data="synthetic"
        )
        document = train_run(plan, request).document
        assert document is not None
        ranks = read_run(Path(folder) / "run", plan).recordings
    chosen = [i for i in range(SKIPPED, steps) if ranks[0].steps[i].traced == profile and not ranks[0].steps[i].profiled]
    cpu = [sum(r.steps[i].process_cpu_s for r in ranks) for i in chosen]
    return {"step_s": statistics.median(document.step_s[i] for i in chosen), "cpu_s": statistics.median(cpu), "marks": len(ranks[0].steps[-1].marks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three pairs of short runs of the tiny model")
    quick = parser.parse_args().quick
    pairs, steps, model, batch = (3, 8, "tiny", 8) if quick else (9, 24, "small", 8)
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder), model, batch)
    raw = []
    for pair in range(pairs):
        found = {}
        for spans in (True, False) if pair % 2 else (False, True):
            found[spans] = one_run(plan, steps, spans=spans)
        raw.append({"with": found[True], "without": found[False]})
        ratio = {key: found[True][key] / found[False][key] - 1 for key in ("step_s", "cpu_s")}
        print(f"pair {pair}: step {ratio['step_s']:+.2%}, cpu {ratio['cpu_s']:+.2%}", flush=True)
    profiled = one_run(plan, max(steps, 12), spans=True, profile=True)
    rows = []
    for key, what in (("step_s", "by the clock"), ("cpu_s", "processor time")):
        cost = statistics.median(p["with"][key] / p["without"][key] - 1 for p in raw)
        rows.append({"what": f"module spans, {what}", "value": round(cost, 5), "unit": "of the step", "limit": LIMIT})
        beside = profiled[key] / statistics.median(p["without"][key] for p in raw) - 1
        rows.append({"what": f"torch.profiler (--profile), {what}", "value": round(beside, 4), "unit": "of the step"})
    for row in rows:
        print(f"{row['what']:<45} {row['value']:+.2%}")
    if not quick:
        machine.record("recorder_cost", rows, model=model, global_batch=batch, steps=steps, pairs=raw, profiled=profiled)


if __name__ == "__main__":
    main()
