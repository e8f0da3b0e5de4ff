"""Handing schedules over: every exported MSCCL file replayed in an interpreter of the executor's rules; mutants of 20 files refused.

Run: `python benchmarks/handover.py` (prints a summary; raw output goes to benchmarks/results/handover.json).

- `replay`: schedules of all strategies on several fabrics, written as MSCCL XML and run on integers by `tests/io/msccl_executor_twin.py`, which
  shares no code with the reader, the writer or the checker. Refusals are listed with the limit they name.
- `mutants`: 20 schedules, all operators of `meshwright.testing.mutate_msccl`, `PER_OPERATOR` of each. A mutant that the checker accepts is replayed
  `SEEDS` times: if every replay is right it counts as equivalent, else as missed. A diagnostic is all messages about a mutant; two
  different mutants of one schedule with the same diagnostic are counted as not distinct, and listed.
Times are processor seconds of this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.decide.collective import NAMES, OPERATIONS, CollectiveProblem
from meshwright.drive.handover.msccl import export_msccl
from meshwright.drive.handover.verdicts import check_msccl
from meshwright.errors import MeshwrightError
from meshwright.interop.msccl import MscclAlgo
from meshwright.io.fabric.name import load_fabric
from meshwright.io.msccl.xml import msccl_text, parse_msccl
from meshwright.testing.mutate_msccl import MSCCL_OPERATORS, msccl_mutants

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "io"))
import machine
from msccl_executor_twin import Hang, replays

SIZE = 1 << 20
PER_OPERATOR = 3
SEEDS = 25
WIDE = ("ring", "forestcoll", "double-tree", "halving-doubling", "direct", "hierarchical", "pat")  # on the bigger fabrics
SCHEDULES = [
    ("two-islands", op, name)
    for op, names in (
        ("all-reduce", ("ring", "forestcoll", "double-tree", "halving-doubling", "direct", "hierarchical")),
        ("all-gather", ("ring", "forestcoll", "bruck", "pat")),
        ("reduce-scatter", ("ring", "direct")),
        ("broadcast", ("ring", "forestcoll")),
        ("reduce", ("ring", "direct")),
        ("all-to-all", ("direct", "bruck")),
        ("scatter", ("direct",)),
        ("gather", ("hierarchical",)),
    )
    for name in names
]


def exported(fabric: str, op: str, name: str, size: int = SIZE) -> tuple[MscclAlgo, float]:
    f = load_fabric(fabric)
    program = NAMES[name]().plan(CollectiveProblem.on(f, op, size, effort_s=20), rng=np.random.default_rng(0)).program
    start = time.process_time()
    return export_msccl(program).algo, time.process_time() - start


def replay_row(fabric: str, op: str, name: str) -> dict[str, Any] | None:
    row: dict[str, Any] = {"what": "replay", "fabric": fabric, "op": op, "strategy": name}
    try:
        algo, cpu_s = exported(fabric, op, name)
    except MeshwrightError as error:
        if "limit" not in error.data:
            return None  # the strategy has no schedule for this, or the format has no such operation
        return row | {"refused": error.message, "limit": error.data["limit"]}
    text = msccl_text(algo)
    try:
        replays(text, seeds=3)
        right = parse_msccl(text.encode()) == algo
    except (AssertionError, Hang) as error:
        right = False
        row["error"] = repr(error)[:200]
    steps = sum(1 for _ in algo.steps())
    return row | {
        "right": right, "steps": steps, "blocks_per_gpu": max(len(g.blocks) for g in algo.gpus), "channels": algo.channels,
        "steps_per_block": max(len(b.steps) for g in algo.gpus for b in g.blocks), "in_place": algo.in_place, "out_of_place": algo.out_of_place,
        "export_cpu_s": cpu_s, "kib": len(text) // 1024,
    }  # fmt: skip


def means_the_same(algo: MscclAlgo) -> bool:
    try:
        replays(msccl_text(algo), seeds=SEEDS, root=0)
    except (AssertionError, Hang):
        return False
    return True


def mutants_row(fabric: str, op: str, name: str, caught: Counter[str]) -> dict[str, Any]:
    algo, _ = exported(fabric, op, name, 1 << 14)
    assert check_msccl(algo).ok
    seen = {algo}
    said: dict[tuple[str, ...], str] = {}
    counts, missed, alike = Counter[str](), [], []
    start = time.process_time()
    for m in msccl_mutants(algo, np.random.default_rng(0), per_operator=PER_OPERATOR):
        if m.algo in seen:
            continue
        seen.add(m.algo)
        verdict = check_msccl(m.algo)
        counts["mutants"] += 1
        if verdict.ok:
            kind = "equivalent" if means_the_same(m.algo) else "missed"
            counts[kind] += 1
            if kind == "missed":
                missed.append(f"{m.operator}: {m.what}")
            continue
        counts[verdict.status] += 1
        caught[m.operator] += 1
        counts[verdict.findings[0].check] += 1
        words = tuple(f.message for f in verdict.findings)
        if words in said:
            alike.append([said[words], f"{m.operator}: {m.what}", words[0][:160]])
        said.setdefault(words, f"{m.operator}: {m.what}")
    steps = sum(1 for _ in algo.steps())
    return {
        "what": "mutants", "fabric": fabric, "op": op, "strategy": name, "steps": steps, **counts, "distinct_diagnostics": len(said), "alike": alike,
        "missed_mutants": missed, "cpu_s": time.process_time() - start,
    }  # fmt: skip


def main() -> None:
    rows: list[dict[str, Any]] = []
    for fabric, names in (("two-islands", tuple(NAMES)), ("dgx1-v100", WIDE), ("ndv2:2", WIDE), ("dgx-a100:2", WIDE), ("mi250:1", WIDE)):
        for op in OPERATIONS:
            for name in names:
                if name in NAMES and (row := replay_row(fabric, op, name)) is not None:
                    rows.append(row)
    caught: Counter[str] = Counter()
    rows += [mutants_row(*schedule, caught) for schedule in SCHEDULES]
    replayed = [r for r in rows if r["what"] == "replay" and "right" in r]
    mutants = [r for r in rows if r["what"] == "mutants"]

    def total(key: str) -> int:
        return sum(r.get(key, 0) for r in mutants)

    summary = {
        "what": "summary", "files": len(replayed), "files_right": sum(r["right"] for r in replayed),
        "refused": Counter(r["limit"] for r in rows if "limit" in r), "operators": len(MSCCL_OPERATORS), "schedules": len(mutants),
        "operators_never_refused": [x for x in MSCCL_OPERATORS if not caught[x]], "mutants": total("mutants"), "refused_mutants": total("wrong"),
        "equivalent": total("equivalent"), "missed": total("missed"), "undecided": total("unknown"),
        "distinct_diagnostics": total("distinct_diagnostics"), "distinct_share": total("distinct_diagnostics") / total("wrong"),
    }  # fmt: skip
    machine.record(
        "handover", rows_of(summary), summary=summary, per_operator=PER_OPERATOR, seeds=SEEDS,
        replays=[r for r in rows if r["what"] == "replay"], mutants=mutants,
    )  # fmt: skip
    print(json.dumps(summary, indent=1))


def rows_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Counts against how many there are (ratio 1 = all), and what must not be against nothing (ratio 0 = none)."""

    def none(what: str, value: int) -> dict[str, Any]:
        return {"what": what, "value": value, "unit": "count", "limit": 0, "ratio": float(value)}

    return [
        {"what": "exported MSCCL files that replay right", "value": summary["files_right"], "unit": "files", "limit": summary["files"]},
        none("mutation operators whose mutants were never refused", len(summary["operators_never_refused"])),
        {"what": "mutants refused, or the same schedule", "value": summary["refused_mutants"] + summary["equivalent"], "unit": "mutants",
         "limit": summary["mutants"]},
        none("mutants missed", summary["missed"]),
        none("mutants without a verdict", summary["undecided"]),
        {"what": "distinct diagnostics of refused mutants", "value": summary["distinct_diagnostics"], "unit": "diagnostics",
         "limit": summary["refused_mutants"]},
    ]  # fmt: skip


if __name__ == "__main__":
    main()
