"""What goes on, for whoever waits: stages inside stages, how far each is, and the best so far.

    with stage("layouts", of=25) as here:
        for candidate in candidates:
            here.begin()                       # one more of them
            here.best = "dp=2 tp=4, 1.34 s"

Whoever works says it; nobody who works reads it. `now` gives a line of it to whoever shows it (the command line does). A `Budget` of `effort` counts
in the innermost stage by itself. A stage costs a microsecond, so it may stand around whatever takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["Stage", "counted", "innermost", "now", "stage"]

T = TypeVar("T")


class Stage:
    """`done` of `of` have begun (0: nobody knows how many there are); `best`: the best so far, in words, nothing before there is one."""

    __slots__ = ("best", "done", "of", "what")

    def __init__(self, what: str, of: int = 0) -> None:
        self.what, self.of, self.done, self.best = what, of, 0, ""

    def begin(self) -> None:
        self.done += 1

    def __str__(self) -> str:
        return f"{self.what} {self.done} of {self.of}" if self.of > 1 and self.done else self.what


_NOWHERE = Stage("")
_open: list[Stage] = []  # outermost first; of the process: whoever waits sees one line


@contextmanager
def stage(what: str, of: int = 0) -> Iterator[Stage]:
    """A stage that lasts as long as the block."""
    here = Stage(what, of)
    _open.append(here)
    try:
        yield here
    finally:
        _open.remove(here)


def counted(items: Iterable[T], what: str, of: int = 0) -> Iterator[T]:
    """The items, each a step of a stage. `of`: how many there are, by default the length where there is one."""
    with stage(what, of or (len(items) if isinstance(items, Sized) else 0)) as here:
        for item in items:
            here.begin()
            yield item


def innermost() -> Stage:
    """Where whoever works is; a stage that nobody sees where none is open."""
    return _open[-1] if _open else _NOWHERE


def now() -> tuple[str, str]:
    """(the stages from the outermost to the innermost, the best so far by the outermost that has one)."""
    stages = list(_open)
    return ": ".join(str(s) for s in stages), next((s.best for s in stages if s.best), "")
