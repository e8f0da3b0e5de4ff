"""Lists and runs the benchmarks, keeps their raw output and prints one table of ratios.

    python benchmarks/run.py                    every benchmark, one after the other
    python benchmarks/run.py plan_file forestcoll
    python benchmarks/run.py --list
    python benchmarks/run.py --show             the kept results, without running anything

A benchmark is `benchmarks/<name>.py`: run as a script, it writes `results/<name>.json` (see `machine.record`). What it prints is kept as
`results/<name>.txt`. A ratio is value / limit or value / peer, taken in the same run: 1 or less is inside the limit.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

HERE = Path(__file__).parent
NOT_BENCHMARKS = {"run", "machine", "megatron_step", "trace_models"}


def names() -> dict[str, str]:
    """Benchmark -> the first line of its docstring."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        if path.stem not in NOT_BENCHMARKS:
            found[path.stem] = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    return found


def run(name: str, timeout_s: float) -> str:
    """Run one benchmark; '' or why it failed."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    machine.RESULTS.mkdir(exist_ok=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout_s:g} s"
    (machine.RESULTS / f"{name}.txt").write_text(done.stdout)
    sys.stdout.write(done.stdout)
    return "" if done.returncode == 0 else f"exit code {done.returncode}"


def table(name: str) -> list[str]:
    """Lines `what  value unit  ratio` of the kept result."""
    path = machine.RESULTS / f"{name}.json"
    if not path.exists():
        return ["(no result yet)"]
    lines = []
    for row in json.loads(path.read_text()).get("rows", []):
        ratio = row.get("ratio")
        against = "limit" if "limit" in row else "peer" if "peer" in row else ""
        compared = "" if ratio is None else f"{ratio:8.3f}" + (f" of {against} {_short(row[against])}" if against else "")
        lines.append(f"{row.get('what', '')[:70]:<70} {_short(row.get('value', '')):>14} {row.get('unit', ''):<10} {compared}".rstrip())
    return lines


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--show", action="store_true", help="print the kept results")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="seconds per benchmark (default 1800)")
    args = parser.parse_args()
    known = names()
    unknown = [name for name in args.names if name not in known]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(known)}")
    if args.list:
        print("\n".join(f"{name:<16} {line}" for name, line in known.items()))
        return 0
    chosen = args.names or list(known)
    failed = {}
    for name in chosen if not args.show else []:
        print(f"== {name}: {known[name]}", flush=True)
        if why := run(name, args.timeout):
            failed[name] = why
    for name in chosen:
        print(f"\n{name}: {known[name]}")
        print("\n".join(f"  {line}" for line in table(name)))
    for name, why in failed.items():
        print(f"\nFAILED {name}: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
