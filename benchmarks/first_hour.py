"""The first hour: fifteen jobs with the commands of the start and how-to pages, each command a process of its own, in an empty folder.

    python benchmarks/first_hour.py [--topology FILE] [--trace FILE...] [--out FILE]       (without network: unshare -n, as root)

For each job: the time until the first command has answered, and until all have, in wall and processor seconds, and what of it failed. Asked: an
answer within 300 s. `--topology FILE` names a file that NCCL wrote, for the job that imports one (default: one of the tests), `--trace FILES` traces
of somebody's. Compiled kernels are
kept in a folder of this run, so the first jobs pay for compiling, as a newcomer does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from page_commands import BLOCK, has_lab, shown_commands  # noqa: E402

PAGES = (
    "start", "howto/plan_llama", "howto/slow_allreduce", "howto/fit_in_memory", "howto/rehearse", "howto/faster_ddp", "howto/read_trace",
    "howto/write_strategy", "howto/slow_input", "howto/empty_hosts", "howto/right_size", "howto/run_decisions", "howto/which_fabric",
)  # fmt: skip
ASKED_S = 300.0


def of_page(page: str) -> tuple[dict[str, str], list[tuple[str, int]]]:
    """(files that the page gives, commands with the exit code that the page says)."""
    files, commands = {}, []
    for block in BLOCK.finditer((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")):
        if title := re.search(r'title="([^"]+)"', block["head"]):
            files[title[1]] = block["body"]
        note = block["note"] or ""
        if block["head"].split()[:1] == ["console"] and not (note.startswith("lab") and not has_lab()):
            found = [(command, 0) for command, _ in shown_commands(block["body"])]
            if note.startswith("exit"):
                found[-1] = (found[-1][0], int(note.split()[1]))
            commands += found
    return files, commands


def own_jobs(topology: Path, traces: list[Path]) -> dict[str, tuple[dict[str, str], list[tuple[str, int]]]]:
    theirs = {} if not traces else {
        "somebody's trace": ({}, [(f"meshwright trace {word}", 0) for word in (
            f"breakdown {' '.join(map(str, traces))}", f"annotate {traces[0]} --depth 2")]),
    }  # fmt: skip
    return theirs | {
        "my cluster from NCCL's file": (
            {"topology.xml": topology.read_text(encoding="utf-8")},
            [
                ("meshwright fabric import topology.xml --boxes 2 --out mine.toml", 0),
                ("meshwright fabric lint mine.toml", 0),
                ("meshwright collective bound all-reduce --fabric mine.toml --size 64MiB", 0),
            ],
        ),
        "a schedule for MSCCL": (
            {},
            [
                ("meshwright collective plan all-gather --fabric dgx1-v100:1 --size 1MiB --strategy ring --out plan.json", 0),
                ("meshwright collective export plan.json --format msccl-xml --out allgather.xml", 0),
                ("meshwright collective check allgather.xml", 0),
            ],
        ),
    }


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def played(name: str, files: dict[str, str], commands: list[tuple[str, int]], kernels: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NUMBA_CACHE_DIR": kernels, "MESHWRIGHT_CACHE": "0"}
    times: list[tuple[float, float]] = []
    failed = []
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        for link in ("examples", "benchmarks"):
            Path(folder, link).symlink_to(ROOT / link)
        for file, text in files.items():
            Path(folder, file).write_text(text, encoding="utf-8")
        begin, used = time.monotonic(), cpu_s()
        for command, code in commands:
            words = shlex.split(command.replace("\\\n", " "))
            program = words[1:] if words[0] == "python" else ["-m", *words]
            done = subprocess.run([sys.executable, *program], cwd=folder, env=environment, capture_output=True, text=True, check=False)
            times.append((time.monotonic() - begin, cpu_s() - used))
            if done.returncode != code:
                failed.append({"command": command, "exit": done.returncode, "said": (done.stdout + done.stderr)[-400:]})
    (first, first_cpu), (last, last_cpu) = times[0], times[-1]
    return {
        "job": name, "commands": len(commands), "first_answer_s": round(first, 1), "first_answer_cpu_s": round(first_cpu, 1),
        "all_s": round(last, 1), "all_cpu_s": round(last_cpu, 1), "within": first_cpu <= ASKED_S, "failed": failed,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Fifteen jobs of a newcomer, with the time to the first answer of each.")
    parser.add_argument("--topology", type=Path, default=ROOT / "tests" / "data" / "topology" / "box_nvswitch.xml", help="NCCL's topology file")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="traces of torch.profiler, for a job that reads them")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    jobs = {page: of_page(page) for page in PAGES} | own_jobs(args.topology.resolve(), [t.resolve() for t in args.trace])
    rows = []
    with tempfile.TemporaryDirectory(prefix="first-hour-kernels-") as kernels:
        print(f"{'job':<30}{'commands':>9}{'first answer':>14}{'cpu':>8}{'all':>9}{'cpu':>8}  failed", flush=True)
        for name, (files, commands) in jobs.items():
            row = played(name, files, commands, kernels)
            rows.append(row)
            first, both = f"{row['first_answer_s']} s", f"{row['all_s']} s"
            cpu, all_cpu, bad = row["first_answer_cpu_s"], row["all_cpu_s"], len(row["failed"])
            print(f"{name:<30}{row['commands']:>9}{first:>14}{cpu:>8}{both:>9}{all_cpu:>8}  {bad}", flush=True)
    if args.out:
        load = os.getloadavg()[0]
        args.out.write_text(json.dumps({"asked_s": ASKED_S, "cores": os.cpu_count(), "load_at_the_end": load, "jobs": rows}, indent=1) + "\n")
    for row in rows:
        for x in row["failed"]:
            print(f"{row['job']}: {x['command']} ended with {x['exit']}: {x['said']}")
    return 1 if any(row["failed"] or not row["within"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
