"""Ranks connect for their messages all together or not at all, however late the last one comes and whatever is told meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright.run.group.engine as engines
from meshwright.errors import GroupFailed, RankDiverged
from meshwright.program.builder import ProgramBuilder
from meshwright.program.program import Contract
from meshwright.run.group.call import Call, Session
from meshwright.run.group.engine import Engine
from meshwright.run.group.messages import all_connect
from meshwright.run.group.rank_code import compile_rank, form_of
from meshwright.run.group.settings import Settings
from meshwright.run.group.work import PlannedWork
from meshwright.run.group.worker import Task

SAID = "rank 1 calls something else"


class Rank:
    """One that comes, in a thread: `told` by the verdict, or not; `left` what it raised, `connects` what it was answered."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.told, self.waits = threading.Event(), threading.Event()
        self.left: Exception | None = None
        self.connects: bool | None = None
        self.thread = threading.Thread(target=self.come)
        self.thread.start()

    def check(self) -> None:
        if self.told.is_set():
            raise RankDiverged(SAID)

    def wait_for(self, key: str) -> None:
        while not self.store.check([key]):
            self.check()
            self.waits.set()
            self.told.wait(0.001)

    def come(self) -> None:
        try:
            self.connects = all_connect(self.store, self.rank, self.size, self.wait_for, self.check)
        except RankDiverged as error:
            self.left = error

    def end(self) -> None:
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("told", [False, True], ids=["it hears later", "it has heard"])
def test_the_last_to_come_does_not_connect_alone(told: bool) -> None:
    """The others were told of the end while they waited for it, and have gone."""
    store = dist.HashStore()
    first = [Rank(store, r, 3) for r in (0, 2)]
    for rank in first:
        assert rank.waits.wait(60)
        rank.told.set()
        rank.end()
        assert rank.left is not None and rank.connects is None
    last = Rank(store, 1, 3)
    if told:
        last.told.set()
    last.end()
    assert not last.connects


def test_all_connect_when_all_have_come() -> None:
    store = dist.HashStore()
    ranks = [Rank(store, r, 3) for r in range(3)]
    for rank in ranks:
        rank.end()
        assert rank.connects and rank.left is None


def test_who_is_told_when_others_connect_already_connects_too() -> None:
    store = dist.HashStore()
    waits = Rank(store, 0, 2)
    assert waits.waits.wait(60)
    store.set("messages/all", "all")  # by a rank that has seen all come
    waits.told.set()
    waits.end()
    assert waits.connects and waits.left is None


def test_the_store_may_be_gone_when_a_rank_leaves() -> None:
    class Store:
        def set(self, key: str, value: bytes) -> None: ...

        def compare_set(self, *args: str) -> bytes:
            raise RuntimeError("connection reset")

    def wait_for(key: str) -> None:
        raise RankDiverged(SAID)

    with pytest.raises(RankDiverged, match=SAID):
        all_connect(Store(), 0, 2, wait_for, lambda: None)


def engine_and_task(folder: Path) -> tuple[Engine, Task]:
    """Of rank 0, which sends to a rank that this process does not have."""
    b = ProgramBuilder(ranks=2, name="one message")
    buffers, lanes, channel = [b.buffer(r, chunks=1, chunk_bytes=8) for r in range(2)], [b.lane(r) for r in range(2)], b.channel(0, 1, depth=1)
    lanes[0].send(channel, buffers[0], 0)
    lanes[1].recv(channel, buffers[1], 0)
    rows = tuple((buffer, 0, 1) for buffer in buffers)
    b.contract = Contract(op="broadcast", inputs=rows, outputs=rows, root=0)
    engine = Engine(Settings(record_dir=str(folder)), dist.HashStore(), 0, 1, 5.0, global_ranks=(0,), devices=(), fabric=None)
    x = torch.ones(2)
    session = Session(compile_rank(form_of(b.build()), 0, 2), "broadcast", 0, 2, x.dtype, x.device)
    return engine, Task(Call("broadcast", x, x, 0), session, None, 1, PlannedWork([x], "broadcast"), None)


def test_a_verdict_that_comes_while_a_rank_connects_ends_its_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, task = engine_and_task(tmp_path)
    aborted: list[bool] = []

    class Connecting:
        size, mask = 2, 0

        def __init__(self, *args: Any) -> None:
            engine._failed(GroupFailed(SAID))  # as the control thread does

        def abort(self) -> None:
            aborted.append(True)

        def receive(self, *args: Any) -> Any:
            raise AssertionError("a message was posted after the verdict")

        send = wait = receive

    monkeypatch.setattr(engines, "GlooMessages", Connecting)
    monkeypatch.setattr(engine, "_wait_for", lambda key: None)  # all have come
    for _ in range(2):  # and any later one
        with pytest.raises(GroupFailed, match=SAID):
            engine.submit(task)
            task.work.wait()
    assert aborted
    engine.close()


def test_nobody_connects_where_one_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, task = engine_and_task(tmp_path)
    engine.plans.store.set("messages/all", "none")
    monkeypatch.setattr(engines, "GlooMessages", lambda *args: pytest.fail("connects alone"))
    with pytest.raises(GroupFailed, match="closed"):
        engine.submit(task)
    engine.close()
