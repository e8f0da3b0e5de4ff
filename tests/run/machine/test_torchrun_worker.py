"""What torchrun learns of a worker that fails before it is a rank, and of one that is told to end while it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "TORCHELASTIC_RUN_ID": "x"}

LEAVING = """
import atexit, os, signal, sys, threading, time
from meshwright.run.machine.torchrun_worker import ends_with_its_own_code
signal.signal(signal.SIGTERM, lambda *_: None)
atexit.register(lambda: print("other exit functions ran"))
if "told" in sys.argv:
    ends_with_its_own_code(7, 0.5 if "hang" in sys.argv else 100.0)
if "hang" in sys.argv:
    threading.Thread(target=lambda: time.sleep(50)).start()
class Late:  # deleted when modules are cleared, after Python has put back the default signal handlers
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGTERM, sleep=time.sleep):
        kill(me, number)
        sleep(50)
late = Late()
sys.exit(7)
"""


@pytest.mark.parametrize("content", ["{", "", '{"schema": "meshwright.plan", "version": 99}'])
def test_a_broken_plan_is_in_the_error_file(tmp_path, content):
    (tmp_path / "plan.json").write_text(content)
    file = tmp_path / "error.json"
    environment = {**os.environ, **RANK, "TORCHELASTIC_ERROR_FILE": str(file)}
    command = [sys.executable, "-m", "meshwright", "train", "run", str(tmp_path / "plan.json"), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    told = json.loads(file.read_text())["message"]
    first = done.stderr.splitlines()[0]
    assert first.startswith("error: ") and first.removeprefix("error: ") in told["message"]
    assert told["errorCode"] == done.returncode != 0 and told["extraInfo"]["py_callstack"].startswith(told["message"])
    assert not (tmp_path / "run").exists()


def test_without_torchrun_no_error_file_is_written(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in RANK} | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    (tmp_path / "plan.json").write_text("{")
    command = [sys.executable, "-m", "meshwright", "train", "run", str(tmp_path / "plan.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode != 0 and not (tmp_path / "error.json").exists()


@pytest.mark.interpreter
@pytest.mark.parametrize(("words", "code"), [((), -signal.SIGTERM), (("told",), 7), (("told", "hang"), -signal.SIGALRM)])
def test_a_signal_during_shutdown_does_not_change_the_exit_code(words, code):
    done = subprocess.run([sys.executable, "-c", LEAVING, *words], capture_output=True, timeout=200, text=True)
    assert done.returncode == code
    assert ("other exit functions ran" in done.stdout) == ("hang" not in words)
