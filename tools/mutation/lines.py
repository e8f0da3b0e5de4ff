"""Which of the asked lines run: probes in a copy of the source, which every process that imports it brings along.

What is recorded is one JSON line per first sight, `[tag, source, line]`; line 0 says that some function of the file was called. The tag
is the test under way: what pytest's plugin says, in other processes what pytest says in the environment, `nodeid (call)`, `nodeid (setup)`.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import CodeType

RECORDING = "MUTATION_RECORDING"  # in the environment of a run that records
TEST = "PYTEST_CURRENT_TEST"
FUNCTION = 0x1  # CO_OPTIMIZED: not a module's nor a class's body, which run at import whatever the test


class _Process:
    """What this process has seen; a fork starts anew, and opens a file of its own."""

    def __init__(self) -> None:
        self.tag: str | None = None
        self.seen: set[tuple[str, int]] = set()
        self.out: int | None = None
        os.register_at_fork(after_in_child=self.forget)  # the environment may still be changed, and the file's number asked for

    def forget(self) -> None:
        if self.out is not None:
            os.close(self.out)
        self.out, self.tag, self.seen = None, None, set()

    def saw(self, folder: str, source: str, line: int) -> None:
        self.seen.add((source, line))
        if self.tag is None:
            self.tag = os.environ.get(TEST, "")
        if self.out is None:
            self.out = os.open(Path(folder) / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self.out, (json.dumps([self.tag, source, line]) + "\n").encode())


PROCESS = _Process()


def under(tag: str) -> None:
    """From now on what runs in this process belongs to `tag`."""
    PROCESS.tag, PROCESS.seen = tag, set()


def recorder(folder: str, source: str) -> Callable[[int], None]:
    """What the probes of a source call with their line."""

    def saw(line: int) -> None:
        if (source, line) not in PROCESS.seen:
            PROCESS.saw(folder, source, line)

    return saw


def probed(text: str, lines: frozenset[int], folder: str, name: str) -> str:
    """The source with a call before every statement that holds an asked line, and at the start of every function.

    A function's first line, with its defaults, counts when it is called; a line that a function runs but no statement of a function holds (a
    lambda's of the module) whenever some function is.
    """
    tree = ast.parse(text)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    plain = [f for f in functions if not compiled(f)]
    held: set[int] = set()
    for function in plain:
        _probe(function.body, lines, held)
        held.add(function.lineno)
    start = [0, *sorted((function_lines(text) & lines) - held)]
    for function in plain:
        at = int(ast.get_docstring(function, clean=False) is not None)
        function.body[at:at] = [_call(line) for line in (*start, *({function.lineno} & lines))]
    at = sum(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body) + int(ast.get_docstring(tree) is not None)
    tree.body[at:at] = ast.parse(f"from mutation.lines import recorder as _recorder\n_saw = _recorder({folder!r}, {name!r})").body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether numba compiles it: a probe would not compile."""
    from .operators import COMPILED

    return any(COMPILED.search(ast.unparse(decorator)) for decorator in function.decorator_list)


def _call(line: int) -> ast.stmt:
    return ast.parse(f"_saw({line})").body[0]


def _probe(body: list[ast.stmt], lines: frozenset[int], held: set[int]) -> None:
    """Puts calls into a list of statements and the lists below them, not into the functions and classes there; `held` gets the lines."""
    made: list[ast.stmt] = []
    for statement in body:
        below = [part for part in ast.walk(statement) if part is not statement and isinstance(part, ast.stmt)]
        inside = {line for part in below if part.lineno > statement.lineno for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)}
        own = lines & (set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)) - inside)
        held |= own
        made += [_call(line) for line in sorted(own)] + [statement]
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for holder in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                for part in ("body", "orelse", "finalbody"):
                    if isinstance(inner := getattr(holder, part, None), list):
                        _probe(inner, lines, held)
    body[:] = made


def function_lines(text: str) -> frozenset[int]:
    """Lines that a function runs; the others run at import."""
    found: set[int] = set()
    waiting = [compile(text, "source", "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]
        if code.co_flags & FUNCTION:
            found |= {line for _, _, line in code.co_lines() if line is not None}
    return frozenset(found)
