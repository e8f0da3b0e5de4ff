"""Which of the asked lines run: a trace function for pytest's process and for every Python process that a test starts.

What is recorded is one JSON line per first sight, `[tag, source, line]`; line 0 says that some function of the file was called. The tag
is the test under way. Only functions that hold an asked line are followed line by line, until all of their asked lines were seen.
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
FUNCTION = 0x1  # CO_OPTIMIZED: not a module's nor a class's body, which run at import whatever the test


class Recorder:
    def __init__(self, asked: str) -> None:
        wanted = json.loads(Path(asked).read_text())
        self.tag = ""
        self.seen: set[tuple[str, int]] = set()
        self.codes: dict[str, dict[tuple[str, int], frozenset[int]]] = {}
        self.names: dict[str, str] = {}
        for name, lines in wanted["lines"].items():
            path = str(Path(wanted["root"]) / name)
            self.names[path] = name
            self.codes[path] = _functions(path, frozenset(lines))
        self.out = os.open(Path(wanted["out"]) / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

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
    """What a process that a test started does first: its lines belong to the test that runs, `nodeid (call)`, `nodeid (setup)`."""
    asked, test = os.environ.get(ASKED), os.environ.get("PYTEST_CURRENT_TEST")
    if asked and test:
        recorder = Recorder(asked)
        recorder.under(test)
        recorder.start()
