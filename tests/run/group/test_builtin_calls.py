"""Handing on to the built-in backend: who waits, what is counted and recorded, what is raised, and when it stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import GroupFailed
from meshwright.run.group.builtin_calls import METHODS, Tally, builtin_call, install_builtin_calls, uninstall_builtin_calls
from meshwright.run.group.record_file import call_text
from meshwright.run.group.recorder import Recorder
from meshwright.run.group.work import BuiltinWork, loss_of


class Work:
    def __init__(self, error: RuntimeError | None = None) -> None:
        self.waits, self.error = 0, error

    def wait(self, *_: object) -> bool:
        self.waits += 1
        if self.error is not None:
            raise self.error
        return True


class Engine:
    """What `builtin_call` uses of an engine."""

    def __init__(self) -> None:
        self.over: list[Exception] = []
        self.inside, self.size = [0], 2
        self.recorder = Recorder(None, (0, 1), 0)
        self.health = object()

    def explain(self, error: RuntimeError) -> None:
        if loss_of(error):
            raise GroupFailed("explained") from error

    def wait_inside(self, work: Any, number: int, timeout: Any) -> bool:
        self.inside[0] = number
        return bool(work.wait())


def options(asynchronous: bool) -> Any:
    return SimpleNamespace(asyncOp=asynchronous)


def test_synchronous_calls_are_waited_for_and_others_are_not() -> None:
    engine, made, count = Engine(), Work(), [0]
    hand = builtin_call(engine, "all-reduce", lambda *_: made, count)  # type: ignore[arg-type]
    assert hand("tensors", options(False)) is made and made.waits == 1
    later = hand("tensors", options(True))
    assert isinstance(later, BuiltinWork) and made.waits == 1
    assert later.wait() and made.waits == 2 and engine.inside == [2], "the second collective is the one that is waited for"
    assert count == [2] and engine.recorder.number == 2 and sorted(engine.recorder.calls) == [1, 2]


def test_a_lost_connection_is_explained_and_a_refusal_is_not() -> None:
    engine = Engine()
    for text, error in (("Connection closed by peer", GroupFailed), ("Timed out waiting 1000ms", GroupFailed), ("Invalid scalar type", RuntimeError)):
        hand = builtin_call(engine, "all-reduce", lambda *_, text=text: Work(RuntimeError(text)), [0])  # type: ignore[arg-type, misc]
        with pytest.raises(error) as raised:
            hand("tensors", options(False))
        assert engine.inside == [0] and type(raised.value) is error


def test_a_group_that_is_over_says_so() -> None:
    engine, count = Engine(), [0]
    hand = builtin_call(engine, "broadcast", lambda *_: Work(), count)  # type: ignore[arg-type]
    engine.over.append(GroupFailed("first"))
    engine.over.append(GroupFailed("second"))
    with pytest.raises(GroupFailed, match="first"):
        hand("tensors", options(False))
    assert count == [0] and engine.recorder.number == 0


class Group:
    def allreduce(self, *args: Any, **named: Any) -> Any:
        return "usual", args, named


def test_methods_of_a_group_without_plans_are_replaced_until_it_has_some() -> None:
    engine, tally, group = Engine(), Tally(), Group()
    builtin = SimpleNamespace(**{name: lambda *args: None for _, _, name in METHODS.values()})
    install_builtin_calls(group, engine, builtin, tally, "no plans")  # type: ignore[arg-type]
    given = options(False)
    given.reduceOp = dist.ReduceOp.MAX
    assert group.allreduce([torch.ones(3)], given) is None
    assert call_text(*engine.recorder.calls[1][:2]) == "all-reduce max float32 12 bytes"
    gaps = [torch.ones(6)[::2]]
    assert group.allreduce(gaps, given) == ("usual", (gaps, given), {}), "the class's own method packs them"
    assert group.allreduce("tensors") == ("usual", ("tensors",), {}), "options are left out: the class's own method knows which"
    assert group.allreduce("tensors", opts=1) == ("usual", ("tensors",), {"opts": 1})
    assert dict(tally.builtin) == {("all-reduce", "no plans"): 1}
    uninstall_builtin_calls(group)
    assert group.allreduce("tensors", 2) == ("usual", ("tensors", 2), {}) and not vars(group)
