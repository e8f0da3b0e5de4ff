"""The one starter of processes: ranks meet on a port that nobody can take in between, the first cause is named, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launched
import pytest

from meshwright.errors import PortInUse, RankDied, RankFailed, RunTimeout, UsageError
from meshwright.run.ranks.launcher import LocalRanks, listen, scratch_folder

HERE = str(Path(__file__).parents[1])
pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def ranks_of(folder: Path, function: str, count: int = 2, **more: Any) -> LocalRanks:
    environment = {"PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]), "MESHWRIGHT_TEST_SAID": "hello"}
    return LocalRanks(count, folder, getattr(launched, function), {"sleep_s": 60.0}, environment=environment, **more)


def running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def usual_scheduling():
    """Not as the tests themselves are scheduled (conftest.py)."""
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    yield
    os.sched_setscheduler(0, before, os.sched_param(0))


@contextlib.contextmanager
def nothing_left(started: LocalRanks):
    yield
    pids = [*started.pids, *([started.worker.pid] if started.worker else [])]
    assert pids and not any(map(running, pids))


def when_all_wait(started: LocalRanks, act: Callable[[], None]) -> threading.Thread:
    """`act` in a thread, once every rank is past its start."""

    def watch() -> None:
        while len(list(started.folder.glob("here-*"))) < started.ranks or not started.pids:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_the_port_is_taken_from_the_first_moment() -> None:
    with listen(0) as sock, pytest.raises(PortInUse, match="is in use"):
        listen(sock.getsockname()[1])


def test_ranks_meet_by_our_store_and_by_torchs_environment(tmp_path: Path) -> None:
    started = ranks_of(tmp_path, "meet")
    with nothing_left(started):
        started.run()
    assert started.results(dict) == [{"rank": r, "sums": [2, 2], "said": "hello"} for r in range(2)]
    assert started.machine_use["wall_s"] > 0


def test_a_killed_rank_is_named_and_the_rest_is_ended(tmp_path: Path) -> None:
    started = ranks_of(tmp_path, "waits")
    when_all_wait(started, lambda: os.kill(started.pids[1], signal.SIGKILL))
    with nothing_left(started), pytest.raises(RankDied, match="rank 1 was killed by SIGKILL while measuring") as caught:
        started.run()
    assert caught.value.data["rank"] == 1 and caught.value.data["exit"] == -signal.SIGKILL


def test_a_frozen_rank_runs_into_the_limit(tmp_path: Path) -> None:
    started = ranks_of(tmp_path, "waits", limit_s=90.0, limit_hint="try again")

    def freeze() -> None:
        os.kill(started.pids[0], signal.SIGSTOP)
        while Path("/proc", str(started.pids[0]), "stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)  # a busy machine takes its time to stop it
        started.limit_s = 0.1

    when_all_wait(started, freeze)
    with nothing_left(started), pytest.raises(RunTimeout, match=r"not done after 0\.1 s and were ended: rank 0 is stopped") as caught:
        started.run()
    assert caught.value.hint == "try again" and caught.value.data["stopped"] == [0]


def test_slow_ranks_run_into_the_limit_while_they_start(tmp_path: Path) -> None:
    started = ranks_of(tmp_path, "waits", limit_s=0.1)
    with nothing_left(started), pytest.raises(RunTimeout, match="ranks 0, 1 had not ended"):
        started.run()


def test_what_a_rank_refuses_is_the_error_itself(tmp_path: Path) -> None:
    started = ranks_of(tmp_path, "refuses")
    with nothing_left(started), pytest.raises(UsageError, match="makes no sense") as caught:
        started.run()
    assert (caught.value.where, caught.value.hint) == ("--question", "ask another one")


def test_an_exception_is_named_with_its_rank(tmp_path: Path) -> None:
    started = ranks_of(tmp_path, "breaks")
    with nothing_left(started), pytest.raises(RankFailed, match="rank 1 failed while measuring: ValueError: sample 20 is damaged") as caught:
        started.run()
    assert "launched.py" in caught.value.data["traceback"]


def test_an_early_exit_is_named_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(RankDied, match=r"rank \d ended with exit code 3"):
        ranks_of(tmp_path, "leaves").run()


def test_a_start_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched.waits, "__qualname__", "nothing")  # by which the ranks' process finds none
    with pytest.raises(RankDied, match="the process that starts the ranks") as caught:
        ranks_of(tmp_path, "waits").run()
    assert "nothing" in caught.value.hint
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankDied, match="the process that starts the ranks"):
        ranks_of(tmp_path, "waits").run()


CALLER = """
import sys
from pathlib import Path
import launched
from meshwright.run.ranks.launcher import LocalRanks, scratch_folder
with scratch_folder("test") as folder:
    started = LocalRanks(2, folder, launched.waits, {"sleep_s": 60.0})
    wait, told = started._wait_until, []
    def tell(*words):
        wait(*words)
        print(started.worker.pid, *started.pids, flush=True)
    started._wait_until = tell
    started.run()
"""


def test_ranks_die_with_a_killed_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path}
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True, env=env)
    killer = threading.Timer(200, caller.kill)
    killer.start()
    try:
        assert caller.stdout is not None
        pids = [int(x) for x in caller.stdout.readline().split()]
    finally:
        killer.cancel()
        caller.kill()
        caller.wait()
        caller.stdout.close()
    assert len(pids) == 3
    deadline = time.monotonic() + 60
    while any(running(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(running(p) for p in pids)
    left, foreign = list(tmp_path.iterdir()), tmp_path / "meshwright-test-mine"
    foreign.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("test") as folder:  # a killed process cannot tidy up; the next run does
        assert sorted(tmp_path.iterdir()) == sorted([foreign, folder])
    assert len(left) == 1 and list(tmp_path.iterdir()) == [foreign]


@pytest.mark.interpreter
@pytest.mark.skipif(sys.platform != "linux", reason="policies of Linux")
@pytest.mark.usefixtures("usual_scheduling")
def test_ranks_do_not_push_each_other_aside(tmp_path: Path) -> None:
    started = ranks_of(tmp_path, "scheduling")
    with nothing_left(started):
        started.run()
    assert started.results(int) == [os.SCHED_BATCH] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
