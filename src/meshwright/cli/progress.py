"""What a command says while it works, on stderr, and what Ctrl-C does to it.

On a terminal: from the second second on one line, written anew, with the stage, how far it is, the best so far and the time. It is gone before
anything else is written. In a log: the same line after 2 s, and then whenever the time is four times as long. Nothing is said with `--quiet`, with
`--json` in a log, or with MESHWRIGHT_PROGRESS=0. `kernels.stages` is what is shown.

The first Ctrl-C ends the search that runs, with the best so far. Where none runs, and the second time, it ends the command.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from ..errors import Interrupted, TimeLimit
from ..kernels.interrupts import TIME_IS_UP, interrupt, raise_flags
from ..kernels.stages import now, stage

__all__ = ["Interrupts", "progress_line", "shown"]

FIRST_S = 2.0  # nothing is said of what takes less
EVERY_S = 0.25  # from line to line on a terminal
TIMES_LONGER = 4.0  # from line to line in a log
DUMB_COLUMNS = 80
STOPPING = "stopping: what follows is made of the best so far; Ctrl-C again ends at once\n"


def progress_line(seconds: float, columns: int, beside: str = "") -> str:
    """The line as it is now, cut to so many columns: the stage is cut, the best so far and the time are not. `beside`: what no stage says."""
    stages, best = now()
    stages = f"{stages}: {beside}" if beside else stages
    minutes, rest = divmod(int(seconds), 60)
    end = f"{f'; best so far {best}' if best else ''} ({f'{minutes} min ' if minutes else ''}{rest} s)"
    room = columns - len(end)
    if room < 8:
        return f"{stages}{end}"[:columns]
    return (stages if len(stages) <= room else stages[: room - 3] + "...") + end


def _beside(frame: FrameType | None) -> str:
    """What takes seconds in a new environment and is no stage: packages that are loaded, and kernels that are compiled when they are first used."""
    loaded = ""
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if function == "_find_and_load" and file.startswith("<frozen importlib"):  # the outermost that is not ours
            package = str(frame.f_locals.get("name", "")).partition(".")[0]
            loaded = package if package != __package__.partition(".")[0] or not loaded else loaded
        elif function == "compile" and file.endswith("numba/core/dispatcher.py"):
            return "compiling kernels (kept for the next time)"
        frame = frame.f_back
    return f"loading {loaded}" if loaded else ""


class _Shown:
    """Stands for stderr while the line is shown: whoever writes there finds the line gone."""

    def __init__(self, stream: TextIO, terminal: bool) -> None:
        self.stream, self.terminal = stream, terminal
        self.begun_s, self.next_s, self.on_screen = time.monotonic(), FIRST_S, 0
        self.lock, self.over = threading.RLock(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self.lock:
            self.clear()
            return self.stream.write(text)

    def clear(self) -> None:
        if self.on_screen:
            self.stream.write("\r" + " " * self.on_screen + "\r")
            self.stream.flush()
            self.on_screen = 0

    def look(self) -> None:
        """Says what there is to say now."""
        seconds = time.monotonic() - self.begun_s
        if seconds < self.next_s:
            return
        columns = shutil.get_terminal_size((DUMB_COLUMNS, 24)).columns - 1 if self.terminal else 2 * DUMB_COLUMNS
        line = progress_line(seconds, columns, _beside(sys._current_frames().get(threading.main_thread().ident or 0)))
        with self.lock:
            if self.over.is_set():
                return
            if self.terminal:
                self.stream.write(f"\r{line:<{min(self.on_screen, columns)}}")
                self.on_screen = len(line)
            else:
                self.stream.write(line + "\n")
                self.next_s = seconds * TIMES_LONGER
            self.stream.flush()

    def watch(self) -> None:
        try:
            while not self.over.wait(EVERY_S):
                self.look()
        except (OSError, ValueError):  # stderr is closed or full: nobody watches
            pass


@contextmanager
def shown(command: str, *, as_json: bool) -> Iterator[None]:
    """Shows what goes on in the block, where somebody may wait for it."""
    stream = sys.stderr
    terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    with stage(command):
        if os.environ.get("MESHWRIGHT_PROGRESS") == "0" or (as_json and not terminal):
            yield
            return
        line = _Shown(stream, terminal)
        thread = threading.Thread(target=line.watch, name="progress", daemon=True)
        sys.stderr = line
        thread.start()
        try:
            yield
        finally:
            with line.lock:
                line.over.set()
                line.clear()
            thread.join()
            sys.stderr = stream


class Interrupts:
    """Ctrl-C while a command runs. `asked`: whether it has ended a search."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: Any) -> None:
        if not interrupt():
            raise KeyboardInterrupt
        self.asked = True
        sys.stderr.write(STOPPING)

    def nothing_yet(self, error: TimeLimit) -> Interrupted:
        """Of a search that was ended with nothing to give."""
        said = f"interrupted before there was anything to give: {error.message}".removesuffix(f": {TIME_IS_UP}")
        return Interrupted(said, where=error.where, data=error.data)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Only where Python would raise KeyboardInterrupt: not in other threads, nor where somebody else has said what happens."""
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self)
        try:
            with _compiled_loops_told():
                yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _compiled_loops_told() -> Iterator[None]:
    """Python handles a signal when what is compiled returns, which may be in ten seconds. So a thread reads its number from a pipe, and tells those
    loops to return."""
    arrived, noticed = os.pipe()
    os.set_blocking(noticed, False)

    def watch() -> None:
        while numbers := os.read(arrived, 64):
            if signal.SIGINT in numbers:
                raise_flags()

    thread = threading.Thread(target=watch, name="interrupts", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(noticed, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(noticed)  # the thread reads the end
        thread.join()
        os.close(arrived)
