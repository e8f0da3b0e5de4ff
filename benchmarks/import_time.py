"""CPU time of `import meshwright` and `meshwright --help` above `python -c pass`, best of five fresh processes, as JSON.

    python benchmarks/import_time.py [REPEATS]

Ends with 1 when a limit is broken (0.15 s for the import, 0.5 s for the help). CPU time of the child, user and system, so
that other programs on the machine do not show.
"""

import json
import os
import platform
import subprocess
import sys

CASES = {
    "pass": ["-c", "pass"],
    "import": ["-c", "import meshwright"],
    "help": ["-m", "meshwright", "--help"],
    "fabric_show": ["-m", "meshwright", "fabric", "show", "dgx-a100:2"],
}
LIMITS = {"import": 0.15, "help": 0.5}


def cpu_s(arguments: list[str]) -> float:
    """User and system seconds of one fresh Python process."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arguments} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    raw = {name: [cpu_s(arguments) for _ in range(repeats)] for name, arguments in CASES.items()}
    above = {name: min(times) - min(raw["pass"]) for name, times in raw.items() if name != "pass"}
    broken = [name for name, limit in LIMITS.items() if above[name] > limit]
    result = {
        "schema": "meshwright.benchmark.import-time",
        "version": 1,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_above_pass_s": above,
        "limits_s": LIMITS,
        "broken": broken,
        "raw_cpu_s": raw,
    }
    print(json.dumps(result, indent=1))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
