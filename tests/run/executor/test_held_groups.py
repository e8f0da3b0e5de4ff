"""Process groups that are held in attributes: gone when the interpreter begins to end, as if they had been destroyed."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.nn import FeedForward, MoELayer
from meshwright.run.executor import held_groups
from meshwright.run.executor.held_groups import holds_group, let_groups_go
from meshwright.run.executor.transport import TaggedTransport


@dataclass(frozen=True)
class Frozen:
    group: Any

    def __post_init__(self) -> None:
        holds_group(self)


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(held_groups, "_HOLDERS", [])  # what other tests hold stays
    return [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]  # the only reference


def alive(group):
    there = weakref.ref(group.pop())
    gc.collect()
    return there


def test_a_layer_in_a_cycle_keeps_its_group_until_the_end_and_no_longer(group):
    layer = MoELayer(FeedForward(8, 8), 2, group=group[0], seed=0)
    there = alive(group)
    assert there() is layer.group is layer.runner.group
    let_groups_go()
    gc.collect()
    assert there() is None and layer.group is None


def test_so_do_transports_and_frozen_records(group):
    transport, record = TaggedTransport(group[0]), Frozen(group[0])
    holds_group(record)  # known already
    there = alive(group)
    assert there() is transport.group is record.group
    let_groups_go()
    gc.collect()
    assert there() is None and transport.group is None is record.group


def test_one_that_is_gone_before_is_no_matter(group):
    TaggedTransport(group[0])
    gc.collect()
    let_groups_go()
    assert group[0].size() == 1
