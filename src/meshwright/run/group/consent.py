"""All ranks call the same before any of them enters the built-in backend: gloo ends the process that gets more bytes than it expects.

Asking the others before every call would cost as much as a small call itself. So each rank foresees its next call from those before. What was
called is equal at all ranks, so what is foreseen is, too: a rank that does what is foreseen needs to ask nobody. One that does anything else waits
until all ranks have said that they do the same (over the control connections, where it also hears that they do not). So two ranks are never inside
with different calls: either both do the one foreseen call, or all have agreed. A loop of calls is foreseen from its second turn on.

A call that nobody waits for (`asyncOp`) must not wait here: it is handed to a thread, and so is every later one until that thread has nothing to do.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from .recorder import Recorder
from .signatures import Signature
from .work import PlannedWork

__all__ = ["Consent", "Foreseen"]

MAX_KEPT_CALLS = 8192  # from which the next is foreseen: a longer loop is asked about in every turn
MAX_PLACES, MAX_MATCH = 16, 64  # earlier places of a call that are compared, by so many calls before them


class Foreseen:
    """`next`: what followed where the calls before were most like the last ones, None where nothing is known. A function of the calls alone."""

    def __init__(self) -> None:
        self.next: Signature | None = None
        self._calls: list[Signature] = []
        self._places: dict[Signature, deque[int]] = {}
        self._placed = 0  # so many calls are in `_places`; the others are those that were foreseen since
        self._at = 0  # the earlier place of the last call

    def called(self, signature: Signature) -> None:
        calls = self._calls
        if len(calls) >= MAX_KEPT_CALLS:
            kept = calls[-MAX_KEPT_CALLS // 2 :]
            self.__init__()  # type: ignore[misc]
            for one in kept:
                self.called(one)
            calls = self._calls
        calls.append(signature)
        if signature == self.next:  # nearly always, so little is done
            self._at = at = self._at + 1
            self.next = calls[at + 1]
        else:
            self._look(signature)

    def _look(self, signature: Signature) -> None:
        """The earlier place that is most like that of the last call."""
        calls, here = self._calls, len(self._calls) - 1
        for place in range(self._placed, here):
            self._places.setdefault(calls[place], deque(maxlen=MAX_PLACES)).append(place)
        places = self._places.setdefault(signature, deque(maxlen=MAX_PLACES))
        if places:
            self._at = max(places, key=lambda place: (self._alike(place, here), place))
        self.next = calls[self._at + 1] if places else None
        places.append(here)
        self._placed = here + 1

    def _alike(self, place: int, here: int) -> int:
        """How many calls before the two places are equal."""
        calls, count = self._calls, 1
        while count <= MAX_MATCH and count <= place and calls[place - count] == calls[here - count]:
            count += 1
        return count


class Group(Protocol):
    """What is needed of the engine."""

    recorder: Recorder

    def agree(self, number: int, signature: Signature, /) -> None: ...

    def wait_inside(self, work: Any, number: int, timeout: timedelta | None) -> bool: ...

    def raise_if_failed(self) -> None: ...


class Consent:
    """Of one group. `enter` where the call at hand is not `foreseen.next`, or while `busy`."""

    def __init__(self, engine: Group) -> None:
        self.engine, self.foreseen = engine, Foreseen()
        self.pending = 0  # calls that the thread has not made yet
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] | None = None
        self._passed: tuple[int, Signature] | None = None

    def called(self, signature: Signature) -> int:
        """This call has been made. Gives its number."""
        self.foreseen.called(signature)
        return self.engine.recorder.asked(*signature, 0)

    def enter(self, signature: Signature, run: Callable[..., Any], args: tuple[Any, ...]) -> PlannedWork | None:
        """Waits until all ranks do this, or has the thread do so, and then the call itself; then the answer is its work.

        Raises: what ended the group, RankDiverged where a rank does something else.
        """
        waits = not args[-1].asyncOp
        # On an accelerator a call belongs to the caller's stream, so this thread must make it.
        if (waits and not self.pending) or not _on_cpu(args):
            entry = self.engine.recorder.number + 1, signature
            # The built-in backend may refuse a call at this rank alone; asked again rightly, the others have agreed and wait inside.
            if signature != self.foreseen.next and entry != self._passed:
                self.engine.agree(*entry)
                self._passed = entry
            return None
        agreed = signature == self.foreseen.next
        with self._lock:
            self.pending += 1
            if self._queue is None:
                self._queue = queue.SimpleQueue()
                threading.Thread(target=self._loop, args=(self._queue,), name="meshwright-consent", daemon=True).start()
        targets = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
        work = PlannedWork(targets, f"collective {self.engine.recorder.number + 1}")
        self._queue.put((work, None if agreed else signature, self.called(signature), run, args))
        if waits:
            work.wait()
        return work

    def close(self) -> None:
        with self._lock:
            if self._queue is not None:
                self._queue.put(None)

    def _loop(self, calls: queue.SimpleQueue[tuple[Any, ...] | None]) -> None:
        engine = self.engine
        while (item := calls.get()) is not None:
            work, asks, number, run, args = item
            error: BaseException | None = None
            try:
                engine.raise_if_failed()
                if asks is not None:
                    engine.agree(number, asks)
                engine.wait_inside(run(*args), number, None)
            except BaseException as found:
                error = found
            with self._lock:
                self.pending -= 1
            work.finish(error)
            del item, work, args  # tensors of a finished call are not kept until the next one comes


def _on_cpu(args: Any) -> bool:
    """Of the first tensor among these arguments; nothing else is on an accelerator."""
    found = next(_tensors(args), None)
    return found is None or found.device.type == "cpu"


def _tensors(args: Any) -> Any:
    if isinstance(args, torch.Tensor):
        yield args
    elif isinstance(args, (list, tuple)):
        for one in args:
            yield from _tensors(one)
