"""The pytest plugin: records which tests run which lines, or runs chosen tests in a chosen order. Configured by MUTATION_RUN, a JSON file.

`{"journal": file, "chosen": [[nodeid, limit in s], ...] or null}`. The journal gets one JSON line per event: `["start", nodeid]` and
`["passed" | "failed" | "skipped", nodeid, seconds]`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from mutation import lines

OPTIONS = json.loads(Path(os.environ["MUTATION_RUN"]).read_text())
JOURNAL = os.open(OPTIONS["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
RECORDING = lines.RECORDING in os.environ
TAKEN: defaultdict[str, float] = defaultdict(float)
BAD: set[str] = set()
SKIPPED: set[str] = set()
LIMITS_S: dict[str, float] = dict(OPTIONS["chosen"] or ())
GRACE_S = 5.0  # from a test's limit to the end of the process: compiled code never looks at the signal that ends a test


def _in_fork() -> None:
    """A fork of a test has not the thread that watches the limit: who ends it there, as pytest does at a failure, would wait until the limit."""
    faulthandler.cancel_dump_traceback_later = faulthandler.dump_traceback_later = lambda *_, **__: None


os.register_at_fork(after_in_child=_in_fork)


def note(*event: Any) -> None:
    os.write(JOURNAL, (json.dumps(event) + "\n").encode())


def pytest_configure(config: pytest.Config) -> None:
    if not RECORDING:  # a found failure is enough, the smallest one is not looked for
        settings.register_profile("mutation", phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False)
        settings.load_profile("mutation")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if OPTIONS["chosen"] is None:
        return
    place = {nodeid: (k, limit) for k, (nodeid, limit) in enumerate(OPTIONS["chosen"])}
    items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid][0])
    for item in items:
        for mark in list(item.iter_markers("timeout")):
            for node in item.listchain():
                if mark in node.own_markers:
                    node.own_markers.remove(mark)
        item.add_marker(pytest.mark.timeout(place[item.nodeid][1]))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    if RECORDING:
        lines.under(f"{collector.nodeid.partition('::')[0]} (collection)")
    return (yield)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note("failed", report.nodeid, 0.0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    note("start", item.nodeid)
    if RECORDING:
        lines.under(item.nodeid)
    if item.nodeid in LIMITS_S:  # a thread of its own, which needs no lock of the interpreter; exit status 1
        faulthandler.dump_traceback_later(LIMITS_S[item.nodeid] + GRACE_S, exit=True, file=sys.__stderr__)
    result = yield
    faulthandler.cancel_dump_traceback_later()
    outcome = "failed" if item.nodeid in BAD else "skipped" if item.nodeid in SKIPPED else "passed"
    note(outcome, item.nodeid, round(TAKEN[item.nodeid], 4))
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    TAKEN[report.nodeid] += report.duration
    if report.failed:
        BAD.add(report.nodeid)
    if report.skipped:
        SKIPPED.add(report.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[Any]:
    """What a shared fixture runs belongs to all tests of the file, not only to the first that asks."""
    if not RECORDING or fixturedef.scope == "function":
        return (yield)
    test = lines.PROCESS.tag or ""
    lines.under(f"{request.node.nodeid.partition('::')[0] or test.partition('::')[0]} (collection)")
    try:
        return (yield)
    finally:
        lines.under(test)
