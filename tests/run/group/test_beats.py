"""Who waits for a plan waits beyond its deadline while it is being made, and no longer."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.errors import GroupFailed
from meshwright.io.fabric.name import load_fabric
from meshwright.run.group.beats import beating, beats_of
from meshwright.run.group.engine import Engine
from meshwright.run.group.plans import GroupPlans
from meshwright.run.group.settings import Settings

TIMEOUT_S = 1.5  # many beats long: a thread of a busy machine may come late


def waits(store: Any) -> Any:
    """An engine as far as waiting for a key goes."""

    def lost(why: str) -> GroupFailed:
        return GroupFailed(why)

    engine: Any = SimpleNamespace(plans=SimpleNamespace(store=store), timeout_s=TIMEOUT_S, health=SimpleNamespace(lost=lost), over=[])
    engine.raise_if_failed = lambda: None
    return lambda key: Engine._wait_for(engine, key)


def test_a_plan_that_takes_longer_than_the_deadline_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    fabric = load_fabric("star:2")
    names = [d.name for d in fabric.devices]
    first, second = (GroupPlans(Settings(cache="0"), store, r, 2, devices=names, fabric=fabric, timeout_s=TIMEOUT_S) for r in (0, 1))
    second.wait_for = waits(store)

    def slowly(*_: Any) -> bytes:
        # The other rank waits here and now: its deadline passes several times.
        begin = time.monotonic()
        key = "plan/all-reduce/0/1048576"
        assert beats_of(store, key) >= 0
        while time.monotonic() < begin + 4 * TIMEOUT_S:
            time.sleep(0.01)
        return b'{"none": "it was slow"}'

    monkeypatch.setattr(first, "_kept_or_planned", slowly)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(second.choose("all-reduce", 0, 1 << 20)))
    thread.start()
    assert first.choose("all-reduce", 0, 1 << 20) == "it was slow"
    thread.join(100)
    assert answers == ["it was slow"]


def test_nobody_waits_for_a_rank_that_does_not_plan() -> None:
    store = dist.HashStore()
    with pytest.raises(GroupFailed, match="deadline"):
        waits(store)("plan/x")
    with beating(store, "plan/y", TIMEOUT_S):
        pass
    begin = time.monotonic()
    # It began and stopped: one more deadline, and no more.
    with pytest.raises(GroupFailed, match="deadline"):
        waits(store)("plan/y")
    assert beats_of(store, "plan/y") >= 1 and time.monotonic() - begin >= 2 * TIMEOUT_S
