"""Context parallelism beside tensor parallelism: a step of 32,768 tokens on four ranks in the lab, links of 200 Mbit/s.

Run: `python benchmarks/context_parallel.py` (root or user namespaces; some minutes; the ranks share this machine's cores). One layer of the Llama of
the examples: width 128, four query heads, one key-value head, and as many tokens as one sequence or as eight. Both plans are made by the search of
`train plan` with the degrees fixed, and run by `train run`; figures are medians of the steps after the first. Bytes: counted at the lab's links,
headers and connections included, beside what the program says that ranks send. Raw: benchmarks/results/context_parallel.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import llama
import machine
from executed import star

HERE = Path(__file__).resolve().parent
MBIT, TOKENS, RANKS, WARM = 200, 32768, 4, 1
WAYS = {"tensor 4": {"tensor": RANKS, "context": 1}, "context 4": {"tensor": 1, "context": RANKS}}


def _model(sequence: int) -> Any:
    return llama.build(vocabulary=256, sequence=sequence, layers=1, width=128, heads=4, kv_heads=1, hidden=256, batch=1)


def one() -> Any:
    """One sequence of all tokens."""
    return _model(TOKENS)


def eight() -> Any:
    """Of an eighth of them."""
    return _model(TOKENS // 8)


def plan_of(fabric: Any, model: str, batch: int, tensor: int, context: int) -> Any:
    from meshwright.cost import assumed_cost
    from meshwright.drive.training.training import plan_training
    from meshwright.drive.training.wishes import LayoutWanted
    from meshwright.job import Training

    job = Training(model=f"{HERE / 'context_parallel.py'}:{model}", global_batch=batch, optimizer="sgd")
    wanted = LayoutWanted(data=1, tensor=tensor, pipeline=1, microbatch=1, context=context)
    return plan_training(job, fabric, assumed_cost(fabric), wishes=(wanted,))


def sent_bytes(plan: Any) -> int:
    """Of all ranks in a step, as the program says."""
    from meshwright.program.calls import inline
    from meshwright.program.program import Part

    program = inline(plan.main, plan.programs).program
    return int(program.message_bytes()[(program.steps.parts & Part.SEND) > 0].sum())


def measured(lab: Any, plan: Any, folder: Path, steps: int) -> tuple[list[float], int]:
    """(seconds of the steps after the first, bytes into the switch per step)."""
    from meshwright.drive.plans import write_plan

    write_plan(folder / "plan.json", plan)
    command = [sys.executable, "-m", "meshwright", "train", "run", str(folder / "plan.json"), "--out", str(folder / "run"), "--no-gate"]
    before = {n: c.bytes for n, c in lab.counters().items()}
    command += ["--steps", str(WARM + steps), "--no-calibration", "--timeout", "500"]
    lab.run(
        command, env={"TORCHELASTIC_RUN_ID": folder.name, "OMP_NUM_THREADS": "1"}, timeout_s=900, sink=lambda rank, line: None,
    )  # fmt: skip
    carried = sum(c.bytes - before[n] for n, c in lab.counters().items() if n.endswith("switch"))
    run = json.loads((folder / "run" / "run.json").read_text())
    return [float(s) for s in run["step_s"][WARM:]], carried // (WARM + steps)


def main() -> None:
    from meshwright.io.fabric.name import load_fabric
    from meshwright.lab import Lab

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2, help="measured steps of every run (default 2)")
    parser.add_argument("--models", default="one,eight")
    args = parser.parse_args()
    device, plain, rows = load_fabric("laptop:4").devices[0], star(*[MBIT] * RANKS), []
    fabric = replace(plain, devices=tuple(replace(device, name=d.name, group=d.name) for d in plain.devices))
    with Lab.up(fabric) as lab, tempfile.TemporaryDirectory() as name:
        for model, batch in (("one", 1), ("eight", 8)):
            if model not in args.models.split(","):
                continue
            what, found = f"{batch} x {TOKENS // batch} tokens", {}
            for way, degrees in WAYS.items():
                plan = plan_of(lab.measured_fabric, model, batch, **degrees)
                folder = Path(name, f"{model}-{degrees['context']}")
                folder.mkdir()
                steps_s, carried = measured(lab, plan, folder, args.steps)
                found[way] = statistics.median(steps_s)
                planned = sent_bytes(plan)
                rows += [
                    {"what": f"{what}, {way}: step", "value": round(found[way], 3), "unit": "s", "peer": plan.prediction.time_s, "steps_s": steps_s},
                    {"what": f"{what}, {way}: bytes at the links over bytes planned", "value": round(carried / planned, 4), "unit": "x",
                     "limit": 1.1, "planned_bytes": planned, "carried_bytes": carried},
                ]  # fmt: skip
                print(rows[-2], rows[-1], file=sys.stderr, flush=True)
            gain = found["tensor 4"] / found["context 4"]
            rows.append({"what": f"{what}: context over tensor", "value": round(gain, 3), "unit": "x", "limit": 1.5, "higher_is_better": True})
    for row in rows:
        print(f"{row['what']:<60} {row['value']:>10.4g} {row['unit']} {row.get('peer', row.get('limit', '')):>8}")
    machine.record("context_parallel", rows, command="python benchmarks/context_parallel.py")


if __name__ == "__main__":
    main()
