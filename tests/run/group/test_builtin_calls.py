"""Handing on to the built-in backend: who waits, what is counted and recorded, what is raised, and when it stops."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import GroupFailed
from meshwright.run.group.builtin_calls import builtin_call
from meshwright.run.group.consent import Consent
from meshwright.run.group.quick_calls import MAX_KEPT, METHODS, QuickCalls
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
    def allreduce(self, *args: Any) -> Any:
        return "usual", args

    def _allgather_base(self, *args: Any) -> Any:
        return "usual", args

    def allgather(self, *args: Any) -> Any:
        return "usual", args


def reducing(op: Any, asynchronous: bool = False) -> Any:
    given = options(asynchronous)
    given.reduceOp = op
    return given


def quick_group(work: Work) -> tuple[Engine, QuickCalls, Group]:
    engine, group = Engine(), Group()
    quick = QuickCalls(engine, SimpleNamespace(**{name: lambda *args: work for _, name in METHODS.values()}))  # type: ignore[arg-type]
    quick.install(group)
    return engine, quick, group


def test_a_call_is_quick_where_it_was_looked_at_before_and_is_foreseen() -> None:
    made = Work()
    engine, quick, group = quick_group(made)
    args, count = ([torch.ones(3)], reducing(dist.ReduceOp.MAX)), [0]
    signature = signing("all-reduce", 2)(args)
    assert group.allreduce(*args) == ("usual", args), "nobody has looked at it"
    quick.learn("all-reduce", args, signature, count)
    engine.consent.called(signature)
    assert group.allreduce(*args) == ("usual", args), "it is not foreseen: the class's own method asks the other ranks"
    engine.consent.called(signature)
    assert group.allreduce(*args) is made and made.waits == 1 and count == [1] and engine.inside == [0]
    assert engine.recorder.number == 3 and call_text(*engine.recorder.calls[3][:2]) == "all-reduce max float32 12 bytes"
    others: list[tuple[Any, Any]] = [
        ([torch.ones(3)], reducing(dist.ReduceOp.SUM)), ([torch.ones(4)], args[1]), ([torch.ones(3, dtype=torch.int32)], args[1]),
        ([torch.ones(6)[::2]], args[1]), ([torch.ones(3), torch.ones(3)], args[1]), ("tensors", args[1]), ([torch.ones(3)], None),
        ([torch.ones(3).to_sparse()], args[1]),
    ]  # fmt: skip
    for other in others:
        assert group.allreduce(*other)[0] == "usual", other
    engine.consent.pending = 1
    assert group.allreduce(*args) == ("usual", args), "calls are waiting in the thread: this one goes behind them"
    engine.consent.pending = 0
    later = group.allreduce(args[0], reducing(dist.ReduceOp.MAX, asynchronous=True))
    assert isinstance(later, BuiltinWork) and later.wait() and made.waits == 2 and count == [2]
    quick.forget()
    assert group.allreduce(*args) == ("usual", args), "plans may be others"
    engine.over.append(GroupFailed("ended"))
    with pytest.raises(GroupFailed, match="ended"):
        group.allreduce(*args)


def test_pairs_and_lists_are_quick_as_well_and_an_error_at_this_rank_alone_never_is() -> None:
    made = Work()
    engine, quick, group = quick_group(made)
    for name, args, wrong in (
        ("_allgather_base", (torch.ones(6), torch.ones(3), options(False)), (torch.ones(5), torch.ones(3), options(False))),
        ("allgather", ([[torch.ones(3), torch.ones(3)]], [torch.ones(3)], options(False)), ([[torch.ones(3)]], [torch.ones(3)], options(False))),
    ):
        signature = signing("all-gather", 2)(args)
        quick.learn("all-gather", args, signature, [0])
        for _ in range(4):
            engine.consent.called(signature)
        assert getattr(group, name)(*args) is made and getattr(group, name)(*wrong) == ("usual", wrong)
    quick.uninstall(group)
    assert group.allgather(1, 2, 3) == ("usual", (1, 2, 3)) and not vars(group)


def test_no_more_calls_are_kept_than_routes() -> None:
    _, quick, _ = quick_group(Work())
    for length in range(3 * MAX_KEPT):
        quick.learn("all-reduce", ([torch.empty(length)], reducing(dist.ReduceOp.SUM)), (1, length), [0])
        assert len(quick._known) <= MAX_KEPT


def test_a_lost_connection_in_a_quick_call_is_explained() -> None:
    engine, quick, group = quick_group(Work(RuntimeError("Connection closed by peer")))
    args = ([torch.ones(3)], reducing(dist.ReduceOp.SUM))
    signature = signing("all-reduce", 2)(args)
    quick.learn("all-reduce", args, signature, [0])
    engine.consent.called(signature)
    engine.consent.called(signature)
    with pytest.raises(GroupFailed, match="explained"):
        group.allreduce(*args)
    assert engine.inside == [0]


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
