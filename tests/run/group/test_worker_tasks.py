"""The thread of a group on tasks without messages: what is done at the end of a collective, and with what error all that waits ends."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.errors import GroupFailed, MessageDamaged
from meshwright.run.executor.transport import Broken
from meshwright.run.group.instructions import Op
from meshwright.run.group.work import PlannedWork
from meshwright.run.group.worker import Lost, Task, Worker


class Log:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.said.append((name, *values))


def task(log: list[str], rows: list[Any] = [], *, divide: bool = False, number: int = 1) -> Task:
    flow = SimpleNamespace(followers=[[i + 1] if i + 1 < len(rows) else [] for i in range(len(rows))], waits=[int(i > 0) for i in range(len(rows))])
    session: Any = SimpleNamespace(
        with_tensors=lambda call: (SimpleNamespace(rows=rows, flow=flow), lambda: log.append("finished")),
        code=SimpleNamespace(unrolled=SimpleNamespace(describe=lambda step: f"step {step} of it")),
    )
    call: Any = SimpleNamespace(op="all-reduce", target=torch.full((2,), 6.0))
    reduction: Any = SimpleNamespace(combine=lambda a, b: a.add_(b), divide=divide)
    return Task(call, session, reduction, 0, PlannedWork([], "it"), lambda: log.append("after"), number, 40 + number)


def worker(messages: Any) -> tuple[Worker, Log, list[Any]]:
    recorder, diagnosed = Log(), list[Any]()
    messages.send, messages.receive = getattr(messages, "send", None), None

    def diagnose(error: Exception, of: Task) -> GroupFailed:
        diagnosed.append((error, of))
        return GroupFailed(f"diagnosed {error}")

    return Worker(messages, recorder, 2.5, diagnose), recorder, diagnosed  # type: ignore[arg-type]


@pytest.mark.parametrize("here", [True, False])
def test_a_task_is_done_to_its_end(here: bool) -> None:
    log, messages = list[str](), SimpleNamespace(size=3, mask=0, wait=lambda work, limit: None)
    w, recorder, _ = worker(messages)
    one = task(log, divide=True, number=7)
    if here:
        assert w.run_here(one)
    else:
        w.submit(one)
    assert one.work.wait(timedelta(seconds=100)) and one.work.is_success()
    assert log == ["finished", "after"] and one.call.target.tolist() == [2.0, 2.0] and messages.mask == 47  # type: ignore[union-attr]
    assert recorder.said == [("begin", 7), ("end",)]
    two = task(log)
    assert w.run_here(two) and two.call.target.tolist() == [6.0, 6.0], "nothing is left over, and a sum is not divided"  # type: ignore[union-attr]
    assert w.task is None and w.alive
    w.close()
    assert not w.alive


@pytest.mark.parametrize(
    ("fails", "why"),
    [(RuntimeError("Timed out waiting"), "deadline"), (RuntimeError("Connection closed by peer"), "closed"), (Broken(2, "gone"), "closed")],
)
def test_a_lost_wait_ends_this_task_and_all_that_come(fails: RuntimeError, why: str) -> None:
    def send(tensor: Any, peer: int, tag: int) -> Any:
        if isinstance(fails, Broken):
            raise fails
        return "sent"

    def wait(work: Any, limit: timedelta) -> None:
        assert work == "sent" and limit == timedelta(seconds=2.5)
        raise fails

    log = list[str]()
    w, recorder, diagnosed = worker(SimpleNamespace(size=3, mask=0, wait=wait, send=send, receive=None))
    rows = [(Op.SEND, 4, torch.ones(1), None, 4, 2, 9), (Op.DONE, 4, None, None, 4, 2, 9)]
    one = task(log, rows)
    w.submit(one)
    with pytest.raises(GroupFailed, match="diagnosed"):
        one.work.wait(timedelta(seconds=100))
    [(error, of)] = diagnosed
    assert of is one and isinstance(error, Lost) and (error.peer, error.why) == (2, why) and error.__cause__ is fails
    assert (error.step, error.receives) == ((-1, False) if isinstance(fails, Broken) else (4, False))
    assert recorder.said[-1] == ("fail",) and not log
    later = task(log)
    assert w.run_here(later) and later.work.exception() is one.work.exception() is w.failed and not log
    w.close()


def test_a_damaged_message_says_in_which_step() -> None:
    def wait(work: Any, limit: timedelta) -> None:
        raise MessageDamaged("other bits")

    w, recorder, diagnosed = worker(SimpleNamespace(size=2, mask=0, wait=wait, send=lambda *_: 1))
    w.submit(one := task([], [(Op.SEND, 3, torch.ones(1), None, 3, 1, 9), (Op.DONE, 3, None, None, 3, 1, 9)]))
    with pytest.raises(GroupFailed):
        one.work.wait(timedelta(seconds=100))
    error = diagnosed[0][0]
    assert (error.where, error.data["step"]) == ("step 3 of it", 3) and ("waiting", 3, 1, False) in recorder.said
    w.close()


def test_giving_up_ends_what_is_under_way_and_what_waits() -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait(work: Any, limit: timedelta) -> None:
        inside.set()
        leave.wait(100)

    w, _, _ = worker(SimpleNamespace(size=2, mask=0, wait=wait, send=lambda *_: 1))
    rows = [(Op.SEND, 0, torch.ones(1), None, 0, 1, 9), (Op.DONE, 0, None, None, 0, 1, 9)]
    log = list[str]()
    under, waits = task(log, rows), task(log)
    w.submit(under)
    assert inside.wait(100)
    w.submit(waits)
    assert not w.run_here(task(log)), "something is under way"
    w.give_up(GroupFailed("over"))
    for one in (under, waits):
        with pytest.raises(GroupFailed, match="over"):
            one.work.wait(timedelta(seconds=100))
    leave.set()
    w.close()
    assert not w.alive and w.failed is not None and w.failed.message == "over"
