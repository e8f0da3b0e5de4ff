"""Generated jobs and layouts before the gate: equal to a plain loop, or refused by name.

    python benchmarks/gate.py                          # 520 combinations, six minutes of processor time
    python benchmarks/gate.py --quick                  # 20 of them, nothing recorded
    python benchmarks/gate.py --first 520 --stop 700   # others
    python benchmarks/gate.py --narrow                 # 500 combinations with bfloat16 weights, bfloat16 autocast and averages among them
    python benchmarks/gate.py --summary                # only sum up the rows

Nets, losses, optimizers, layouts and recipes (clipping, schedules, decay, averages, statistics of the whole batch) are drawn by number
(`tests/run/gate_nets.py`, `tests/run/gate_combinations.py`). What the gate lets pass is
trained for three steps by the plan's ranks and by a loop written out in the tests, on other samples than the gate saw; more than 1e-6 apart in
float64 (5e-3 in float32) is "different", which must not happen; nor must a difference that the gate finds no cause for.

With `--narrow` a third each have bfloat16 weights (float32 masters) or bfloat16 autocast, and half of all keep a moving average: averages and masters
are compared too. What is narrow agrees up to rounding: its error is given as a share of what is allowed (`gate_combinations.NARROW_...`).

A row is appended as soon as it is known, with the commit it was judged at; numbers that are there are not judged again, so an interrupted run goes
on. Raw output: benchmarks/results/gate.jsonl (gate_narrow.jsonl), summed up in gate.json. What the gate costs: `gate_cost.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import RESULTS, describe, record
from real_ranks import ROOT, TESTS

COMBINATIONS = 520
QUICK = 20
NARROW = 500


def judged(numbers: list[int], narrow: bool) -> Iterator[dict[str, Any]]:
    import torch
    from gate_combinations import draw, judge

    torch.set_num_threads(1)
    commit = describe()["commit"]
    for number in numbers:
        combination = draw(number, recipes=True, narrow=narrow)
        verdict = judge(combination)
        print(f"{number:4} {combination}: {verdict.outcome}, {verdict.why}, {verdict.error:.1e}", flush=True)
        found = {"number": number, "what": str(combination), "outcome": verdict.outcome, "why": verdict.why, "error": verdict.error}
        yield {**found, "commit": commit}


def known(rows: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def rows_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    outcomes = Counter(x["outcome"] for x in found)
    worst = max((x["error"] for x in found if x["outcome"] == "equal" and x["why"] == "float64"), default=0.0)
    narrow = max((x["error"] for x in found if x["outcome"] == "equal" and ("narrow_" in x["what"] or "bf16" in x["what"])), default=0.0)
    rows = [{"what": f"combinations: {outcome}", "value": outcomes[outcome], "unit": "combinations"} for outcome in ("equal", "refused")]
    rows.append({"what": "combinations: refused without a cause", "value": outcomes["unexplained"], "unit": "combinations"})
    rows.append({"what": "combinations: different, and let pass", "value": outcomes["different"], "unit": "combinations"})
    rows.append({"what": "largest error after three steps, float64", "value": worst, "unit": "of the largest entry", "limit": 1e-6})
    rows += [{"what": "largest error after three steps, bfloat16", "value": narrow, "unit": "of what is allowed", "limit": 1.0}] if narrow else []
    reasons = Counter(x["why"] for x in found if x["outcome"] == "refused")
    rows += [{"what": f"refused: {why}", "value": n, "unit": "combinations"} for why, n in reasons.most_common()]
    rows += [{"what": f"judged at {commit}", "value": n, "unit": "combinations"} for commit, n in Counter(x["commit"] for x in found).most_common()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--narrow", action="store_true")
    parser.add_argument("--summary", action="store_true")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    name = "gate_narrow" if args.narrow else "gate"
    if args.quick:
        found = list(judged([*range(QUICK)], args.narrow))
    else:
        raw = RESULTS / f"{name}.jsonl"
        there, stop = {x["number"] for x in known(raw)}, args.stop or (NARROW if args.narrow else COMBINATIONS)
        for row in judged([n for n in range(args.first, stop) if n not in there], args.narrow) if not args.summary else ():
            with raw.open("a") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        found = sorted(known(raw), key=lambda x: x["number"])
    rows = rows_of(found)
    for r in rows:
        print(f"{r['what']:100} {r['value']:.6g} {r['unit']}")
    if not args.quick:
        record(name, rows)
    assert all(x["outcome"] in ("equal", "refused") for x in found)


if __name__ == "__main__":
    main()
