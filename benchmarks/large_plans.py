"""Plans of many servers, full circle: planned, written, read, checked by value, simulated, shown, explained, exported to MSCCL, read back and
replayed there, reported.

    python benchmarks/large_plans.py [FABRIC ...] [--ops all-gather,all-reduce,...] [--size 1GiB] [--strategy auto] [--without PARTS]

Every command is a process of its own, as a user gives it. Per command: exit code, seconds of processor time (user and system), peak memory; per plan:
bytes of the file, its simulated time and the bound's share of it. `check` proves every value and simulates again what the file predicts; `bound`
explains what is tight; `check_export` replays the exported schedule. Rows that are not run again stay as they were, each with its own command.
`export` may be refused by a limit of MSCCL's executor, which the row names.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import RESULTS, record

FABRICS = ["dgx-h100:13", "dgx-h100:16"]
OPS = "all-gather,reduce-scatter,all-reduce,broadcast,reduce,all-to-all,scatter,gather"
MAX_COMMAND_S = 1800
MAX_FILE_BYTES = 50_000_000


def command(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What one command cost, and its JSON document (empty where it failed)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.run(
        ["/usr/bin/env", sys.executable, "-m", "meshwright", *words, "--json"], capture_output=True, text=True, timeout=MAX_COMMAND_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {"exit": child.returncode, "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)}
    document = json.loads(child.stdout) if child.returncode == 0 and child.stdout.startswith("{") else {}
    if child.returncode:
        cost["said"] = (child.stdout + child.stderr).strip()[:300]
    return cost, document


def circle(folder: Path, op: str, fabric: str, size: str, strategy: str, down: str) -> dict[str, Any]:
    plan, xml = folder / "plan.json.gz", folder / "plan.xml"
    on = f"{fabric} without {down}" if down else fabric
    row: dict[str, Any] = {"what": f"{op} of {size} on {on}: the plan's file", "value": 0, "unit": "bytes", "limit": MAX_FILE_BYTES}
    for file in (plan, xml):
        file.unlink(missing_ok=True)
    more = ["--without", down] if down else []
    row["plan"], document = command(
        "collective", "plan", op, "--fabric", fabric, "--size", size, "--strategy", strategy, *more, "--out", str(plan)
    )
    if not plan.exists():
        return row
    row |= {"value": plan.stat().st_size, "strategy": document.get("strategy"), "time_s": document.get("time_s")}
    row["share_of_bound"] = round(1 / document["ratio"], 4) if document.get("ratio") else None
    row["check"], _ = command("collective", "check", str(plan))
    row["show"], _ = command("program", "show", str(plan))
    row["stats"], _ = command("program", "stats", str(plan))
    row["bound"], _ = command("collective", "bound", op, "--fabric", fabric, "--size", size, *more)
    row["export"], document = command("collective", "export", str(plan), "--out", str(xml))
    if xml.exists():
        row["blocks_per_gpu"], row["steps_per_block"] = document.get("blocks_per_gpu"), document.get("steps_per_block")
        row["check_export"], _ = command("collective", "check", str(xml))
    row["report"], _ = command("report", str(plan), "--out", str(folder / "report.html"))
    return row


def kept_beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows recorded before that are not among these, and these."""
    path = RESULTS / "large_plans.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "command": ""}
    new = {row["what"] for row in rows}
    return [{"command": before["command"]} | row for row in before["rows"] if row["what"] not in new] + rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("fabrics", nargs="*", default=FABRICS)
    parser.add_argument("--ops", default=OPS)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--without", default="", help="parts that are down")
    args = parser.parse_args()
    command_line = " ".join(["python benchmarks/large_plans.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as name:
        for fabric in args.fabrics or FABRICS:
            for op in args.ops.split(","):
                row = circle(Path(name), op, fabric, args.size, args.strategy, args.without)
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
                # After every row: a run that is ended early keeps what it has measured.
                peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
                record("large_plans", kept_beside([row | {"command": command_line}]), command=command_line, peak_bytes_of_any_command=peak)


if __name__ == "__main__":
    main()
