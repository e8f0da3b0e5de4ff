"""The thread of a process group: walks one collective after the other, in the order in which they were asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ...errors import GroupFailed, MeshwrightError, MessageDamaged
from ..executor.transport import Broken
from .call import Call, Session
from .messages import GlooMessages
from .recorder import Recorder
from .reductions import Reduction
from .walk import Under, walk
from .work import PlannedWork

__all__ = ["Lost", "Task", "Worker"]


class Lost(Exception):
    """A wait failed: for `peer`, in `step` of the program; the transport's words are the cause. `why`: "deadline" or "closed"."""

    def __init__(self, step: int, peer: int, receives: bool, why: str) -> None:
        super().__init__(f"step {step}, peer {peer}")
        self.step, self.peer, self.receives, self.why = step, peer, receives, why


@dataclass
class Task:
    """One collective to run. `name` identifies its program for the recorder; `after` puts the result where the caller's tensors are not flat.

    `number`: its place in the group's sequence; `mask`: see `messages`.
    """

    call: Call
    session: Session
    reduction: Reduction | None
    name: int
    work: PlannedWork
    after: Callable[[], None] | None
    number: int = 0
    mask: int = 0


class Worker:
    """`diagnose` turns a failure into the error that every survivor raises; after one the group is unusable and every task ends with it."""

    def __init__(
        self, messages: GlooMessages, recorder: Recorder, timeout_s: float, diagnose: Callable[[Exception, Task], MeshwrightError]
    ) -> None:  # fmt: skip
        self.messages, self.recorder, self.timeout_s, self.diagnose = messages, recorder, timeout_s, diagnose
        self.failed: MeshwrightError | None = None
        self.task: Task | None = None  # under way
        self.under = Under()
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._left, self._counting = 0, threading.Lock()  # tasks that are not over
        self._walking = threading.Lock()  # by one thread at a time: this one's own, or a caller's
        self._thread = threading.Thread(target=self._loop, name="meshwright-group", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        with self._counting:
            self._left += 1
        self._queue.put(task)

    def run_here(self, task: Task) -> bool:
        """In the caller's thread, unless something is under way or waits before it: waking two threads costs as much as a small message.

        False: not done, hand it to `submit`. Raises nothing of its own: what becomes of the task, its work says.
        """
        with self._counting:
            if self._left:
                return False
            self._left = 1
        error: BaseException | None = GroupFailed("this rank was interrupted in a collective", where=task.call.op, hint="start the job again")
        try:
            with self._walking, torch.inference_mode():
                error = self.failed or self._run(task)
        finally:
            self._over(task, error)
        return True

    def _over(self, task: Task, error: BaseException | None) -> None:
        with self._counting:
            self._left -= 1
        if isinstance(error, MeshwrightError):
            self.failed = self.failed or error
        task.work.finish(error)

    def close(self, timeout_s: float = 5.0) -> None:
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def give_up(self, error: MeshwrightError) -> None:
        """From another thread: all that was asked for ends with `error` now.

        This thread may stay blocked until its own deadline: gloo never tells a wait whose message is half transferred that its connection is closed.
        It keeps the tensors alive that the transport may still write to.
        """
        self.failed = self.failed or error
        # Read once: the thread sets it to None when its collective is over.
        task = self.task
        if task is not None:
            task.work.finish(error)
        while True:
            try:
                waiting = self._queue.get_nowait()
            except queue.Empty:
                return
            # None ends the thread.
            if waiting is None:  # the end of the thread was asked for: that stays last
                self._queue.put(None)
                return
            self._over(waiting, error)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _loop(self) -> None:
        with torch.inference_mode():
            while (task := self._queue.get()) is not None:
                with self._walking:
                    error = self.failed or self._run(task)
                self._over(task, error)
                del task, error  # tensors of a finished collective are not kept until the next one comes

    def _run(self, task: Task) -> BaseException | None:
        recorder = self.recorder
        # Before the first message of this collective: those of a rank that is elsewhere in the sequence then find no receive.
        self.task, self.messages.mask = task, task.mask
        recorder.begin(task.number)
        try:
            self._walk(task)
            recorder.end()
        except Exception as error:
            self.failed = self.diagnose(error, task)
            recorder.fail()
            return self.failed
        finally:
            self.task = None
        return None

    def _walk(self, task: Task) -> None:
        reduction = task.reduction
        bound, finish = task.session.with_tensors(task.call)
        combine: Any = reduction.combine if reduction is not None else None
        self.under = under = Under()
        waiting, moving, wait = self.recorder.waiting, self.recorder.moving, self.messages.wait
        limit = timedelta(seconds=self.timeout_s)
        try:
            for step, work, peer, receives in walk(bound, self.messages, combine, under):
                waiting(step, peer, receives)
                try:
                    wait(work, limit)
                except RuntimeError as error:
                    raise Lost(step, peer, receives, "deadline" if "timed out" in str(error).lower() else "closed") from error
                except MessageDamaged as error:
                    error.where = task.session.code.unrolled.describe(step)
                    error.data["step"] = step
                    raise
                moving()
        except Broken as error:
            raise Lost(-1, error.peer, False, "closed") from error
        finish()
        if reduction is not None and reduction.divide and task.call.target is not None:
            task.call.target.div_(self.messages.size)
        if task.after is not None:
            task.after()
