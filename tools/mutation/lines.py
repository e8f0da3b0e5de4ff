"""Which of the asked lines run: a trace function for pytest's process and for every Python process that a test starts.

What is recorded is one JSON line per first sight, `[tag, source, line]`; line 0 says that some function of the file was called. The tag
is the test under way. Only functions that hold an asked line are followed line by line, until all of their asked lines were seen. A fork
goes on recording, for the test that its environment names.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ASKED = "MUTATION_LINES"  # names a JSON file {"root": folder of the sources, "lines": {source: [line, ...]}, "out": folder}
TEST = "PYTEST_CURRENT_TEST"  # what pytest says in the environment: `nodeid (call)`, `nodeid (setup)`
FORKED_FROM = "warm_interpreters.py"  # the tests' server of interpreters: what it imports is no test's, what is forked from it is
FUNCTION = 0x1  # CO_OPTIMIZED: not a module's nor a class's body, which run at import whatever the test


class Recorder:
    def __init__(self, asked: str) -> None:
        wanted = json.loads(Path(asked).read_text())
        self.tag: str | None = ""
        self.folder = Path(wanted["out"])
        self.out: int | None = None
        self.seen: set[tuple[str, int]] = set()
        self.codes: dict[str, dict[tuple[str, int], frozenset[int]]] = {}
        self.names: dict[str, str] = {}
        for name, lines in wanted["lines"].items():
            path = str(Path(wanted["root"]) / name)
            self.names[path] = name
            self.codes[path] = _functions(path, frozenset(lines))
        os.register_at_fork(after_in_child=self.forked)

    def forked(self) -> None:
        """In a fork: nothing is seen yet, the environment may still be changed, and the file's number may be given to another one."""
        if self.out is not None:
            os.close(self.out)
        self.out, self.tag, self.seen = None, None, set()
        self.start()

    def start(self) -> None:
        threading.settrace(self.called)
        sys.settrace(self.called)

    def under(self, tag: str) -> None:
        """From now on what runs belongs to `tag`."""
        self.tag, self.seen = tag, set()

    def called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        codes = self.codes.get(code.co_filename)
        if codes is None or not code.co_flags & FUNCTION:
            return None
        path = code.co_filename
        self.saw(path, 0)
        lines = codes.get((code.co_name, code.co_firstlineno))
        if lines is None:
            return None
        if frame.f_lineno in lines:
            self.saw(path, frame.f_lineno)
        if all((path, line) in self.seen for line in lines):
            return None

        def follow(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line" and frame.f_lineno in lines:
                self.saw(path, frame.f_lineno)
            return follow

        return follow

    def saw(self, path: str, line: int) -> None:
        if (path, line) not in self.seen:
            self.seen.add((path, line))
            if self.tag is None:
                self.tag = os.environ.get(TEST, "")
            if self.out is None:
                self.out = os.open(self.folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(self.out, (json.dumps([self.tag, self.names[path], line]) + "\n").encode())


def _functions(path: str, lines: frozenset[int]) -> dict[tuple[str, int], frozenset[int]]:
    found: dict[tuple[str, int], frozenset[int]] = {}
    waiting = [compile(Path(path).read_text(encoding="utf-8"), path, "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]
        here = lines & {line for _, _, line in code.co_lines() if line is not None}
        if here and code.co_flags & FUNCTION:
            key = (code.co_name, code.co_firstlineno)
            found[key] = found.get(key, frozenset()) | here
    return found


def function_lines(path: str, lines: frozenset[int]) -> frozenset[int]:
    """Those lines that a function runs; the others run at import."""
    return frozenset().union(*_functions(path, lines).values())


def record_child() -> None:
    """What a process that a test started does first: its lines belong to the test that runs."""
    asked, test = os.environ.get(ASKED), os.environ.get(TEST)
    if asked and test:
        recorder = Recorder(asked)
        recorder.under(test)
        if not any(word.endswith(FORKED_FROM) for word in sys.orig_argv):
            recorder.start()
