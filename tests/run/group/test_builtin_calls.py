"""Handing on to the built-in backend: who waits, what is counted and recorded, what is raised, and when it stops."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import GroupFailed
from meshwright.run.group.builtin_calls import METHODS, Tally, builtin_call, install_builtin_calls, uninstall_builtin_calls
from meshwright.run.group.consent import Consent
from meshwright.run.group.record_file import call_text
from meshwright.run.group.recorder import Recorder
from meshwright.run.group.signatures import signing
from meshwright.run.group.work import BuiltinWork, PlannedWork, loss_of


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
        self.consent = Consent(self)  # type: ignore[arg-type]
        self.agreed: list[int] = []

    def agree(self, number: int, signature: Any) -> None:
        self.agreed.append(number)

    def raise_if_failed(self) -> None:
        pass

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
    assert hand("tensors", options(False)) is made and hand("tensors", options(False)) is made and made.waits == 2
    later = hand("tensors", options(True))
    assert isinstance(later, BuiltinWork) and made.waits == 2 and engine.agreed == [1, 2], "what came twice is foreseen"
    assert later.wait() and made.waits == 3 and engine.inside == [3], "the third collective is the one that is waited for"
    assert count == [3] and engine.recorder.number == 3 and sorted(engine.recorder.calls) == [1, 2, 3]


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
    assert group.allreduce([torch.ones(3)], given)[0] == "usual", "not foreseen: the class's own method looks at the arguments first"
    engine.consent.foreseen.next = signing("all-reduce", 2)(([torch.ones(3)], given))
    assert group.allreduce([torch.ones(3)], given) is None
    assert call_text(*engine.recorder.calls[1][:2]) == "all-reduce max float32 12 bytes"
    gaps = [torch.ones(6)[::2]]
    assert group.allreduce(gaps, given) == ("usual", (gaps, given), {}), "the class's own method packs them"
    assert group.allreduce("tensors") == ("usual", ("tensors",), {}), "options are left out: the class's own method knows which"
    assert group.allreduce("tensors", opts=1) == ("usual", ("tensors",), {"opts": 1})
    assert dict(tally.builtin) == {("all-reduce", "no plans"): 1}
    uninstall_builtin_calls(group)
    assert group.allreduce("tensors", 2) == ("usual", ("tensors", 2), {}) and not vars(group)


def test_a_new_call_that_nobody_waits_for_is_made_by_a_thread_and_so_are_those_behind_it() -> None:
    engine, go, order = Engine(), threading.Event(), []
    usual = engine.agree

    def agree(number: int, signature: Any) -> None:
        assert go.wait(60)
        usual(number, signature)

    engine.agree = agree  # type: ignore[method-assign]

    def made(name: str) -> Any:
        return builtin_call(engine, name, lambda *_: order.append(name) or Work(), [0])  # type: ignore[arg-type, func-returns-value]

    first = made("all-reduce")([torch.ones(1)], options(True))
    assert isinstance(first, PlannedWork) and not first.is_completed() and not order
    second = made("broadcast")([torch.ones(1)], options(True))
    go.set()
    assert second.wait() and first.wait() and order == ["all-reduce", "broadcast"] and engine.agreed == [1, 2]
    engine.consent.close()


def test_a_call_refused_here_alone_is_asked_for_again_without_asking_the_others_twice() -> None:
    engine, refusals = Engine(), [RuntimeError("a list is too short")]

    def run(*_: Any) -> Work:
        if refusals:
            raise refusals.pop()
        return Work()

    hand = builtin_call(engine, "gather", run, [0])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="too short"):
        hand("tensors", options(False))
    assert engine.recorder.number == 0, "it is none of the group's"
    hand("tensors", options(False))
    assert engine.agreed == [1] and engine.recorder.number == 1
