"""What a command says while it works, and what Ctrl-C does to it."""

from __future__ import annotations

import io
import os
import signal

import pytest
from test_frame import DOCUMENT, command  # noqa: F401

from meshwright.cli import main, progress
from meshwright.cli.frame import Result
from meshwright.cli.progress import progress_line, shown
from meshwright.errors import TimeLimit
from meshwright.kernels.effort import Budget, look
from meshwright.kernels.stages import stage

pytestmark = pytest.mark.usefixtures("said")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is said, at once and by hand: no test waits for a clock."""
    monkeypatch.setenv("MESHWRIGHT_PROGRESS", "1")
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 1e6)


def test_the_line_keeps_the_best_and_the_time_and_cuts_the_stage() -> None:
    with stage("train plan"), stage("deciding on layout", of=25) as here:
        here.done, here.best = 3, "dp=2 tp=4, 1.34 s a step"
        whole = progress_line(75.2, 200)
        assert whole == "train plan: deciding on layout 3 of 25; best so far dp=2 tp=4, 1.34 s a step (1 min 15 s)"
        cut = progress_line(75.2, 79)
        assert len(cut) == 79 and "..." in cut and cut.endswith("best so far dp=2 tp=4, 1.34 s a step (1 min 15 s)")
        assert len(progress_line(75.2, 20)) == 20


def test_on_a_terminal_the_line_is_gone_before_anything_else_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    with shown("train plan", as_json=True):
        sys.stderr.look()  # type: ignore[attr-defined]
        line = screen.getvalue()
        assert line == "\rtrain plan (0 s)"
        sys.stderr.write("warning: x\n")
        sys.stderr.look()  # type: ignore[attr-defined]
    text = screen.getvalue().removeprefix(line)
    blank = f"\r{' ' * 16}\r"
    assert text == f"{blank}warning: x\n\rtrain plan (0 s){blank}" and sys.stderr is screen and "\x1b" not in text


@pytest.mark.parametrize(("as_json", "dumb", "expected"), [(False, False, 1), (True, False, 0), (False, True, 1)])
def test_in_a_log_there_is_one_line_until_much_more_time_has_passed(
    monkeypatch: pytest.MonkeyPatch, as_json: bool, dumb: bool, expected: int
) -> None:
    import sys

    log = Terminal() if dumb else io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(progress, "TIMES_LONGER", 1e9)
    with shown("train plan", as_json=as_json):
        for _ in range(3):
            getattr(sys.stderr, "look", lambda: None)()
    assert log.getvalue() == "train plan (0 s)\n" * expected


def test_quiet_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    import sys

    command(lambda args: (getattr(sys.stderr, "look", lambda: None)(), Result(DOCUMENT, "text"))[1])
    assert main(["fabric", "tryout", "--quiet"]) == 0 and capsys.readouterr().err == ""
    assert main(["fabric", "tryout"]) == 0 and capsys.readouterr().err == "fabric tryout (0 s)\n"


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------------
def searching(args: object) -> Result:
    """A search of five that is interrupted in its third."""
    budget = Budget(5)
    while budget.spend():
        if budget.looked == 3:
            with budget.net():
                os.kill(os.getpid(), signal.SIGINT)
                assert budget.late
    return Result(DOCUMENT, "the best of two", cut=budget.cut)


def finding_nothing(args: object) -> Result:
    budget = Budget(5)
    budget.spend()
    with budget.net():
        os.kill(os.getpid(), signal.SIGINT)
        look()
    raise AssertionError("look ends it")


def impatient(args: object) -> Result:
    with Budget(5).net():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("the second ends it")


def test_ctrl_c_gives_the_best_so_far_and_says_so(capsys, command) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    command(searching)
    assert main(["fabric", "tryout"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "the best of two\ninterrupted: looked at 2 of 5\n"
    assert progress.STOPPING in captured.err and captured.err.endswith("error: interrupted: looked at 2 of 5; this is the best so far\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("what", "message"), [(finding_nothing, "interrupted before there was anything to give"), (impatient, "interrupted")])
def test_ctrl_c_before_there_is_anything_and_ctrl_c_twice(capsys, command, what, message: str) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    command(what)
    assert main(["fabric", "tryout"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "" and f"error: {message}" in captured.err


def test_without_ctrl_c_a_time_limit_is_one(command) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    def late(args: object) -> Result:
        raise TimeLimit("the time limit was reached")

    command(late)
    assert main(["fabric", "tryout"]) == 5
