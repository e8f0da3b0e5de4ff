"""A command that is the process ends with its code, after what was registered for the end, and with all that it printed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from meshwright.cli import frame

CODE = """
import atexit, sys
{before}
from meshwright.cli import process
atexit.register(lambda: print("at the end"))
sys.argv = ["meshwright", *sys.argv[1:]]
process()
"""


@pytest.mark.parametrize("before", ["", "import threading; threading.Timer(0.05, lambda: print('a thread')).start()"])
def test_the_end_of_a_process(before: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(before=before), "--version"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith("meshwright ") and lines[-1] == "at the end" and ("a thread" in lines) == bool(before)


def test_the_code_of_a_command_that_is_wrong() -> None:
    done = subprocess.run([sys.executable, "-m", "meshwright", "--nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown option")


def test_a_callers_environment_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    frame.one_blas_thread()
    assert "OPENBLAS_NUM_THREADS" not in os.environ
    monkeypatch.setattr(frame, "whole_process", True)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    frame.one_blas_thread()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "2"
