"""Generated jobs and layouts before the gate: equal to a plain loop, or refused by name; and what the gate costs on the quickstart's plan and at 8B.

    python benchmarks/gate.py                      # 520 combinations, some twenty minutes
    python benchmarks/gate.py --quick              # 20 of them, nothing recorded
    python benchmarks/gate.py --first 0 --stop 130 --keep part0.json     # a part; join with --join part0.json part1.json ...

Nets, losses, optimizers and layouts are drawn by number (`tests/run/gate_nets.py`, `tests/run/gate_combinations.py`). What the gate lets pass is
trained for three steps by the plan's ranks and by a loop written out in the tests, on other samples than the gate saw; more than 1e-6 apart in
float64 (5e-3 in float32) is "different", which must not happen; nor must a difference that the gate finds no cause for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import join_parts, keep_part, record
from real_ranks import ROOT, TESTS

COMBINATIONS = 520
MAX_GATE_S = 10.0
MAX_SHARE_OF_PLANNING = 0.05


def judged(first: int, stop: int) -> list[dict[str, Any]]:
    import torch
    from gate_combinations import draw, judge

    torch.set_num_threads(1)
    found = []
    for number in range(first, stop):
        combination = draw(number)
        verdict = judge(combination)
        print(f"{number:4} {combination}: {verdict.outcome}, {verdict.why}, {verdict.error:.1e}", flush=True)
        found.append({"number": number, "what": str(combination), "outcome": verdict.outcome, "why": verdict.why, "error": verdict.error})
    return found


def quickstart_s() -> float:
    """Processor time of the gate, from the plan's file on: what `train run` takes longer."""
    from meshwright.cli import main

    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder, "plan.json"))
        words = ["train", "plan", "--model", "examples/gpt.py:small", "--fabric", "examples/fabrics/two_islands.toml", "--global-batch", "32"]
        assert main([*words, "--out", plan]) == 0
        start = time.process_time()
        assert main(["train", "gate", plan]) == 0
        return time.process_time() - start


def large_s() -> tuple[float, float]:
    """Processor time of planning transformers' LLaMA class at 8B on one machine of eight GPUs, and of the gate, which compares a copy."""
    from llama_capture import FIELDS, LENGTH, SIZES

    from meshwright.cli import main
    from meshwright.errors import TimeLimit

    with tempfile.TemporaryDirectory() as folder:
        plan, config = str(Path(folder, "plan.json")), Path(folder, "config.json")
        config.write_text(json.dumps({**FIELDS, **SIZES["8B"]}))
        words = ["--model", f"hf:{config}@{LENGTH}", "--fabric", "dgx-h100:1", "--global-batch", "64", "--out", plan]
        start = time.process_time()
        assert main(["train", "plan", *words]) in (0, TimeLimit.exit_code)  # of a search that was cut the plan is written too
        planned = time.process_time()
        assert main(["train", "gate", plan, "--data", "synthetic"]) == 0
        return planned - start, time.process_time() - planned


def rows_of(found: list[dict[str, Any]], gate_s: float, large: tuple[float, float] | None) -> list[dict[str, Any]]:
    outcomes = Counter(x["outcome"] for x in found)
    worst = max((x["error"] for x in found if x["outcome"] == "equal" and x["why"] == "float64"), default=0.0)
    rows = [{"what": f"combinations: {outcome}", "value": outcomes[outcome], "unit": "combinations"} for outcome in ("equal", "refused")]
    rows.append({"what": "combinations: refused without a cause", "value": outcomes["unexplained"], "unit": "combinations"})
    rows.append({"what": "combinations: different, and let pass", "value": outcomes["different"], "unit": "combinations"})
    rows.append({"what": "largest error after three steps, float64", "value": worst, "unit": "of the largest entry", "limit": 1e-6})
    reasons = Counter(x["why"] for x in found if x["outcome"] == "refused")
    rows += [{"what": f"refused: {why}", "value": n, "unit": "combinations"} for why, n in reasons.most_common()]
    rows.append({"what": "the gate on the quickstart's plan", "value": gate_s, "unit": "s", "limit": MAX_GATE_S})
    if large is not None:
        rows.append({"what": "planning LLaMA 8B on dgx-h100:1", "value": large[0], "unit": "s"})
        rows.append({"what": "the gate on a copy of that plan", "value": large[1], "unit": "s", "limit": MAX_SHARE_OF_PLANNING * large[0]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stop", type=int, default=COMBINATIONS)
    parser.add_argument("--keep")
    parser.add_argument("--join", nargs="+")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    found = join_parts(args.join)[0] if args.join else judged(args.first, 20 if args.quick else args.stop)
    if args.keep:
        keep_part(args.keep, found)
        return
    rows = rows_of(found, quickstart_s(), large_s() if find_spec("transformers") and not args.quick else None)
    for r in rows:
        print(f"{r['what']:100} {r['value']:.6g} {r['unit']}")
    if not args.quick:
        record("gate", rows, combinations=found)
    assert all(x["outcome"] in ("equal", "refused") for x in found)


if __name__ == "__main__":
    main()
