"""A rank that is told to end: the report that it leaves, also while it is blocked."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from meshwright.run.machine.process import STEP, WAITING_FOR, FailureReport, ProgressTable
from meshwright.run.ranks.worker import EXIT_REPORTED, Seat, WorkerSetup, rank_main

pytestmark = pytest.mark.timeout(280)


def blocked(seat: Seat) -> None:
    seat.progress[STEP], seat.progress[WAITING_FOR] = 5, 1
    (seat.folder / "here").touch()
    time.sleep(60)


def test_a_rank_that_is_told_to_end_says_for_whom_it_waited(tmp_path: Path) -> None:
    ProgressTable(tmp_path / "progress", 2, create=True)
    setup = WorkerSetup(ranks=2, folder=str(tmp_path), host="", port=0, token="", parent=0, function=f"{__name__}:blocked", options={})
    pid = os.fork()
    if not pid:
        os._exit(rank_main(setup, 1))
    try:
        while not (tmp_path / "here").exists():
            time.sleep(0.01)
    finally:
        os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_REPORTED
    (file,) = [p for p in tmp_path.iterdir() if p.name not in ("progress", "here")]
    report = msgspec.json.decode(file.read_bytes(), type=FailureReport)
    assert (report.rank, report.peer, report.training_step, report.error) == (1, 0, 5, "SIGTERM") and report.message == "was told to end"
