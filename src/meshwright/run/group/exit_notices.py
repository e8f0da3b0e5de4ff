"""What a process that ends tells the others: an exception that nobody caught, a normal end, SIGTERM.

A peer that waits for this rank then hears why at once, instead of waiting for its deadline. Hooks are installed with the first group and pass on to
whatever was there before: the user's excepthook, the user's SIGTERM handler, or the default end by the signal.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from .verdict import Claim

if TYPE_CHECKING:
    from .health import GroupHealth

__all__ = ["watch"]


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_closers: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = 0
_lock = threading.Lock()


def watch(group: GroupHealth, engine: Any) -> None:
    """Tell `group`'s ranks when this process ends; `engine.let_go()` is called at a normal end."""
    global _installed
    _watched.add(group)
    _closers.add(engine)
    with _lock:
        if _installed == os.getpid():
            return
        first, _installed = not _installed, os.getpid()
        if first:
            _install_excepthook()
            atexit.register(_at_exit)
    _install_sigterm()


def _install_excepthook() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            _tell_failure(kind, error, trace)
        before(kind, error, trace)

    sys.excepthook = hook


def _tell_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if os.getpid() != _installed:
        return
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace is not None else ""
    words = " ".join(str(error).split())[:300]
    for group in list(_watched):
        if group.error is None:
            name = group.names[group.rank]
            text = f"rank {name} failed outside of a collective: {kind.__name__}: {words}{place}"
            group.leave("failed", Claim(code="rank-failed", message=text, rank=group.rank, hint=f"see the traceback in the output of rank {name}"))


def _at_exit() -> None:
    if os.getpid() != _installed:
        return
    for group in list(_watched):
        with contextlib.suppress(Exception):
            group.leave("exited")
    for engine in list(_closers):
        with contextlib.suppress(Exception):
            engine.let_go()


def _install_sigterm() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)
    if before is None or before == signal.SIG_IGN or getattr(before, "_meshwright", False):  # None: somebody else's, not from Python
        return
    signal.signal(signal.SIGTERM, _handler(before))


def _handler(before: Any) -> Callable[[int, FrameType | None], None]:
    def terminated(number: int, where: FrameType | None) -> None:
        if os.getpid() == _installed:
            for group in list(_watched):
                with contextlib.suppress(Exception):
                    group.leave("terminated")
        if callable(before):
            before(number, where)
        else:
            for engine in list(_closers):
                with contextlib.suppress(Exception):
                    engine.let_go()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    terminated._meshwright = True  # type: ignore[attr-defined]
    return terminated
