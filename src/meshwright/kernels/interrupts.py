"""Whoever waits has had enough: searches that run end now with the best so far, as if their time were up. `effort` looks; Ctrl-C asks.

A search that begins after the request is not ended by it: what is made of the best so far may take its time. This module loads nothing.
"""

from __future__ import annotations

import threading

__all__ = ["ASKED", "NETS", "interrupt"]

NEVER_BORN = float("inf")


class _Asked:
    """How often the process was interrupted so far."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = 0


class _Nets(threading.local):
    """`born`: interrupts before the oldest search of this thread that can be ended; a later one ends it. Infinite where there is none."""

    born: float = NEVER_BORN


ASKED, NETS = _Asked(), _Nets()


def interrupt() -> bool:
    """Ends the searches of this thread. False where none runs that can be ended, or what runs has been told already."""
    if NETS.born == NEVER_BORN or NETS.born < ASKED.times:
        return False
    ASKED.times += 1
    return True
