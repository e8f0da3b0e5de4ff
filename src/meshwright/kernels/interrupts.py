"""Whoever waits has had enough: searches that run end now with the best so far, as if their time were up. `effort` looks; Ctrl-C asks.

A search that begins after the request is not ended by it: what is made of the best so far may take its time. This module loads nothing.

Python calls nobody while a compiled loop runs. So loops that may run for seconds have a flag, which another thread raises (`raise_flags`); they
return, and Python then calls whoever handles the signal.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["ASKED", "NETS", "TIME_IS_UP", "interrupt", "raise_flags", "raised_on_interrupt"]

NEVER_BORN = float("inf")
TIME_IS_UP = "the time limit was reached"  # what an error says of a search that was ended with nothing to give


class Flag(Protocol):
    """An array or a list."""

    def __setitem__(self, place: int, value: int, /) -> Any: ...


class _Asked:
    """How often the process was interrupted so far."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = 0


class _Nets(threading.local):
    """`born`: interrupts before the oldest search of this thread that can be ended; a later one ends it. Infinite where there is none."""

    born: float = NEVER_BORN


ASKED, NETS = _Asked(), _Nets()
_flags: list[Flag] = []  # of compiled loops that run now; of the process


@contextmanager
def raised_on_interrupt(flag: Flag) -> Iterator[None]:
    """In the block, `flag[0]` becomes 1 when the process is interrupted."""
    _flags.append(flag)
    try:
        yield
    finally:
        _flags[:] = [f for f in _flags if f is not flag]


def raise_flags() -> None:
    """From another thread than those that work."""
    for flag in [*_flags]:
        flag[0] = 1


def interrupt() -> bool:
    """Ends the searches of this thread. False where none runs that can be ended, or what runs has been told already."""
    if NETS.born == NEVER_BORN or NETS.born < ASKED.times:
        return False
    ASKED.times += 1
    return True
