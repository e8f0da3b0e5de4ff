"""An infeasible training job says what would make it feasible, and each change that it names does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from captured import captured
from meshwright.drive.plans import read_fabric
from meshwright.drive.training.changes import one_more_device
from meshwright.drive.training.collective_choice import CollectivesWanted
from meshwright.drive.training.layout import Layout
from meshwright.drive.training.nearest import with_nearest_changes
from meshwright.drive.training.sharding import ShardingWanted
from meshwright.drive.training.training import plan_training
from meshwright.drive.training.wishes import LayoutWanted
from meshwright.errors import Infeasible
from meshwright.job import Training

MODEL = "examples/gpt.py:tiny"


@cache
def graph(model=MODEL):
    return captured(model)


def limited(memory_bytes, count=2):
    fabric = read_fabric(f"laptop:{count}")
    return replace(fabric, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in fabric.devices))


def planned(fabric, batch=4, model=MODEL, sharding=None, **fixed):
    return plan_training(
        Training(model=model, global_batch=batch), fabric, graph=graph(model), wishes=(LayoutWanted(**fixed), CollectivesWanted("ring"), sharding),
    )  # fmt: skip


def refused(fabric, batch=4, model=MODEL, **fixed):
    with pytest.raises(Infeasible) as caught:
        planned(fabric, batch, model, **fixed)
    assert caught.value.exit_code == 3
    return caught.value


def test_what_was_fixed_is_named_where_it_is_the_reason():
    whole = ShardingWanted(level=0, overlap=False)  # a level would make room another way
    free = planned(limited(0), 8, tensor=1, pipeline=2, sharding=whole)  # 1F1B, which keeps less than the schedules that win without a limit
    least = max(free.prediction.memory_worst_bytes)
    error = refused(limited(least), 8, data=2, microbatch=4, sharding=whole)
    opened = next(c for c in error.data["changes"] if c["kind"] == "open")
    assert opened["what"].startswith("without --") and opened["what"] in error.hint
    keep = {"data": 2} if "--dp" not in opened["what"] else {}
    keep |= {"microbatch": 4} if "--microbatch" not in opened["what"] else {}
    assert planned(limited(least), 8, sharding=whole, **keep).layout is not None


@pytest.mark.parametrize("model", [MODEL, "examples/convnet.py:tiny"])
def test_memory_and_devices_that_are_named_are_enough(model):
    size = sum(p.size_bytes for p in graph(model).parameters)
    error = refused(limited(2 * size), model=model)
    changes = {c["kind"]: c for c in error.data["changes"]}
    assert error.data["least_bytes"] == changes["memory"]["needed_bytes"] > 2 * size
    assert planned(limited(changes["memory"]["needed_bytes"]), model=model).layout is not None
    if "devices" in changes:
        fabric = limited(2 * size)
        while len(fabric.devices) < changes["devices"]["devices"]:
            fabric = one_more_device(fabric)[1]
        assert planned(fabric, model=model).layout is not None
    if "batch" in changes:
        assert planned(limited(2 * size), changes["batch"]["global_batch"], model).layout is not None


def test_a_degree_that_follows_from_the_others_is_not_searched_again(monkeypatch):
    """Opening one of three fixed degrees leaves what was refused; opening the micro-batch or all of them does not."""
    asked, choose = [], Layout.choose
    monkeypatch.setattr(Layout, "choose", lambda self, found, context: asked.append(context.wish(LayoutWanted).fixed) or choose(self, found, context))
    refused(limited(500_000), data=2, tensor=1, pipeline=1, microbatch=2)
    alike = [x for x in asked if sum(given is not None for given in x[:3]) == 2 and x[0] is not None]
    assert not alike and (2, 1, 1, None) in asked and (None, None, None, None) in asked


def test_without_a_change_the_error_stays():
    error = Infeasible("x", hint="y")
    assert with_nearest_changes(error, []) is error
