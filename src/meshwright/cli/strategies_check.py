"""`meshwright strategies check`: the contract batteries on the strategies that an installed package brings."""

from __future__ import annotations

import argparse

from .frame import Result

HELP = "run the contract batteries on the strategies that an installed package brings"
EPILOG = """\
A package brings a strategy by an entry point: group `meshwright.<decision>`, the strategy's name, and its class; see docs/extending.md.
Every strategy is tried on generated problems, the same in every run. Needs meshwright[test]."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", help="the name under which the package is installed")


def run(args: argparse.Namespace) -> Result:
    import json
    import subprocess
    import sys
    from importlib.util import find_spec

    from ..drive.strategies import of_package
    from ..errors import MissingExtra, RunError

    of_package(args.package)  # raises what is wrong with the package, before a process is started for it
    for needed in ("pytest", "hypothesis"):
        if find_spec(needed) is None:
            raise MissingExtra(needed, extra="test", needed_for="strategies check")
    command = [sys.executable, "-m", f"{__package__.rpartition('.')[0]}.testing.contracts", args.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
        tests = found["tests"]
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise RunError(f"the batteries did not run: {said[0][:200]}", where="strategies check", data={"exit_code": done.returncode}) from None
    names = ", ".join(f"{decision} {name}" for decision, own in found["strategies"].items() for name in own)
    failed = [t for t in tests if t["outcome"] == "failed"]
    lines = [f"{args.package}: {names}: {len(tests) - len(failed)} of {len(tests)} contract tests pass"]
    for t in failed:
        lines += [f"failed: {t['battery']} {t['test']} [{t['strategy']}]", *(f"  {line}" for line in t["why"].splitlines())]
    document = {"schema": "meshwright.strategies-check", "version": 1, **found}
    return Result(document, "\n".join(lines), 0 if found["ok"] else 4)
