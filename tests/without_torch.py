"""Where torch is not installed, tests that need it are skipped and all others run: `tools/wheels` does so on every version of Python."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

import pytest

__all__ = ["TORCH", "WithoutTorch"]

TORCH = importlib.util.find_spec("torch") is not None
# What Python, a module of ours, a command in a process of its own, or a command that asks for the module says where torch is missing.
MISSING = re.compile(r"No module named 'torch|needs the package 'torch'|could not import 'torch|meshwright\[(?:torch|hf|lightning|transformers)\]")


class WithoutTorch:
    """A plugin; registered only where torch is missing. What fails and names torch as missing is skipped, whatever else fails fails."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Iterator[None]:
        report = yield
        if report.outcome == "failed" and MISSING.search(str(report.longrepr)):
            report.outcome, report.longrepr = "skipped", (__file__, 0, "needs torch")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        said = "\n".join([str(report.longrepr), *(text for _, text in report.sections)]) if report.failed else ""
        if MISSING.search(said):
            report.outcome, report.longrepr = "skipped", (__file__, 0, "needs torch")
        return report
