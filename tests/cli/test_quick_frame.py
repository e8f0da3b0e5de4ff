"""What a terminal shows: folded lines, what is loaded or compiled, and errors of searches that were interrupted."""

from __future__ import annotations

import importlib.machinery
import os
import signal
import sys

import pytest

from meshwright.cli import columns, main
from meshwright.cli.progress import Interrupts, _beside, progress_line
from meshwright.drive.pipeline import pipelines
from meshwright.errors import TimeLimit
from meshwright.kernels import effort
from meshwright.kernels.interrupts import TIME_IS_UP
from meshwright.kernels.stages import stage


def test_wide_lines_are_folded_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = "short\n  name      " + "word " * 12 + "\n" + "x" * 70
    found = columns.folded(text).split("\n")
    assert found[0] == "short" and found[1].startswith("  name      word") and found[2].startswith("      word") and found[-1] == "x" * 70
    assert max(map(len, found[:-1])) <= 60
    monkeypatch.setenv("COLUMNS", "200")
    assert columns.folded(text) == text


def seen_while_loading(package: str, source: str) -> str:
    """What is said while `package`, which runs `source`, is imported."""
    said: list[str] = []

    class Loader:
        def create_module(self, spec):
            return None

        def exec_module(self, module):
            said.append(_beside(sys._getframe()))
            exec(source, module.__dict__)

    class Finder:
        def find_spec(self, name, path, target=None):
            return importlib.machinery.ModuleSpec(name, Loader()) if name == package else None

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        __import__(package)
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop(package, None)
    return said[0]


def test_it_is_said_what_is_loaded_and_compiled() -> None:
    assert _beside(sys._getframe()) == "" and _beside(None) == ""
    assert seen_while_loading("a_large_package", "") == "loading a_large_package"
    inside: list[str] = []
    code = compile("def compile():\n    said()\n", "/x/numba/core/dispatcher.py", "exec")
    space = {"said": lambda: inside.append(_beside(sys._getframe()))}
    exec(code, space)
    space["compile"]()
    assert inside == ["compiling kernels (kept for the next time)"]
    with stage("train plan"):
        assert progress_line(3.0, 80, "loading torch") == "train plan: loading torch (3 s)"


def test_what_was_interrupted_with_nothing_to_give_says_no_more_of_time() -> None:
    error = TimeLimit("36 of 40 jobs had ended")
    assert Interrupts().nothing_yet(error).message == "interrupted before there was anything to give: 36 of 40 jobs had ended"
    assert Interrupts().nothing_yet(TimeLimit(TIME_IS_UP)).message == "interrupted before there was anything to give"


def test_schedules_that_were_not_reached_say_that_they_were_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def judged(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        effort.look()

    monkeypatch.setattr(pipelines, "_judged", judged)
    assert main(["pipeline", "compare", "--stages", "2", "--microbatches", "2"]) == 130
    said = capsys.readouterr().out
    assert "not judged: interrupted" in said and "interrupted: looked at 0 of" in said
    assert "time limit" not in said and "nothing fits in memory" not in said
