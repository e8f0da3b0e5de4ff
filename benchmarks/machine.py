"""What every benchmark result says about where and how it was taken, and how it is written down."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("meshwright", "numpy", "numba", "msgspec", "torch", "networkx", "highspy")


def describe() -> dict[str, Any]:
    """Processor, cores, memory, kernel, load before the run, versions, commit. No host or user name, no path."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(), "load_1min": round(os.getloadavg()[0], 2), "python": platform.python_version(), "versions": versions,
        "commit": _commit(), "taken": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }  # fmt: skip


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.strip() or "unknown"


def cpu_s(function: Any, *, repeat: int = 3) -> tuple[float, Any]:
    """Least processor time of `repeat` calls, and the last result."""
    best, result = float("inf"), None
    for _ in range(repeat):
        start = time.process_time()
        result = function()
        best = min(best, time.process_time() - start)
    return best, result


def memory_high_water_bytes() -> int:
    """Largest resident size of this process so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def fresh(module: str, *arguments: str, timeout_s: float = 300) -> dict[str, Any]:
    """Run `python benchmarks/<module>.py arguments` in a process of its own; its last line of output is the JSON result."""
    script = Path(__file__).parent / f"{module}.py"
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=True, timeout=timeout_s)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def record(name: str, rows: list[dict[str, Any]], *, command: str | None = None, **facts: Any) -> dict[str, Any]:
    """Write `results/<name>.json` and return it.

    A row is `{"what", "value", "unit", "limit"?, "peer"?, "ratio"?}`. `ratio` is value / limit (or value / peer) unless given: below 1
    means inside the limit.
    """
    for row in rows:
        against = row.get("limit", row.get("peer"))
        if "ratio" not in row and against:
            row["ratio"] = round(row["value"] / against, 4)
    command = command or f"python benchmarks/{name}.py"
    document = {"schema": "meshwright.benchmark", "version": 1, "name": name, "command": command, "machine": describe(), "rows": rows, **facts}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return document


def keep_part(path: str | Path, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write a part of a benchmark that is run in pieces; `join_parts` reads it."""
    Path(path).write_text(json.dumps({"rows": rows, **facts}))


def join_parts(paths: Iterable[str | Path]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of all parts, and their facts."""
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for path in paths:
        part = json.loads(Path(path).read_text())
        rows += part.pop("rows")
        facts |= part
    return rows, facts
