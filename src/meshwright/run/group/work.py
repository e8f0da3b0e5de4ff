"""A torch `Work` for what a worker thread does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...errors import RunTimeout

__all__ = ["BuiltinWork", "JoinedWork", "PlannedWork", "answered", "loss_of"]


# What gloo says when a connection or a deadline is the cause; anything else is about the arguments (an operator or a type that it lacks).
TRANSPORT_WORDS = ("timed out", "connection", "gloo/transport", "pair closure", "broken pipe", "socket", "peer")


class PlannedWork(dist._Work):  # type: ignore[misc]
    """Waited on by Python (`wait` raises our typed errors) or by C++, through the future (DDP's reducer; it sees the error's text)."""

    def __init__(self, outputs: Any, what: str) -> None:
        super().__init__()
        self._outputs, self._what = outputs, what
        self._over = threading.Event()
        self._first = threading.Lock()
        self._error: BaseException | None = None
        self._start: torch.futures.Future[Any] = torch.futures.Future()
        self._future: Any = None

    # ---- the worker's side -------------------------------------------------------------------------------------
    def finish(self, error: BaseException | None = None) -> None:
        """Only the first call counts: the worker's, or that of whoever gives the group up while the worker is blocked."""
        if not self._first.acquire(blocking=False):
            return
        self._error = error
        self._over.set()
        self._start.set_result(None)

    # ---- torch's side ------------------------------------------------------------------------------------------
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds() if timeout is not None else 0.0
        if not self._over.wait(limit if limit > 0 else None):
            raise RunTimeout(f"{self._what} did not end within {limit:g} s", hint="the group's own deadline names the step and the peer")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> Any:
        if self._future is None:
            self._future = self._start.then(self._value)
        return self._future

    def _value(self, _: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._outputs


class JoinedWork(dist._Work):  # type: ignore[misc]
    """Several works as one; `after` runs once, when all are done."""

    def __init__(self, outputs: Any, works: list[Any], after: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._outputs, self._works, self._after = outputs, works, after

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        while self._works:
            self._works[0].wait(timeout) if timeout else self._works[0].wait()
            self._works.pop(0)
        if self._after is not None:
            self._after()
            self._after = None
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(w.is_completed() for w in self._works)

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.wait()
        future.set_result(self._outputs)
        return future


def loss_of(error: RuntimeError) -> str:
    """What an error of gloo's says of the connections: "deadline", "closed", or "" where it is about the arguments."""
    text = str(error).lower()
    if not any(word in text for word in TRANSPORT_WORDS):
        return ""
    return "deadline" if "timed out" in text else "closed"


class Waiter(Protocol):
    """The engine: `inside[0]` is the number of the collective that its caller waits in."""

    inside: list[int]

    def wait_inside(self, work: Any, number: int, timeout: timedelta | None) -> bool: ...

    def explain(self, error: RuntimeError) -> None: ...


class BuiltinWork(dist._Work):  # type: ignore[misc]
    """A work of the built-in backend, collective `number` of its group; `engine` looks into its failure."""

    def __init__(self, work: Any, engine: Waiter, number: int) -> None:
        super().__init__()
        self._work, self._engine, self._number = work, engine, number

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._engine.wait_inside(self._work, self._number, timeout)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return int(self._work._source_rank())

    _source_rank = source_rank

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> Any:
        return self._work.get_future()


def answered(engine: Waiter) -> Callable[[Any, int, bool], Any]:
    """`answer(work, number, asynchronous)`: what a caller gets for the built-in backend's work on a collective. A synchronous one is waited for in
    his thread, and a failure is looked into; that of an asynchronous one when it is waited for."""
    inside = engine.inside

    def answer(work: Any, number: int, asynchronous: bool) -> Any:
        if asynchronous:
            return BuiltinWork(work, engine, number)
        inside[0] = number
        try:
            work.wait()
        except RuntimeError as error:
            engine.explain(error)
            raise
        finally:
            inside[0] = 0
        return work

    return answer
