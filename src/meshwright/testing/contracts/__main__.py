"""Runs the batteries on the strategies of an installed package: `python -m meshwright.testing.contracts PACKAGE`.

Prints one JSON object: the strategies, and of every test its strategy, its outcome and, where it failed, why. Examples are drawn from fixed seeds, so
two runs say the same. Exit code: 0 where all passed, 4 where one did not.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from ...drive.strategies import of_package
from ...errors import MeshwrightError
from . import BATTERIES
from .chosen import KINDS

MAX_MESSAGE_LINES = 12  # of a failure's message


class Chosen:
    """The plug-in that gives the batteries their strategies and keeps what came out."""

    def __init__(self, kinds: dict[str, tuple[type[Any], ...]]) -> None:
        self.kinds = kinds
        self.tests: list[dict[str, str]] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[KINDS] = self.kinds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped or (report.when != "call" and not report.failed):
            return
        name, _, kind = report.nodeid.rpartition("::")[2].partition("[")
        row = {"battery": Path(report.location[0]).stem, "test": name, "strategy": kind.rstrip("]"), "outcome": report.outcome}
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)  # the error, and the example that made it
            row["why"] = "\n".join((crash.message if crash is not None else report.longreprtext).splitlines()[:MAX_MESSAGE_LINES])
        self.tests.append(row)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tests.append({"battery": report.nodeid, "test": "", "strategy": "", "outcome": "failed", "why": report.longreprtext[-800:]})


def main(package: str) -> int:
    try:
        chosen = Chosen(of_package(package))
    except MeshwrightError as error:
        sys.stdout.write(json.dumps({"error": error.to_json()}))
        return error.exit_code
    hypothesis.settings.register_profile("contracts", derandomize=True, database=None)
    hypothesis.settings.load_profile("contracts")
    # No constants of the modules that happen to be loaded: reading all their sources takes seconds, and a checkout would have other examples.
    vars(providers).update(_get_local_constants=lambda: providers._local_constants)
    with tempfile.TemporaryDirectory() as empty:
        settings = Path(empty) / "pytest.ini"  # not those of whatever project the command is called in
        settings.write_text("[pytest]\naddopts =\n")
        batteries = [f"{__package__}.{b.replace('.', '_')}" for b in BATTERIES if b in chosen.kinds]
        words = ["-c", str(settings), "--rootdir", empty, "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:randomly"]
        code = pytest.main([*words, "--pyargs", *batteries], plugins=[chosen])
    failed = any(test["outcome"] == "failed" for test in chosen.tests)
    strategies = {decision: [kind.name for kind in kinds] for decision, kinds in chosen.kinds.items()}
    sys.stdout.write(json.dumps({"package": package, "strategies": strategies, "tests": chosen.tests, "ok": not failed and code == 0}))
    return 0 if not failed and code == 0 else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
