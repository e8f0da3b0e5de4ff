"""Tries the wheel on versions of Python: `python tools/wheels.py [--tests FOLDER...] [--out FILE] PYTHON...` (paths or names of interpreters).

The wheel is built once. For each interpreter a new environment gets the wheel alone, without torch, and the commands run that a release runs
(`tools/release`). With `--tests`, pytest runs those folders there; what needs torch is skipped. Versions that the package is for and that were not
named are listed as not tried. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEST_TOOLS = ("hypothesis", "networkx", "pytest", "pytest-randomly", "pytest-timeout", "pytest-xdist")
_loader = importlib.machinery.SourceFileLoader("release", str(ROOT / "tools" / "release"))
_spec = importlib.util.spec_from_loader("release", _loader)
assert _spec
release = importlib.util.module_from_spec(_spec)
_loader.exec_module(release)


def meant() -> list[str]:
    """Versions of Python in the package's classifiers."""
    return re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tried(python: str, wheel: Path, tests: list[str]) -> dict[str, Any]:
    """One interpreter: its version, what was installed, the counts of pytest. Raises: release.Refused."""
    version = release.run(python, "-c", "import platform; print(platform.python_version())", cwd=ROOT).strip()
    row: dict[str, Any] = {"python": version}
    with tempfile.TemporaryDirectory(prefix=f"wheel-{version}-") as name:
        folder = Path(name)
        release.run(python, "-m", "venv", str(folder / "venv"), cwd=folder)
        row["with"] = release.tried(wheel, folder).split()
        row["commands"] = len(release.WITHOUT_TORCH)
        if tests:
            row["tests"] = tested(folder, tests)
    return row


def tested(folder: Path, tests: list[str]) -> str:
    """The last line of pytest on these folders, run with the installed package; src/ is there for tests that read it."""
    inside = folder / "venv" / "bin" / "python"
    release.run(str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TEST_TOOLS, cwd=folder)
    for place in (p for p in ROOT.iterdir() if not p.name.startswith(".")):
        (folder / place.name).symlink_to(place)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"NUMBA_CACHE_DIR": str(folder / "kernels")}
    command = [str(inside), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or ["pytest printed nothing"])[-1]
    if done.returncode:
        failed = "\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
        raise release.Refused(f"tests failed: {last}\n{failed or done.stderr[-2000:]}")
    return last.strip("= ")


def main() -> int:
    parser = argparse.ArgumentParser(description="Tries the wheel on versions of Python.")
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="interpreters, e.g. python3.11 /opt/python3.13/bin/python")
    parser.add_argument("--tests", nargs="*", default=[], metavar="FOLDER", help="run these folders of tests, too")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    rows, bad = [], 0
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        wheel = release.built(Path(folder))
        for python in args.pythons:
            try:
                rows.append(tried(python, wheel, args.tests))
            except (release.Refused, OSError) as why:
                rows.append({"python": python, "error": str(why)})
                bad = 1
            print(json.dumps(rows[-1]), flush=True)
    missing = sorted(set(meant()) - {".".join(r["python"].split(".")[:2]) for r in rows if "error" not in r})
    print("not tried: " + (", ".join(missing) or "none of those that the package is for"))
    if args.out:
        args.out.write_text(json.dumps({"name": "wheels", "rows": rows, "not_tried": missing}, indent=1) + "\n", encoding="utf-8")
    return bad


if __name__ == "__main__":
    sys.exit(main())
